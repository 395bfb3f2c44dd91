"""What is on the module around a step of one stage: tensors of other stages, what outlives a step, what is put back."""
