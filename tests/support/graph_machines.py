"""Where a captured step is replayed: the CPU machine, by tests/support/graph_driver.py, or a GPU. The same calls on both."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import numpy as np

from kvgen.runtime import cuda, packing
from kvgen.runtime.memory import DeviceMemory
from tests.support.graph_driver import STREAM, DeviceArray, GraphDriver, graphs
from tests.support.launching import Raw, on_device

Work = Callable[[int], None]
# Kernels of somebody else's. One writes step `*count % steps`, of arrays that have them all, to arrays that launches read, and
# counts. The other one starts early and does not wait for anybody.
FOREIGN: Final = r"""
extern "C" __global__ void next_step(int* count, int steps, int* to0, const int* from0, int n0,
                                     int* to1, const int* from1, int n1) {
  const int step = *count % steps;
  for (int i = threadIdx.x; i < n0; i += blockDim.x) to0[i] = from0[step * n0 + i];
  for (int i = threadIdx.x; i < n1; i += blockDim.x) to1[i] = from1[step * n1 + i];
  __syncthreads();
  if (threadIdx.x == 0) ++*count;
}
extern "C" __global__ void heedless(int* x) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  x[threadIdx.x] = threadIdx.x;
}
"""


class Machine(Protocol):
    """Arrays of a device, its stream, and graphs captured on it. `replays`: how often a graph is worth replaying."""

    stream: int
    replays: int

    def place(self, array: Raw) -> Any:
        """A device array with these elements."""
        ...

    def read(self, array: Any) -> Raw:
        """Its elements, behind all work so far."""
        ...

    def write(self, array: Any, elements: Raw) -> None:
        """Other elements for it, behind all work so far."""
        ...

    def poison(self, array: Any, stream: int) -> None:
        """All its bytes become 0xFF, in the order of the stream."""
        ...

    @contextmanager
    def capture(self) -> Iterator[list[Callable[[], None]]]:
        """What is launched on `stream` inside goes into a graph; the list has the function that replays it, afterwards."""
        ...

    def beside(self, work: Work) -> None:
        """`work` on a second stream, which begins behind what `stream` has so far, and `stream` waits for its end."""
        ...

    def next_step(self, count: Any, steps: int, pairs: list[tuple[Any, Any]]) -> Work:
        """A launch of somebody else's kernel: for two pairs of an array and all its steps, the step that `count` is at."""
        ...

    def heedless(self, scratch: Any) -> Work:
        """A launch of somebody else's kernel that overlaps with both its neighbours, and waits for nothing."""
        ...


class CpuGraphs:
    """Over host memory: what a graph froze runs on the CPU machine, one launch behind the other."""

    replays = 9

    def __init__(self, driver: GraphDriver) -> None:
        self.driver, self.stream = driver, STREAM

    def place(self, array: Raw) -> DeviceArray:
        return self.driver.place(array)

    def read(self, array: DeviceArray) -> Raw:
        return np.array(array.elements)

    def write(self, array: DeviceArray, elements: Raw) -> None:
        array.elements[...] = elements

    def poison(self, array: DeviceArray, stream: int) -> None:
        self.driver.fill_later(array.elements.ctypes.data, 0xFF, array.elements.nbytes, stream, 0)

    @contextmanager
    def capture(self) -> Iterator[list[Callable[[], None]]]:
        replay: list[Callable[[], None]] = []
        with self.driver.capture(self.stream) as graph:
            yield replay
        replay.append(graph.replay)

    def beside(self, work: Work) -> None:
        work(self.stream)

    def next_step(self, count: DeviceArray, steps: int, pairs: list[tuple[Any, Any]]) -> Work:
        def run() -> None:
            for to, every in pairs:
                to.elements[...] = every.elements[int(count.elements[0]) % steps]
            count.elements[0] += 1

        return lambda stream: self.driver.other_kernel("next_step", run, stream)

    def heedless(self, scratch: DeviceArray) -> Work:
        return lambda stream: self.driver.other_kernel("heedless", lambda: None, stream)


class GpuArray:
    """An array in a GPU's memory, and those along its first axis."""

    def __init__(self, like: Raw, memory: DeviceMemory, offset: int = 0) -> None:
        self.like, self.memory, self.pointer = like, memory, memory.pointer + offset
        self.dtype = like.dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        found: dict[str, Any] = on_device(self.like, self.pointer).__cuda_array_interface__
        return found

    def __getitem__(self, index: int) -> GpuArray:
        part = self.like[index]
        return GpuArray(part, self.memory, self.pointer - self.memory.pointer + index * part.nbytes)


class GpuGraphs:
    """A GPU, through the bindings."""

    replays = 1000

    def __init__(self) -> None:
        self.driver = cuda.driver()
        self.api: Any = importlib.import_module("cuda.bindings.driver")
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", 0)))
        self._streams = [self._call("cuStreamCreate", 1) for _ in range(2)]  # that do not wait for the default stream
        self.stream = int(self._streams[0])
        self._event = self._call("cuEventCreate", 2)  # without a time
        self._foreign = self._compiled()

    def _call(self, name: str, *arguments: Any) -> Any:
        result, *values = getattr(self.api, name)(*arguments)
        assert int(result) == 0, f"{name}: {result}"
        return values[0] if values else None

    def _compiled(self) -> bytes:
        from cuda.core import Program, ProgramOptions

        major, minor = self.driver.capability(0)
        program = Program(FOREIGN, "c++", ProgramOptions(arch=f"sm_{major}{minor}"))
        return bytes(program.compile("cubin").code)

    def place(self, array: Raw) -> GpuArray:
        found = GpuArray(array, DeviceMemory(max(array.nbytes, 1), 0))
        self.write(found, array)
        return found

    def read(self, array: GpuArray) -> Raw:
        self.driver.synchronize(self.stream, 0)
        data = self.driver.read(array.pointer, array.like.nbytes, 0)
        return np.frombuffer(data, array.like.dtype).reshape(array.like.shape)

    def write(self, array: GpuArray, elements: Raw) -> None:
        self.driver.synchronize(self.stream, 0)
        self.driver.write(array.pointer, np.ascontiguousarray(elements).tobytes(), 0)

    def poison(self, array: GpuArray, stream: int) -> None:
        self.driver.fill_later(array.pointer, 0xFF, array.like.nbytes, stream, 0)

    @contextmanager
    def capture(self) -> Iterator[list[Callable[[], None]]]:
        replay: list[Callable[[], None]] = []
        mode = self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._streams[0], mode)
        try:
            yield replay
        finally:
            graph = self._call("cuStreamEndCapture", self._streams[0])
        executable = self._call("cuGraphInstantiate", graph, 0)
        replay.append(lambda: self._call("cuGraphLaunch", executable, self._streams[0]))

    def beside(self, work: Work) -> None:
        own, other = self._streams
        for first, behind in ((own, other), (other, own)):
            self._call("cuEventRecord", self._event, first)
            self._call("cuStreamWaitEvent", behind, self._event, 0)
            if behind is other:
                work(int(other))

    def next_step(self, count: GpuArray, steps: int, pairs: list[tuple[Any, Any]]) -> Work:
        kinds: list[packing.ParamKind] = ["ptr", "i32"]
        values: list[packing.Value] = [count.pointer, steps]
        for to, every in pairs:
            kinds += ["ptr", "ptr", "i32"]
            values += [to.pointer, every.pointer, to.like.size]
        return self._launch("next_step", kinds, values, pdl=False)

    def heedless(self, scratch: GpuArray) -> Work:
        return self._launch("heedless", ["ptr"], [scratch.pointer], pdl=True)

    def _launch(self, entry: str, kinds: list[packing.ParamKind], values: list[packing.Value], *, pdl: bool) -> Work:
        function = cuda.function(self._foreign, entry)
        return function.bind((1, 1, 1), (32, 1, 1), packing.PackedArgs(kinds, values), pdl=pdl)


@contextmanager
def graph_machine(device: str) -> Iterator[Machine]:
    """`device`: "cpu" or "cuda:0"."""
    if device == "cpu":
        with graphs() as driver:
            yield CpuGraphs(driver)
    else:
        yield GpuGraphs()
