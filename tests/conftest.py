"""The session's rank processes, the options every test shares, and the table of parity cases."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests import devices
from tests.ranks import pools

REPEATS = re.compile(
    r"""
    collective_counts.*\[fused-4 | trainer_stages.*\[tp2-dp2 | trainer_checkpoint.*(tp2-dp2|tp4.*tp1-dp2)
    | pipeline_lightning.*\[tp2.*(keeps|module|plateaus|samples_once) | plateaus.*tp2 | metrics_count.*dp2
    | pipeline_lightning.*(hook|frozen)-\{\} | finds_out.*unfreezes | pipeline_checkpoint.*(grouped_fused|dp2_pp2)
    | pipeline_runtime.*(swiglu_rms|grouped|deep_tied-zb_v|happened\[deep-1f1b) | in_flight\[4
    | pipeline_parity.*(gpipe-m8|1f1b-m8|interleaved-m8|zb_v-m8|pp4.*zb_h1|tp2.*interleaved|separate|head_outside.*dp2)
    | crash_at_import_while | ends_all\[2 | never_ends_is_stopped | megatp\[pytorch_lightning | zb_v-64 | tokens_of\[4
    | compat/test_sweep.*(torch_encoder|gpt_oss|vit|tensor_ranks\[bert|four_ranks.*gpt2|stages\[t5)
    | test_a_hugging_face_config | never_trains | bodies_written_for_one_device\[3 | module_kinds.*(tp'|dp'|bf16)
    | numbers_on_every_rank\[True | finds_out.*no.loss | leaves_a_killed_child | crash_at_import\] | raise-setup
    | trainer_failure.*raise-training_step-1-file | pipeline_errors.*asks-StopIteration | four_ranks.*bert
    | pipeline_values.*compiled_blocks\[tp2 | pipeline_lightning.*raise-backward-0 | copies_that_do_not_fit
    | pipeline_runtime.*(deep-1f1b-pp4|deep_tied-interleaved) | are_those_of_one_device\[tp2.*swiglu_rms
    | test_parity\[.*tp4-dp2 | pipeline_parity.*(pp4-tp2|pp2-tp2-dp2) | torchrun_on_one_node | stages_on_two_nodes
    | four_ranks.*mixtral | those_of_one_device.*ema-folder-grouped | every_layout_goes_on\[tied-plain
    | printed_config_with_an_override | is_refused\[(dict|mixed|hook_of_data)- | verify_with_fewer_layers
    | test_compiled.*(wrapped|whole|adapted|checkpoint\]|recompute|mixed|dropout)
    """,
    re.VERBOSE,
)
"""Cases that repeat others in a further layout: like those marked `extended`, they run with --all-cases."""
CASES = pytest.StashKey[list[tuple[str, float, float, float, float]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run the parity matrix, not its pairwise cover")
    parser.addoption("--seed", type=int, default=0, help="of the random numbers that tests in this process draw")
    parser.addoption("--device", choices=devices.KINDS, default="cpu", help="where ranks compute: tests/devices.py")
    parser.addoption("--case", metavar="NAME", help="run one parity case, by the name the table gives it")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CASES] = []
    devices.choose(config.getoption("--device"))
    config.addinivalue_line("markers", "extended: run by --all-cases only; counted as deselected otherwise")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all-cases"):
        extended = [item for item in items if item.get_closest_marker("extended") or REPEATS.search(item.nodeid)]
        config.hook.pytest_deselected(items=extended)
        left_out = set(extended)
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
