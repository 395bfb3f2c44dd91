"""What people read: warnings and notes, once, on global rank 0."""

from __future__ import annotations

import logging
import warnings

from lightning_utilities.core.rank_zero import rank_zero_only

log = logging.getLogger("lightning_megatp")


@rank_zero_only
def warn_once_per_run(text: str) -> None:
    """A warning on rank 0."""
    warnings.warn(f"MegaTPStrategy: {text}", UserWarning, stacklevel=3)
