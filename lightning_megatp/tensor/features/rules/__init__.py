"""Where the features of a result lie, per operation: what runs on a FeatureShard without gathering it, and how.

A rule looks at whole shapes and at the ownership of all ranks, so that every rank decides the same. None says that the
operation needs whole tensors. Dims are counted from the last (-1), so that broadcasting keeps them.
"""
