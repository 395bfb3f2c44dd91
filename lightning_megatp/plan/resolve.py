"""From a plan and a model to what exactly is split where. Pure: reads names, types and shapes, changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lightning_megatp.plan.attributes import check_heads, divide
from lightning_megatp.plan.layer_styles import expert_counts, layer_plan
from lightning_megatp.plan.parallel_plan import ParallelPlan, named, plain_name
from lightning_megatp.plan.regions import place
from lightning_megatp.plan.specs import parameter_specs
from lightning_megatp.plan.styles import StyleLike, as_mapping, read_plan
from lightning_megatp.shim.compiler import is_compiled


def resolve(
    plan: Mapping[str, StyleLike] | str | None, model: nn.Module, tp: int, sequence_parallel: bool = True
) -> ParallelPlan:
    """Match a plan against a model and check everything that can be known before a step.

    Args:
        plan: see `lightning_megatp.plan.styles`; "auto" leaves all to be planned (`ParallelPlan.open`).
        model: the unsplit model; parameters may be on meta.
        tp: size of the tensor axis.
        sequence_parallel: False ignores the plan's `sequence` and `token_local` entries.

    Raises:
        ValueError: a pattern that matches nothing, a style on a module that can't take it, sizes or heads that can't be
            divided, tied parameters with different styles, a column layer that no row layer consumes, a module that
            torch.jit made.
    """
    _check_scripted(model)
    plan = as_mapping(plan)
    found = ParallelPlan(tp, plan, sequence_parallel)
    modules = {plain_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    compiled = [plain_name(name) for name, module in model.named_modules() if is_compiled(module)]
    for style in read_plan(plan):
        if style.style == "auto":
            found.open.append(style.pattern)
        elif style.style in ("sequence", "token_local") and not sequence_parallel:
            named(style.pattern, modules)
        elif style.style == "divide":
            found.attributes += divide(style, modules, tp)
        elif style.style == "sequence":
            names = named(style.pattern, modules)
            found.whole_sequences += [name for name in names if any(_nested(name, other) for other in compiled)]
            found.sequences |= {name: style for name in names if name not in found.whole_sequences}
        elif style.style == "token_local":
            found.token_local += named(style.pattern, modules)
        else:
            for name in named(style.pattern, modules):
                if name in found.layers:
                    other = found.layers[name].style.pattern
                    raise ValueError(
                        f"MegaTPStrategy: both `{other}` and `{style.pattern}` of the plan match `{name}`."
                    )
                found.layers[name] = layer_plan(name, style, modules, tp)
    check_heads(found, modules)
    found.attributes += expert_counts(found, modules)
    place(found, modules)
    found.parameters = parameter_specs(found, model)
    return found


def _check_scripted(model: nn.Module) -> None:
    name = next((name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)), None)
    if name is not None:
        raise ValueError(
            f"MegaTPStrategy: `{name}` is a module that torch.jit made (by script, trace or load). Its parameters and"
            " its code are out of Python's reach, so that it can be neither split nor given to a pipeline stage. Use"
            " the module that it was made of, compiled by torch.compile if you like; scripted functions are fine."
        )


def _nested(one: str, other: str) -> bool:
    """Whether two names are of one module, or of one inside the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
