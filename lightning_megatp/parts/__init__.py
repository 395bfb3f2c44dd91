"""Parameters of which a rank has a part: what the user's code finds when it looks at them, and their gradients."""
