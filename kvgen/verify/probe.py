"""What a calibration runs on, a GPU or the CPU machine, and the parts of one: sizes, records of timed stretches, figures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvgen.compile import Unit, compile_unit, default_cache, quick_on_cpu
from kvgen.emulator import Buffer, Library, Schedule, build
from kvgen.errors import ArgumentError, DeviceError
from kvgen.runtime import cuda, packing
from kvgen.runtime.cuda import Launch
from kvgen.runtime.tensor_map import encode
from kvgen.tensor_map import TensorMapPlan
from kvgen.verify.device import Gpu
from kvgen.verify.memory import Bytes, GpuBytes, HostPlaced

RECORD: Final = np.dtype([(name, np.uint64) for name in ("begin", "end", "ns", "steps", "sum")])
Records = NDArray[Any]


class Wrong(DeviceError):
    """A kernel of the calibration did not leave what its steps give."""


@dataclass(frozen=True)
class Measured:
    """A figure of this device, the median of what was measured; `low` and `high` are the least and the most."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    what: str


@dataclass(frozen=True)
class Sizes:
    """How much a calibration runs; everything is bounded by these counts."""

    trips: int = 64  # of 16 steps
    chase: int = 1024  # steps of an idle chain
    most: int = 1 << 14  # steps of a chain beside streams, which end it
    lines: int = 1 << 21  # of 128 bytes: what chains go through
    stream_bytes: int = 0  # what streams and runs read; 0: 16 to 32 times L2, a quarter of the memory at most
    loads: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16, 24, 31)  # streaming warps a multiprocessor
    runs: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)  # bytes
    near_bytes: int = 16 << 20  # what L2 holds while all multiprocessors read it; half of L2 at most
    rounds: int = 64  # that it is read in, of which 16 fill all loads of a block
    boxes: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)  # bytes
    copies: int = 4096  # of boxes
    warps: int = 16  # of which the sub-core is asked
    blocks: int = 16  # that follow idle chains
    nodes: int = 64  # of a graph

    def __post_init__(self) -> None:
        for name in ("trips", "chase", "most", "copies", "blocks", "nodes"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name}: got {getattr(self, name)}; it must be at least 1")
        if not 1 <= self.trips <= 120:
            raise ArgumentError(f"trips: got {self.trips}; it must be 1 to 120: sums of f16 are exact up to 2048")
        if self.rounds < 16 or self.rounds % 16:
            raise ArgumentError(f"rounds: got {self.rounds}; it must be a multiple of 16")
        if not 2 <= self.warps <= 16:
            raise ArgumentError(f"warps: got {self.warps}; it must be 2 to 16")
        for name in ("lines", "stream_bytes", "near_bytes"):
            value = getattr(self, name)
            if value & (value - 1) or (name != "stream_bytes" and not value):
                raise ArgumentError(f"{name}: got {value}; it must be a power of two")
        for name, least, largest in (("runs", 16, 1 << 16), ("boxes", 1024, 16384)):
            for value in getattr(self, name):
                if value & (value - 1) or not least <= value <= largest:
                    raise ArgumentError(f"{name}: got {value}; it must be a power of two from {least} to {largest}")
            if not getattr(self, name):
                raise ArgumentError(f"{name}: got none; it must have one at least")
        if not self.loads or not all(1 <= n <= 31 for n in self.loads):
            raise ArgumentError(f"loads: got {self.loads}; it must be numbers of warps from 1 to 31")


SMALL: Final = Sizes(
    trips=2, chase=32, most=64, lines=1 << 10, stream_bytes=1 << 17, loads=(1, 2), runs=(64, 1024),
    near_bytes=1 << 12, rounds=16, boxes=(1024, 4096), copies=64, warps=4, blocks=2, nodes=2,
)  # fmt: skip


class Held(Protocol):
    """Device memory."""

    pointer: int
    nbytes: int

    def write(self, data: bytes) -> None:
        """Its first bytes."""
        ...

    def read(self) -> Bytes:
        """A copy, behind every kernel launched so far."""
        ...


Value = Held | int | bytes


class Machine(Protocol):
    """What runs the kernels of calibrate.cu."""

    arch: str
    multiprocessors: int
    l2_bytes: int

    def free_bytes(self) -> int:
        """Memory that can still be had."""
        ...

    def memory(self, nbytes: int) -> Held:
        """Memory with anything in it."""
        ...

    def bind(self, entry: str, grid: int, block: int, *values: Value, shared: int = 0, pdl: bool = False) -> Launch:
        """A launch of a kernel with these pointers, numbers and tensor maps."""
        ...

    def tensor_map(self, plan: TensorMapPlan) -> bytes:
        """A tensor map as kernels take it."""
        ...

    def time(self, launches: Sequence[Launch]) -> float:
        """Microseconds a launch, of all in a graph; they have run before."""
        ...

    def run(self, launch: Launch) -> None:
        """Launch, and wait for it."""
        ...


class GpuMachine:
    """A GPU, and the cubin of the kernels for it."""

    def __init__(self, gpu: Gpu, arch: str, cubin: bytes) -> None:
        self.gpu, self.arch, self.cubin = gpu, arch, cubin
        self.multiprocessors, self.l2_bytes = gpu.multiprocessors, gpu.l2_bytes

    def free_bytes(self) -> int:
        return self.gpu.free_bytes()

    def memory(self, nbytes: int) -> GpuBytes:
        return GpuBytes(nbytes, self.gpu.ordinal)

    def bind(self, entry: str, grid: int, block: int, *values: Value, shared: int = 0, pdl: bool = False) -> Launch:
        function = cuda.function(self.cubin, entry, shared, device=self.gpu.ordinal)
        kinds: list[packing.ParamKind] = [
            "u32" if isinstance(v, int) else packing.TENSOR_MAP if isinstance(v, bytes) else "ptr" for v in values
        ]
        params = packing.PackedArgs(kinds, [v if isinstance(v, int | bytes) else v.pointer for v in values])
        launch = function.bind((grid, 1, 1), (block, 1, 1), params, pdl=pdl)

        def go(stream: int, memory: object = values) -> None:  # which lives as long as the launch
            launch(stream)

        return go

    def tensor_map(self, plan: TensorMapPlan) -> bytes:
        return encode(plan, f"cuda:{self.gpu.ordinal}")

    def time(self, launches: Sequence[Launch]) -> float:
        return self.gpu.time(launches, samples=7).median

    def run(self, launch: Launch) -> None:
        launch(self.gpu.stream)
        self.gpu.wait()


class HostHeld:
    """Memory of the host, for the CPU machine."""

    def __init__(self, nbytes: int) -> None:
        self._placed = HostPlaced(np.full(nbytes, 0xEE, np.uint8))
        self.pointer, self.nbytes = int(self._placed.bytes.ctypes.data), nbytes

    def write(self, data: bytes) -> None:
        self._placed.bytes[: len(data)] = np.frombuffer(data, np.uint8)

    def read(self) -> Bytes:
        return self._placed.read()


class CpuMachine:
    """The CPU machine: every access is checked, and a clock is no time."""

    multiprocessors, l2_bytes = 2, 1 << 12

    def __init__(self, unit: Unit, arch: str, schedule: Schedule = "ascending") -> None:
        """Raises CompileError, ToolError."""
        self.arch, self.schedule = arch, schedule
        ptx = compile_unit(unit, arch, "ptx", cache=default_cache(), quick=quick_on_cpu()).data.decode()
        self.library: Library = build([ptx], mode="check")

    def free_bytes(self) -> int:
        return 1 << 24

    def memory(self, nbytes: int) -> HostHeld:
        return HostHeld(nbytes)

    def bind(self, entry: str, grid: int, block: int, *values: Value, shared: int = 0, pdl: bool = False) -> Launch:
        kernel = self.library.kernels[entry]
        raw, buffers = list[bytes](), list[Buffer]()
        for i, value in enumerate(values):
            if isinstance(value, bytes):
                raw.append(value)
            elif isinstance(value, int):
                raw.append(value.to_bytes(4, "little"))
            else:
                raw.append(value.pointer.to_bytes(8, "little"))
                buffers.append(Buffer(f"argument {i}", value.pointer, value.nbytes, True))

        def go(stream: int, memory: object = values) -> None:
            kernel.launch(
                (grid, 1, 1),
                (block, 1, 1),
                raw,
                dynamic_shared=shared,
                buffers=buffers,
                schedule=self.schedule,
                programmatic=pdl,
            )

        return go

    def tensor_map(self, plan: TensorMapPlan) -> bytes:
        return encode(plan, "cpu")

    def time(self, launches: Sequence[Launch]) -> float:
        begin = time.perf_counter()
        for launch in launches:
            launch(0)
        return (time.perf_counter() - begin) * 1e6 / len(launches)

    def run(self, launch: Launch) -> None:
        launch(0)
