"""`torch.cuda` of the simulated device.

A torch without CUDA has these functions, and they raise. Here they do what a program can see of them; streams and
events are there, and everything is in order anyway.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.simulated.building import NAME

BACKEND = "simulated"
"""Of process groups."""


def start(library: Path) -> None:
    """From now on this process has the device. Before torch is imported, which looks for devices once."""
    assert "torch" not in sys.modules
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
        ctypes.CDLL(os.path.join(os.path.dirname(spec.origin), "lib", name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401

    spec = importlib.util.spec_from_file_location(library.stem, library)
    assert spec is not None and spec.loader is not None
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    sys.modules[library.stem] = device
    _put(device)
    _storages(device)
    _collectives(device)


def listen(heard: Callable[[str], None] | None) -> None:
    """From now on `heard(why)` is called where the host would wait for the device."""
    sys.modules[NAME].listen(heard)


def _put(device: Any) -> None:
    """The functions of `torch.cuda`, and of `torch._C` what others import from there."""
    import torch

    count, current = device.COUNT, device.current_device

    def index(of: Any = None) -> int:
        if isinstance(of, int) or of is None:
            return current() if of is None or of < 0 else of
        found = torch.device(of).index
        return current() if found is None else found

    def generator(of: Any = None) -> torch.Generator:
        return device.default_generator(index(of))

    class Context:
        def __init__(self, of: Any) -> None:
            self.index = index(of)

        def __enter__(self) -> None:
            self.before = current()
            device.set_device(self.index)

        def __exit__(self, *raised: object) -> None:
            device.set_device(self.before)

    properties = types.SimpleNamespace(
        name="simulated", total_memory=1 << 36, major=9, minor=0, multi_processor_count=1
    )
    streams = [Stream()]

    @contextlib.contextmanager
    def stream(of: Stream | None) -> Iterator[None]:
        streams.append(of or streams[-1])
        try:
            yield
        finally:
            streams.pop()

    functions: dict[str, Any] = {
        "_lazy_init": _nothing, "_lazy_call": lambda call, **options: call(), "init": _nothing, "_is_in_bad_fork": _no,
        "is_available": _yes, "is_initialized": _yes, "_is_compiled": _yes, "is_bf16_supported": _yes,
        "is_current_stream_capturing": _no, "device_count": lambda: count, "current_device": current,
        "set_device": lambda of: device.set_device(index(of)), "device": Context, "synchronize": _nothing,
        "Stream": Stream, "Event": Event, "stream": stream, "current_stream": lambda of=None: streams[-1],
        "default_stream": lambda of=None: streams[0], "set_stream": lambda of: streams.__setitem__(-1, of),
        "get_device_name": lambda of=None: properties.name, "get_device_capability": lambda of=None: (9, 0),
        "get_device_properties": lambda of=None: properties, "mem_get_info": lambda of=None: (1 << 36, 1 << 36),
        "manual_seed": lambda seed: generator().manual_seed(seed),
        "manual_seed_all": lambda seed: [generator(i).manual_seed(seed) for i in range(count)],
        "get_rng_state": lambda of=None: generator(of).get_state(),
        "set_rng_state": lambda state, of=None: generator(of).set_state(state),
        "get_rng_state_all": lambda: [generator(i).get_state() for i in range(count)],
        "set_rng_state_all": lambda states: [generator(i).set_state(state) for i, state in enumerate(states)],
        "default_generators": tuple(map(generator, range(count))), "empty_cache": _nothing,
        "memory_allocated": lambda of=None: device.used(), "max_memory_allocated": lambda of=None: device.most_used(),
        "memory_stats": lambda of=None: {}, "memory_reserved": lambda of=None: 0,
        "max_memory_reserved": lambda of=None: 0,
        "reset_peak_memory_stats": lambda of=None: device.forget_most_used(),
        "reset_accumulated_memory_stats": _nothing,
    }  # fmt: skip
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
        for name, value in functions.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    inner: dict[str, Callable[..., Any]] = {
        "_cuda_getDeviceCount": lambda: count, "_cuda_getDevice": current, "_cuda_setDevice": device.set_device,
        "_cuda_getCurrentRawStream": lambda of: 0, "_cuda_isCurrentStreamCapturing": _no,
        "_cuda_getCompiledVersion": lambda: 13000, "_cuda_hasPrimaryContext": _yes,
    }  # fmt: skip
    for name, value in inner.items():
        setattr(torch._C, name, value)
    torch.cuda.nccl.version = lambda: (2, 0, 0)
    torch.Tensor.record_stream = _nothing  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda self, *of: self  # type: ignore[assignment]


def _storages(device: Any) -> None:
    """What storages do in C++ by asking for the kind of their device."""
    import torch

    kind = torch.UntypedStorage
    resize, clone, copy, new = kind.resize_, kind.clone, kind.copy_, kind.__new__

    def over(storage: Any) -> torch.Tensor:
        x = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return x.set_(getattr(storage, "_untyped_storage", storage), 0, (storage.nbytes(),), (1,))

    def make(cls: Any, *args: Any, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type == "cpu":
            return new(cls, *args, **options)
        return torch.empty(*args or (0,), dtype=torch.uint8, device=device).untyped_storage()

    def resized(self: Any, nbytes: int) -> Any:
        if self.device.type == "cpu":
            return resize(self, nbytes)
        device.resize_storage(over(self), nbytes)
        return self

    def copied(self: Any, source: Any, non_blocking: bool = False) -> Any:
        if self.device.type == source.device.type == "cpu":
            return copy(self, source, non_blocking)
        over(self).copy_(over(source), non_blocking)
        return self

    kind.__new__, kind.__init__ = make, _nothing  # type: ignore[assignment, method-assign]
    kind.resize_, kind.copy_ = resized, copied  # type: ignore[method-assign]
    kind.clone = lambda self: clone(self) if self.device.type == "cpu" else over(self).clone().untyped_storage()  # type: ignore[method-assign]


def _collectives(device: Any) -> None:
    """Process groups of the device: gloo's, for its tensors alone."""
    import torch.distributed as dist

    def make(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
        return device.collectives(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))

    dist.Backend.register_backend(BACKEND, make, devices=["cuda"])


class Stream:
    """All of them are one."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.priority, self.stream_id, self.cuda_stream = priority, id(self), 0

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        return True


class Event:
    """The moment of `record`."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self.record()

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


def _nothing(*args: Any, **options: Any) -> None:
    return None


def _yes(*args: Any, **options: Any) -> bool:
    return True


def _no(*args: Any, **options: Any) -> bool:
    return False
