"""Loading what the host compiler made, checking a launch, running it, and turning a fault into an exception."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from kvgen.emulator.abi import BufferInfo, FaultRecord, KeptPage, LaunchInfo, SiteCount
from kvgen.emulator.counters import Counters, Site, Tally
from kvgen.emulator.errors import EmulatorError, HostCompilerError, KernelFault
from kvgen.emulator.host import Built, build_object, cores
from kvgen.emulator.padding import PAGE_BYTES, Pages, Probing
from kvgen.emulator.writer import KernelFacts

Schedule = Literal["ascending", "descending"] | int
Mode = Literal["fast", "check", "hardware"]
_MOST_WORKERS = 64
_LARGEST_CLUSTER = 16
_CALLER = re.compile(r"(:\d+)\|(?=[^\s|]+:\d)")  # "file:line|file:line": where the first was inlined
_REGISTERS = 65536  # of a multiprocessor
_SHARED_LIMIT = 232448  # 227 KiB: what one block may have on sm_90


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a launch may touch: `nbytes` bytes from `address`. Names are unique within a launch. `settled`: no kernel
    before or behind this one writes it, so that it may be read before griddepcontrol.wait and after launch_dependents."""

    name: str
    address: int
    nbytes: int
    writable: bool
    settled: bool = False


def _triple(name: str, value: tuple[int, int, int], limits: tuple[int, int, int]) -> None:
    if len(value) != 3:
        raise EmulatorError(f"{name}: got {value}; it has three extents (x, y, z)")
    for axis, n, limit in zip("xyz", value, limits, strict=True):
        if not 1 <= n <= limit:
            raise EmulatorError(f"{name}: got {tuple(value)}; {axis} must be 1 to {limit}")


def _check_cluster(grid: tuple[int, int, int], cluster: tuple[int, int, int]) -> None:
    _triple("cluster", cluster, (_LARGEST_CLUSTER,) * 3)
    if cluster[0] * cluster[1] * cluster[2] > _LARGEST_CLUSTER:
        raise EmulatorError(f"cluster: got {tuple(cluster)}; a cluster has at most {_LARGEST_CLUSTER} blocks")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise EmulatorError(f"cluster: got {tuple(cluster)} for a grid of {tuple(grid)}; it must divide the grid")


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
        self._lines = tuple(_shorten(line) for line in facts.lines)

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

    @property
    def registers(self) -> int | None:
        """A thread's at the start, where setmaxnreg moves them and the PTX says how many."""
        return self._facts.registers

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[bytes],
        *,
        dynamic_shared: int = 0,
        buffers: Sequence[Buffer] = (),
        schedule: Schedule = "ascending",
        workers: int | None = None,
        programmatic: bool = False,
        cluster: tuple[int, int, int] | None = None,
        registers: int | None = None,
    ) -> Counters:
        """Run the kernel to its end.

        `args` holds each parameter's raw little-endian bytes (a pointer is 8 bytes: the address). `buffers` is all the
        global memory the kernel may touch; fast mode does not look at it. `schedule` is the order in which threads that
        can run do so: a number seeds a random one. `workers` is the most OS threads to spread blocks over, by default one
        a core; results and reports do not depend on it. `programmatic` launches as with programmatic stream serialization:
        check mode then faults on global memory that is touched before griddepcontrol.wait, or read after
        griddepcontrol.launch_dependents. `cluster` is how many blocks
        share a cluster along each axis, by default what the kernel was compiled for. `registers` are a thread's where
        setmaxnreg moves them, a cubin's count; by default what ptxas makes of the PTX.

        Raises EmulatorError for a launch that a GPU would refuse, KernelFault for what goes wrong inside.
        """
        self._check_shape(grid, block, dynamic_shared)
        required = self._facts.cluster
        cluster = cluster or required or (1, 1, 1)
        if required not in (None, tuple(cluster)):
            raise EmulatorError(f"cluster: got {tuple(cluster)}; {self.name} was compiled for {required}")
        _check_cluster(grid, cluster)
        if workers is None:
            workers = min(cores(), _MOST_WORKERS)
        if not 1 <= workers <= _MOST_WORKERS:
            raise EmulatorError(f"workers: got {workers}; it is 1 to {_MOST_WORKERS}")
        params = self._pack(args)
        registers = self._registers(registers, block)
        _check_buffers(buffers)
        infos = (BufferInfo * max(len(buffers), 1))()
        for i, b in enumerate(buffers):
            infos[i] = BufferInfo(b.name.encode(), b.address, b.nbytes, int(b.writable), int(b.settled))
        executed = (ctypes.c_uint64 * (2 * len(self._facts.blocks)))()
        kind, seed = {"ascending": (0, 0), "descending": (1, 0)}.get(schedule, (2, -1)) if isinstance(
            schedule, str) else (2, schedule)  # fmt: skip
        if seed < 0:
            raise EmulatorError(f"schedule: got {schedule!r}; it is 'ascending', 'descending' or a seed (an int >= 0)")
        info = LaunchInfo(
            kernel=self._index, grid=grid, block=block, cluster=cluster, dynamic_shared=dynamic_shared, schedule=kind,
            seed=seed & (2**64 - 1), workers=workers, programmatic=int(programmatic), registers=registers, params=params[1],
            buffer_count=len(buffers), buffers=infos, executed=executed,
        )  # fmt: skip
        sites = self._library.run(self.name, info, len(self._facts.blocks), [b for b in buffers if b.writable])
        names = tuple(b.name for b in buffers)
        counts = (info.warp_operations, info.barriers, info.peak_in_flight)
        return Counters((Tally(self._lines, self._facts.blocks, tuple(executed), names, sites, *counts),))

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

    def _registers(self, given: int | None, block: tuple[int, int, int]) -> int:
        found = (self._facts.registers if given is None else given) or 0
        threads = -(-block[0] * block[1] * block[2] // 32) * 32
        if not 0 <= found <= 256 or found * threads > _REGISTERS:
            raise EmulatorError(
                f"registers: got {found} for each of {threads} threads; a thread has at most 256, a block {_REGISTERS}"
            )
        return found

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


_runtimes: dict[str, ctypes.CDLL] = {}
_runtime_locks: dict[str, threading.RLock] = {}  # a launch holds its runtime's
_loading = threading.RLock()  # held while the two above grow


def _before_fork() -> None:
    """Wait for the launches of other threads: a child would have their runtimes as they are in the middle of one."""
    _loading.acquire()
    for lock in _runtime_locks.values():
        lock.acquire()


def _after_fork() -> None:
    for lock in _runtime_locks.values():
        lock.release()
    _loading.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


class Library:
    """The kernels of one build. Launches of one mode are serialised in a process, "hardware" with "check"; a fork waits for
    their end, and its child may launch."""

    def __init__(self, built: Built, mode: Mode) -> None:
        """Raises OSError where the dynamic loader refuses an object."""
        self.mode: Mode = mode
        # By name and not by path: kernels find their runtime by its soname, which a second cache folder has too.
        name = built.runtime.name
        with _loading:
            if name not in _runtimes:
                _runtimes[name] = ctypes.CDLL(str(built.runtime))
            self._runtime, self._lock = _runtimes[name], _runtime_locks.setdefault(name, threading.RLock())
        self._runtime.emu_launch.argtypes = [ctypes.POINTER(LaunchInfo)]
        self._runtime.emu_launch.restype = ctypes.c_int
        self._runtime.emu_fault_record.restype = ctypes.POINTER(FaultRecord)
        self._runtime.emu_suspicion.restype = ctypes.POINTER(FaultRecord)
        self._runtime.emu_printed.restype = ctypes.c_void_p
        if mode == "hardware":
            self._runtime.emu_kept_pages.restype = ctypes.POINTER(KeptPage)
        self._program = ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(str(built.library)), "emu_program"))
        self.kernels: Mapping[str, Kernel] = {f.name: Kernel(self, i, f) for i, f in enumerate(built.kernels)}

    def run(self, kernel: str, info: LaunchInfo, blocks: int, written: Sequence[Buffer]) -> tuple[Site, ...]:
        """Perform a checked launch and return its counts by instruction; for Kernel.launch. `blocks`: how many basic
        blocks the kernel has. `written`: the buffers that it may write. In mode "hardware" what is suspected is probed."""
        info.program, info.level = self._program, int(self.mode == "hardware")
        with self._lock:
            fault = self._once(kernel, info)
            printed = self._printed()
            sites = tuple(_site(info.sites[i]) for i in range(info.site_count)) if fault is None else ()
            suspicion = self._runtime.emu_suspicion().contents
            if self.mode == "hardware":
                if suspicion.set:
                    fault = self._probed(kernel, info, blocks, written, _fault(kernel, suspicion), fault)
                self._runtime.emu_drop_pages()
        if printed:
            sys.stdout.write(printed)
        if fault is not None:
            raise fault
        return sites

    def _probed(
        self,
        kernel: str,
        info: LaunchInfo,
        blocks: int,
        written: Sequence[Buffer],
        suspected: KernelFault,
        fault: KernelFault | None,
    ) -> KernelFault | None:
        """What the launch `info` is to be blamed for, which ended in `fault` after it had been suspected."""
        if fault is not None:
            return fault.because(f"before it, {suspected}")
        probing = Probing(written, self._kept)
        consequence = probing.consequence(info, blocks, lambda probe: self._once(kernel, probe))
        if consequence is None:
            return None
        return suspected.because(f"it matters: with other bytes there {consequence}")

    def _once(self, kernel: str, info: LaunchInfo) -> KernelFault | None:
        status = self._runtime.emu_launch(ctypes.byref(info))
        if status > 1:
            raise EmulatorError(f"{kernel}: no memory for the stacks of the block's threads")
        return _fault(kernel, self._runtime.emu_fault_record().contents) if status else None

    def _kept(self) -> Pages:
        """The pages that the launch and its probes have written, as they were before it."""
        count = ctypes.c_uint64()
        pages = self._runtime.emu_kept_pages(ctypes.byref(count))
        return {pages[i].address: ctypes.string_at(pages[i].bytes, PAGE_BYTES) for i in range(count.value)}

    def _printed(self) -> str:
        """What the kernel printed, in the order of its blocks."""
        count = ctypes.c_uint64()
        text = self._runtime.emu_printed(ctypes.byref(count))
        return ctypes.string_at(text, count.value).decode(errors="replace")


def _site(row: SiteCount) -> Site:
    return Site(_innermost(row.where), row.buffer, row.kind, row.requests, row.bytes, row.units, row.ideal, row.worst)


@functools.cache
def _innermost(where: bytes) -> str:
    return _shorten(where.decode(errors="replace").partition("|")[0])


def _fault(kernel: str, record: FaultRecord) -> KernelFault:
    def text(raw: bytes) -> str | None:
        return raw.decode(errors="replace") or None

    places = [_shorten(p) for p in (text(record.where) or "").split("|") if p]
    return KernelFault(
        kind=text(record.kind) or "fault",
        level="hardware" if record.level else "check",
        kernel=kernel,
        block=(record.block[0], record.block[1], record.block[2]) if record.has_thread else None,
        thread=(record.thread[0], record.thread[1], record.thread[2]) if record.has_thread else None,
        source=places[0] if places else None,
        inlined_at=tuple(places[1:]),
        operation=text(record.op),
        buffer=text(record.buffer),
        detail=_CALLER.sub(r"\1, inlined at ", text(record.detail) or "").replace(os.getcwd() + os.sep, ""),
    )


def build(ptx: Sequence[str], *, mode: Mode = "check", cache_dir: Path | None = None) -> Library:
    """Translate PTX modules and compile them as one; objects are cached by content.

    `mode` "check" finds memory errors, races and misused synchronisation by the letter of the PTX ISA; "hardware", which
    runs the same objects, reports of these what hardware can get wrong; "fast" only computes. Raises TranslateError for
    PTX that is not understood in full, HostCompilerError without a working C++ compiler.
    """
    if mode not in get_args(Mode):
        raise EmulatorError(f"mode: got {mode!r}; it is 'fast', 'check' or 'hardware'")
    if isinstance(ptx, str):
        raise EmulatorError("ptx: got one str; it is a sequence of PTX texts")
    objects: Literal["fast", "check"] = "fast" if mode == "fast" else "check"
    try:
        return Library(build_object(ptx, objects, cache_dir), mode)
    except OSError:  # what is in the cache is whole, but not for this system
        pass
    try:
        return Library(build_object(ptx, objects, cache_dir, afresh=True), mode)
    except OSError as error:
        raise HostCompilerError(
            f"the objects just compiled cannot be kept or loaded: {error}; "
            "set KVGEN_CACHE_DIR to a folder with room that is not mounted noexec"
        ) from error
