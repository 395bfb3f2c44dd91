"""The prediction for a run that goes on: its module, plan, optimizers and last batch, without values."""

from __future__ import annotations

from typing import Any

from lightning_megatp.mesh import MeshShape, ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.settings import pipeline_rank
from lightning_megatp.planner.formula import rehearse_or_estimate
from lightning_megatp.planner.measure import MemoryAccount
from lightning_megatp.planner.optimizers import StateTensor, states_of
from lightning_megatp.planner.sizes import Bytes, Layout, predict


def predict_run(
    strategy: Any, parallel: ParallelModule, mesh: ParallelMesh, account: MemoryAccount | None
) -> tuple[Bytes | None, str]:
    """What this rank should hold, and in words what could not be predicted."""
    if account is None:
        return None, "predictions need MegaTPStrategy(memory=True), given before the model was split"
    problems: list[str] = []
    states = rehearsal = None
    try:
        states = _states(strategy, parallel, account)
    except Exception as error:  # an optimizer's own code
        problems.append(f"the optimizer's state could not be predicted ({type(error).__name__}: {error})")
    pipeline = strategy.pipeline
    stage_of_unit = None if pipeline is None else pipeline.stage_of_unit
    if account.microbatch is not None:
        rehearsal, problem = rehearse_or_estimate(
            account.module,
            strategy.parallelism,
            parallel.plan,
            account.microbatch,
            rank=mesh.rank("tp"),
            pipelined=pipeline is not None,
            recompute=strategy.recompute,
            stage_of_unit=stage_of_unit,
            device=strategy.root_device.type,
            around=strategy.precision_plugin.forward_context,
        )
        problems += [problem] if problem else []
    layout = layout_of(strategy, mesh.shape)
    found = predict(
        account.module,
        parallel.plan,
        layout,
        states,
        rehearsal,
        stage_of_unit,
        mesh.rank("tp"),
        mesh.rank("dp"),
    )
    rank = 0 if pipeline is None else pipeline_rank(mesh, layout.made())
    return found[rank], "; ".join(problems)


def layout_of(strategy: Any, sizes: MeshShape) -> Layout:
    """The layout of a run."""
    options = strategy.pipeline_options
    return Layout(
        tp=sizes.tp,
        pp=sizes.pp,
        dp=sizes.dp,
        zero=strategy.zero.level if sizes.dp > 1 else 0,
        replicas=strategy.zero.replicas,
        schedule=options.schedule,
        microbatches=options.microbatches or 4 * sizes.pp,
        virtual_stages=options.virtual_stages,
        stages=options.stages,
    )


def _states(strategy: Any, parallel: ParallelModule, account: MemoryAccount) -> dict[int, list[StateTensor]]:
    """By the parameters of the module without values. Those of other stages are not known here, nor asked for."""
    whole = dict(account.module.named_parameters())
    held = {id(x): name for name, x in parallel.named_held()}
    found = states_of(strategy.optimizers)
    return {id(whole[held[i]]): tensors for i, tensors in found.items() if i in held}
