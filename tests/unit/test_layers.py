"""Imports go one way: no folder of the package imports, directly or through others, one that imports it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lightning_megatp

PACKAGE = Path(lightning_megatp.__file__).parent
NAME = PACKAGE.name


def place(parts: tuple[str, ...]) -> str:
    """The folder, or the file at the top, of a module."""
    return parts[1] if len(parts) > 1 else NAME


def imported(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """Modules of the package that a file imports when it is run, wherever in it; not those for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else names
        if names == [NAME] and isinstance(node, ast.ImportFrom):
            names = [f"{NAME}.{alias.name}" for alias in node.names]
        yield from (tuple(name.split(".")) for name in names if name.split(".")[0] == NAME)
        yield from imported(node)


def edges(package: Path) -> dict[str, set[str]]:
    """Place -> those that it imports."""
    found: dict[str, set[str]] = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        if (own := place(parts)) != "__init__":
            found.setdefault(own, set()).update({place(other) for other in imported(ast.parse(file.read_text()))})
            found[own].discard(own)
    return found


def test_imports_go_one_way() -> None:
    order = list(TopologicalSorter(edges(PACKAGE)).static_order())
    assert order.index("plan") < order.index("tensor") < order.index("pipeline") < order.index("gradients")
    importers = {own for own, others in edges(PACKAGE).items() if "strategy" in others}
    assert importers == {"pytorch_lightning"}, "and what a user imports, `lightning_megatp` itself"


def test_a_cycle_is_found(tmp_path: Path) -> None:
    for name, text in {
        "one/a.py": f"from {NAME}.two import b",
        "two/b.py": f"def f():\n    from {NAME}.three.c import d",
        "three/c.py": f"from {NAME} import one",
        "four/d.py": f"if TYPE_CHECKING:\n    from {NAME}.five import e",
        "five/e.py": f"import {NAME}.four.d",
    }.items():
        (tmp_path / NAME / name).parent.mkdir(parents=True)
        (tmp_path / NAME / name).write_text(text)
    with pytest.raises(CycleError) as cycle:
        TopologicalSorter(edges(tmp_path / NAME)).prepare()
    assert set(cycle.value.args[1]) == {"one", "two", "three"}
