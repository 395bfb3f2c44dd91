"""`python -m lightning_megatp` is the command `megatp`."""

from lightning_megatp.cli import main

if __name__ == "__main__":
    main()
