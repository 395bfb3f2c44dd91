"""The measure of truth: how far a parallel run is from the one-device run, and how far it may be."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from tests.parity.running import Run


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The largest allowed differences; None is not compared. Losses relative where `relative`, all else absolute."""

    loss: float
    gradient: float | None = None
    parameter: float | None = None
    relative: bool = False


# 64-true: the promise. Sums in another order differ by 1e-16 relative; AdamW's eps (1e-8) keeps a gradient that is zero
#   but for rounding from being normalised to one, so 20 steps stay below 1e-9.
# 32-true: the promise is on losses. Adam normalises the rounding of gradients that are analytically zero (key biases),
#   so parameters are not compared; a first-step gradient is a sum of < 1000 terms of size < 1, each rounded by 2^-24.
# bf16: a value carries a relative error of up to 2^-9 (half of eps = 2^-8). Two runs that round partial sums at other
#   places differ by a few of these per layer; a loss sees the mean over 4 * L tokens of logits that are each off by
#   k * 2^-9 relative, k about 4 for two blocks. bf16-true also rounds each parameter update (3e-3 on values of about
#   0.25 to 1 is 1 to 3 units in the last place), so two runs round some updates apart and the distance grows along the
#   20 steps: 2^-5. bf16-mixed keeps float32 parameters: 2^-6. First-step gradients: the same few roundings: 2^-5.
TOLERANCES: dict[str, Tolerance] = {
    "64-true": Tolerance(loss=1e-9, gradient=1e-9, parameter=1e-9),
    "32-true": Tolerance(loss=1e-5, gradient=1e-5, relative=True),
    "bf16-true": Tolerance(loss=2.0**-5, gradient=2.0**-5, relative=True),
    "bf16-mixed": Tolerance(loss=2.0**-6, gradient=2.0**-5, relative=True),
    "16-mixed": Tolerance(loss=2.0**-6, gradient=2.0**-5, relative=True),  # Lightning runs it as bf16-mixed on CPU
}


class ParityError(AssertionError):
    """The parallel run is not the one-device run."""


@dataclasses.dataclass(frozen=True)
class Differences:
    """The largest difference of each kind."""

    loss: float
    gradient: float
    parameter: float


def compare(reference: Run, runs: list[Run], tp: int, precision: str) -> Differences:
    """Compare the runs of all ranks (tp fastest) with the one-device run.

    The loss of dp ranks is their mean. Gradients and whole states are read on every rank that has them; a rank's own
    parameters are compared too where they are whole, so that a replica that drifts is found on whatever rank it is.

    Raises:
        ParityError: a difference above the tolerance, or a name, shape or count that differs.
    """
    tolerance = TOLERANCES[precision]
    losses = [_worst_loss(reference, runs[offset::tp], tolerance.relative) for offset in range(tp)]
    if not runs[0].parameters:
        raise ParityError("global rank 0 has no whole state")
    for rank, run in enumerate(runs):
        if run.steps != reference.steps:
            raise ParityError(f"rank {rank} took {run.steps} optimizer steps, the one-device run {reference.steps}")
    gradients = [_worst(f"rank {rank}: gradient", reference.gradients, run.gradients) for rank, run in enumerate(runs)]
    states = [_worst("state", reference.parameters, run.parameters) for run in runs if run.parameters]
    replicas = [_worst(f"rank {rank}: replica", *_whole(reference, run)) for rank, run in enumerate(runs)]
    found = Differences(*(max(value for value, _ in kind) for kind in (losses, gradients, states + replicas)))
    limits = (tolerance.loss, tolerance.gradient, tolerance.parameter)
    wrong = [
        f"{name} differs by {value:.3g} > {limit:.3g}"
        for kind, limit in zip((losses, gradients, states + replicas), limits, strict=True)
        for value, name in kind
        if limit is not None and not value <= limit  # NaN is wrong too
    ]
    if wrong:
        raise ParityError("; ".join(wrong))
    return found


def _worst_loss(reference: Run, peers: list[Run], relative: bool) -> tuple[float, str]:
    counts = {len(run.losses) for run in peers}
    if counts != {len(reference.losses)}:
        raise ParityError(f"{counts} losses, the one-device run has {len(reference.losses)}")
    worst, name = 0.0, "loss"
    for batch, expected in enumerate(reference.losses):
        value = sum(run.losses[batch] for run in peers) / len(peers)
        difference = abs(value - expected) / (max(abs(expected), 1e-3) if relative else 1.0)
        if not difference <= worst:
            worst, name = difference, f"loss of batch {batch} ({value!r}, expected {expected!r})"
    return worst, name


def _worst(what: str, expected: dict[str, Tensor], found: dict[str, Tensor]) -> tuple[float, str]:
    if expected.keys() != found.keys():
        raise ParityError(f"{what}: missing {sorted(expected.keys() - found)}, more {sorted(found.keys() - expected)}")
    worst, name = 0.0, what
    for key, value in expected.items():
        if value.shape != found[key].shape:
            raise ParityError(f"{what} {key}: shape {tuple(found[key].shape)}, expected {tuple(value.shape)}")
        if value.dtype != found[key].dtype:
            raise ParityError(f"{what} {key}: {found[key].dtype}, expected {value.dtype}")
        difference = float((value.double() - found[key].double()).abs().max()) if value.numel() else 0.0
        if not difference <= worst:
            worst, name = difference, f"{what} {key}"
    return worst, name


def _whole(reference: Run, run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The rank's own parameters that are whole, and what they should be."""
    own = {name: p for name, p in run.local.items() if reference.parameters[name].shape == p.shape}
    return {name: reference.parameters[name] for name in own}, own
