"""Which of several errors is the cause, and how it is said."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError

from lightning_megatp.failure.cause import Evidence, Kind, evidence_of, first_cause, is_communication_error
from lightning_megatp.failure.ending import say, saying_after
from lightning_megatp.failure.link import Address
from lightning_megatp.failure.star import Hub, Spoke
from lightning_megatp.parts.rows import finds_rows

GLOO = "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:10972."


def raised(exc: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise exc from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    "exc",
    [
        RuntimeError(GLOO),
        RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation"),
        RuntimeError("NCCL communicator was aborted on rank 1."),
        DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:2, remote process exited or there was a network error"),
        raised(ValueError("training failed"), cause=RuntimeError(GLOO)),
        ExceptionGroup("two", [ValueError("bad batch"), RuntimeError(GLOO)]),
    ],
)
def test_communication_error_is_a_bystander_s(exc: BaseException) -> None:
    assert is_communication_error(exc)
    assert evidence_of(exc, 1, "rank 1").kind is Kind.BYSTANDER


@pytest.mark.parametrize(
    "exc", [ValueError("bad batch"), RuntimeError("CUDA out of memory"), ConnectionResetError("the data's server")]
)
def test_own_error_is_not_a_bystander_s(exc: BaseException) -> None:
    assert not is_communication_error(exc)


def test_nccl_s_own_gpu_is_no_lost_peer() -> None:
    text = (
        "NCCL error in: ProcessGroupNCCL.cpp:3, unhandled cuda error, NCCL version 2.27.5\nncclUnhandledCudaError: \n"
    )
    exc = DistBackendError(f"{text}Last error:\nCuda failure 2 'out of memory'")
    evidence = evidence_of(exc, 1, "rank 1")
    assert evidence.kind is Kind.EXCEPTION
    assert "failed first: DistBackendError: Cuda failure 2 'out of memory', in: NCCL error" in evidence.sentence()


def test_communication_error_that_was_handled_is_no_cause() -> None:
    try:
        try:
            raise RuntimeError(GLOO)
        except RuntimeError:
            raise ValueError("bad batch") from None
    except ValueError as exc:
        assert not is_communication_error(exc)


def test_first_cause_is_the_first_that_is_no_bystander() -> None:
    bystander = Evidence(1, "rank 1", Kind.BYSTANDER, GLOO)
    death = Evidence(2, "rank 2", Kind.DEATH)
    consequence = Evidence(0, "rank 0", Kind.EXCEPTION, "OSError: gone")

    assert first_cause([bystander, death, consequence]) is death
    assert first_cause([bystander]) is bystander


def test_sentence_names_rank_error_and_the_user_s_line() -> None:
    def training_step() -> None:
        int("not a number")  # raises in the standard library's terms, at this line in ours

    try:
        training_step()
    except ValueError as exc:
        sentence = evidence_of(exc, 2, "rank 2 (tp 0, dp 1) [node3, pid 4711]").sentence()

    assert sentence.startswith(
        "MegaTPStrategy: rank 2 (tp 0, dp 1) [node3, pid 4711] failed first: ValueError: invalid"
    )
    assert "(test_failure_cause.py:" in sentence
    assert sentence.endswith("in training_step). All ranks stop.")


def test_sentence_is_one_line_of_a_long_message() -> None:
    error = "ValueError: first line\nsecond line" + "x" * 1000

    sentence = Evidence(2, "rank 2", Kind.EXCEPTION, error).sentence()

    assert sentence == "MegaTPStrategy: rank 2 failed first: ValueError: first line. All ranks stop."


def test_sentence_keeps_the_advice_of_our_own_errors() -> None:
    error = "RuntimeError: MegaTPStrategy: " + "why " * 200 + "Use tp=2."

    assert "why Use tp=2." in Evidence(2, "rank 2", Kind.EXCEPTION, error).sentence()


def test_our_errors_are_cut_at_the_end_of_a_sentence_only() -> None:
    error = RuntimeError("MegaTPStrategy: It is so. " + "Why? Because. " * 200)

    sentence = evidence_of(error, 2, "rank 2").sentence()

    assert sentence.endswith("Because. All ranks stop.")


def test_place_is_the_user_s_line_though_the_package_raises() -> None:
    names: dict[str, Any] = {"__name__": "lightning_megatp.norms"}
    exec(compile("def check():\n    raise RuntimeError('MegaTPStrategy: no')", "/somewhere/norms.py", "exec"), names)
    try:
        names["check"]()
    except RuntimeError as exc:
        sentence = evidence_of(exc, 2, "rank 2").sentence()

    assert "(test_failure_cause.py:" in sentence and "norms.py" not in sentence


def test_place_is_the_caller_of_the_trainer_where_no_other_line_is_the_user_s() -> None:
    names: dict[str, Any] = {"__name__": "lightning.pytorch.trainer", "evidence_of": evidence_of}
    code = "def fit():\n try:\n  raise ValueError('MegaTPStrategy: no')\n except ValueError as e:\n"
    exec(compile(f"{code}  return evidence_of(e, 2, 'rank 2')", "/somewhere/trainer.py", "exec"), names)

    assert "test_failure_cause.py:" in names["fit"]().where


def test_sentence_of_bystanders_only_says_so() -> None:
    sentence = Evidence(1, "rank 1", Kind.BYSTANDER, "RuntimeError: " + GLOO).sentence()

    assert "rank 1 was the first to lose a peer, and no rank named a cause of its own: RuntimeError: [third" in sentence


def test_the_cause_is_said_before_other_ranks_hear_of_it() -> None:
    """Else their tracebacks could be on the screen before it."""
    order: list[str] = []
    told = threading.Event()

    def conclude(cause: Evidence, announce: bool) -> None:
        time.sleep(0.2)
        order.append("said")

    def hear(cause: Evidence, announce: bool) -> None:
        order.append("heard")
        told.set()

    hub = Hub(2, "token", 0.0, conclude, lambda pid: None, lambda: None, lambda note: None)
    hub.start()
    spoke = Spoke(
        Address(hub.hosts, hub.port, "token", "rank 0").connect(1, "rank 1"),
        "rank 0",
        hear,
        told.set,
        lambda note: None,
    )
    spoke.start()
    spoke.report(Evidence(1, "rank 1", Kind.EXCEPTION, "ValueError: bad batch"))
    assert told.wait(10)
    assert order == ["said", "heard"]
    spoke.leave()
    hub.leave()


def test_a_screen_that_takes_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=lambda text: never.wait(10), flush=never.set))
    start = time.monotonic()
    say("the cause")
    assert time.monotonic() - start < 5
    never.set()


def test_a_long_wait_says_for_what(capsys: pytest.CaptureFixture[str]) -> None:
    with saying_after(0.05, "waiting for rank 1"):
        time.sleep(0.5)
    with saying_after(30.0, "never"):
        pass
    assert capsys.readouterr().err.strip() == "waiting for rank 1"


@pytest.mark.parametrize(
    ("error", "told"),
    [("RuntimeError('a wrong shape')", True), ("torch.OutOfMemoryError('CUDA out of memory')", False)],
)
def test_what_fails_inside_of_dtensor_uses_rows_unless_memory_is_out(error: str, told: bool) -> None:
    names: dict[str, Any] = {"torch": torch, "__name__": "torch.distributed.tensor._dispatch"}
    exec(f"def dispatch():\n    raise {error}", names)
    with pytest.raises(RuntimeError) as raised:
        names["dispatch"]()
    assert finds_rows(raised.value) is told


@pytest.mark.parametrize("kind", [Hub, Spoke])
def test_threads_have_no_names_of_pythons_own(kind: type[threading.Thread]) -> None:
    """Python 3.13 keeps a `_handle` on every thread, and 3.14 a `_context`: methods of these names would be hidden."""
    pythons = {
        *vars(threading.Thread(target=print)),
        *vars(threading.Thread),
        "_handle",
        "_context",
        "_os_thread_handle",
    }
    own = {name for name in vars(kind) if not name.startswith("__")} - {"run"}
    assert own.isdisjoint(pythons)
