"""Loading what the host compiler made, checking a launch, running it, and turning a fault into an exception."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvgen.emulator.errors import EmulatorError, KernelFault
from kvgen.emulator.host import Mode, build_object
from kvgen.emulator.writer import KernelFacts

Schedule = Literal["ascending", "descending"] | int
_SHARED_LIMIT = 232448  # 227 KiB: what one block may have on sm_90


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a launch may touch: `nbytes` bytes from `address`. Names are unique within a launch."""

    name: str
    address: int
    nbytes: int
    writable: bool


@dataclass(frozen=True, slots=True)
class BufferCounters:
    """One buffer's traffic. A request is one instruction of one warp; a sector is 32 bytes, counted once a request."""

    load_requests: int
    load_bytes: int
    load_sectors: int
    store_requests: int
    store_bytes: int
    store_sectors: int
    atomic_requests: int
    atomic_bytes: int
    atomic_sectors: int


@dataclass(frozen=True, slots=True)
class Counters:
    """What a launch did. Exact and the same for every schedule of a kernel without races.

    `warp_instructions` counts a basic block as often as the busiest lane of each warp ran it. `per_buffer` is filled in
    check mode; in fast mode its numbers are 0.
    """

    thread_instructions: int
    warp_instructions: int
    warp_operations: int
    barriers: int
    per_buffer: Mapping[str, BufferCounters]


class _BufferInfo(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p), ("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint32), ("padding", ctypes.c_uint32),
    )  # fmt: skip


_COUNT_FIELDS = tuple(BufferCounters.__dataclass_fields__)


class _BufferCount(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in _COUNT_FIELDS)


class _LaunchInfo(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_uint32), ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3),
        ("dynamic_shared", ctypes.c_uint32), ("schedule", ctypes.c_uint32), ("buffer_count", ctypes.c_uint32),
        ("seed", ctypes.c_uint64), ("params", ctypes.c_void_p), ("buffers", ctypes.POINTER(_BufferInfo)),
        ("counts", ctypes.POINTER(_BufferCount)), ("thread_instructions", ctypes.c_uint64),
        ("warp_instructions", ctypes.c_uint64), ("warp_operations", ctypes.c_uint64), ("barriers", ctypes.c_uint64),
        ("switches", ctypes.c_uint64),
    )  # fmt: skip


class _FaultRecord(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint32), ("has_thread", ctypes.c_uint32), ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3), ("kind", ctypes.c_char * 48), ("where", ctypes.c_char * 2048),
        ("op", ctypes.c_char * 160), ("buffer", ctypes.c_char * 256), ("detail", ctypes.c_char * 6144),
    )  # fmt: skip


def _triple(name: str, value: tuple[int, int, int], limits: tuple[int, int, int]) -> None:
    if len(value) != 3:
        raise EmulatorError(f"{name}: got {value}; it has three extents (x, y, z)")
    for axis, n, limit in zip("xyz", value, limits, strict=True):
        if not 1 <= n <= limit:
            raise EmulatorError(f"{name}: got {tuple(value)}; {axis} must be 1 to {limit}")


def _shorten(place: str) -> str:
    """A path below the working directory is given relative to it, as the generated #line names it."""
    here = os.getcwd() + os.sep
    return place.removeprefix(here)


class Kernel:
    """One entry of a Library."""

    def __init__(self, library: Library, index: int, facts: KernelFacts) -> None:
        self._library = library
        self._index = index
        self._facts = facts

    @property
    def name(self) -> str:
        return self._facts.name

    @property
    def parameter_sizes(self) -> tuple[int, ...]:
        """Bytes of each parameter, in order."""
        return self._facts.param_sizes

    @property
    def static_shared(self) -> int:
        """Bytes of statically declared shared memory."""
        return self._facts.static_shared

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[bytes],
        *,
        dynamic_shared: int = 0,
        buffers: Sequence[Buffer] = (),
        schedule: Schedule = "ascending",
    ) -> Counters:
        """Run the kernel to its end.

        `args` holds each parameter's raw little-endian bytes (a pointer is 8 bytes: the address). `buffers` is all the
        global memory the kernel may touch; fast mode does not look at it. `schedule` is the order in which threads that
        can run do so: a number seeds a random one.

        Raises EmulatorError for a launch that a GPU would refuse, KernelFault for what goes wrong inside.
        """
        self._check_shape(grid, block, dynamic_shared)
        params = self._pack(args)
        _check_buffers(buffers)
        infos = (_BufferInfo * max(len(buffers), 1))()
        for i, b in enumerate(buffers):
            infos[i] = _BufferInfo(b.name.encode(), b.address, b.nbytes, int(b.writable), 0)
        counts = (_BufferCount * max(len(buffers), 1))()
        kind, seed = {"ascending": (0, 0), "descending": (1, 0)}.get(schedule, (2, -1)) if isinstance(
            schedule, str) else (2, schedule)  # fmt: skip
        if seed < 0:
            raise EmulatorError(f"schedule: got {schedule!r}; it is 'ascending', 'descending' or a seed (an int >= 0)")
        info = _LaunchInfo(
            kernel=self._index, grid=grid, block=block, dynamic_shared=dynamic_shared, schedule=kind,
            buffer_count=len(buffers), seed=seed & (2**64 - 1), params=params[1], buffers=infos, counts=counts,
        )  # fmt: skip
        self._library.run(self.name, info)
        per_buffer = {
            b.name: BufferCounters(**{f: int(getattr(counts[i], f)) for f in _COUNT_FIELDS})
            for i, b in enumerate(buffers)
        }
        return Counters(
            info.thread_instructions, info.warp_instructions, info.warp_operations, info.barriers, per_buffer
        )

    def _check_shape(self, grid: tuple[int, int, int], block: tuple[int, int, int], dynamic_shared: int) -> None:
        _triple("grid", grid, (2**31 - 1, 65535, 65535))
        _triple("block", block, (1024, 1024, 64))
        threads = block[0] * block[1] * block[2]
        limit = min(1024, self._facts.max_threads or 1024)
        if threads > limit:
            raise EmulatorError(f"block: got {tuple(block)}, {threads} threads; {self.name} takes at most {limit}")
        total = dynamic_shared + self._facts.static_shared
        if dynamic_shared < 0 or total > _SHARED_LIMIT:
            raise EmulatorError(
                f"dynamic_shared: got {dynamic_shared} bytes beside {self._facts.static_shared} static ones; "
                f"a block has at most {_SHARED_LIMIT} in all"
            )

    def _pack(self, args: Sequence[bytes]) -> tuple[ctypes.Array[ctypes.c_char], int]:
        sizes = self._facts.param_sizes
        if len(args) != len(sizes):
            raise EmulatorError(f"args: got {len(args)} values; {self.name} takes {len(sizes)} parameters")
        memory = ctypes.create_string_buffer(self._facts.param_bytes + 128)
        start = -(-ctypes.addressof(memory) // 128) * 128
        for i, (value, size, offset) in enumerate(zip(args, sizes, self._facts.param_offsets, strict=True)):
            if len(value) != size:
                raise EmulatorError(f"args[{i}]: got {len(value)} bytes; this parameter of {self.name} has {size}")
            ctypes.memmove(start + offset, bytes(value), size)
        return memory, start


def _check_buffers(buffers: Sequence[Buffer]) -> None:
    names: set[str] = set()
    for b in buffers:
        if b.name in names:
            raise EmulatorError(f"buffers: got {b.name!r} twice; each name must be unique")
        names.add(b.name)
        if b.nbytes < 0 or b.address < 0 or b.address + b.nbytes >= 2**64:
            raise EmulatorError(f"buffers: {b.name!r} is {b.nbytes} bytes at {b.address:#x}; no memory is there")


class Library:
    """The kernels of one build. Launches of one library are serialised; nothing else is shared between threads."""

    def __init__(self, path: Path, facts: Sequence[KernelFacts]) -> None:
        self._lock = threading.Lock()
        self._object = ctypes.CDLL(str(path))
        self._object.emu_launch.argtypes = [ctypes.POINTER(_LaunchInfo)]
        self._object.emu_launch.restype = ctypes.c_int
        self._object.emu_fault_record.restype = ctypes.POINTER(_FaultRecord)
        self.kernels: Mapping[str, Kernel] = {f.name: Kernel(self, i, f) for i, f in enumerate(facts)}

    def run(self, kernel: str, info: ctypes.Structure) -> None:
        """Perform a checked launch; for Kernel.launch."""
        with self._lock:
            status = self._object.emu_launch(ctypes.byref(info))
            if status == 0:
                return
            if status == 2:
                raise EmulatorError(f"{kernel}: no memory for the stacks of the block's threads")
            raise _fault(kernel, self._object.emu_fault_record().contents)


def _fault(kernel: str, record: _FaultRecord) -> KernelFault:
    def text(raw: bytes) -> str | None:
        return raw.decode(errors="replace") or None

    places = [_shorten(p) for p in (text(record.where) or "").split("|") if p]
    return KernelFault(
        kind=text(record.kind) or "fault",
        kernel=kernel,
        block=(record.block[0], record.block[1], record.block[2]) if record.has_thread else None,
        thread=(record.thread[0], record.thread[1], record.thread[2]) if record.has_thread else None,
        source=places[0] if places else None,
        inlined_at=tuple(places[1:]),
        operation=text(record.op),
        buffer=text(record.buffer),
        detail=text(record.detail) or "",
    )


def build(ptx: Sequence[str], *, mode: Mode = "check", cache_dir: Path | None = None) -> Library:
    """Translate PTX modules and compile them as one; objects are cached by content.

    `mode` "check" finds memory errors, races and misused synchronisation; "fast" only computes. Raises TranslateError
    for PTX that is not understood in full, HostCompilerError without a working C++ compiler.
    """
    if mode not in ("fast", "check"):
        raise EmulatorError(f"mode: got {mode!r}; it is 'fast' or 'check'")
    if isinstance(ptx, str):
        raise EmulatorError("ptx: got one str; it is a sequence of PTX texts")
    path, facts = build_object(ptx, mode, cache_dir)
    return Library(path, facts)
