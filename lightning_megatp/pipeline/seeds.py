"""Seeds of what a batch draws on several stages: alike on all of them, and another one for every batch. And contexts
that draw from a seed, and leave generators as they were."""

from __future__ import annotations

import contextlib
import pickle
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
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


@contextlib.contextmanager
def seeded(seed: int, generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Draw from a seed, and leave the generators as they were.

    `torch.manual_seed` would do it for all devices; for every kind of device that isn't there it formats a stack trace,
    to be shown if one ever is.
    """
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed % 2**63)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextlib.contextmanager
def host_seeded(seed: int) -> Iterator[Callable[[], bool]]:
    """Let Python and NumPy draw from a seed, and leave their generators as they were.

    Yields:
        A function that tells whether something was drawn.
    """
    python, of_numpy = random.getstate(), np.random.get_state()

    def drawn() -> bool:
        fresh = random.Random(seed), np.random.RandomState(seed % 2**32)
        return random.getstate() != fresh[0].getstate() or pickle.dumps(np.random.get_state()) != pickle.dumps(
            fresh[1].get_state()
        )

    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield drawn
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)


def _batches(trainer: Any) -> int:
    """That training has begun, as checkpoints count them too; in an evaluation those of this one, since a hook that
    seeds the generator before it wants each to draw the same."""
    fitted = trainer.fit_loop.epoch_loop
    if trainer.training:
        return int(fitted.batch_progress.total.ready)
    evaluated = fitted.val_loop if trainer.state.fn == "fit" else trainer.validate_loop
    loop = trainer.predict_loop if trainer.predicting else trainer.test_loop if trainer.testing else evaluated
    return int(loop.batch_progress.current.ready)
