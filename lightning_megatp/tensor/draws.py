"""Which of torch's operations draw random numbers from the default generator."""

from __future__ import annotations

from typing import Any

from lightning_megatp.tensor.functions import argument, operation_names

DROPOUTS = operation_names(
    """
    dropout dropout_ native_dropout alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout
    feature_alpha_dropout_ dropout1d dropout2d dropout3d
    """
)
"""Dropouts, of an input, a share and whether they are to do anything."""
_BY_CHANNEL = operation_names("feature_dropout feature_dropout_ feature_alpha_dropout feature_alpha_dropout_")
_BY_CHANNEL |= operation_names("dropout1d dropout2d dropout3d")
LIKE_TENSORS = operation_names(
    """
    rand_like randn_like randint_like bernoulli bernoulli_ normal normal_ uniform_ random_ exponential_ log_normal_
    cauchy_ geometric_ poisson binomial rrelu rrelu_ _standard_gamma
    """
)
"""A number for each element of their tensors."""
LIKE_SHAPES = operation_names("rand randn randint normal")
"""A number for each element of a shape that they are given."""
_FROM_ROWS = operation_names("multinomial gumbel_softmax _sample_dirichlet")

OF_TENSORS = DROPOUTS | LIKE_TENSORS | _FROM_ROWS | {"scaled_dot_product_attention"}
"""All that draw, or may, by what a tensor is."""
OF_ELEMENTS = (DROPOUTS - _BY_CHANNEL) | LIKE_TENSORS
"""What draws a number for each element of a tensor."""


def draws_random(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws from the default generator."""
    if name == "scaled_dot_product_attention":
        return bool(argument(args, kwargs, 4, "dropout_p", default=0.0))
    if name in DROPOUTS:
        return drops(args, kwargs)
    return (name in OF_TENSORS or name in LIKE_SHAPES) and kwargs.get("generator") is None


def drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a dropout is to do anything."""
    training = argument(args, kwargs, 2, "training", "train", default=True)
    return bool(argument(args, kwargs, 1, "p", default=0.5)) and bool(training)
