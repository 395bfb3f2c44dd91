"""What is known of a failure, and which piece of it is the cause, not the error of a bystander."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lightning_megatp.origins import is_frameworks_frame, is_librarys

# What gloo, NCCL and the store say when a peer went away; gloo's errors are plain RuntimeErrors.
_COMMUNICATION_TEXT = re.compile(
    r"\bgloo\b|Connection closed by peer|Connection reset by peer|Timed out waiting \d+ ?ms"
    r"|Application timeout caused pair|Socket Timeout|[Ww]ait timeout after \d+ ?ms|failed to recv, got 0 bytes"
    r"|Broken pipe|NCCL|nccl[A-Z]\w*Error|remote process exited|communicator was aborted|monitoredBarrier"
)
# What NCCL says, on a line of its own, when the rank's own GPU refused: most often memory for its buffers.
_OWN_GPU = re.compile(r"Cuda failure.*")
_MAX_ERROR_CHARS = 2000  # of an exception's text that travel to rank 0
_MAX_LINE_CHARS = 300  # of its first line that are printed: the whole text is in the traceback of its rank
_OURS = re.compile(r"(\w+: )?MegaTPStrategy: ")  # an error of this package: its last sentence says what to do


class Kind(StrEnum):
    """How a rank ended."""

    EXCEPTION = "exception"
    DEATH = "death"
    BYSTANDER = "bystander"
    INTERRUPT = "interrupt"


@dataclass(frozen=True)
class Evidence:
    """What is known of one rank's end: its own report, or that its connection closed without a goodbye."""

    rank: int
    who: str
    """For people: `rank 2 (tp 0, dp 1) [node3, pid 4711]`."""
    kind: Kind
    error: str = ""
    """`ValueError: bad batch`; for a death how the process ended, where that is known."""
    where: str = ""
    """`train.py:12 in training_step`."""
    everywhere: bool = False
    """For a verdict: whether all ranks ended with the same."""

    @property
    def is_ours(self) -> bool:
        """Whether it is an error that this package words itself."""
        return self.kind is Kind.EXCEPTION and _OURS.match(self.error) is not None

    def sentence(self) -> str:
        """One line for the screen that names this as the first cause."""
        place = f" ({self.where})" if self.where else ""
        lines = self.error.strip().splitlines()
        error = lines[0] if lines else ""
        error = error if self.is_ours else error[:_MAX_LINE_CHARS]
        match self.kind:
            case Kind.EXCEPTION:
                text = f"{self.who} failed first: {error if place else error.removesuffix('.')}{place}"
            case Kind.DEATH:
                text = f"{self.who} died first, without reporting an exception"
                text += f": its process {error}" if error else ""
            case Kind.BYSTANDER:
                text = f"{self.who} was the first to lose a peer, and no rank named a cause of its own: {error}{place}"
            case Kind.INTERRUPT:
                text = f"{self.who} was interrupted"
        return f"MegaTPStrategy: {text}. All ranks stop."


def evidence_of(exc: BaseException, rank: int, who: str) -> Evidence:
    """Describe an exception that ends this rank."""
    if isinstance(exc, KeyboardInterrupt):
        kind = Kind.INTERRUPT
    elif is_communication_error(exc):
        kind = Kind.BYSTANDER
    else:
        kind = Kind.EXCEPTION
    error = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
    if kind is Kind.EXCEPTION and (gpu := _OWN_GPU.search(error)):
        error = f"{type(exc).__name__}: {gpu.group()}, in: {exc}"
    return Evidence(rank, who, kind, _shortened(error), _where(exc))


def first_cause(evidence: Sequence[Evidence]) -> Evidence:
    """Choose the cause among evidence in its order of arrival.

    A rank reports its own exception before it closes anything, so what is a consequence comes later; only the errors of
    bystanders can overtake what caused them (a connection to a dead process breaks in every peer at the same moment).
    """
    return next((e for e in evidence if e.kind is not Kind.BYSTANDER), evidence[0])


def is_communication_error(exc: BaseException) -> bool:
    """Whether an exception says that a peer went away, itself or through what it was raised from."""
    return any(_says_peer_gone(e) for e in chain(exc))


def _says_peer_gone(exc: BaseException) -> bool:
    if _OWN_GPU.search(str(exc)):
        return False
    # by name: torch.distributed has DistError only in builds with c10d
    if any(cls.__name__ == "DistError" for cls in type(exc).__mro__):
        return True
    return isinstance(exc, RuntimeError) and _COMMUNICATION_TEXT.search(str(exc)) is not None


def chain(exc: BaseException) -> Iterator[BaseException]:
    """An exception, and all that a traceback shows it was raised from."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [exc]
    while todo:
        e = todo.pop()
        if e is None or id(e) in seen:
            continue
        seen.add(id(e))
        yield e
        todo.append(e.__cause__ or (None if e.__suppress_context__ else e.__context__))
        if isinstance(e, BaseExceptionGroup):
            todo.extend(e.exceptions)


def _shortened(error: str) -> str:
    """At the end of a sentence, where there is one."""
    if len(error) <= _MAX_ERROR_CHARS:
        return error
    cut = error[:_MAX_ERROR_CHARS]
    end = cut.rfind(". ")
    return cut if end < 0 else cut[: end + 1]


def _where(exc: BaseException) -> str:
    """The last frame of the user's own code, else the last frame at all. What the Trainer has caught has no frames of
    its caller; these are found below it."""
    frames = list(traceback.walk_tb(exc.__traceback__))
    if not frames:
        return ""
    callers = list(traceback.walk_stack(frames[0][0].f_back))[::-1]
    own = [x for x in [*callers, *frames] if not is_frameworks_frame(x[0]) and not is_librarys(x[0].f_code)]
    frame, line = (own or frames)[-1]
    return f"{os.path.basename(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
