"""CUDA graphs without a GPU: what a capture froze, replayed on the CPU machine over host memory that stands for a GPU's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray

from kvgen.emulator import Buffer
from kvgen.errors import DeviceError
from kvgen.runtime import cuda, tensor_map
from kvgen.runtime import gpu as backend
from kvgen.runtime.module import Module, cpu_kernel
from kvgen.runtime.packing import PackedArgs
from kvgen.runtime.workspace import multiprocessors_of
from tests.support.emulated_gpu import EmulatedDriver
from tests.support.launching import BF16

STREAM: Final = 0x57  # the engine's; graphs are captured on it
_BUSY: Final = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"


@dataclass(frozen=True)
class Node:
    """One piece of a graph's work: `what` is the kernel's entry, or the driver's call; `frozen` all that it was captured with."""

    what: str
    frozen: tuple[object, ...]
    run: Callable[[], None] = field(compare=False)


@dataclass
class Graph:
    """A captured graph. `replay` does its work with the launch sizes and argument bytes of the capture, whatever became of
    the Python objects that made them."""

    nodes: list[Node] = field(default_factory=list)

    def replay(self) -> None:
        for node in self.nodes:
            node.run()


class DeviceArray:
    """An array in the GPU's memory: shape, dtype, slices and views, and no way for the host to read an element.

    The CUDA array interface says where it lies. `elements` are for the test alone: they stand for what copies and other
    kernels write there.
    """

    def __init__(self, elements: NDArray[Any]) -> None:
        self.elements = elements

    shape = property(lambda self: self.elements.shape)
    dtype = property(lambda self: self.elements.dtype)
    ndim = property(lambda self: self.elements.ndim)
    strides = property(lambda self: self.elements.strides)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raw = self.elements
        typestr = f"|V{raw.itemsize}" if raw.dtype.kind == "V" or raw.dtype == BF16 else raw.dtype.str
        place = (raw.ctypes.data, False)
        return {"shape": raw.shape, "typestr": typestr, "data": place, "version": 3, "strides": raw.strides}

    def __getitem__(self, key: Any) -> DeviceArray:
        keys = key if isinstance(key, tuple) else (key,)
        found = self.elements[key] if Ellipsis in keys or None in keys else self.elements[(*keys, ...)]
        return DeviceArray(_view(found, self.elements))  # of one element too

    def __len__(self) -> int:
        return len(self.elements)

    def reshape(self, *shape: Any) -> DeviceArray:
        return DeviceArray(_view(self.elements.reshape(*shape), self.elements))

    def transpose(self, *axes: Any) -> DeviceArray:
        return DeviceArray(self.elements.transpose(*axes))

    def _read(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("the host reads device memory: that waits for the GPU, and a graph freezes what was read")

    __array__ = __iter__ = __bool__ = __int__ = __float__ = __index__ = item = tolist = tobytes = _read


def _view(found: Any, base: NDArray[Any]) -> NDArray[Any]:
    assert isinstance(found, np.ndarray), "the host reads device memory"
    assert not found.size or np.shares_memory(found, base), "a copy: device arrays are sliced and viewed"
    return found


class GraphDriver(EmulatedDriver):
    """A driver that runs launches on the CPU machine at once, or keeps them, frozen, while their stream captures.

    As a real one it refuses to load kernels, to allocate and to wait while a stream captures, and knows no address that it
    did not give out.
    """

    def __init__(self, arch: str = "sm_90a") -> None:
        super().__init__([], None)
        self.arch = arch
        self.launched: list[str] = []  # the entries of all kernels that ran, replayed ones too
        self.capturing_on: dict[int, Graph] = {}
        self.kernels: dict[bytes, tuple[Module, str, str]] = {}  # by what stands for a cubin

    def place(self, elements: Any) -> DeviceArray:
        """A device array with these elements, at 256 bytes."""
        given = np.asarray(elements)
        pointer = self.allocate(max(given.nbytes, 1), 0)
        raw = self._bytes(pointer, given.nbytes)
        raw[...] = np.frombuffer(given.tobytes(), np.uint8)
        return DeviceArray(np.ndarray(given.shape, given.dtype, raw.data))

    @contextmanager
    def capture(self, stream: int = STREAM) -> Iterator[Graph]:
        """What is launched on `stream` inside goes to the graph and does not run."""
        graph = self.capturing_on[stream] = Graph()
        try:
            yield graph
        finally:
            del self.capturing_on[stream]

    def other_kernel(self, name: str, run: Callable[[], Any], stream: int = STREAM) -> None:
        """A launch of somebody else's kernel on `stream`, which does what `run` does."""
        self._do(stream, name, (), run)

    def capability(self, device: int) -> tuple[int, int]:
        return int(self.arch[3]), int(self.arch[4])

    def multiprocessors(self, device: int) -> int:
        return multiprocessors_of("cpu")  # plans divide the work as they do there

    def pointer_device(self, pointer: int) -> int:
        if pointer and not any(start <= pointer < start + size for start, (_, size) in self.memory.items()):
            raise DeviceError(f"cuPointerGetAttribute: got CUDA_ERROR_INVALID_VALUE; {pointer:#x} is no device memory")
        return 0

    def load(self, cubin: bytes, entry: str, device: int) -> object:
        self._refuse_in_capture("cuModuleLoadData")
        return cpu_kernel(*self.kernels[cubin], self.arch, "check")

    def prepare(
        self, handle: Any, device: int, grid: cuda.Dim3, block: cuda.Dim3, shared: int, params: PackedArgs, pdl: bool
    ) -> cuda.Launch:
        def go(stream: int) -> None:
            raw = tuple(params.bytes_list())  # a driver copies them when the launch is made

            def run() -> None:
                buffers = [Buffer(f"memory {i}", at, n, True) for i, (at, (_, n)) in enumerate(self.memory.items())]
                handle.launch(grid, block, list(raw), dynamic_shared=shared, buffers=buffers, programmatic=pdl)
                self.launched.append(handle.name)

            self._do(stream, handle.name, (grid, block, shared, raw, pdl), run)

        return go

    def allocate(self, nbytes: int, device: int) -> int:
        self._refuse_in_capture("cuMemAlloc")
        return super().allocate(nbytes, device)

    def synchronize(self, stream: int, device: int) -> None:
        self._refuse_in_capture("cuStreamSynchronize")

    def allocate_pinned(self, nbytes: int, device: int) -> int:
        return self.allocate(nbytes, device)

    def free_pinned(self, pointer: int, device: int) -> None:
        self.free(pointer, device)

    def read_later(self, target: int, pointer: int, nbytes: int, stream: int, device: int) -> None:
        self._do(
            stream, "cuMemcpyDtoHAsync", (target, pointer, nbytes), lambda: ctypes.memmove(target, pointer, nbytes)
        )

    def fill_later(self, pointer: int, byte: int, nbytes: int, stream: int, device: int) -> None:
        self._do(stream, "cuMemsetD8Async", (pointer, byte, nbytes), lambda: ctypes.memset(pointer, byte, nbytes))

    def event(self, device: int) -> object:
        return object()

    def free_event(self, event: object, device: int) -> None:
        return None

    def record(self, event: object, stream: int, device: int) -> None:
        return None

    def reached(self, event: object, device: int) -> bool:
        return True

    def capturing(self, stream: int, device: int) -> bool:
        return bool(self.capturing_on) and (stream == 0 or stream in self.capturing_on)

    def _do(self, stream: int, what: str, frozen: tuple[object, ...], run: Callable[[], Any]) -> None:
        if stream in self.capturing_on:
            self.capturing_on[stream].nodes.append(Node(what, frozen, run))
        elif self.capturing(stream, 0):
            raise DeviceError(f"cuLaunchKernelEx: got CUDA_ERROR_STREAM_CAPTURE_IMPLICIT; stream {stream}")
        else:
            run()

    def _refuse_in_capture(self, call: str) -> None:
        if self.capturing_on:
            raise DeviceError(f"{call}: got {_BUSY}; load, allocate and wait before the capture begins")


@contextmanager
def graphs(arch: str = "sm_90a") -> Iterator[GraphDriver]:
    """Launchers take device arrays to a GraphDriver; their kernels are those of `arch`."""
    driver = GraphDriver(arch)

    def stand_in(module: Module, file: str, entry: str, capability: tuple[int, int]) -> bytes:
        name = f"{id(module)}/{file}".encode()
        driver.kernels[name] = (module, file, entry)
        return name

    def function(code: bytes, entry: str, shared: int = 0, *, device: int = 0) -> cuda.Function:
        return cuda.Function(driver, driver.load(code, entry, device), entry, device, shared)

    backend._function.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "driver", lambda: driver)
        patch.setattr(cuda, "function", function)
        patch.setattr(backend, "cubin", stand_in)
        patch.setattr(tensor_map, "_encode_cuda", lambda plan, device: tensor_map._encode_cpu(plan))
        try:
            yield driver
        finally:
            backend._function.cache_clear()
