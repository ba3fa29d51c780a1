"""The `cpu` backend: the compiled kernel's PTX, executed by the emulator on host arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvgen.architectures import architecture, cpu_targets, on_cpu
from kvgen.errors import ArgumentError, DeviceError
from kvgen.plan.params import Array
from kvgen.runtime.arrays import extent
from kvgen.runtime.cpu_mode import environment_mode, held_mode
from kvgen.runtime.module import cpu_kernel
from kvgen.runtime.stream import no_stream

if TYPE_CHECKING:
    from kvgen.emulator import Mode, Schedule
    from kvgen.runtime.arrays import ArrayView
    from kvgen.runtime.kernel import Extra, Grid, Kernel
    from kvgen.runtime.layer_cache import LayerCache
    from kvgen.runtime.module import Module
    from kvgen.runtime.packing import PackedArgs


class Memory(NamedTuple):
    """An array that a launch may touch."""

    name: str
    view: ArrayView
    writes: bool


# Called before a launch with its entry and memory; what it returns is called after it.
Watch = Callable[[str, "Sequence[Memory]"], Callable[[], None]]


@dataclass(frozen=True)
class Launched:
    """One kernel launch on the CPU machine, of the PTX for `arch`, and what it counted."""

    entry: str
    grid: Grid
    counters: Any
    arch: str


@dataclass
class Machine:
    """How launches on host arrays run: the architecture whose PTX is executed (None: the set's last), the mode and the thread
    schedule. `launches` logs every launch made under it, `watch` sees each of them before and after."""

    arch: str | None
    mode: Mode
    schedule: Schedule = "ascending"
    watch: Watch | None = None
    launches: list[Launched] = field(default_factory=list)


_machine: ContextVar[Machine | None] = ContextVar("kvgen_cpu_machine", default=None)


def _in_force() -> Machine:
    """The settings of the innermost `with`, else those of the environment."""
    return _machine.get() or Machine(None, environment_mode())


@contextmanager
def machine(
    arch: str | None = None,
    mode: Mode | None = None,
    schedule: Schedule = "ascending",
    watch: Watch | None = None,
) -> Iterator[Machine]:
    """Run the launches on host arrays inside the `with` under these settings; yields an object with their log, `launches`.

    mode: "check" finds out-of-bounds and misaligned accesses, races, uninitialised reads and misused barriers; "hardware" what
    of that a GPU can get wrong; "fast" only computes. None: that of the `with` around this one, else what KVGEN_CPU_MODE says,
    else "hardware".
    arch: the architecture whose PTX is executed, "sm_80", "sm_89" or "sm_90a"; None: the last one that the set has of them.
    schedule: the order of threads that can run, "ascending", "descending" or a seed from 0 on.

    A bound launch runs under the settings in force when it was bound. Raises ArgumentError for another mode.
    """
    if mode is None:
        mode = _in_force().mode
    chosen = Machine(arch, held_mode(mode, "mode"), schedule, watch)
    token = _machine.set(chosen)
    try:
        yield chosen
    finally:
        _machine.reset(token)


def require_host_compiler() -> None:
    """Raise DeviceError where the CPU machine lacks the compiler that makes its code, before anything is compiled."""
    from kvgen.emulator import HostCompilerError, host_compiler

    try:
        host_compiler()
    except HostCompilerError as error:
        raise DeviceError(f"CPU machine: {error}") from error


def cpu_archs(module: Module) -> list[str]:
    """The architectures of a set whose code runs here."""
    return on_cpu(module.arch)


def arch_in_force(module: Module) -> str:
    """The set's architecture that launches run under the settings in force; DeviceError where the machine runs none of them."""
    return _cpu_arch(module, _in_force().arch)


def _cpu_arch(module: Module, wanted: str | None) -> str:
    if wanted is not None and wanted not in module.arch:
        raise DeviceError(f"arch: got {wanted}; {module.name} is generated for {', '.join(module.arch)}")
    runs = cpu_archs(module)
    if not runs:
        raise DeviceError(f"{module.name}: the CPU machine runs {cpu_targets()}; the spec has none of them")
    if wanted is not None and wanted not in runs:
        raise DeviceError(f"arch: got {wanted}; the CPU machine runs {cpu_targets()}; pass {' or '.join(runs)}")
    return wanted or runs[-1]


def _memory(kernel: Kernel, cache: LayerCache, views: dict[str, ArrayView], extra: Extra) -> list[Memory]:
    """The arrays a launch may touch."""
    found = [Memory(name, tensor, kernel.writes and writes) for name, tensor, writes in cache.memory]
    found += [Memory(name, tensor, writes) for name, tensor, writes in extra]
    found += [Memory(name, table, False) for name, table in cache.tables.items()]
    for p in kernel.params:
        array = views.get(p.name) if isinstance(p, Array) else None
        if isinstance(p, Array) and array is not None:
            taken = any(m.name == p.name for m in found)  # a tensor of the cache has the name
            found.append(Memory(f"{p.name} of the call" if taken else p.name, array, p.access != "in"))
    return found


def ranges(memory: Sequence[Memory]) -> list[tuple[str, int, int, bool]]:
    """Name, first and past-the-last byte, writable; overlapping arrays (K and V of one qkv row) joined into one."""
    joined: list[tuple[str, int, int, bool]] = []
    found = [(m.name, *extent(m.view), m.writes) for m in memory]
    for name, low, high, writes in sorted(found, key=lambda r: r[1]):
        if joined and low < joined[-1][2]:
            last = joined[-1]
            joined[-1] = (f"{last[0]}+{name}", last[1], max(last[2], high), last[3] or writes)
        else:
            joined.append((name, low, high, writes))
    return joined


class CpuLaunch:
    """A launch on the CPU machine, under the settings in force when it was made; calling it runs the kernel to its end."""

    def __init__(
        self, kernel: Kernel, cache: LayerCache, views: dict[str, ArrayView], extra: Extra, args: PackedArgs, grid: Grid
    ) -> None:
        self._kernel, self._extra, self._args, self._grid = kernel, extra, args, grid
        self._machine = _in_force()
        self._arch = _cpu_arch(kernel.module, self._machine.arch)
        file = kernel.file_on(self._arch)
        kernel.module.require(f"{kernel.module.name}/{file}")
        self._entry = cpu_kernel(kernel.module, file, kernel.entry, self._arch, self._machine.mode)
        self._views: dict[str, ArrayView] = {}
        self.move(cache, views)

    def move(self, cache: LayerCache, views: dict[str, ArrayView]) -> None:
        """Take these arrays in the place of those of the same names, and this layer."""
        from kvgen.emulator import Buffer

        self._views = {**self._views, **views}
        self._memory = _memory(self._kernel, cache, self._views, self._extra)
        self._buffers = [Buffer(name, low, high - low, writes) for name, low, high, writes in ranges(self._memory)]
        self._raw = self._args.bytes_list()

    def __call__(self, stream: object) -> None:
        from kvgen.emulator import EmulatorError

        no_stream(stream)
        chosen, now, kernel = self._machine, _machine.get(), self._kernel
        if now is not None and now.watch is not None and now is not chosen:
            raise ArgumentError(
                f"{kernel.entry}: got a launch that was bound before, under other settings; what is checked here must be "
                "bound here; call bind() inside"
            )
        done = chosen.watch(kernel.entry, self._memory) if chosen.watch is not None else None
        try:
            counters = self._entry.launch(
                self._grid,
                (kernel.threads_on(self._arch), 1, 1),
                self._raw,
                dynamic_shared=kernel.shared_on(self._arch),
                buffers=self._buffers,
                schedule=chosen.schedule,
                programmatic=architecture(
                    self._arch
                ).programmatic,  # as on a GPU: it may start while the kernel before it runs
            )
        except EmulatorError as error:
            raise DeviceError(f"{kernel.entry} on the CPU machine: {error}") from error
        if done is not None:
            done()
        chosen.launches.append(Launched(kernel.entry, self._grid, counters, self._arch))
