"""Docstrings of classes and of public functions can be read alone: none continues the one before, and each begins with
a summary, under which its sections are indented."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lightning_megatp"
NO_SUMMARY = re.compile(r"(Args|Raises|Returns|Yields|Warns):|$")
CONTINUES = re.compile(r"(Of|The same|Those|Their|The opposite|Likewise)\b")


def test_docstrings_can_be_read_alone() -> None:
    found = [(path, name, text) for path in sorted(PACKAGE.rglob("*.py")) for name, text in _docstrings(path)]
    assert len(found) > 1000
    assert [f"{path.name} {name}: {text}" for path, name, text in found if CONTINUES.match(text)] == []
    assert [f"{path.name} {name}" for path, name, text in found if NO_SUMMARY.match(text)] == []


def _docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Names of classes and public functions, and the first lines of their docstrings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) or (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
        ):
            text = ast.get_docstring(node)
            if text:
                yield node.name, text.partition("\n")[0]
