"""What a step does with units, as far as its dry run on an example batch tells: in which order it calls them, and which
parameters it uses beside them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_megatp.batches.example import Example
from lightning_megatp.mesh import alone
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.slicing.errors import KindError, SliceError
from lightning_megatp.pipeline.slicing.order import UnitsOfStep, followed, units_of_step
from lightning_megatp.pipeline.slicing.slicer import Slicer
from lightning_megatp.pipeline.slicing.state.ownership import Sizes
from lightning_megatp.plan.units import find_units


def units_in_use(parallel: ParallelModule, example: Example, device: torch.device) -> tuple[list[str], set[str]]:
    """The units that a step calls, as far as that can be found out; and the names of their parameters that it also uses
    beside them."""
    found = observed_order(parallel.module, find_units(parallel.module), example, device, parallel.sizes)
    return found.order, found.touched


def used_beside(module: nn.Module, units: Sequence[str], example: Example | None) -> set[str]:
    """The names of the parameters of some layers and blocks that a step uses otherwise than by calling these, as far as
    that can be found out. The module may not be on its device yet."""
    tensors = (x.device for x in (*module.parameters(), *module.buffers()) if not x.is_meta)
    device = next(tensors, torch.device("cpu"))
    for cut in (list(units), find_units(module)):  # blocks that can't be passed over, may be by parts
        found = observe(module, cut, example, device) if cut else None
        if found is not None:  # of a step that ends by a value (a router's choice) the rest was not seen
            return _with_siblings(module, found.touched) if found.idle else found.touched
    return set()


def _with_siblings(module: nn.Module, names: Collection[str]) -> set[str]:
    """Parameters, and those of the same name in other entries of their lists (`layers.0.gate`, `layers.1.gate`)."""

    def pattern(name: str) -> str:
        return re.sub(r"\.\d+\.", ".*.", name)

    patterns = set(map(pattern, names))
    return {name for name, _ in module.named_parameters() if pattern(name) in patterns}


def flows_forward(
    parallel: ParallelModule,
    stage_of_unit: Mapping[str, int],
    n_stages: int,
    example: Example,
    device: torch.device,
    unused: Collection[str] = (),
) -> bool:
    """Whether a step can run on these stages, as far as that can be found out.

    Args:
        unused: units that it doesn't call, wherever it could not be followed.
    """
    if example.batch is None:
        return True
    batch = apply_to_collection(example.batch, Tensor, lambda x: x.to(device))
    slicer = Slicer(parallel.module, stage_of_unit, n_stages, parallel.sizes, device)
    try:
        plan = slicer.plan(followed(slicer, parallel.module, example.bare_step), batch)
    except SliceError:
        return False
    except Exception:
        return True  # see `observe`
    finally:
        slicer.close()
    called = {unit for operation in plan.operations for unit in operation.units}
    # what was not seen may come after the end
    unseen = [unit for unit in stage_of_unit if plan.ended and unit not in called and unit not in unused]
    return all(stage_of_unit[unit] == n_stages - 1 for unit in unseen)


def observed_order(
    module: nn.Module, units: list[str], example: Example, device: torch.device, sizes: Sizes, refuse: bool = False
) -> UnitsOfStep:
    """The units in the order in which a step calls them, which is not always that of definition.

    Raises:
        KindError: see `observe`.
    """
    return observe(module, units, example, device, sizes, refuse) or UnitsOfStep(units)


def observe(
    module: nn.Module,
    units: list[str],
    example: Example | None,
    device: torch.device,
    sizes: Sizes | None = None,
    refuse: bool = False,
) -> UnitsOfStep | None:
    """What a step does with units; None if that can't be seen.

    Raises:
        KindError: with `refuse`, it does what no pipeline can do.
    """
    if example is None or example.batch is None:
        return None
    batch = apply_to_collection(example.batch, Tensor, lambda x: x.to(device))
    try:
        with alone():  # of a step's own messages those of fakes would not be sent, and the others so
            return units_of_step(module, units, example.bare_step, batch, sizes, device)
    except KindError:
        if refuse:
            raise
        return None
    except Exception:
        return None  # what keeps the step from being looked at is told when the first batch is planned
