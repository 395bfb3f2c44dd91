"""The four kinds of steps, and what Lightning calls them in the names of methods and hooks."""

from __future__ import annotations

from enum import StrEnum


class StepKind(StrEnum):
    """A kind of step. The values are those of Lightning's `RunningStage`, which exists once per copy of Lightning and
    knows sanity checks as a kind of their own."""

    TRAIN = "train"
    VALIDATE = "validate"
    TEST = "test"
    PREDICT = "predict"

    @classmethod
    def first_of(cls, fn: str) -> StepKind:
        """The kind that a run is about.

        Args:
            fn: `trainer.state.fn`: fit, validate, test or predict.
        """
        return cls.TRAIN if fn == "fit" else cls(fn)

    @property
    def noun(self) -> str:
        """training, validation, test or predict."""
        return _NOUNS.get(self, self.value)

    @property
    def method(self) -> str:
        """The LightningModule's: `training_step`, ..."""
        return f"{self.noun}_step"

    def hook(self, moment: str) -> str:
        """The name of a hook around steps: `on_train_batch_end`, `on_validation_batch_end`, ...

        Args:
            moment: batch_start, epoch_end, model_eval, ...
        """
        return f"on_{self.value if self is StepKind.TRAIN else self.noun}_{moment}"


_NOUNS = {StepKind.TRAIN: "training", StepKind.VALIDATE: "validation"}
EVALUATION = (StepKind.VALIDATE, StepKind.TEST, StepKind.PREDICT)
"""The kinds of steps without a backward."""
