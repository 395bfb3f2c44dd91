"""Calls of units that are on other stages, for steps that no schedule can follow."""
