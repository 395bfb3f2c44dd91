"""ZeRO: what the data-parallel ranks would all hold, divided over them by FSDP2.

Level 1 divides the optimizer's state, level 2 also the reduced gradients of every batch, level 3 also the parameters
between their uses. A unit (block, embedding, head) is gathered as a whole when it runs. What is in no unit, is small,
or is used beside its unit (tied weights, a regulariser) is gathered together for the length of a step.

FSDP2's own modules stand beside the user's: a unit's call goes through one, and the user's classes, names and hooks are
as they were. The optimizer steps plain tensors, this rank's rows, that share memory with FSDP2's; DTensors would cost
more per step than the step.

Source: Rajbhandari et al. 2020 (ZeRO), section 5; Zhao et al. 2023 (PyTorch FSDP), section 3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megatp.calls import around_calls
from lightning_megatp.containers import parameters_of
from lightning_megatp.detour import Detour, entries_replaced
from lightning_megatp.kept_parameters import kept_parameters, replace_kept
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.parts.rows import (
    DividedParameter,
    finds_rows,
    load_rows,
    replace_parameters,
    rows_of,
    used_outside_forward,
)
from lightning_megatp.shim.autograd import hold_hooks, hooks_held
from lightning_megatp.shim.fakes import FakeTensorMode
from lightning_megatp.shim.torch import storage_id, tensor_version
from lightning_megatp.steps import StepKind
from lightning_megatp.zero.holders import Group, Holder, Root, Sharder
from lightning_megatp.zero.options import ZeroOptions
from lightning_megatp.zero.preparing import hooks_of, lay_out, main_dtype, refuse_sparse
from lightning_megatp.zero.shown import ShownGradients
from lightning_megatp.zero.units import in_several, large_units
from lightning_megatp.zero.uses import Uses
from lightning_megatp.zero.writes import WriteWatch, lost_change


class ZeroSharding:
    """Divides the parameters of one rank's stages over the data-parallel ranks, in place.

    Args:
        parallel: the module, its layers swapped, other stages' parameters gone.
        mesh: who is where.
        options: level > 0.
        units: names of the modules that are gathered one by one, of this rank only.
        together: names of parameters that are used beside their units.
        make: gives the parameters of a module their values, if they have none yet; called right before it is divided.

    Communication per step, of the P parameters of this rank's stages over d ranks: levels 1 and 2 gather them once,
    (d - 1) / d P received; level 3 gathers units once per forward and once per backward of every microbatch (the last
    one once, without a pipeline), and the rest once. Gradients are reduce-scattered, (d - 1) / d P, once per step at
    level 1, once per accumulated batch at 2 and 3 and in a pipeline; see `Pipeline.reduces_each`.
    """

    def __init__(
        self,
        parallel: ParallelModule,
        mesh: ParallelMesh,
        options: ZeroOptions,
        units: Sequence[str],
        together: Collection[str],
        make: Callable[[nn.Module], None],
    ) -> None:
        self.parallel, self.mesh, self.options = parallel, mesh, options
        module, roles = parallel.module, parallel.roles()
        undivided = _undivided(parallel)
        hooks = hooks_of(module)
        refuse_sparse(module)
        attributes = {name: dict(vars(p)) for name, p in module.named_parameters()}
        kept = kept_parameters(module)
        self.whole = [name for name, p in module.named_parameters() if id(p) in undivided]
        """Parameters that are not divided: numbers without a dim, those without elements, and trained ones of another
        dtype than most."""
        apart = {id(parallel.names[name]) for name in together if name in parallel.names}
        apart |= in_several(module, units) | undivided
        parallel.names.clear()  # or all that is divided would be held until the end
        data_mesh = mesh.divided_data(options.replicas)
        self.group = data_mesh.get_group(-1)
        """The ranks that hold different rows."""
        self._place = data_mesh.get_local_rank(data_mesh.ndim - 1)
        first_copy = data_mesh.ndim == 1 or data_mesh.get_local_rank(0) == 0
        self.units = large_units(module, units, apart)
        self._holders = {unit: Holder(module.get_submodule(unit)) for unit in self.units}
        in_rest = self._shard(data_mesh, apart, undivided, make)
        self.parameters = lay_out(module, self._groups, in_rest, self._place, self.group.size(), first_copy)
        for holder in self._holders.values():
            around_calls(holder.unit, holder.call)
            inside = set(holder.unit.modules())
            holder.divided = [p for p in self.parameters if not p.together and p.owners[0][0] in inside]
        self.by_unit = {p.name for p in self.parameters if not p.together}
        """Names of what is gathered only while a unit runs."""
        self._give_back(attributes, hooks, kept)
        for group in self._groups:
            group.reduce_unused()
            group.see_shards(parallel.context)
        self._versions = {p.name: tensor_version(p.whole) for p in self.parameters}
        self._rows = [p.local.detach() for p in self.parameters]
        """In the memory that FSDP2 gathers from."""
        self._shells = [storage_id(p.sharded) for p in self.parameters]
        """What a DTensor's `.data` is set to changes its shell alone."""
        self._reduces = True
        self._keeps = False
        """Whether units stay gathered for all of a backward."""
        self.watches = False
        """Whether steps are looked at for writes that nothing else shows, those by `.data`."""
        self._uses = Uses(self.parameters, self._holders, mesh, options.level)
        self.shown = ShownGradients(self.parameters)
        """The gradients that hooks find."""
        self._stepping = False
        Detour(module, "forward", self._explain_outside)
        Detour(module, "zero_grad", self._clear_gradients)
        for name in ("toggle_optimizer", "untoggle_optimizer"):
            Detour(module, name, self._freeze_rows)
        parallel.adopt_divided(self.parameters, self.group, roles)
        load_rows(self.parameters)

    # ---------------------------------------------------------------- set-up

    def _shard(
        self,
        data_mesh: DeviceMesh,
        apart: Collection[int],
        undivided: Collection[int],
        make: Callable[[nn.Module], None],
    ) -> set[str]:
        """Give the parameters of each unit, and then the rest, to FSDP2.

        Args:
            apart: id of parameters that no unit gathers.
            undivided: id of those that stay as they are.

        Returns:
            The names of the rest.
        """
        options, module = self.options, self.parallel.module
        reduce_dtype = torch.float32 if options.reduce_dtype is not None else None
        shard = Sharder(data_mesh, options.offload is not None, reduce_dtype)
        # The backward of the last unit is the next that runs.
        last = self.units[-1] if self.units and self.parallel.pipeline is None else ""
        for unit, holder in self._holders.items():
            make(holder.unit)
            frees = options.level == 3 and unit != last
            shard(holder, {p for p in holder.parameters() if id(p) not in apart}, frees)
        make(module)
        rest = {p for p in module.parameters() if id(p) not in undivided and not isinstance(p, DTensor)}
        names = {name for name, p in module.named_parameters() if p in rest}
        self._root = Root(module, self._holders.values())
        shard(self._root, rest, False)
        return names

    @property
    def _groups(self) -> tuple[Group, ...]:
        """What is gathered together: each unit, and last the rest."""
        return (*self._holders.values(), self._root)

    def _give_back(
        self, attributes: Mapping[str, dict[str, Any]], hooks: Mapping[str, Any], kept: Mapping[int, str]
    ) -> None:
        """What users have put on the parameters, or keep them in, goes on with those in their places.

        Args:
            attributes: by name of the parameter, as `hooks` are.
            kept: see `kept_parameters`.
        """
        for parameter in self.parameters:
            for tensor in (parameter.sharded, parameter.whole, parameter.local):
                vars(tensor).update(attributes[parameter.name])
            if parameter.name in hooks:
                hold_hooks(parameter.sharded, hooks[parameter.name])
        sharded = {parameter.name: parameter.sharded for parameter in self.parameters}
        replace_kept(self.parallel.module, {key: sharded[name] for key, name in kept.items() if name in sharded})

    # ---------------------------------------------------------------- around steps

    def begin(self) -> None:
        """Gather what is held for the length of a step. Every rank calls it before each batch, whatever that is."""
        for parameter in self.parameters:
            held = hooks_held(parameter.sharded)  # those that users registered, maybe since the last step
            if held is not hooks_held(parameter.whole):
                hold_hooks(parameter.whole, held)
        self._root.gather()
        for group in self._groups:
            group.stay()

    def end(self) -> None:
        """Let go of all that is gathered: after evaluation, and when values have changed."""
        self._uses.wait()
        self._check_unchanged()
        for group in self._groups:
            group.free()

    @torch.no_grad()
    def take_back_rows(self) -> None:
        """During and after an optimizer's step: one that says `p.data = values` has given its rows other memory."""
        for parameter, rows in zip(self.parameters, self._rows, strict=True):
            if parameter.local.data_ptr() != rows.data_ptr():
                rows.copy_(parameter.local)
                parameter.local.data = rows

    def step(self, function: Callable[[], Any]) -> Any:
        """Run a user's step, or a pipeline stage's part of it; units are gathered as they run."""
        with_graph = torch.is_grad_enabled()  # leaving inference mode would set it
        watching: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.watches:
            watching = WriteWatch(self.parameters, lambda: self.parallel.context.user_code)
        with torch.inference_mode(False), torch.set_grad_enabled(with_graph), watching:  # what is gathered is trained
            self._stepping = True
            try:
                return self._root(function)
            finally:
                self._stepping = False

    def _explain_outside(self, forward: Callable[[], Any]) -> Any:
        """The LightningModule's forward, which hooks and scripts may call."""
        try:
            return forward()
        except (RuntimeError, AssertionError) as error:
            if self._stepping or not finds_rows(error):
                raise
            raise RuntimeError(
                "MegaTPStrategy: the module's forward is called outside of a step, where its parameters are divided"
                f" (zero={self.options.level}). Only training, validation, test and predict steps gather them: do it in"
                " one of these, or from a checkpoint with zero=0."
            ) from error

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around a batch without a backward."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def between_steps(self, call: Callable[[], Any]) -> Any:
        """Run a forward that a hook calls: it gathers what it computes with, and lets go of it."""
        with self.evaluating():
            return self.step(call)

    def as_rows(self) -> contextlib.AbstractContextManager[None]:
        """Meanwhile the module's parameters are this rank's plain rows."""
        return self._showing(lambda p: p.local)

    def as_divided(self) -> contextlib.AbstractContextManager[None]:
        """Meanwhile they are what they are between steps."""
        return self._showing(lambda p: p.sharded)

    def _showing(self, form: Callable[[DividedParameter], Any]) -> contextlib.AbstractContextManager[None]:
        return entries_replaced((owner._parameters, leaf, form(p)) for p in self.parameters for owner, leaf in p.owners)

    @contextlib.contextmanager
    def planning(self, fake_mode: FakeTensorMode) -> Iterator[None]:
        """Meanwhile units run as they are, on parameters without data: for a pipeline's dry run."""

        def without_data(parameter: DividedParameter) -> nn.Parameter:
            with fake_mode:
                empty = torch.empty(parameter.shape, dtype=parameter.local.dtype, device=self.mesh.device)
            return nn.Parameter(empty, requires_grad=parameter.sharded.requires_grad)

        fakes = [(p, without_data(p)) for p in self.parameters if not p.together]
        with entries_replaced((owner._parameters, leaf, fake) for p, fake in fakes for owner, leaf in p.owners):
            self._switch(on=False)
            try:
                yield
            finally:
                self._switch(on=True)

    def _switch(self, on: bool) -> None:
        for holder in self._holders.values():
            holder.on = on

    def shape_of_rows(self, name: str, shape: torch.Size) -> torch.Size:
        """The shape of what this rank would have of a parameter of another stage."""
        if name in self.whole or not shape:
            return shape
        start, stop = rows_of(shape[0], self._place, self.group.size())
        return torch.Size((stop - start, *shape[1:]))

    # ---------------------------------------------------------------- backward

    def from_step(self, loss: Tensor) -> Tensor:
        """A loss whose backward begins before the step is over. What leaves the root starts FSDP2's own end of a
        backward; without it, a backward that passes no unit would reduce nothing."""
        if isinstance(loss, DTensor):  # of divided parameters alone: a backward would end in an error of torch's
            raise used_outside_forward(StepKind.TRAIN, self.options.level)
        return self._root(lambda: loss) if self._stepping else loss

    def before_backward(self, last: bool) -> None:
        """Tell what the next backward is for.

        Args:
            last: the last one of the batches that are accumulated.
        """
        self._agree_on_trained()
        self._reduces = last or self.options.level > 1
        if self._reduces and self.options.reduce_dtype is not None:
            for group in self._groups:
                group.accumulated()
        reduces = self._reduces and not self._keeps  # these `collect` reduces
        for holder in self._holders.values():
            holder.prepare(reduces, frees=not self._keeps and (last or self.options.level == 3))
        self._root.prepare(reduces, frees=last)
        self._root.tell_last(True)

    def before_backward_of(self, units: Collection[str], reduces: bool) -> None:
        """In a pipeline tell what the next backward of a stage, of one microbatch, is for.

        Args:
            units: of the stage.
            reduces: whether their gradients are reduced then. Else they are added up until `reduce_units`.
        """
        self._agree_on_trained()
        for name, holder in self._holders.items():
            if name in units:
                holder.prepare(reduces, frees=not self._keeps and self.options.level == 3)
            else:
                holder.skip()
        self._root.skip()
        self._root.tell_last(False)

    def reduce_units(self, units: Collection[str], factor: Tensor | None) -> None:
        """In a pipeline, behind the last backward of a stage.

        Args:
            units: of the stage.
            factor: () float64, by which this rank's gradients are multiplied before they are reduced; None where
                backwards have reduced them.
        """
        for holder in (holder for name, holder in self._holders.items() if name in units):
            if factor is not None:
                holder.reduce(factor, frees=not self._keeps)
                continue
            holder.skip()
            if not self._keeps:
                holder.free()

    def reduce_rest(self, factor: Tensor) -> None:
        """After a batch in a pipeline: reduce what is in no unit, and wait for all that is being reduced."""
        self._reduces = True
        self._root.reduce(factor, frees=True)
        self._root.end_backward()

    def _agree_on_trained(self) -> None:
        for parameter in self.parameters:
            parameter.agree_on_trained()
        self._refuse_frozen()
        # The graph of a gradient uses weights, and leads to them, when FSDP2 takes the unit's backward for over: one
        # that was called again on the gradient, or whose own result the gradient doesn't depend on.
        self._keeps = self.parallel.partial.differentiable

    def _refuse_frozen(self) -> None:
        for p in self.parameters:
            frozen = not (p.sharded.requires_grad and p.whole.requires_grad and p.local.requires_grad)
            if frozen and p.name in self._uses:
                raise RuntimeError(
                    f"MegaTPStrategy: `{p.name}` was frozen between two accumulated batches, and FSDP2 (zero > 0) would"
                    " lose the gradient that it has of the first. Freeze it before or after all of them, or use zero=0."
                )

    def drop_old(self) -> None:
        """Before the first backward of a batch: what earlier ones left is in `local.grad`, or was cleared there."""
        self._check_unchanged()
        self.shown.hide()

    @torch.no_grad()
    def collect(self) -> None:
        """After the last backward: add the reduced gradients to those of the plain rows.

        Communication: that of `Uses.reduced`. A parameter that no rank has used keeps having no gradient.
        """
        self._check_unchanged()
        if self._keeps and self._reduces:
            for group in self._groups:
                group.reduce(None, frees=True)
            self._root.end_backward()
        for parameter, shell in zip(self.parameters, self._shells, strict=True):
            if storage_id(parameter.sharded) != shell:
                raise RuntimeError(lost_change(parameter.name))
        self.shown.bring_back()
        new = self._uses.reduced()
        held = [(p.local.grad, grad) for p, grad in new if p.local.grad is not None]
        if held:
            torch._foreach_add_([grad for _, grad in held], [before for before, _ in held])
        for parameter, grad in new:
            parameter.local.grad = grad
        if self._reduces:
            self._uses.forget()
            for holder in self._holders.values():
                holder.called = False
        if self._keeps:
            self._keeps = self.parallel.partial.differentiable = False
            for holder in self._holders.values():
                holder.free()

    def forget_unreduced(self) -> None:
        """Gradients of accumulated batches that no optimizer will step, since the epoch or the fit has ended between
        them. FSDP2 keeps them at level 1, where nobody else can clear them."""
        for group in self._groups:
            group.forget()
        for parameter in self.parameters:
            parameter.whole.grad = None
        self._uses.forget()

    def _clear_gradients(self, zero_grad: Callable[[], Any]) -> Any:
        """`self.zero_grad()` of the LightningModule."""
        for parameter in self.parameters:
            parameter.local.grad = None
        return zero_grad()

    def _freeze_rows(self, toggle: Callable[[], Any]) -> Any:
        """`toggle_optimizer` and `untoggle_optimizer` freeze, and thaw, what the optimizers hold: rows. What the module
        computes with follows."""
        for parameter in self.parameters:
            parameter.local.requires_grad_(parameter.is_trained)
        toggle()
        for parameter in self.parameters:
            parameter.sharded.requires_grad_(parameter.local.requires_grad)
            parameter.whole.requires_grad_(parameter.local.requires_grad)

    def _check_unchanged(self) -> None:
        """See whether what is gathered still has the values of the rows.

        Raises:
            RuntimeError: a value was written to what is gathered, and would be lost.
        """
        for parameter in self.parameters:
            if tensor_version(parameter.whole) != self._versions[parameter.name]:
                raise RuntimeError(lost_change(parameter.name))

    def check_known(self, optimizers: Iterable[Optimizer]) -> None:
        """See whether optimizers were given parameters of the module alone.

        Raises:
            ValueError: an optimizer was given a parameter that isn't the module's any more.
        """
        known = {id(p) for p in self.parallel.module.parameters()} | self.parallel.divided.keys()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in known:
                        raise ValueError(
                            f"MegaTPStrategy: an optimizer was given a parameter of shape {tuple(parameter.shape)} that"
                            " is not the module's (zero > 0 has replaced what an earlier run had). Let"
                            " `configure_optimizers` take them from `self.parameters()`."
                        )

    def give_to(self, optimizers: Iterable[Optimizer]) -> None:
        """Let optimizers step the plain rows instead of the module's parameters, also those that a callback added."""
        for optimizer in optimizers:
            if any(isinstance(p, DTensor) for p in parameters_of(optimizer)):
                replace_parameters(optimizer, self.parallel.held)

    def take_from(self, optimizer: Optimizer) -> None:
        """Let an optimizer have the module's parameters in place of the rows, until `give_to`."""
        divided = self.parallel.divided
        for group in optimizer.param_groups:
            group["params"] = [divided[id(p)].sharded if id(p) in divided else p for p in group["params"]]


def _undivided(parallel: ParallelModule) -> set[int]:
    """id of the parameters that can't be divided, or not in one group with the others.

    Communication: see `main_dtype`.
    """
    dtype = main_dtype(parallel.module)
    return {
        id(p)
        for p in parallel.module.parameters()
        if p.dim() == 0
        or not parallel.whole_size(p)
        or not p.is_floating_point()
        or (p.requires_grad and p.dtype != dtype)
    }
