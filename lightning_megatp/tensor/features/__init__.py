"""What a rank does with its own features of a tensor; operations are added in `rules/table.py`."""
