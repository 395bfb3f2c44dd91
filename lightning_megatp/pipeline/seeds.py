"""Seeds of what a batch draws on several stages: alike on all of them, and another one for every batch."""

from __future__ import annotations

import zlib
from typing import Any

import torch


def shared_seed(trainer: Any, of: str) -> int:
    """A seed from the generator that is alike on all stages, which stays where it is: what loaders, data sets and hooks
    draw from it is then what they draw on one device. It may stand where it did in the batch before, so batches are
    counted.

    Args:
        trainer: in the middle of a batch, or behind it.
        of: what draws: a kind of step, or a hook.
    """
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    drawn = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
    return mixed(mixed(drawn, _batches(trainer)), zlib.crc32(of.encode()))


def mixed(seed: int, index: int) -> int:
    """Unrelated seeds for neighbouring indices."""
    x = (seed ^ (index + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    return (x ^ (x >> 27)) % 2**63


def _batches(trainer: Any) -> int:
    """That training has begun, as checkpoints count them too; in an evaluation those of this one, since a hook that
    seeds the generator before it wants each to draw the same."""
    fitted = trainer.fit_loop.epoch_loop
    if trainer.training:
        return int(fitted.batch_progress.total.ready)
    evaluated = fitted.val_loop if trainer.state.fn == "fit" else trainer.validate_loop
    loop = trainer.predict_loop if trainer.predicting else trainer.test_loop if trainer.testing else evaluated
    return int(loop.batch_progress.current.ready)
