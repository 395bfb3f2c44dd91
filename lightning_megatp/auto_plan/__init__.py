"""A plan for a model that comes without one: found by probing its blocks, and proven before it is used.

Pure: everything runs in one process, on thin copies of one block of each kind, whose linear layers have low-rank
weights. So neither a process group nor the weights of the model are needed, and the size of the model hardly matters.
"""
