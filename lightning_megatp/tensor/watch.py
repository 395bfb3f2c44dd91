"""RegionWatch: sees which operations of a step lie between a column and a row layer.

There every tensor rank has other features, so its random numbers need a stream of their own. The operations may be
functional (`F.dropout`, the dropout of scaled_dot_product_attention), so no look at the modules finds them. And what
looks at several features there (a norm) was not proven if the block did not do it when its plan was made. Nor was what
a stack of experts did not do then, or what hooks do in backward that a module got later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatp.messages import with_article
from lightning_megatp.origins import is_frameworks, module_of
from lightning_megatp.plan.layer import UserOperation
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import tree_leaves
from lightning_megatp.tensor.context import OpenStack, TensorContext
from lightning_megatp.tensor.draws import draws_random
from lightning_megatp.tensor.functions import (
    LOOKS_AT_GRADIENT,
    argument,
    bare_name,
    check_caller,
    couples,
    done_by_user,
    operation_name,
    operation_names,
    without_arguments,
)
from lightning_megatp.tensor.layers import ParallelLayer
from lightning_megatp.tensor.lineage import computed_with, enters_region
from lightning_megatp.tensor.shards import NO_VALUES, VIEWS


class RegionWatch(TorchFunctionMode):
    """Active around a user's step; costs Python time at every operation, so it is for single steps.

    Args:
        context: of the parallel layers.
        known: block -> what was seen in it, when its plan was proven, that looks at several elements at once.
        stacks: stack of experts -> all operations that were seen in it then.
        module: the model.
    """

    def __init__(
        self,
        context: TensorContext,
        known: Mapping[str, Collection[UserOperation]],
        stacks: Mapping[str, Collection[UserOperation]],
        module: nn.Module,
    ) -> None:
        super().__init__()
        self.context, self._known, self._stacks, self._module = context, known, stacks, module
        self._handles: list[Any] = []

    def __enter__(self) -> RegionWatch:
        for child in self._module.modules() if self._known else ():
            if child._backward_hooks or child._backward_pre_hooks:
                after = child.register_forward_hook(lambda child, args, output: self._check_hooks(child, output))
                self._handles += [child.register_forward_pre_hook(self._check_hooks), after]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        check_caller(func)
        kwargs = kwargs or {}
        context = self.context
        if context.open_region is not None and not context.open_region.tracked and context.user_code:
            name = operation_name(func)
            if draws_random(name, args, kwargs):
                dry = any(map(is_fake, tree_leaves((args, kwargs))))
                if not dry:
                    self._check_operand(name, args)
                context.draw_inside(_device(args, kwargs), dry)
            elif couples(name):
                self._check_known(name, args, kwargs)
            elif name in LOOKS_AT_GRADIENT:
                self._check_gradient(name, args)
        if context.open_stack is not None and context.user_code:
            self._check_stack(context.open_stack, operation_name(func), args, kwargs)
        return func(*args, **kwargs)

    def _seen(self, region: str) -> Collection[UserOperation] | None:
        """What was seen in the block that a region is of; None if its plan is the user's."""
        parts = region.split(".")
        blocks = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
        return next((self._known[block] for block in blocks if block in self._known), None)

    def _check_known(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse what nobody saw the step do with all features of a layer.

        Raises:
            RuntimeError: an operation looks at all features of a rank, as none did when the plan was proven.
        """
        x, region = args[0] if args else None, self.context.open_region
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim() or region is None:
            return
        seen = self._seen(region.name)
        if seen is None or done_by_user(name) in seen:
            return
        columns = (column() for column in region.columns)
        own = {column.sizes[self.context.rank] for column in columns if column is not None}
        if x.shape[-1] in own and _over_last(name, x.dim(), args, kwargs):
            raise RuntimeError(
                f"MegaTPStrategy: `{name}` looks at several features in the tensor-parallel region `{region.name}`,"
                f" where this rank holds {x.shape[-1]} of them. The batch that was looked at before training did not"
                " take this path, so the automatic plan did not know of it. Give these layers a plan with"
                " `global_sizes: true`, or leave them whole (`plan` names what `auto` may split). If it is a hook of"
                " `register_forward_hook` that does so, register it in `__init__` or `setup`: the plan then has whole"
                " values there."
            )

    def _check_gradient(self, name: str, args: tuple[Any, ...]) -> None:
        """Raises:
        RuntimeError: code would see the gradient of a part of the features, and none did when the plan was proven.
        """
        x, region = args[0], self.context.open_region
        seen = None if region is None else self._seen(region.name)
        if region is None or seen is None or done_by_user(name) in seen or not enters_region(x):
            return
        if len(args) > 1 and is_frameworks(without_arguments(args[1])):  # FSDP2's, of a layer that is a unit
            return
        raise RuntimeError(
            f"MegaTPStrategy: `{name}` in the tensor-parallel region `{region.name}` would see the gradient of a part"
            f" of the features, {tuple(x.shape)}, and the batch that was looked at before training did not show it. If"
            " a hook of `register_forward_hook` does so, register that in `__init__` or `setup`: the plan then has"
            " whole values there. Or leave these layers whole (`plan` names what `auto` may split)."
        )

    def _check_hooks(self, module: nn.Module, values: Any) -> None:
        """Before a module's forward, with its arguments, and after it, with what it returns.

        Raises:
            RuntimeError: hooks of the user's would be given the gradients of a part of these in backward, as none was
                when the plan was proven.
        """
        region = self.context.open_region
        if region is None or region.tracked or self._seen(region.name) is None:
            return
        held = (module._backward_hooks, module._backward_pre_hooks)
        hooks = [without_arguments(hook) for of_kind in held for hook in of_kind.values()]
        own = [hook for hook in hooks if not (is_frameworks(type(hook)) or is_frameworks(hook))]
        parts = (x for x in tree_leaves(values) if isinstance(x, Tensor) and enters_region(x))
        if own and (part := next(parts, None)) is not None:
            split = isinstance(module, ParallelLayer)
            what = f"`{module.label}`" if split else with_article(type(module).__name__)
            raise RuntimeError(
                f"MegaTPStrategy: {what}, in the tensor-parallel region `{region.name}`, has a hook of"
                f" `register_full_backward_hook` ({module_of(own[0])}), which would be given the gradient of a part of"
                f" the features, {tuple(part.shape)}: it was registered after the plan was made. Register it in"
                " `__init__` or `setup`, and the plan has whole values there; or give these layers a plan with"
                " `global_sizes: true`."
            )

    def _check_stack(self, stack: OpenStack, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse what nobody saw the step do with the outputs of experts.

        Raises:
            RuntimeError: an operation on what experts computed, as none was when their parts were found to add up.
        """
        seen = self._stacks.get(stack.name)
        if seen is None or name in _ADDS_UP or any(map(is_fake, stack.parts)):  # in a dry run nothing is computed
            return
        done = done_by_user(name)
        if done in seen or (not couples(name) and any(name == other for other, _, _ in seen)):
            return
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(computed_with(x, stack.parts) for x in tensors):
            raise RuntimeError(
                f"MegaTPStrategy: the experts `{stack.name}` use `{name}` ({done[1]}:{done[2]}) on what each tensor"
                " rank has computed with its part of their features. They did not when these parts were tried out,"
                " before training, and found to add up. Do this outside of the module that has the experts' parameters,"
                " or leave it whole (`plan` names what `auto` may split)."
            )

    def _check_operand(self, name: str, args: tuple[Any, ...]) -> None:
        """Whole values need the same random numbers on every rank, and there is one stream between the layers."""
        x = args[0] if args else None
        region = self.context.open_region
        if isinstance(x, Tensor) and x.grad_fn is not None and region is not None and not enters_region(x):
            raise RuntimeError(
                f"MegaTPStrategy: `{name}` draws random numbers for a value that is the same on all tensor ranks,"
                f" between the column and the row layers of `{region.name or 'the LightningModule'}`, where every rank"
                " has its own stream. Compute it before the column layers, give these `global_sizes: true`, or leave"
                " them out of the plan."
            )


_ADDS_UP = (
    NO_VALUES
    | VIEWS
    | operation_names(
        """
        add add_ sub sub_ rsub neg __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __neg__ sum flip roll
        mul mul_ div div_ true_divide __mul__ __rmul__ __imul__ __truediv__ __itruediv__ matmul __matmul__ linear bmm mm
        einsum baddbmm addmm addbmm
        clone contiguous to type type_as float double half bfloat16 detach data requires_grad_ register_hook retain_grad
        cat concat concatenate stack hstack vstack gather take take_along_dim index_select masked_select index_add
        index_add_ index_put index_put_ index_copy index_copy_ scatter scatter_ scatter_add scatter_add_ __setitem__
        copy_ zero_ repeat repeat_interleave broadcast_to tile pad ravel zeros_like empty_like ones_like new_zeros
        new_empty new_ones new_full full_like __deepcopy__ __repr__ __format__ where masked_fill masked_fill_ dropout
        """
    )
)
"""What leaves a sum a sum, or is done with the weights of experts anyway."""
_DIM_AT = {"norm": 2, "vector_norm": 2, "topk": 2, "kthvalue": 2, "quantile": 2, "nanquantile": 2, "roll": 2}
"""Operations whose dim is not their second argument."""


def _over_last(name: str, dims: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation looks at several elements along the last dim."""
    given = argument(args, kwargs, _DIM_AT.get(bare_name(name), 1), "dim", "axis", "dims")
    if given is None or name in ("layer_norm", "rms_norm"):
        return True
    chosen = given if isinstance(given, (list, tuple)) else (given,)
    return any(isinstance(dim, int) and dim % dims == dims - 1 for dim in chosen)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensor = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)
    return tensor.device if tensor is not None else torch.device(kwargs.get("device") or "cpu")
