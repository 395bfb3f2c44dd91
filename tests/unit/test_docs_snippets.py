"""What the documentation shows is true: Python blocks run, plans fit the models they are shown with, quoted messages
exist, links lead somewhere.

In a page all Python blocks share one namespace, from top to bottom; `Trainer.fit` is replaced by a look at the plan.
Comments, which the site doesn't show, say the rest: `<!-- setting: CODE -->` runs where it stands, and
`<!-- model: EXPRESSION -->` is the model of the next plan in YAML.
"""

from __future__ import annotations

import ast
import copy
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Trainer
from rich.console import Console
from torch import nn

from lightning_megatp.plan.resolve import resolve
from lightning_megatp.strategy import MegaTPStrategyBase
from lightning_megatp.tables import layers_table

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PIECE = re.compile(r"<!-- (setting|model): (.+?) -->|^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_something_is_tested() -> None:
    kinds = [kind for page in PAGES for kind, _ in _pieces(page)]
    assert kinds.count("python") > 20 and kinds.count("yaml") > 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run_and_plans_fit(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "fit", _fit)
    namespace: dict[str, Any] = {"__name__": "__main__", "in_blocks": in_blocks, "nn": nn}
    model = None
    for kind, text in _pieces(page):
        if kind == "model":
            model = text
        elif kind in ("setting", "python"):
            exec(compile(text, f"{page.name}: {text.strip().splitlines()[0]}", "exec"), namespace)
        elif kind == "yaml":
            for plan in _plans(yaml.safe_load(text)):
                assert model, f"{page.name}: no model is named for the plan {plan}"
                found = resolve(plan, eval(model, namespace), tp=2)
                assert found.layers or found.token_local
                model = None
    assert model is None, f"{page.name}: {model} has no plan"


def test_getting_started_shows_the_table_that_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = ROOT / "docs" / "getting-started.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "fit", _fit)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for kind, text in list(_pieces(page)):
        if kind == "python":
            exec(text, namespace)
            if text.startswith("plan = {"):
                break
    layers = resolve(namespace["plan"], namespace["LanguageModel"](), tp=2).layers.values()
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(layers_table("What is split over tp=2", layers, 0, "on rank 0", {}))
    assert console.file.getvalue() in page.read_text()  # type: ignore[attr-defined]


def _fit(self: Trainer, model: nn.Module, *args: Any) -> None:
    if isinstance(self.strategy, MegaTPStrategyBase):
        found = self.strategy.parallelism.resolve(model, self.strategy.tp, self.strategy.sequence_parallel)
        assert found.layers or found.open


def in_blocks(block: nn.Module | None = None, **children: nn.Module) -> nn.Module:
    """A model whose two blocks are the given one, or hold the given modules."""
    model = nn.Module()
    model.blocks = nn.ModuleList(copy.deepcopy(block or nn.ModuleDict(children)) for _ in range(2))
    return model


def test_quoted_messages_exist() -> None:
    """In the first column of the tables of messages `…` stands for what varies."""
    pages = (ROOT / "docs" / "plans.md").read_text().split("## Messages and their fixes")[1]
    quoted = re.findall(r"^\| `(.+?)` \|", pages, re.MULTILINE)
    assert len(quoted) > 25
    messages = list(_messages())
    for text in quoted:
        pattern = re.compile(".*".join(map(re.escape, text.split("…"))), re.DOTALL)
        assert any(pattern.search(message) for message in messages), text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def _pieces(page: Path) -> Iterator[tuple[str, str]]:
    """Comments and fenced blocks in their order: (kind or language, text)."""
    for found in PIECE.finditer(page.read_text()):
        comment, value, language, code = found.groups()
        yield (comment, value) if comment else (language, code)


def _plans(content: Any) -> Iterator[dict[str, Any]]:
    if isinstance(content, dict):
        if "plan" in content:
            yield content["plan"]
        for value in content.values():
            yield from _plans(value)


def _messages() -> Iterator[str]:
    """Every text in the package's source, with its placeholders as `{}`."""
    for path in (ROOT / "lightning_megatp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)  # type: ignore[misc]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
