"""The loss of a batch, of which microbatches compute parts: what each part averages, and how much it weighs."""
