"""Whether stacks of experts may be split as transformers' are, whose names they have: a class of the user's own may do
something else with them (gate and up that alternate, a norm of what lies between)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_megatp.plan.auto.blocks import Block, Call
from lightning_megatp.plan.auto.exact import exact
from lightning_megatp.plan.auto.thin import block_copy, concrete_call, thin_copy
from lightning_megatp.plan.layer import LayerPlan
from lightning_megatp.plan.parallel_plan import AttributePlan
from lightning_megatp.tensor.collectives import take_ranges

_CLOSE = 1e-8
_MOST = 2**28
"""Elements of a stack that is tried out."""


def of_transformers(module: nn.Module) -> bool:
    """Whether a module's code is that library's."""
    return type(module).__module__.partition(".")[0] == "transformers"


def experts_hold(stack: Block, layer: LayerPlan, counts: Sequence[AttributePlan], tp: int) -> bool:
    """Run the shares of a stack of experts, and compare their sum.

    Args:
        stack: with its calls.
        layer: how it is split.
        counts: its attributes that become those of a rank.
        tp: number of tensor ranks.
    """
    if not stack.calls or sum(p.numel() for p in stack.module.parameters()) > _MOST:
        return False
    try:
        whole = thin_copy(stack.module, seed=0)
        shares = [_share(whole, layer, counts, rank) for rank in range(tp)]
        calls = (concrete_call(call, 0, noise=0.1) for call in (*stack.calls, *stack.other_calls))
        with exact(), torch.no_grad():
            return all(_adds_up(whole, shares, call) for call in calls)
    except Exception:  # it may be any code
        return False


def _adds_up(whole: nn.Module, shares: Sequence[nn.Module], call: Call) -> bool:
    wanted, *parts = [module(*call.args, **call.kwargs) for module in (whole, *shares)]
    if not isinstance(wanted, Tensor) or any(x.shape != wanted.shape for x in parts):
        return False
    return torch.allclose(sum(parts[1:], parts[0]), wanted, rtol=_CLOSE, atol=_CLOSE)


def _share(experts: nn.Module, layer: LayerPlan, counts: Sequence[AttributePlan], rank: int) -> nn.Module:
    share = block_copy(experts)
    for split in layer.splits:
        own = take_ranges(share.get_parameter(split.leaf), split.dim, split.by_rank[rank])
        share._parameters[split.leaf] = nn.Parameter(own)
    for leaf in layer.once if rank else ():
        share.get_parameter(leaf).zero_()
    vars(share).update({count.attribute: count.by_rank[rank] for count in counts})
    return share
