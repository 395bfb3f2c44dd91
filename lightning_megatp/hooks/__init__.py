"""Hooks of the user, where a rank holds a part of what they find: what can be as on one device is, the rest is said."""
