"""Cutting a step into stages: units, the dry run, the plan it gives, one stage's run of it."""
