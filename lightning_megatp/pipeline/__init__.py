"""Pipeline parallelism under an unmodified training_step: cut, schedule, run."""
