"""Activation recomputation: what backward computes again instead of keeping it."""
