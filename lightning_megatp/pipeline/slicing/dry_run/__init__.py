"""The dry run of a step, without data: what each operation is, takes and makes, and the plan that gives."""
