"""The session's rank processes, the options every test shares, and the table of parity cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import crossing, devices
from tests.ranks import pools

CASES = pytest.StashKey[list[tuple[str, float, float, float, float]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run every combination, not a cover of them")
    parser.addoption("--seed", type=int, default=0, help="of the random numbers that tests in this process draw")
    parser.addoption("--device", choices=devices.KINDS, default="cpu", help="where ranks compute: tests/devices.py")
    parser.addoption("--case", metavar="NAME", help="run one parity case, by the name the table gives it")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CASES] = []
    devices.choose(config.getoption("--device"))
    config.addinivalue_line("markers", "extended: run by --all-cases only; counted as deselected otherwise")


@pytest.hookimpl(trylast=True)  # of what -k leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all-cases"):
        left_out = {item for item in items if item.get_closest_marker("extended")}
        left_out |= crossing.left_out(item for item in items if item not in left_out)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """A test alone and the same test after others see the same numbers."""
    torch.manual_seed(request.config.getoption("--seed"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    pools.close()
    if hasattr(session.config, "workeroutput"):  # one of several processes (pytest-xdist)
        session.config.workeroutput["cases"] = session.config.stash[CASES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[CASES] += map(tuple, getattr(node, "workeroutput", {}).get("cases", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[CASES]
    if not rows:
        return
    terminalreporter.section(f"{len(rows)} parity cases: largest difference from one device")
    width = max(len(row[0]) for row in rows)
    terminalreporter.write_line(f"{'case':{width}}  {'loss':>8}  {'gradient':>8}  {'state':>8}  {'seconds':>7}")
    for case, loss, gradient, parameter, seconds in rows:
        terminalreporter.write_line(f"{case:{width}}  {loss:8.1e}  {gradient:8.1e}  {parameter:8.1e}  {seconds:7.2f}")
