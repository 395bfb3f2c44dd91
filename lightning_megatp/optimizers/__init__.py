"""The user's optimizers, tried out: may one step parts of tensors, or each tensor whole, and what is inside of one."""
