"""One launch between canaries: every array in a memory of its own, on the device or on the CPU machine, read back whole."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.contents import Case, Contents, span
from kvgen.cases.operation import cases_of
from kvgen.cases.scene import LAYER
from kvgen.layout.dtypes import DTYPES
from kvgen.runtime.cpu import machine
from kvgen.verify.memory import Memory, Placed, View

GUARD: Final = 256  # bytes of canaries on either side of an array
CANARY: Final = 0xEE


@dataclass(frozen=True)
class Left:
    """All arrays as a launch left them, and the names of those beside which something was written."""

    contents: Contents
    beside: tuple[str, ...]


def kind_of(array: NDArray[Any]) -> str:
    """kvgen's name of an array's element type."""
    return next(d.name for d in DTYPES.values() if not d.packed and d.numpy() == array.dtype)


def place(contents: Contents, memory: Memory) -> tuple[Contents, dict[str, View], dict[str, Placed]]:
    """Copies of all arrays, each in a memory of its own between canaries: as launchers take them, and by name."""
    views, placed = dict[str, View](), dict[str, Placed]()
    for name, array in contents.flat().items():
        views[name] = View(name, GUARD, array.shape, array.strides, kind_of(array))
        data = np.full(span(array) + 2 * GUARD, CANARY, np.uint8)
        views[name].of(data)[...] = array
        placed[name] = memory.place(data)
    return contents.over({name: p.array(views[name]) for name, p in placed.items()}), views, placed


def launch(case: Case, memory: Memory, arch: str | None = None) -> Left:
    """Launch a case's operation over copies of its memory; the planner before it where it has one.

    On the CPU machine every access is checked, and code for `arch` runs (None: the set's last). Raises DeviceError for what the
    machine, or the driver, finds.
    """
    given, views, placed = place(case.before, memory)
    with machine(arch, "check") if memory.device == "cpu" else nullcontext():
        _call(case, given)
    found, beside = dict[str, NDArray[Any]](), []
    for name, p in placed.items():
        data = p.read()
        view = views[name]
        found[name] = view.of(data).copy()
        own = np.ndarray((*view.shape, found[name].itemsize), np.uint8, data.data, GUARD, (*view.strides, 1))
        own[...] = CANARY
        if (data != CANARY).any():
            beside.append(name)
    return Left(case.before.over(found), tuple(beside))


def _call(case: Case, given: Contents) -> None:
    call, cases = case.call, cases_of(case.call.op)
    cache = case.scene.package.Cache(**given.pools, **given.tables)
    arguments: dict[str, Any] = {**given.arrays, **case.numbers}
    arguments |= {name: cases.cache(call, name, memory) for name, memory in given.others.items()}
    arguments = cases.planned(call, cache, arguments)
    call.launcher(cache if call.launcher.KERNEL.all_layers else cache[LAYER], **arguments)
