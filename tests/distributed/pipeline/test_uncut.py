"""Steps of evaluation that no schedule can follow give the numbers of one device: the last stage runs them, and calls
the modules of other stages."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.crossing import crossed
from tests.distributed.training import (
    DP2_PP2,
    PLAIN,
    PP2,
    TP2_PP2,
    Layout,
    eval_loader,
    make_trainer,
    run_program,
    train_loader,
)
from tests.parity.models import GPT, GPTConfig
from tests.ranks import RankError

PP4 = Layout(pp=4, microbatches=2)
ROUND = Layout(pp=2, schedule="zb_v")
SHARDED = Layout(dp=2, pp=2, microbatches=2, zero=3)


class Writes(GPT):
    """Continues each row, greedily: what the model made goes back into it."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(tied=False, layers=4))
        self.written: list[Tensor] = []
        self.drift = torchmetrics.MeanMetric().set_dtype(torch.float64)

    def written_from(self, tokens_BL: Tensor) -> Tensor:
        for _ in range(3):
            next_B = self.head(self.trunk(tokens_BL[:, -6:]))[:, -1].argmax(-1)
            tokens_BL = torch.cat((tokens_BL, next_B[:, None]), 1)
        return tokens_BL

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.drift.update(loss.detach())
        if self.writes(batch_idx):
            written_BL = self.written_from(batch[0])
            self.log("mean", written_BL.double().mean())
            self.written.append(written_BL)
        return loss

    def writes(self, batch_idx: int) -> bool:
        return True

    def on_validation_epoch_end(self) -> None:
        self.log("drift", self.drift.compute())
        self.drift.reset()
        self.log("written", torch.cat(self.written).double().std() if self.written else 0.0)
        self.written.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.written_from(batch[0])


class Stops(Writes):
    """Would end at a token that is never written: where that is read, a step can't be followed any more."""

    def written_from(self, tokens_BL: Tensor) -> Tensor:
        for _ in range(5):
            next_B = self.head(self.trunk(tokens_BL[:, -6:]))[:, -1].argmax(-1)
            tokens_BL = torch.cat((tokens_BL, next_B[:, None]), 1)
            if bool((next_B < 0).all()):
                break
        return tokens_BL


class StopsLate(Stops):
    """Writes for one batch of an epoch, and not when Lightning tries the validation first."""

    def writes(self, batch_idx: int) -> bool:
        return batch_idx == 1 and not self.trainer.sanity_checking


class Peeks(Writes):
    """Reads a value between two blocks."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.trainer.training:
            return super().loss(batch)
        x_BLD = self.blocks[0](self.tok(batch[0]))
        if x_BLD.abs().max().item() > 0:
            x_BLD = x_BLD * 2
        return F.cross_entropy(self.head(self.norm(self.blocks[1](x_BLD))).flatten(0, 1), batch[1].flatten())


class Store:
    """A cache as libraries have them, that blocks fill in place."""

    def __init__(self) -> None:
        self.kept: dict[int, list[Tensor]] = {}
        self.steps = torch.zeros(4)
        self.last: Tensor | None = None


class Caching(nn.Module):
    """A block that keeps what it has seen in a store, in a list, and in a tensor, which it is given."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.linear = index, nn.Linear(8, 8)

    def forward(self, x: Tensor, store: Store | None = None, seen: list[Tensor] | None = None) -> Tensor:
        if store is None or seen is None:
            return x + self.linear(x).tanh()
        kept = store.kept.setdefault(self.index, [])
        kept.append(x)
        store.steps[self.index] += 1
        before, store.last = store.last, x
        seen.append(x.mean())
        past = torch.stack(kept).mean(0) if before is None else torch.stack([*kept, before]).mean(0)
        return x + self.linear(past).tanh()


class KeepsStore(LightningModule):
    """Calls its blocks again and again with the same store."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.blocks = nn.Embedding(32, 8), nn.ModuleList(Caching(i) for i in range(4))
        self.head = nn.Linear(8, 32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        store, seen = Store(), []
        tokens = batch[0][:, :1]
        for _ in range(3):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x, store=store, seen=seen)
            tokens = self.head(x).argmax(-1)
        assert store.last is store.kept[3][-1], "what was one object still is"
        assert len(seen) == 12
        assert store.steps.tolist() == [3, 3, 3, 3]
        self.log("tokens", tokens.double().mean())
        self.log("kept", torch.stack([torch.stack(kept).mean() for kept in store.kept.values()]).mean())
        self.log("seen", torch.stack(seen).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OfHuggingFace(LightningModule):
    """A model of the library generates with its cache of keys and values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

        torch.manual_seed(1)
        self.kind = kind
        ends: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1}
        if kind == "t5":
            sizes: dict[str, Any] = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
            config = T5Config(**sizes, num_layers=2, dropout_rate=0.0, decoder_start_token_id=0, **ends)
            self.model = T5ForConditionalGeneration(config)
        else:
            sizes = {"vocab_size": 32, "n_embd": 16, "n_head": 2, "n_layer": 4, "n_positions": 32}
            dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            self.model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, **ends))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[1]).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.model(input_ids=batch[0], labels=batch[1]).loss)
        options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
        if self.kind == "beams":
            options |= {"num_beams": 2}
        if self.kind == "static":
            options |= {"cache_implementation": "static", "disable_compile": True, "num_beams": 2}
        if self.kind == "states":
            options |= {"output_hidden_states": True, "return_dict_in_generate": True}
        with torch.inference_mode(self.kind == "static"):  # as Lightning evaluates on GPUs
            made = self.model.generate(batch[0], **options)
        if self.kind == "states":
            states = [state.mean() for step in made.hidden_states for state in step]
            self.log("states", torch.stack(states).mean())
            self.log("number", float(len(states)))
            made = made.sequences
        self.log("sum", made.double().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _validated(layout: Layout, kind: Any, *args: Any, **options: Any) -> dict[str, float]:
    trainer = make_trainer(layout, **options)
    torch.manual_seed(0)
    trainer.fit(kind(*args), train_loader(layout, 2), eval_loader(layout, 2))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


BACK = crossed([Peeks, StopsLate, Stops, Writes], [PP2, ROUND, PP4, TP2_PP2])


@pytest.mark.parametrize(("kind", "layout"), BACK, ids=lambda x: x.__name__ if isinstance(x, type) else str(x))
def test_what_goes_back_to_earlier_stages(kind: type[GPT], layout: Layout) -> None:
    expected = run_program(PLAIN, _validated, kind)[0]
    for found in run_program(layout, _validated, kind):
        assert found == pytest.approx(expected, rel=1e-6), "a metric is float32"
        assert {**found, "drift": 0} == pytest.approx({**expected, "drift": 0}, rel=1e-9)


@pytest.mark.parametrize("layout", [PP2, PP4, ROUND], ids=str)
def test_what_blocks_change_is_changed_for_all(layout: Layout) -> None:
    expected = run_program(PLAIN, _validated, KeepsStore)[0]
    for found in run_program(layout, _unsplit, KeepsStore):
        assert found == pytest.approx(expected, rel=1e-9)


GENERATED = crossed(
    ["t5", "cache", "beams", "static", "states"], [PP2, TP2_PP2], extended=[("beams", PP2), ("states", PP2)]
)


@pytest.mark.parametrize(("kind", "layout"), GENERATED, ids=str)
def test_generation_of_hugging_face(kind: str, layout: Layout) -> None:
    expected = run_program(PLAIN, _validated, OfHuggingFace, kind)[0]
    for found in run_program(layout, _unsplit, OfHuggingFace, kind):
        assert found == pytest.approx(expected, rel=1e-6), "losses are float32 there"
        assert {**found, "loss": 0} == pytest.approx({**expected, "loss": 0}, rel=1e-9)


def _unsplit(layout: Layout, kind: Any, *args: Any) -> dict[str, float]:
    return _validated(layout, kind, *args, strategy={"plan": "auto" if layout.tp > 1 else {}})


def _warned(layout: Layout, kind: type[GPT]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _validated(layout, kind)
    return [str(warning.message) for warning in caught if "work in turn" in str(warning.message)]


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Writes, "on the later stage 1."), (Stops, "and when it was planned it did not."), (GPT, "")],
)
def test_a_warning_says_why(kind: type[GPT], why: str) -> None:
    first, *others = run_program(PP2, _warned, kind)
    assert not any(others), "global rank 0 says it"
    assert all(text.endswith(why) for text in first)
    assert bool(first) == bool(why)


def _predicted(layout: Layout, kind: type[GPT]) -> Any:
    torch.manual_seed(0)
    return make_trainer(layout).predict(kind(), eval_loader(layout, 2))


@pytest.mark.parametrize("kind", [Writes, Stops])
def test_predictions(kind: type[GPT]) -> None:
    expected = run_program(PLAIN, _predicted, kind)[0]
    found = run_program(PP2, _predicted, kind)[0]
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)


@pytest.mark.parametrize("layout", [DP2_PP2, SHARDED], ids=str)
def test_each_copy_of_the_model_writes_its_rows(layout: Layout) -> None:
    expected = run_program(PLAIN, _rows, Writes)[0]
    found = run_program(layout, _rows, Writes)
    last = [rows for rows in found if rows]
    assert len(last) == 2, "the last stage of both copies"
    assert sorted(last[0] + last[1]) == sorted(expected)


def _rows(layout: Layout, kind: type[GPT]) -> list[list[int]]:
    torch.manual_seed(0)
    made = make_trainer(layout).predict(kind(), eval_loader(layout, 2)) or []
    return [row for rows in made if rows is not None for row in rows.tolist()]


class Differentiates(Writes):
    """Asks for gradients through blocks of another stage."""

    def written_from(self, tokens_BL: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().written_from(tokens_BL)


class Borrows(Writes):
    """Uses a parameter of the first stage by itself."""

    def written_from(self, tokens_BL: Tensor) -> Tensor:
        written_BL = super().written_from(tokens_BL)
        return written_BL + self.tok.weight.norm().round().long()


class Hands(Writes):
    """Gives a block what can't be sent."""

    def written_from(self, tokens_BL: Tensor) -> Tensor:
        self.blocks[0].register_forward_pre_hook(lambda module, args, kwargs: (args, {}), with_kwargs=True)
        self.blocks[0](self.tok(tokens_BL), told=lambda x: x)
        return super().written_from(tokens_BL)


@pytest.mark.parametrize(
    ("kind", "text"),
    [(Differentiates, "no_grad"), (Borrows, "of another stage's module"), (Hands, "can't be sent")],
)
def test_what_can_not_be_done_is_said(kind: type[GPT], text: str) -> None:
    with pytest.raises(RankError) as error:
        run_program(PP2, _validated, kind)
    messages = [failure.message for failure in error.value.failures]
    assert any(text in message and message.startswith("MegaTPStrategy") for message in messages), messages
