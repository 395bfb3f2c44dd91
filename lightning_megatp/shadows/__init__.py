"""What users keep beside their weights, a tensor for each: averages made in `__init__`, say."""
