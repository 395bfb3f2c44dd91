"""What is summed after backward, and in which order: dp reduction, partial sums over tp, norm, clip, step."""
