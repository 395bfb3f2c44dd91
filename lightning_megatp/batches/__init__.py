"""Batches: the same one on all tensor ranks, one to try out with, microbatches, what kind of batch one is."""
