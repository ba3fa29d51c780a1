"""Kernels of the project's own: their arguments in a batch, and the oracle of their spec, a function over arrays."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import cycle
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Call
from kvgen.cases.operation import Cases
from kvgen.cases.scene import LAYER, Scene, aligned
from kvgen.cases.tolerance import Distance
from kvgen.errors import ToolError
from kvgen.layout.dtypes import dtype
from kvgen.ops import Custom
from kvgen.plan.params import Array, Scalar, Size
from kvgen.runtime import Fault

Raw = NDArray[Any]
_SIZES: Final = ((7, 5), (133, 70))  # of the first two names of shapes, then again
_SCALAR: Final = 0.37
# Tolerance of an output where the spec gives none, relative to numbers above 1, absolutely below.
TOLERANCES: Final = {"f32": 2e-5, "f16": 2e-3, "bf16": 1.6e-2, "e4m3": 0.07, "e5m2": 0.13}


class CustomCases(Cases[Custom]):
    """A kernel of the project's own, over sizes as the spec has them, or that are no multiples of a block's threads."""

    def call(self, scene: Scene) -> Call:
        """An integer array has 0 and 1, one that is `untrusted` any number; `row_offsets` are those of the batch's new tokens.
        Raises ToolError for a kernel that takes a tensor map."""
        op, launcher = self.op, getattr(scene.package, self.op.name)
        batch, new = len(scene.workload.totals), scene.workload.new
        offsets = np.cumsum([0, *new])
        drawn = cycle(_SIZES[batch > 2])
        sizes = {"B": batch, "M": scene.columns, "pages": scene.pages, "layers": 2, "rows": scene.pages}
        if any(p.name == "row_offsets" for p in op.params):
            sizes["T"] = int(offsets[-1])
        sizes |= dict(op.sizes)
        rng = np.random.default_rng([batch, *map(ord, op.name)])
        arrays, numbers = dict[str, Raw](), dict[str, int]()
        for spec in launcher.KERNEL.arguments:
            if spec.name == "errors":
                continue
            if isinstance(spec, Scalar):
                numbers[spec.name] = _SCALAR if spec.dtype == "f32" else 1  # type: ignore[assignment]
            elif isinstance(spec, Array):
                shape = tuple(_extent(axis, sizes, drawn) for axis in spec.shape)
                arrays[spec.name] = array = aligned(shape, dtype(spec.dtype).numpy())
                if array.dtype.kind in "iu" and spec.access != "out":
                    limits = np.iinfo(array.dtype) if _untrusted(op, spec.name) else None
                    low, high = (int(limits.min), int(limits.max)) if limits else (0, 1)
                    array[...] = rng.integers(low, high, shape, array.dtype, endpoint=True)
                if spec.name == "row_offsets" and shape == offsets.shape:
                    array[...] = offsets
            elif not isinstance(spec, Size):
                raise ToolError(f"{spec.name} is a tensor map, which kvgen verify cannot draw")
        rows = int(offsets[-1])
        return Call(op, scene, launcher, scene.tables(), arrays, rows, rows, numbers=numbers)

    @property
    def unheld(self) -> str:
        if self.op.oracle is not None:
            return ""
        return "ran, and its accesses were checked; its results were compared with nothing, for the spec has no oracle="

    def compare(self, j: Comparison) -> int:
        """Written arrays, in a batch whose data is right. Everything else must be as it was, but for the cache of a kernel that
        writes to it. Returns the error word, 0 in such a batch."""
        op, bad = self.op, bool(j.case.fault)
        if op.writes:
            j.wanted.pools = j.got.pools
        written = {
            p.name: p.dtype for p in j.case.call.launcher.KERNEL.arguments if isinstance(p, Array) and p.access != "in"
        }
        written.pop("errors", None)
        if op.oracle is not None and not bad:
            _compare(j, op, written)
        for name in written:
            j.wanted.arrays[name][...] = j.got.arrays[name]
        unknown = bad or any(getattr(p, "untrusted", False) for p in op.params)  # only the kernel knows what is wrong
        return int(j.got.arrays["errors"][0]) if unknown and "errors" in j.got.arrays else 0


def _untrusted(op: Custom, name: str) -> bool:
    return any(p.name == name and getattr(p, "untrusted", False) for p in op.params)


def _extent(axis: int | str, sizes: dict[str, int], drawn: Iterator[int]) -> int:
    if isinstance(axis, int):
        return axis
    name, _, more = axis.partition("+")
    if name not in sizes:
        sizes[name] = next(drawn)
    return sizes[name] + int(more or 0)


def _compare(j: Comparison, op: Custom, written: Mapping[str, str]) -> None:
    given, oracle = _given(j), op.oracle
    assert oracle is not None
    try:
        found = oracle(**{name: given[name] for name in inspect.signature(oracle).parameters})
    except Exception as error:  # the user's function
        j.wrong.append(f"oracle: it raised {type(error).__name__}: {error}")
        return
    if not isinstance(found, Mapping):
        found = {next(iter(written)): found}
    if set(found) != set(written):
        j.wrong.append(f"oracle: it returned {_names(found)}; it must return {_names(written)}")
        return
    for name, right in found.items():
        _hold(
            j, name, np.asarray(right), op.tolerance if op.tolerance is not None else TOLERANCES.get(written[name], 0.0)
        )


def _names(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, names))) or "nothing"


def _hold(j: Comparison, name: str, right: Raw, tolerance: float) -> None:
    got = j.got.arrays[name]
    if right.shape != got.shape:
        j.wrong.append(f"oracle: {name} has the shape {right.shape}; the array's is {got.shape}")
        return
    if got.dtype.kind in "iu":
        different = np.flatnonzero((got != right).reshape(-1))
        if len(different):
            at = tuple(int(i) for i in np.unravel_index(different[0], got.shape))
            what = f"{len(different)} of {got.size} numbers differ, the first at {at}"
            j.wrong.append(f"{name}: {what}: got {got[at]}, it must be {right[at]}")
        return
    mine, theirs = got.astype(np.float64), right.astype(np.float64)
    finite = np.isfinite(theirs)
    other = np.where(finite, ~np.isfinite(mine), ~((mine == theirs) | (np.isnan(mine) & np.isnan(theirs))))
    if other.any():
        at = tuple(int(i) for i in np.argwhere(other)[0])
        what = f"{int(other.sum())} of {got.size} numbers are infinite or NaN on one side only, the first at {at}"
        j.wrong.append(f"{name}: {what}: got {mine[at]}, it must be {theirs[at]}")
        return
    far = Distance()
    far.record(np.abs(mine[finite] - theirs[finite]), tolerance * np.maximum(1, np.abs(theirs[finite])))
    j.record(name, far)


def _given(j: Comparison) -> dict[str, Any]:
    """Data that an oracle may ask for: K and V of each request, lengths, and the call's arrays and numbers, floats as f64."""
    found: dict[str, Any] = {}
    if not j.case.scene.cache.states:
        rows = j.case.before.rows(j.case.scene, LAYER)
        found = {role: _tokens(j, which) for which, role in enumerate(("keys", "values")[: len(rows)])}
        found.setdefault("values", None)
        found["lengths"] = np.array([j.view.length(b) for b in range(j.view.requests)], np.int64)
    for name, array in j.arrays.items():
        found[name] = array.copy() if array.dtype.kind in "iu" else array.astype(np.float64)
    return found | j.case.numbers


def _tokens(j: Comparison, which: int) -> list[NDArray[np.float64]]:
    """Entries of K (0) or V (1) of each request, `[n, heads, dim]` in float64; NaN where a window has dropped them."""
    scene, view, found = j.case.scene, j.view, []
    rows = j.case.before.rows(scene, LAYER)[which]
    for b in range(view.requests):
        count = scene.entries(view.length(b) or 0)
        its = np.full((count, rows.heads, rows.dim), np.nan)
        for at in range(view.first_token(count), count):
            places = view.places(b, at // scene.tokens)
            if not isinstance(places, Fault):
                its[at] = rows.token_numbers(b, at, places[which])
        found.append(its)
    return found
