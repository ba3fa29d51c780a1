"""Running a prepared case, and holding every byte of every memory to it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.gpu.cases import FLOATS, Blobs, Bytes, Case, CaseFile, Close, View, save
from kvgen.layout.dtypes import dtype
from kvgen.runtime import describe
from kvgen.verify.memory import Memory

SOME = 100


def run(case: Case, blobs: Blobs, package: ModuleType, memory: Memory) -> dict[str, Bytes]:
    """Launch the case's operation; every memory as it is afterwards."""
    from kvgen.runtime.cpu import machine

    placed = {name: memory.place(blobs.get(key)) for name, key in case.memories.items()}

    def array(view: View) -> object:
        return placed[view.memory].array(view)

    def cache_of(kind: Any, tensors: dict[str, tuple[View, ...]], tables: dict[str, View]) -> Any:
        names = {t.name for t in kind.TENSORS}
        pointers = not any("layer" in t.axes for t in kind.TENSORS)
        pools: dict[str, object] = {}
        for name, views in tensors.items():
            arrays = [array(v) for v in views]
            pools[name] = arrays if pointers and name in names else arrays[0]
        return kind(**pools, **{n: array(v) for n, v in tables.items()})

    launcher = getattr(package, case.op)
    with machine(mode="check") if memory.device == "cpu" else nullcontext():
        cache = cache_of(package.Cache, case.pools, case.tables)
        layer = cache if launcher.KERNEL.all_layers else cache[case.layer]
        arguments = {n: array(v) for n, v in case.arguments.items()} | dict(case.numbers)
        if case.source:
            source = cache_of(getattr(package, case.source), case.source_pools, case.source_tables)
            arguments["source"] = source[case.layer]
        for name, kind in case.keys.items():
            arguments[name] = cache_of(getattr(package, kind), case.keys_pools[name], {})[case.layer]
        if hasattr(launcher, "workspace"):
            rows = case.arguments["q"].shape[0]
            longest = cache.max_cache_length if launcher.SPLIT_PLAN.chunk_tokens else None
            workspace = launcher.workspace(max(rows, 1), device=layer.device, max_tokens=longest)
            taken = [p.name for p in launcher.PLAN.arguments if p.name != "workspace"]
            launcher.plan(layer, workspace, rows=rows, **{n: arguments.pop(n) for n in taken if n in arguments})
            arguments["workspace"] = workspace
        launcher(layer, **arguments)
    return {name: p.read() for name, p in placed.items()}


def failures(case: Case, blobs: Blobs, got: dict[str, Bytes]) -> list[str]:
    """What is wrong with the memories after a case; empty if nothing."""
    found: list[str] = []
    views = {v.memory: (name, v) for name, v in case.arguments.items()}
    for name, key in case.memories.items():
        expected = blobs.get(case.after.get(name, key))
        actual = got[name].copy()
        argument, view = views.get(name, ("", None))
        if view is not None and argument in case.close:
            found += _far(argument, view, actual, case.close[argument], blobs)
            view.of(actual)[...] = view.of(expected)  # what is left to compare lies around it
        elif view is not None and case.nan_rows.get(argument):
            rows = list(case.nan_rows[argument])
            if not np.isnan(view.of(actual)[rows].astype(np.float64)).all():
                found.append(f"{argument}: rows {rows} must be NaN and are not all")
            view.of(actual)[rows] = view.of(expected)[rows]
        if argument == "errors" and view is not None:
            is_word, must = int(view.of(actual)[0]), int(view.of(expected)[0])
            if is_word != must:
                found.append(f"errors: got {_word(is_word)}; it must be {_word(must)}")
        elif name in case.near and _neighbours(actual, expected, case.near[name]):
            continue
        elif not np.array_equal(actual, expected):
            wrong = np.flatnonzero(actual != expected)
            at = int(wrong[0])
            found.append(
                f"{name}: {len(wrong)} of {len(expected)} bytes differ, the first at {at}: got {actual[at]:#04x}, "
                f"not {expected[at]:#04x}"
            )
    return found


def _neighbours(actual: Bytes, expected: Bytes, kind: str) -> bool:
    """Whether two memories hold the same numbers, but for one in SOME that is the next one up or down."""
    if kind == "nibbles":
        pairs = [(actual & 15, expected & 15), (actual >> 4, expected >> 4)]
        apart = np.concatenate([np.abs(a.astype(int) - b.astype(int)) for a, b in pairs])
    else:
        size = dtype(kind).bytes
        a, b = (m[: len(m) // size * size].view(f"i{size}").astype(np.int64) for m in (actual, expected))
        if not np.array_equal(actual[len(actual) // size * size :], expected[len(expected) // size * size :]):
            return False
        apart = np.abs(a - b)
    return bool(apart.max(initial=0) <= 1 and (apart > 0).sum() * SOME <= max(len(apart), SOME))


def _word(word: int) -> str:
    try:
        return str(describe(word))
    except ValueError as error:
        return str(error)


def _wanted(view: View, close: Close, blobs: Blobs) -> tuple[Any, Any]:
    """(exact values, what an element may be off by), float64 in the shape of the view."""
    wanted = np.frombuffer(blobs.get(close.wanted).tobytes(), FLOATS[close.kind]).astype(np.float64).reshape(view.shape)
    slack = np.frombuffer(blobs.get(close.slack).tobytes(), np.float64)
    if slack.size == wanted.size:
        slack = slack.reshape(view.shape)
    else:
        slack = slack.reshape(view.shape[:2] + (1,) * (len(view.shape) - 2))
    with np.errstate(invalid="ignore"):  # infinity times 0
        return wanted, slack + close.relative * np.abs(wanted)


def _far(name: str, view: View, memory: Bytes, close: Close, blobs: Blobs) -> list[str]:
    values = view.of(memory).astype(np.float64)
    wanted, allowed = _wanted(view, close, blobs)
    found = []
    odd = np.isnan(values) != np.isnan(wanted)
    if odd.any():
        found.append(f"{name}: NaN where no NaN belongs, or none where one does, in rows {_rows(odd)}")
    with np.errstate(invalid="ignore"):
        error = np.abs(values - wanted)
        off = ~((values == wanted) | (error <= allowed)) & ~np.isnan(wanted) & ~np.isnan(values)
    if off.any():
        with np.errstate(over="ignore", invalid="ignore"):
            worst = float(np.nanmax(error[off] / np.broadcast_to(allowed, error.shape)[off].clip(1e-300)))
        found.append(f"{name}: {int(off.sum())} elements too far off (worst {worst:.3g} times), in rows {_rows(off)}")
    return found


def _rows(mask: Any) -> list[int]:
    return sorted({int(i) for i in np.nonzero(mask)[0]})


# Golden vectors --------------------------------------------------------------------------------------------------


def store_golden(file: CaseFile, outputs: dict[tuple[str, str, str], dict[str, Bytes]], folder: Path) -> Path:
    """Inputs of the golden cases and the bits that `outputs` has for each, as `folder/<set>.npz`."""
    blobs, cases = Blobs(), []
    for case in file.cases:
        if case.key not in outputs:
            continue
        keys = [
            *case.memories.values(),
            *case.after.values(),
            *(k for c in case.close.values() for k in (c.wanted, c.slack)),
        ]
        for key in keys:
            blobs.add(key, file.blobs.get(key))
        got = {name: blobs.add(f"{case.op}.{case.name}.{name}.got", data) for name, data in outputs[case.key].items()}
        cases.append(replace(case, got=got))
    path = folder / f"{file.facts.name}.npz"
    save(path, file.facts, cases, blobs)
    return path


def compare_golden(case: Case, blobs: Blobs, got: dict[str, Bytes]) -> tuple[list[str], dict[str, float]]:
    """`got` against a case's stored bits: what contradicts, and how far the outputs are apart.

    Outputs that must be close may differ by as much as the case allows each of them, in both directions; all else must be
    the same bits. `ulps` is the largest distance, in units of the output's type; NaN and infinity must fall together.
    """
    found: list[str] = []
    facts = {"elements": 0.0, "different": 0.0, "ulps": 0.0}
    views = {v.memory: (name, v) for name, v in case.arguments.items()}
    for name, key in case.got.items():
        stored, actual = blobs.get(key), got[name].copy()
        argument, view = views.get(name, ("", None))
        if view is not None and argument in case.close:
            one, other = view.of(actual), view.of(stored)
            apart = _ulps(one, other, view.dtype)
            facts["elements"] += apart.size
            facts["different"] += int((apart > 0).sum())
            facts["ulps"] = max(facts["ulps"], float(apart.max(initial=0)))
            _, allowed = _wanted(view, case.close[argument], blobs)
            a, b = one.astype(np.float64), other.astype(np.float64)
            with np.errstate(invalid="ignore"):
                agree = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= 2 * allowed)
            if not agree.all():
                found.append(
                    f"{argument}: {int((~agree).sum())} elements differ from the stored ones by more than allowed"
                )
            view.of(actual)[...] = other
        if not np.array_equal(actual, stored):
            found.append(f"{name}: differs from the stored bits in {int((actual != stored).sum())} bytes")
    return found, facts


def _ulps(one: Any, other: Any, kind: str) -> Any:
    """Distance in representable numbers, 0 for NaN against NaN; float64."""
    bits = dtype(kind).bits
    words = []
    for array in (one, other):
        plain = np.ascontiguousarray(array).view(f"i{bits // 8}").astype(np.int64)
        words.append(np.where(plain < 0, -(plain & (2 ** (bits - 1) - 1)), plain))
    both = np.isnan(one.astype(np.float64)) & np.isnan(other.astype(np.float64))
    return np.where(both, 0, np.abs(words[0] - words[1])).astype(np.float64)
