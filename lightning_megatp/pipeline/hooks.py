"""Which of the user's hooks may read what steps left behind, on the module or in gradients."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatp.containers import parameters_of
from lightning_megatp.origins import is_lightnings_default
from lightning_megatp.steps import StepKind
from lightning_megatp.user_hooks import codes_of, words_of


@dataclass(frozen=True)
class Hook:
    """A hook that runs after steps."""

    name: str
    gets_outputs: bool
    """What the step returned is among its arguments."""
    moves_weights: bool
    """Its code has to do with parameters or averages of them: it may put others in, or back."""


def hooks_after_steps(module: nn.Module) -> Iterator[Hook]:
    """The hooks after steps that the user defined: what Lightning's own class has does nothing."""
    for kind in StepKind:
        for name, gets_outputs in ((kind.hook("batch_end"), True), (kind.hook("epoch_end"), False)):
            if getattr(module, name, None) is not None and not is_lightnings_default(getattr(module, name)):
                words = set[str]().union(*map(words_of, codes_of(module, name)))
                yield Hook(name, gets_outputs, moves_weights=any(map(_OF_WEIGHTS.search, words)))


def cleared_unseen(trainer: Any) -> list[Tensor]:
    """The parameters whose gradients Lightning clears between this training step and its backward, with no hook of the
    user's, nor an optimizer's own way to clear, in between that may look at them.

    Args:
        trainer: in a training step of automatic optimization.
    """
    module = trainer.lightning_module
    see = [module.optimizer_zero_grad, *(x.on_before_zero_grad for x in (module, *trainer.callbacks))]
    if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches or not all(map(is_lightnings_default, see)):
        return []
    optimizers = [optimizer for optimizer in trainer.optimizers if type(optimizer).zero_grad is Optimizer.zero_grad]
    return list(itertools.chain(*map(parameters_of, optimizers)))


_OF_WEIGHTS = re.compile(
    r"(?<!h)param|weight|state_dict|restore|shadow|teacher|momentum|(\b|_)ema(\b|_)", re.IGNORECASE
)
"""Words of such code. A hook of which this is said for nothing runs on more stages than it would have to."""
