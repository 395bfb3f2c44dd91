"""Which unit is on which stage, as the user chose or balanced by cost; and so which rank holds which parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import Tensor, nn

from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.schedules.schedule import Schedule
from lightning_megatp.plan.units import is_in_list


def assign(
    units: Sequence[str],
    n_stages: int,
    cost: Mapping[str, float],
    stages: Sequence[Sequence[str]] | None = None,
    together: Sequence[tuple[str, str]] = (),
) -> dict[str, int]:
    """Spread units over stages.

    Contiguous in the given order, every stage with at least one unit, such that the costliest stage costs least.

    Args:
        units: in order of execution.
        n_stages: how many stages.
        cost: of each unit: its time, or number of parameters.
        stages: the user's own choice instead: for each stage its units, as names or patterns (`blocks.[0-3]`).
        together: pairs of units that need one stage, and all in between with them, if that leaves something to every
            stage.

    Returns:
        Unit name -> stage.

    Raises:
        ValueError: fewer units than stages, or a choice that does not place every unit once.
    """
    if stages is not None:
        return _chosen(units, n_stages, stages)
    if len(units) < n_stages:
        raise ValueError(
            f"MegaTPStrategy: {n_stages} pipeline stages need at least as many units, and the model has {len(units)}:"
            f" {', '.join(units) or 'none'}. Use fewer stages (pp * virtual_stages), or name smaller modules by"
            " `stages=[[...], ...]`."
        )
    runs = _runs(units, together)
    if len(runs) < n_stages:
        runs = [[unit] for unit in units]
    bounds = [*_balance([sum(cost[unit] for unit in run) for run in runs], n_stages), len(runs)]
    return {unit: s for s in range(n_stages) for run in runs[bounds[s] : bounds[s + 1]] for unit in run}


def _runs(units: Sequence[str], together: Sequence[tuple[str, str]]) -> list[list[str]]:
    """The units, in their order, with no cut between those that belong together."""
    place = {unit: i for i, unit in enumerate(units)}
    joined = {i for first, last in together for i in range(place[first] + 1, place[last] + 1)}
    runs: list[list[str]] = []
    for i, unit in enumerate(units):
        if i in joined:
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return runs


def can_be_cut(units: Sequence[str], n_stages: int, together: Sequence[tuple[str, str]]) -> bool:
    """Whether pairs of units that need one stage, as for `assign`, leave a place for so many stages."""
    return len(_runs(units, together)) >= n_stages


def small_among(module: nn.Module, units: Sequence[str], together: Sequence[tuple[str, str]]) -> set[str]:
    """Units that are small modules, outside of lists, and the first of a pair of units that need one stage: such as are
    called at both ends of a model (an invertible norm, RevIN). What they do can be done between units, where every
    stage has their parameters."""
    sizes = {unit: sum(p.numel() for p in module.get_submodule(unit).parameters()) for unit in units}
    small = _SMALL * sum(sizes.values())
    return {unit for unit, _ in together if sizes[unit] <= small and not is_in_list(module, unit)}


_SMALL = 0.05
"""The share of all parameters in units that a small one has at most."""


def unit_costs(
    module: nn.Module, units: Sequence[str], size: Callable[[Tensor], int] = Tensor.numel
) -> dict[str, float]:
    """An estimate of each unit's time: its parameters, those of embeddings not counted, since looking up is cheap.

    Args:
        size: elements of a parameter. All ranks have to find the same, and their parts may be uneven.
    """
    return {unit: _cost(module.get_submodule(unit), size) for unit in units}


def _cost(unit: nn.Module, size: Callable[[Tensor], int]) -> float:
    embeddings = {id(p) for child in unit.modules() if isinstance(child, nn.Embedding) for p in child.parameters()}
    return 1.0 + sum(size(p) for p in unit.parameters() if id(p) not in embeddings)


def holders_of(module: nn.Module, stage_of_unit: Mapping[str, int], schedule: Schedule) -> dict[int, list[int]]:
    """id(parameter) -> the pipeline ranks that hold it, in the order of its stages. Parameters outside of all units are
    on every rank."""
    stages: dict[int, set[int]] = {}
    for unit, stage in stage_of_unit.items():
        for parameter in module.get_submodule(unit).parameters():
            stages.setdefault(id(parameter), set()).add(stage)
    everywhere = set(range(schedule.stages))
    found = {}
    for parameter in module.parameters():
        ranks = [schedule.placement[stage] for stage in sorted(stages.get(id(parameter), everywhere), reverse=True)]
        found[id(parameter)] = list(dict.fromkeys(ranks))[::-1]
    return found


def stage_sizes(parallel: ParallelModule, stage_of_unit: Mapping[str, int], stages: int) -> list[int]:
    """Parameters of each stage, before they are split over tensor ranks; tied ones in each of their stages."""
    sizes = []
    for stage in range(stages):
        units = [parallel.module.get_submodule(unit) for unit, at in stage_of_unit.items() if at == stage]
        held = {id(p): parallel.whole_size(p) for unit in units for p in unit.parameters()}
        sizes.append(sum(held.values()))
    return sizes


def _chosen(units: Sequence[str], n_stages: int, stages: Sequence[Sequence[str]]) -> dict[str, int]:
    if len(stages) != n_stages:
        raise ValueError(
            f"MegaTPStrategy: `stages` lists {len(stages)} stages, but there are {n_stages} (pp * virtual_stages)."
        )
    placed: dict[str, int] = {}
    for stage, patterns in enumerate(stages):
        for pattern in patterns:
            matching = [unit for unit in units if _matches(unit, pattern)]
            if not matching:
                raise ValueError(
                    f"MegaTPStrategy: `{pattern}` in `stages[{stage}]` matches no unit. The units are"
                    f" {', '.join(units)}."
                )
            for unit in matching:
                if placed.setdefault(unit, stage) != stage:
                    raise ValueError(
                        f"MegaTPStrategy: `stages` places `{unit}` on stage {placed[unit]} and, by `{pattern}`, on"
                        f" stage {stage}. Every unit goes to one stage."
                    )
        if stage not in placed.values():
            raise ValueError(
                f"MegaTPStrategy: `stages[{stage}]` is empty. Every stage needs a unit; or use fewer stages."
            )
    missing = [unit for unit in units if unit not in placed]
    if missing:
        raise ValueError(f"MegaTPStrategy: `stages` leaves out {', '.join(missing)}. Every unit goes to one stage.")
    return placed


def _matches(unit: str, pattern: str) -> bool:
    """A pattern names units, or a module all of whose units are meant."""
    return fnmatchcase(unit, pattern) or unit.startswith(f"{pattern}.")


def _balance(costs: Sequence[float], parts: int) -> list[int]:
    """Where each part starts, if a list is cut into so many parts that the costliest costs least.

    best[k][i] is the cost of the costliest of k + 1 parts of the first i entries.
    """
    total = [0.0, *accumulate(costs)]
    best = [list(total)]
    cuts: list[list[int]] = [[0] * len(total)]
    for k in range(1, parts):
        row, cut = [float("inf")] * len(total), [0] * len(total)
        for i in range(k + 1, len(total)):
            for j in range(i - 1, k - 1, -1):
                last = total[i] - total[j]
                if last >= row[i]:
                    break
                if max(best[-1][j], last) < row[i]:
                    row[i], cut[i] = max(best[-1][j], last), j
        best.append(row)
        cuts.append(cut)
    starts, end = [], len(costs)
    for cut in reversed(cuts):
        starts.append(cut[end])
        end = cut[end]
    return starts[::-1]
