"""Every family of `tests.compat.families`, split without a plan on real ranks and compared with one device.

    python -m tests.compat.sweep [--tp N] [--pp N] [--sequence] [--only NAME ...] [--json FILE]

A family is *verified* if its own training step, in float64, with and without a padding mask, in training and in
evaluation, gives the loss of the unsplit model and every gradient; the share is that of the blocks' parameters which is
not on a rank. Models compute some things in float32 whatever their weights are; here those stay float64 on both sides,
so that a difference is never rounding. A few families can't run in float64, and are compared in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import logging
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatp import MegaTPStrategy, MeshShape, ParallelismPlugin, ParallelMesh
from lightning_megatp.auto_plan.blocks import without_logging
from lightning_megatp.auto_plan.exact import exact
from lightning_megatp.batches.example import untouched
from lightning_megatp.batches.split import split_batch
from lightning_megatp.module import ParallelModule
from lightning_megatp.plan.ranges import length
from lightning_megatp.shim.torch import tree_map
from lightning_megatp.tensor.parameters import gather_shards
from tests.compat.families import FAMILIES, FLOAT32, to
from tests.devices import placed
from tests.ranks import RankError, pools, run_ranks

TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3}
"""Of a gradient, relative to its largest entry, or to a thousandth of the model's largest."""


@dataclasses.dataclass
class Result:
    """What became of one family."""

    name: str
    kind: str
    status: str
    """verified, refused, wrong"""
    share: float = 0.0
    """Of the blocks' parameters, not on rank 0."""
    loss: float = 0.0
    gradient: float = 0.0
    why: str = ""
    gathered: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def check(rank: int, world_size: int, name: str, sequence: bool) -> Result:
    """One family on the ranks of a tensor group."""
    torch.set_num_threads(1)
    family = FAMILIES[name]
    dtype = torch.float32 if name in FLOAT32 else torch.float64
    result = Result(name, family.kind, "verified")
    start = time.perf_counter()
    torch.manual_seed(0)
    module = family.build().to(dtype)
    for parameter in module.parameters():
        if parameter.dim() == 1 and parameter.is_floating_point():
            parameter.data += 0.2 * torch.randn_like(parameter)  # biases and norms that count
    reference = copy.deepcopy(module)
    batches = [to(batch, dtype) for padding in (False, True) if (batch := family.batch(1, padding)) is not None]
    mesh = ParallelMesh(MeshShape(tp=world_size))
    with warnings.catch_warnings(record=True) as caught, without_logging(module), without_logging(reference):
        warnings.simplefilter("always")
        parallel = ParallelismPlugin("auto").parallelize(
            module, mesh, torch.device("cpu"), sequence, example=_Steps([_example(module, batch) for batch in batches])
        )
        result.why = "; ".join(str(w.message) for w in caught if "MegaTPStrategy" in str(w.message))[:400]
        result.share = _share(parallel, reference)
        result.gathered = sorted({n for n, how in parallel.plan.how.items() if "gathered" in how})
        for batch in batches:
            _compare(parallel, reference, batch, dtype, result)
    result.seconds = time.perf_counter() - start
    return result


class _Steps:
    """Stands in for an `Example`, of whose steps there are calls alone."""

    batch = None

    def __init__(self, steps: list[Any]) -> None:
        self._steps = steps

    def calls(self) -> list[Any]:
        return self._steps

    def uncut_calls(self) -> list[Any]:
        return []


def _example(module: Any, batch: dict[str, Any]) -> Any:
    rows = {key: x[:2] if isinstance(x, Tensor) and x.dim() and len(x) == 4 else x for key, x in batch.items()}

    def run() -> Any:
        with untouched(module):
            return _loss(module, rows)

    return run


def _loss(module: Any, batch: dict[str, Any]) -> Tensor:
    torch.manual_seed(0)
    loss: Tensor = module.training_step(batch, 0)
    return loss


def _compare(parallel: ParallelModule, reference: Any, batch: dict[str, Any], dtype: torch.dtype, out: Result) -> None:
    module: Any = parallel.module
    with exact() if dtype == torch.float64 else contextlib.nullcontext():
        for train in (False, True):
            module.train(train), reference.train(train)
            module.zero_grad(), reference.zero_grad()
            wanted = _loss(reference, copy.deepcopy(batch))
            with parallel.step(watch=True):
                found = parallel.outputs(_loss(module, copy.deepcopy(batch)))
            out.loss = max(out.loss, _relative(found.detach(), wanted.detach(), 1e-3))
        wanted.backward()
        parallel.partial.trace([found])
        with parallel.user_code():
            found.backward()
        parallel.partial.sum()
        parallel.partial.forget()
        parallel.keep_whole_where_used_outside()
    largest = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
    worst = ""
    for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
        if p.grad is None and q.grad is None:
            continue
        spec = parallel.spec(p)
        grad = (
            None if p.grad is None else p.grad if spec is None else gather_shards(p.grad, spec, parallel.context.group)
        )
        if grad is None or q.grad is None:
            error = float("inf") if (grad if q.grad is None else q.grad).any() else 0.0  # type: ignore[union-attr]
        else:
            error = _relative(grad, q.grad, 1e-3 * largest)
        if error > out.gradient:
            out.gradient, worst = error, name
    limit = TOLERANCE[dtype]
    if not (out.loss <= limit and out.gradient <= limit) and out.status == "verified":
        out.status, out.why = "wrong", f"loss {out.loss:.1e}, gradient of {worst} {out.gradient:.1e}; {out.why}"


class _Gradients(Callback):
    """Keeps the first step's loss and whole gradients."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}
        self.loss = 0.0

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        self.found = trainer.strategy.full_gradients()  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.loss = float(outputs["loss"])


def check_stages(rank: int, world_size: int, name: str, sequence: bool, tp: int, whole_loss: bool = False) -> Result:
    """One family cut into pipeline stages, each split over `tp` of the ranks, two microbatches, under a Trainer. A loss
    that couples samples (contrastive, BatchNorm) is that of one device over the same microbatches; with `whole_loss`
    it is that of the whole batch, but for BatchNorm, which nothing can be compared with then."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    family, dtype = FAMILIES[name], torch.float32 if name in FLOAT32 else torch.float64
    coupled = False
    result, start = Result(name, family.kind, "verified"), time.perf_counter()
    for padding in (False, True):
        batch = family.batch(1, padding)
        if batch is None:
            continue
        batch = to(batch, dtype)
        torch.manual_seed(0)
        reference: Any = family.build().to(dtype)
        for child in reference.modules():
            if isinstance(child, nn.Dropout):
                child.p = 0.0  # one that no config turns off
        module: Any = copy.deepcopy(reference)
        seen = _Gradients()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(
                **placed(world_size), max_steps=1, logger=False, enable_checkpointing=False,
                strategy=MegaTPStrategy(
                    tp=tp, pp=world_size // tp, microbatches=2, sequence_parallel=sequence, summary=False,
                    whole_loss=whole_loss,
                ),
                callbacks=[seen], enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(module, DataLoader([copy.deepcopy(batch)], batch_size=None))
        whole = sum(p.numel() for p in reference.parameters())
        result.share = 1 - sum(p.numel() for p in module.parameters()) / whole
        normed = any(isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d) for child in reference.modules())
        if whole_loss and normed:
            result.status, result.why = "not compared", "BatchNorm sees microbatches"
            break
        with without_logging(reference):
            wanted = _loss(reference, copy.deepcopy(batch))
            if not padding and not whole_loss:
                parts = torch.stack([_loss(reference, part) for part in split_batch(copy.deepcopy(batch), 2)])
                near = 1e-4 * abs(float(wanted))
                twice = _loss(reference, tree_map(_twice, copy.deepcopy(batch)))
                together = parts.sum() if abs(float(twice - 2 * wanted)) < 2 * near else parts.mean()
                coupled = normed or abs(float(together - wanted)) > near
                wanted = together if coupled else wanted
        if coupled and padding:
            continue  # samples meet within microbatches, and how many of what is in each is then another matter
        wanted.backward()
        result.loss = max(result.loss, abs(seen.loss - float(wanted)) / max(abs(float(wanted)), 1e-3))
        grads = {key: p.grad for key, p in reference.named_parameters() if p.grad is not None}
        largest = max(float(grad.abs().max()) for grad in grads.values())
        for key, grad in grads.items():
            found = seen.found.get(key)
            found = None if found is None else found.cpu()
            error = float(grad.any()) if found is None else _relative(found, grad, 1e-3 * largest)
            if error > result.gradient:
                result.gradient, result.why = error, f"gradient of {key}"
    if result.loss > 1e-4 or result.gradient > 2e-3:  # models compute losses in float32
        result.status = "wrong"
    elif result.status == "verified":
        result.why = ""
    result.seconds = time.perf_counter() - start
    return result


def _twice(x: Any) -> Any:
    """A batch with each row once more."""
    return torch.cat([x, x]) if isinstance(x, Tensor) and x.dim() else x


def _relative(found: Tensor, wanted: Tensor, least: float) -> float:
    error = float((found - wanted).abs().max()) / max(float(wanted.abs().max()), least)
    return float("inf") if error != error else error


def _share(parallel: ParallelModule, reference: nn.Module) -> float:
    """Of the parameters in lists of modules (all, where there are none): what is not on this rank."""
    inside = tuple(f"{n}." for n, m in reference.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential)))
    total = away = 0
    for name, parameter in reference.named_parameters():
        if inside and not name.startswith(inside):
            continue
        total += parameter.numel()
        spec = parallel.plan.parameters.get(name)
        if spec is not None:
            away += parameter.numel() * (spec.shape[spec.dim] - length(spec.by_rank[0])) // spec.shape[spec.dim]
    return away / max(total, 1)


def sweep(names: list[str], tp: int, pp: int, sequence: bool, whole_loss: bool = False) -> Iterator[Result]:
    """Check families one after another; a failing one ends in its own result."""
    for name in names:
        try:
            if pp > 1:
                yield run_ranks(tp * pp, check_stages, name, sequence, tp, whole_loss, timeout=100)[0]
            else:
                yield run_ranks(tp, check, name, sequence, timeout=100)[0]
        except RankError as error:
            first = error.failures[0] if error.failures else None
            text = f"{first.type_name}: {first.message}" if first else str(error)
            status = "refused" if "MegaTPStrategy" in text else "failed"
            yield Result(name, FAMILIES[name].kind, status, why=" ".join(text.split())[:500])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, help="tensor ranks; 2 without stages, else 1")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--sequence", action="store_true")
    parser.add_argument("--whole-loss", action="store_true", help="with stages: what comes after the last block once")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--json")
    options = parser.parse_args()
    results = []
    tp = options.tp or (2 if options.pp == 1 else 1)
    for result in sweep(options.only or list(FAMILIES), tp, options.pp, options.sequence, options.whole_loss):
        results.append(result)
        print(
            f"{result.name:28s} {result.kind:16s} {result.status:9s} {result.share:5.0%} loss {result.loss:.0e}"
            f" grad {result.gradient:.0e} gathered {len(result.gathered)} {result.seconds:.1f}s {result.why}",
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump([dataclasses.asdict(result) for result in results], file, indent=1)
    good = [r for r in results if r.status == "verified"]
    print(f"{len(good)} of {len(results)} verified; {sum(r.share >= 0.4 for r in good)} with 40 % off each rank")
    pools.close()


if __name__ == "__main__":
    from tests.compat import sweep as this  # what the ranks get is pickled by the module's name, not as __main__'s

    this.main()
