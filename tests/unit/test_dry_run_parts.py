"""The parts of a dry run, each by itself: `lightning_megatp/pipeline/slicing/dry_run/`."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from lightning_megatp.pipeline.slicing.dry_run.by_tensor import ByTensor
from lightning_megatp.pipeline.slicing.dry_run.call import Call
from lightning_megatp.pipeline.slicing.dry_run.ending import Ending
from lightning_megatp.pipeline.slicing.dry_run.fakes import Fakes
from lightning_megatp.pipeline.slicing.dry_run.guesses import Guesses
from lightning_megatp.pipeline.slicing.dry_run.host_reads import HostReads
from lightning_megatp.pipeline.slicing.dry_run.lineages import Lineage, Lineages
from lightning_megatp.pipeline.slicing.dry_run.provenance import Maker, Provenance
from lightning_megatp.pipeline.slicing.dry_run.record import Record
from lightning_megatp.pipeline.slicing.dry_run.stage_states import StageStates
from lightning_megatp.pipeline.slicing.dry_run.values import Values
from lightning_megatp.pipeline.slicing.errors import SideDoor, SliceError
from lightning_megatp.pipeline.slicing.operations import NeedsValues, StepEnded
from lightning_megatp.pipeline.slicing.plan import Key
from lightning_megatp.shim.fakes import FakeTensorMode

LAST = 1
"""The last of two stages."""


class Parts:
    """Those of a dry run of a step on one tensor, of a module with a buffer, a parameter, and one of a unit."""

    def __init__(self) -> None:
        self.batch, self.buffer = torch.rand(4), torch.rand(4)
        self.glue, self.weight = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
        names = {id(self.buffer): "buffer", id(self.glue): "glue", id(self.weight): "unit.weight"}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.values = Values(self.mode, names, {id(self.weight): {0}}, {id(self.glue): "glue"}, LAST + 1, {})
        self.left: list[Tensor] = []
        self.provenance = Provenance(nn.Module(), self.values, [self.batch], lambda: self.left)
        self.record, self.fakes = Record(self.values, self.mode), Fakes(self.values, self.mode)

    def of_stage(self, stage: int) -> Tensor:
        """What a stage has made."""
        made = self.fake()
        self.values.add(made, stage, "`a unit`", Key(0, 0))
        return made

    def fake(self) -> Tensor:
        """A tensor without data that is not known yet."""
        with self.mode:
            return torch.rand(4)

    def call(self, name: str, *args: Tensor) -> Call:
        """A call of that operation."""
        call = Call(name, name, getattr(torch, name, torch.sum), args, {})
        call.inputs = [self.provenance.find(x, call.by) for x in args]
        return call


def test_a_table_goes_by_identity_and_keeps_its_tensors() -> None:
    table, x = ByTensor[int](), torch.ones(2)
    table[x] = 3
    assert x in table and table[x] == 3 and torch.ones(2) not in table and table.get(torch.ones(2)) is None
    alive = weakref.ref(x)
    del x
    gc.collect()
    kept = alive()
    assert kept is not None and table.pop(kept) == 3 and kept not in table and table.pop(kept) is None


def test_values_know_whose_a_tensor_is() -> None:
    parts = Parts()
    values = parts.values
    assert [values.is_of_unit(x) for x in (parts.weight, parts.glue, parts.batch)] == [True, False, False]
    assert [values.is_of_module(x) for x in (parts.weight, parts.buffer, parts.batch)] == [True, True, False]
    assert [values.name(x) for x in (parts.weight, parts.batch)] == ["unit.weight", ""]


def test_what_was_there_before_a_step_is_replicated_and_the_batch_is_not_constant() -> None:
    parts = Parts()
    batch, buffer, weight = (parts.provenance.find(x, "`add`") for x in (parts.batch, parts.buffer, parts.weight))
    assert batch.stage is buffer.stage is None and not batch.constant and buffer.constant
    assert buffer.origins == {id(parts.buffer)} and not weight.origins, "units' own is no other stage's business"
    assert parts.provenance.find(parts.batch, "`mul`") is batch


def test_what_came_out_of_a_unit_unseen_is_refused_and_the_hook_is_named() -> None:
    parts = Parts()
    made = parts.fake()
    with pytest.raises(SideDoor, match="came out of an operation that torch functions don't show"):
        parts.provenance.find(made, "`add`")
    maker = Maker("`encoder`", 0)
    parts.provenance.note_inside([made], maker)
    parts.provenance.note_hook(made, "its code")
    with pytest.raises(SideDoor, match=r"`add` uses a tensor that came out of `encoder` by a side door") as refused:
        parts.provenance.find(made, "`add`")
    assert refused.value.hook == "its code" and parts.provenance.side_door(made) == maker
    assert refused.value.attribute is None
    assert not parts.provenance.hangs_on_the_module(made)
    parts.left.append(made)
    assert parts.provenance.hangs_on_the_module(made)


def test_lineages_go_on_from_numbers_and_the_batch_and_end_at_what_a_stage_has_or_learns() -> None:
    parts, known = Parts(), ByTensor[Lineage]()
    for x in (parts.batch, parts.buffer):
        parts.provenance.find(x, "`add`")
    lineages, table, cosines = Lineages(parts.values, known), torch.arange(4), torch.rand(4)
    numbers = lineages.of_result("arange", (4,), {})
    assert numbers == Lineage()
    lineages.note("arange", (4,), {}, table, numbers, [table])
    of_both = lineages.of_result("add", (table, parts.buffer), {})
    assert of_both == Lineage(frozenset([id(parts.buffer)]))
    assert lineages.of_result("add", (table, parts.batch), {}) == Lineage(of_batch=True)
    for other in (parts.of_stage(0), parts.weight, parts.glue):
        assert lineages.of_result("add", (table, other), {}) is None
        assert lineages.of_result("zeros_like", (other,), {}) == Lineage(), "of the shape alone"
    lineages.note("cos", (table,), {}, cosines, of_both, [table, cosines])
    assert lineages.is_of_numbers(cosines)
    lineages.note("add_", (cosines, parts.batch), {}, cosines, Lineage(of_batch=True), [table, cosines])
    assert not lineages.is_of_numbers(cosines)


def test_nothing_is_known_to_be_alike_behind_a_read_of_what_one_stage_has() -> None:
    parts, known = Parts(), ByTensor[Lineage]()
    lineages, table = Lineages(parts.values, known), torch.arange(4)
    lineages.note("item", (parts.of_stage(0),), {}, 3, None, [])
    lineages.note("arange", (3,), {}, table, Lineage(), [table])
    assert table not in known and not lineages.overwrites_alike("copy_", parts.buffer, Lineage())
    fresh = Lineages(parts.values, known)
    assert fresh.overwrites_alike("copy_", parts.buffer, Lineage()) and parts.buffer in known
    assert not fresh.overwrites_alike("add_", parts.buffer, Lineage()), "it reads what was there"


def test_reads_of_the_batch_are_told_from_those_of_constants() -> None:
    parts = Parts()
    reads = HostReads(parts.values, parts.record, parts.provenance, parts.fakes)
    reads.note(parts.call("item", parts.buffer), 2.0)
    assert not reads.of_batch
    reads.note(parts.call("item", parts.batch), 3.0)
    assert reads.of_batch and [read.answer for read in reads.replicated] == [2.0, 3.0]
    for name, is_read in (("nonzero", True), ("sin", False)):
        reads.replicated.clear()
        reads.note_size(parts.call(name, parts.batch))
        assert bool(reads.replicated) is is_read


def test_the_end_of_a_step_takes_what_is_returned_and_early_losses() -> None:
    parts = Parts()
    ending = Ending(parts.values, parts.record, parts.provenance, StageStates({}), is_tail=False)
    hidden = parts.of_stage(0)
    ending.consume({"hidden": [hidden]}, gradient=False, by="the result")
    value = parts.values.get(hidden)
    assert value is not None and value.consumers == {LAST} and not value.has_gradient()
    with parts.mode:
        loss = torch.rand(())
    early = parts.values.add(loss, 0, "`loss`", Key(1, 0))
    with pytest.raises(StepEnded):
        ending.end_at(parts.call("nonzero", hidden), NeedsValues("its shape depends on values"))
    assert early.consumers == {LAST} and "since its shape depends on values" in ending.early


def test_a_step_that_ends_unseen_before_the_last_stage_is_refused() -> None:
    parts = Parts()
    with pytest.raises(SliceError, match="has not begun"):
        Ending(parts.values, parts.record, parts.provenance, StageStates({}), is_tail=False).end_unseen(
            "a class of tensors"
        )
    ending = Ending(parts.values, parts.record, parts.provenance, StageStates({}), is_tail=True)
    ending.end_unseen("a class of tensors")
    assert ending.early == "a class of tensors"


def test_errors_are_laid_to_guesses_that_were_made_before() -> None:
    guesses = Guesses()
    assert not guesses.explain(ValueError("early")) and not guesses.failed
    guesses.any = True  # of a metric
    assert guesses.explain(ValueError("late")) and not guesses.misled
    guesses.note_unit(Call("experts", "experts", torch.sum, (), {}, units=["experts"]))
    assert guesses.explain(ValueError("no rows")) and guesses.failed and guesses.unseen == {"experts"}
    assert guesses.misled.endswith("and then the step failed (ValueError: no rows)")
