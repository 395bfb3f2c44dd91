"""A CUDA device for a torch that was built without CUDA, and for machines that have none.

`device.cpp` is the device, `cuda.py` makes `torch.cuda` speak of it, `building.py` compiles it. Ranks get it by
`RankPool(world_size, device="simulated")`; there `Trainer(accelerator="cuda")` trains on it.
"""
