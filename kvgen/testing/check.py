"""Operations on the CPU machine in check mode, once for every thread schedule; the runs must agree bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, ParamSpec, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from kvgen.emulator import EmulatorError, KernelFault, Mode, Schedule
from kvgen.errors import ArgumentError, DeviceError, KvgenError
from kvgen.layout.dtypes import dtype
from kvgen.runtime.arrays import ArrayView, extent
from kvgen.runtime.cpu import Launched, Memory, machine
from kvgen.runtime.launcher import Launcher

P = ParamSpec("P")


def schedule_of(text: str) -> Schedule:
    """A schedule by its name; ValueError for anything but ascending, descending and whole numbers from 0 on."""
    match text.strip():
        case "ascending":
            return "ascending"
        case "descending":
            return "descending"
        case digits if digits.isdecimal():
            return int(digits)
    raise ValueError(f"got {text!r}; a schedule is ascending, descending or a seed (a whole number from 0 on)")


class Settings(TypedDict, total=False):
    """What `Check.under` can change."""

    arch: str | None
    schedules: tuple[Schedule, ...]
    mode: Mode


@dataclass(frozen=True)
class Check:
    """Calls an operation on NumPy arrays once for every schedule of `schedules`.

    `arch` is the architecture whose PTX runs (None: the set's last one). `mode` "check" finds out-of-bounds and
    misaligned accesses, races, uninitialised reads and misused barriers; "hardware" what of that hardware can get wrong;
    "fast" only computes.
    """

    arch: str | None = None
    schedules: tuple[Schedule, ...] = ("ascending", "descending", 1)
    mode: Mode = "check"

    def __post_init__(self) -> None:
        if not self.schedules:
            raise ArgumentError("schedules: got none; each is a run; pass at least one, as ('ascending',)")

    def under(self, **changes: Unpack[Settings]) -> Check:
        """The same check with another arch, other schedules or another mode."""
        return replace(self, **changes)

    def __call__(self, operation: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> tuple[Launched, ...]:
        """Call `operation(*args, **kwargs)` under every schedule; the launches of the first one, with their counters.

        `operation` is a generated operation, or any function that calls some. Before each run but the first, memory
        that launches wrote, and the NumPy arrays among the arguments (also inside lists, tuples and dicts), are put
        back to what they were; after the last one they hold the results.

        Raises AssertionError for a fault in a kernel, for schedules whose results differ in a bit, and where nothing
        was launched. What keeps a kernel from running (no C++ compiler, an architecture that the spec or the CPU
        machine lacks) raises the error it is, never a skip.
        """
        __tracebackhide__ = True
        passed = [(array, array.copy()) for array in _arrays((args, kwargs)) if array.flags.writeable]
        runs: list[_Run] = []
        for schedule in self.schedules:
            run = _Run(schedule)
            problem: BaseException | None = None
            with machine(self.arch, self.mode, schedule, watch=run.watch) as log:
                try:
                    operation(*args, **kwargs)
                except (KvgenError, EmulatorError) as error:
                    problem = _reported(error, schedule)
            if problem is not None:
                raise problem from None
            run.launched = tuple(log.launches)
            if not run.launches:
                raise AssertionError(
                    "no kernel ran on the CPU machine, so nothing was checked: an empty batch launches nothing, and arrays "
                    "on a GPU are not checked here"
                )
            if runs and (difference := runs[0].difference(run)):
                raise AssertionError(difference)
            runs.append(run)
            if schedule is not self.schedules[-1]:
                run.restore()
                for array, before in passed:
                    array[...] = before
        return runs[0].launched


def _arrays(value: object) -> Iterator[NDArray[Any]]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        yield from _arrays(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _arrays(item)


def _reported(error: KvgenError | EmulatorError, schedule: Schedule) -> BaseException:
    """A kernel's fault as an assertion, anything else as it is; either without frames of kvgen's own."""
    problem: BaseException = error
    if isinstance(error, DeviceError) and isinstance(error.__cause__, KernelFault):
        problem = AssertionError(f"{error.__cause__}\nthread schedule: {schedule!r}")
    return problem.with_traceback(_callers(error.__traceback__))


def _callers(trace: TracebackType | None) -> TracebackType | None:
    """The frames between this module and the launcher: the tested function's."""
    kept = []
    while trace is not None:
        frame = trace.tb_frame
        if isinstance(frame.f_locals.get("self"), Launcher):
            break
        if not frame.f_globals.get("__name__", "").startswith("kvgen."):
            kept.append(trace)
        trace = trace.tb_next
    made = None
    for entry in reversed(kept):
        made = TracebackType(made, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return made


@dataclass
class _Launch:
    """One launch: what it may write, before and after."""

    entry: str
    written: Sequence[Memory]
    before: list[bytes]
    after: list[bytes] = field(default_factory=list)


class _Run:
    """The launches under one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.launches: list[_Launch] = []
        self.launched: tuple[Launched, ...] = ()

    def watch(self, entry: str, memory: Sequence[Memory]) -> Callable[[], None]:
        """Called before each launch; what it returns, after it."""
        written = [m for m in memory if m.writes]
        launch = _Launch(entry, written, [_read(m.view) for m in written])
        self.launches.append(launch)

        def done() -> None:
            launch.after = [_read(m.view) for m in written]

        return done

    def restore(self) -> None:
        """Undo the launches, the last one first: their memories may overlap."""
        for launch in reversed(self.launches):
            for memory, data in zip(launch.written, launch.before, strict=True):
                ctypes.memmove(extent(memory.view)[0], data, len(data))

    def difference(self, other: _Run) -> str | None:
        """Where `other` ends up with other bits, None if nowhere."""
        mine, theirs = ([launch.entry for launch in run.launches] for run in (self, other))
        pair = f"schedules {self.schedule!r} and {other.schedule!r}"
        if mine != theirs:
            return f"{pair} launch different kernels: {', '.join(mine)} and {', '.join(theirs)}"
        for number, (one, two) in enumerate(zip(self.launches, other.launches, strict=True)):
            for i, (m, n) in enumerate(zip(one.written, two.written, strict=True)):
                if (m.name, m.view.shape, m.view.strides) != (n.name, n.view.shape, n.view.strides):
                    return f"{pair} give launch {number}, {one.entry}, another {n.name}: {m.view.shape}, {n.view.shape}"
                bits = [
                    np.frombuffer(data, np.uint8) for data in (one.before[i], one.after[i], two.before[i], two.after[i])
                ]
                # Memory from np.empty() in the tested function differs and says nothing, until a kernel writes it.
                differ = (bits[1] != bits[3]) & ((bits[0] != bits[1]) | (bits[2] != bits[3]))
                if differ.any():
                    place = _place(m.view, differ, one.after[i], two.after[i])
                    return f"{m.name}: {pair} disagree {place}; written by {one.entry} (launch {number})"
        return None


def _read(view: ArrayView) -> bytes:
    low, high = extent(view)
    return ctypes.string_at(low, high - low)


def _place(view: ArrayView, differ: NDArray[np.bool_], one: bytes, two: bytes) -> str:
    """The first element among the bytes that differ, and both its values."""
    kind = dtype(view.dtype).numpy()
    steps = [s * kind.itemsize for s in view.strides]
    offset = view.pointer - extent(view)[0]
    elements = np.ndarray((*view.shape, kind.itemsize), np.bool_, differ.tobytes(), offset, (*steps, 1)).any(axis=-1)
    if not elements.any():
        return f"between its elements, {int(np.flatnonzero(differ)[0])} bytes from its first"
    index = tuple(int(i) for i in np.argwhere(elements)[0])
    values = [np.ndarray(view.shape, kind, data, offset, steps)[index] for data in (one, two)]
    count = f"{int(elements.sum())} of {elements.size} elements"
    return f"at {list(index)}: {values[0]} and {values[1]} ({count})"
