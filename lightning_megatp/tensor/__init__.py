"""Parallel layers, their regions and their collectives."""
