"""Kernels of the project's own beside the oracle of their spec, a function over arrays."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.bench.synthetic_batch import LAYER
from kvgen.bench.tolerance import Distance
from kvgen.ops import Custom
from kvgen.plan.params import Array
from kvgen.runtime import Fault
from kvgen.verify.judged import Judged

Raw = NDArray[Any]
# Tolerance of an output where the spec gives none, relative to numbers above 1, absolutely below.
TOLERANCES: Final = {"f32": 2e-5, "f16": 2e-3, "bf16": 1.6e-2, "e4m3": 0.07, "e5m2": 0.13}


def judge_custom(j: Judged) -> int:
    """Hold a launch to the spec's oracle: written arrays, in a batch whose data is right. Everything else must be as it was, but
    for the cache of a kernel that writes to it. Returns the error word, 0 in such a batch."""
    op, bad = j.case.call.op, bool(j.case.fault)
    assert isinstance(op, Custom)
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


def _compare(j: Judged, op: Custom, written: Mapping[str, str]) -> None:
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


def _hold(j: Judged, name: str, right: Raw, tolerance: float) -> None:
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
    far.meet(np.abs(mine[finite] - theirs[finite]), tolerance * np.maximum(1, np.abs(theirs[finite])))
    j.meet(name, far)


def _given(j: Judged) -> dict[str, Any]:
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


def _tokens(j: Judged, which: int) -> list[NDArray[np.float64]]:
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
