"""Every peer of a tensor-parallel group works on the same batch, whatever its own loader gave.

Samplers, worker seeds and IterableDatasets may differ between ranks; tensor parallelism on different batches trains on
garbage without an error. So the group's first rank sends its batch, and the others take it.
"""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatp.messages import with_article
from lightning_megatp.stopping import Stopping

log = logging.getLogger(__name__)
Batch = TypeVar("Batch")

HEAD = 24
"""Bytes of the two lengths and the note at a message's start."""
HEADER_BYTES = 2048
"""What is sent at least: what a small broadcast costs is its latency, and most descriptions fit in."""
ALIGNMENT = 16
"""Leaves start at multiples of the largest element's size, so that bytes can be viewed as elements."""


class SameBatch:
    """Give every rank of a group the batch of the group's first rank.

    Any picklable batch: dicts, tuples, dataclasses, Hugging Face's BatchEncoding, own classes, with tensors at any
    depth, beside strings, numbers or None. Tensors of any dtype, shape and strides, subclasses too; those that are not
    dense (sparse, nested, quantised) only on the CPU. Shapes and structure may change from batch to batch and differ
    between the peers' own batches, which are dropped. Tensors on the CPU stay there.

    Every peer must ask equally often: if one peer's loader ends before the others', they wait for it until the group's
    timeout. What a peer gets is corrected here, not how much.

    Args:
        group: the tensor-parallel process group. With one rank nothing is ever sent.
        device: where this rank's tensors are, and where the group communicates (NCCL: its CUDA device). Tensors of the
            first rank that are not on the CPU arrive here.
        hosts: the same ranks, for CPU tensors; by default that group.

    Communication: per batch one broadcast between the hosts, of 2 KiB or as long as that of the batch before: what is
    where, and the CPU's tensors; a second one if it is longer. One more of the device's tensors, if there are any,
    which no host waits for. On the first batch also one all-gather of 16 bytes: hashes of what each rank had and has.
    The message also says whether its sender was told to stop, see `Stopping`.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device | str, hosts: dist.ProcessGroup | None = None
    ) -> None:
        self.group = group
        self.hosts = group if hosts is None else hosts
        self.device = torch.device(device)
        self.checked = False
        self.room = HEADER_BYTES
        """Bytes of the next broadcast: every rank knows what the last message took."""
        self.stopping: Stopping | None = None
        """Whose note every message carries."""

    def __call__(self, batch: Batch) -> Batch:
        """The first rank's batch: there the very object, untouched, unless it holds tensors that are not dense (columns
        of a wider one, expanded ones). The others can't have these as they lie, so the first rank gets a copy with
        dense ones, too: what a step does, and which plan is for it, may depend on strides.

        Raises:
            TypeError: the first rank's batch can't be pickled; raised on every rank.
            RuntimeError: on the first batch, ranks ended up with different ones.
        """
        if self.group.size() == 1:
            return batch
        result = self._send(batch) if self.group.rank() == 0 else self._receive()
        if not self.checked:
            self._check(_digest(batch), _digest(result))
            self.checked = True
        return result

    def _send(self, batch: Batch) -> Batch:
        try:
            leaves, specs, structure = _describe(batch)
            description = pickle.dumps((specs, structure), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # pickling runs the batch's own code; whatever it raises, the peers must hear of it
            text = f"{type(error).__name__}: {error}"
            message = torch.zeros(self.room, dtype=torch.uint8)
            _write_head(message, -1, 0, False, text.encode()[: HEADER_BYTES - HEAD])
            self._tell(message)
            raise TypeError(_unsendable(batch, text)) from error
        places = _Places.of([(_bytes_of(leaf), leaf.device.type == "cpu") for leaf in leaves], len(description))
        message = torch.empty(max(places.on_host, self.room), dtype=torch.uint8)
        content = torch.empty(places.on_device, dtype=torch.uint8, device=self.device)
        note = self.stopping is not None and self.stopping.noted
        _write_head(message, len(description), places.on_host, note, description)
        for leaf, offset in zip(leaves, places.offsets, strict=True):
            part = message if leaf.device.type == "cpu" else content
            part[offset : offset + _bytes_of(leaf)].copy_(_as_bytes(leaf))
        self._tell(message[: self.room])
        if places.on_host > self.room:
            self._tell(message[self.room : places.on_host])
        if places.on_device:
            dist.broadcast(content, group_src=0, group=self.group)
        self.room = max(HEADER_BYTES, places.on_host)
        self._hear(note)
        if all(leaf.stride() == spec.stride for leaf, spec in zip(leaves, specs, strict=True)):
            return batch
        laid = [spec.lay(leaf) for leaf, spec in zip(leaves, specs, strict=True)]
        return cast(Batch, _Restorer(structure, laid).load())

    def _receive(self) -> Any:
        message = torch.empty(self.room, dtype=torch.uint8)
        self._tell(message)
        length, total, note = message[:HEAD].view(torch.int64).tolist()
        if length < 0:
            text = message[HEAD:HEADER_BYTES].numpy().tobytes()
            raise TypeError(_unsendable(None, text.rstrip(b"\0").decode(errors="replace")))
        if total > self.room:
            rest = torch.empty(total - self.room, dtype=torch.uint8)
            self._tell(rest)
            message = torch.cat([message, rest])
        self.room = max(HEADER_BYTES, total)
        specs, structure = pickle.loads(message[HEAD : HEAD + length].numpy().tobytes())
        places = _Places.of([(spec.nbytes, spec.on_cpu) for spec in specs], length)
        content = torch.empty(places.on_device, dtype=torch.uint8, device=self.device)
        if places.on_device:
            dist.broadcast(content, group_src=0, group=self.group)
        leaves = [
            spec.rebuild((message if spec.on_cpu else content)[offset : offset + spec.nbytes])
            for spec, offset in zip(specs, places.offsets, strict=True)
        ]
        self._hear(bool(note))
        return _Restorer(structure, leaves).load()

    def _hear(self, note: bool) -> None:
        if self.stopping is not None:
            self.stopping.hear(note)

    def _tell(self, message: Tensor) -> None:
        dist.broadcast(message, group_src=0, group=self.hosts)

    def _check(self, own: bytes, final: bytes) -> None:
        """Compare over the group what each rank came with, and what each ended up with."""
        mine = _as_tensor(own + final)
        gathered = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(gathered, mine, group=self.hosts)
        by_rank = [bytes(item.tolist()) for item in gathered]
        different = [rank for rank, item in enumerate(by_rank) if item[8:] != by_rank[0][8:]]
        if different:
            names = ", ".join(str(dist.get_global_rank(self.group, rank)) for rank in different)
            first = dist.get_global_rank(self.group, 0)
            raise RuntimeError(
                f"MegaTPStrategy: rank {first} sent its first batch, and its tensor-parallel peers of rank {names} "
                "hold another one. Either the network is broken or an object in the batch changes its tensors when it "
                "is unpickled: use plain dicts, tuples or dataclasses of tensors."
            )
        if self.group.rank() == 0 and any(item[:8] != by_rank[0][:8] for item in by_rank):
            log.warning(
                "MegaTPStrategy: the ranks of a tensor-parallel group loaded different batches; the first rank's is"
                " used. Data that was divided by the rank of a process, in `setup` or before, loses the others' part:"
                " divide it where loaders are made or read (there ranks are those of the dp axis), by"
                " `trainer.distributed_sampler_kwargs`, or leave that to Lightning's sampler."
            )


@dataclass(frozen=True)
class _Spec:
    """What a peer needs to know to make a leaf from its bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """The strides of a dense tensor: channels_last stays so, since kernels round differently by layout."""
    dtype: torch.dtype
    on_cpu: bool
    requires_grad: bool
    subclass: type[Tensor]
    attributes: dict[str, Any]
    """The attributes of a subclass such as torchvision's bounding boxes."""

    @staticmethod
    def of(leaf: Tensor) -> _Spec:
        # empty_like keeps strides where they are dense, and makes dense ones where they are not (an expanded tensor).
        stride = leaf.stride() if leaf.is_contiguous() else torch.empty_like(_base(leaf), device="meta").stride()
        attributes = {} if type(leaf) is Tensor else dict(leaf.__dict__)
        on_cpu = leaf.device.type == "cpu"
        return _Spec(tuple(leaf.shape), tuple(stride), leaf.dtype, on_cpu, leaf.requires_grad, type(leaf), attributes)

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def lay(self, leaf: Tensor) -> Tensor:
        """A leaf as the peers have it."""
        return leaf if leaf.stride() == self.stride else self.rebuild(_as_bytes(leaf))

    def rebuild(self, data: Tensor) -> Tensor:
        # A copy, not a view of the payload: views share autograd's version counter, and a step that modifies one input
        # in place would invalidate all others on the receivers only.
        leaf = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=data.device)
        leaf.copy_(data.view(self.dtype).view(self.shape))
        if self.subclass is not Tensor:
            leaf = leaf.as_subclass(self.subclass)
            leaf.__dict__.update(self.attributes)
        return leaf.requires_grad_(self.requires_grad) if self.requires_grad else leaf


class _Describer(pickle.Pickler):
    """Pickles a batch with its tensors taken out: pickle itself finds them in any object at any depth."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.leaves: list[Tensor] = []
        self.index: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        if not _is_dense(obj):
            if obj.device.type != "cpu":
                kind = f"{with_article(type(obj).__name__)} of layout {obj.layout} on {obj.device}"
                raise TypeError(f"it holds {kind}, which is not dense; make it so, or leave it on the CPU")
            return None  # pickled by value
        if id(obj) not in self.index:
            self.index[id(obj)] = len(self.leaves)
            self.leaves.append(obj)
        return self.index[id(obj)]


class _Restorer(pickle.Unpickler):
    def __init__(self, structure: bytes, leaves: list[Tensor]) -> None:
        super().__init__(io.BytesIO(structure))
        self.leaves = leaves

    def persistent_load(self, pid: Any) -> Tensor:
        return self.leaves[pid]


def _describe(batch: Any) -> tuple[list[Tensor], list[_Spec], bytes]:
    """The batch's tensors, what they are, and the pickled rest."""
    file = io.BytesIO()
    describer = _Describer(file)
    describer.dump(batch)
    return describer.leaves, [_Spec.of(leaf) for leaf in describer.leaves], file.getvalue()


def _is_dense(leaf: Tensor) -> bool:
    """Tensors that are their bytes; wrappers of other tensors (DTensor, nested, quantised) are not."""
    wrapper = hasattr(leaf, "__tensor_flatten__") or leaf.is_quantized or leaf.is_nested
    return leaf.layout is torch.strided and not wrapper and leaf.device.type != "meta"


def _base(leaf: Tensor) -> Tensor:
    return leaf.detach() if type(leaf) is Tensor else leaf.detach().as_subclass(Tensor)


def _bytes_of(leaf: Tensor) -> int:
    return leaf.dtype.itemsize * leaf.numel()


def _as_bytes(leaf: Tensor) -> Tensor:
    """(nbytes,) uint8, in the order of the elements."""
    return _base(leaf).resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _write_head(message: Tensor, length: int, total: int, note: bool, content: bytes) -> None:
    """[length of the description, size of the message, the note, the description], as bytes."""
    head = torch.tensor([length, total, int(note)]).view(torch.uint8)
    message[: HEAD + len(content)].copy_(torch.cat([head, _as_tensor(content)]) if content else head)


@dataclass(frozen=True)
class _Places:
    """Where each leaf starts: in the host's message, behind a description of some length, or in the device's."""

    offsets: tuple[int, ...]
    on_host: int
    """Bytes of the message."""
    on_device: int

    @classmethod
    def of(cls, leaves: Iterable[tuple[int, bool]], description: int) -> _Places:
        """Lay leaves out one behind the other.

        Args:
            leaves: bytes of each, and whether it is on the CPU.
        """
        offsets = []
        ends = {True: HEAD + description, False: 0}
        for size, on_cpu in leaves:
            start = -(-ends[on_cpu] // ALIGNMENT) * ALIGNMENT
            offsets.append(start)
            ends[on_cpu] = start + size
        return cls(tuple(offsets), ends[True], ends[False])


def _digest(batch: Any) -> bytes:
    """8 bytes that depend on the tensors only, in any order: equal structures may be pickled differently."""
    try:
        leaves, *_ = _describe(batch)
    except Exception:  # a peer's own batch is dropped: whether it could be sent does not matter
        return bytes(8)
    digests = []
    for leaf in leaves:
        digest = hashlib.blake2b(repr((tuple(leaf.shape), leaf.dtype)).encode(), digest_size=8)
        digest.update(_as_bytes(leaf).cpu().numpy().data)
        digests.append(digest.digest())
    return hashlib.blake2b(b"".join(sorted(digests)), digest_size=8).digest()


def _unsendable(batch: Any, reason: str) -> str:
    kind = f" ({type(batch).__name__})" if batch is not None else ""
    return (
        f"MegaTPStrategy: the batch{kind} can't be sent to the tensor-parallel peers: {reason}. Let the loader return "
        "tensors in dicts, tuples, dataclasses or other picklable objects."
    )
