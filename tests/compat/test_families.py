"""Every family builds and takes a deterministic step on one device, in float64 wherever the library can."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.compat.families import FAMILIES, FLOAT32, MOE, RANDOM, UNBUILDABLE, discovered, dtype_of, step, to

pytestmark = pytest.mark.extended
transformers.logging.set_verbosity_error()


def test_every_discovered_family_is_here_or_has_a_reason() -> None:
    assert set(discovered()) <= set(FAMILIES) | set(UNBUILDABLE)
    assert not set(FAMILIES) & set(UNBUILDABLE)
    assert set(FLOAT32) | set(RANDOM) | MOE <= set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_builds_and_steps(name: str) -> None:
    family, dtype = FAMILIES[name], dtype_of(name)
    torch.manual_seed(0)
    module = family.build().to(dtype)
    experts = any("expert" in type(m).__name__.lower() or "expert" in path for path, m in module.named_modules())
    assert experts == (family.kind == "moe")
    for padding in (False, True):
        batch = family.batch(1, padding)
        if batch is None:
            assert padding
            continue
        loss = step(module, to(batch, dtype), seed=0)
        gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        assert torch.isfinite(loss) and all(g.isfinite().all() for g in gradients)
        assert sum(bool(g.any()) for g in gradients) > 1
        again = step(module, to(family.batch(1, padding), dtype), seed=0 if name in RANDOM else 1)
        assert torch.equal(loss, again)
        if padding and "labels" in batch:
            assert (batch["attention_mask"] == 0).any()


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "mixtral", "nanogpt", "torch_encoder"])
def test_dropout_is_an_option(name: str) -> None:
    losses = []
    for seed in (0, 1):
        torch.manual_seed(0)
        module = FAMILIES[name].build(dropout=0.5)
        losses.append(step(module, FAMILIES[name].batch(0, False), seed=seed))
    assert losses[0] != losses[1]
