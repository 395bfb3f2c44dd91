"""What stages tell each other beside activations: losses and logs, what steps, units and hooks left."""
