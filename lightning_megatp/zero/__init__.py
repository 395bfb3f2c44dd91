"""Parameters divided over the data-parallel ranks, by FSDP2: gathered unit by unit where a step needs them."""
