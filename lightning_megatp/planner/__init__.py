"""What a layout costs, before it is run: bytes per rank."""
