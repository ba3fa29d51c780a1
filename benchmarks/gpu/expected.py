"""Every case of every operation, worked out by the oracle.

The scenes are those of the operation tests: canaries around everything, NaN where no token lies, poison in the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any, Final

import numpy as np

from benchmarks.gpu.builder import Builder, QuarterScene, Raw
from benchmarks.gpu.cases import Blobs, Case, Close
from benchmarks.gpu.machine import is_plain, machine_cases
from kvgen import CSR, Continuous, Indirect, KernelSet, Mapped, Ring
from kvgen.layout.dtypes import dtype
from kvgen.layout.storage import Storage
from kvgen.reference import Decoded, append, decode, extend, gather, seal
from tests.support.batches import OPEN_TOKENS, PLAIN, Batch
from tests.support.loud_tokens import raise_edges
from tests.support.memory import rows_array
from tests.support.scenes import Scene
from tests.support.tolerance import HALF_ULP, Terms, limits, terms

ORACLE: Final = ("append", "decode", "extend", "gather", "seal")
PROMPTS: Final = 140  # rows of a prompt that is longer than a tile of columns


def _offsets(kernels: KernelSet, op: Any, counts: Sequence[int]) -> Raw:
    kind = getattr(op, "index_dtype", None) or kernels.cache.lengths_dtype
    return np.cumsum([0, *counts]).astype(dtype(kind).numpy())


def _batch(kernels: KernelSet, seed: int, totals: Sequence[int], new: Sequence[int], **more: Any) -> Batch:
    fields = {"padding": 0, "shared": False, "strided": True} | more
    return Batch(
        totals=tuple(totals),
        new=tuple(new),
        fill="nan",
        errors=True,
        arch=PLAIN.arch,
        schedule=PLAIN.schedule,
        seed=seed,
        **fields,
    )


def boundary_totals(kernels: KernelSet) -> list[int]:
    """Lengths around the end of a page, and past a window."""
    cache = kernels.cache
    if isinstance(cache, Continuous):
        return [1, 17, min(40, cache.max_tokens or OPEN_TOKENS)]
    page = cache.page_tokens or 1
    if isinstance(cache.page_table, Ring):
        window = cache.page_table.window
        return [1, page + 1, window + 1, 2 * window + page - 1]
    return [1, page, page + 1, max(2 * page - 1, 3)] if page > 1 else [1, 2, 5, 33]


def spoil(scene: Scene) -> None:
    """Make requests 1, 3 and 4 of a scene with five or more bad: an id of -1, one just past the pool, a bad length.

    Where scales have a table of their own, request 2 has none for its first page.
    """
    cache, table, arrays = scene.cache, scene.cache.page_table, scene.tables

    def put(name: str, at: Any, value: int) -> None:
        arrays[name][at] = np.array(value, np.int64).astype(arrays[name].dtype)

    past = -(-scene.pages // table.id_multiplier)
    if isinstance(table, CSR):
        for b, value in ((1, -1), (3, past)):
            put("page_indices", int(arrays["page_indptr"][b]), value)
    elif isinstance(table, Indirect):
        put("request_ids", 1, -1)
        put("req_to_token", (scene.row(3), 2), scene.pages)
    elif isinstance(table, Mapped):
        put("idx_mapping", 1, -1)
        put("page_table", (scene.row(3), 0), past)
    elif "kv_offsets" in arrays:  # lengths are their differences
        put("kv_offsets", 2, -1)
        return
    else:
        for b, value in ((1, -1), (3, past)):
            at: Any = (
                b if isinstance(cache, Continuous) else (b, slice(None)) if isinstance(table, Ring) else (b, ..., 0)
            )
            put("page_table", at, value)
    if isinstance(table, CSR) and table.last_page_len:
        put("last_page_len", 4, scene.tokens + 1)
    else:
        put("lengths", 4, -1)
    if cache.storage.own_table:
        put("scales_page_table", (2, 0), -1)


def cases_of(kernels: KernelSet, package: ModuleType) -> tuple[list[Case], Blobs]:
    """Every case of every operation of a set; of operations without an oracle here, what the CPU machine makes of them."""
    cases: list[Case] = []
    blobs = Blobs()
    for op in kernels.ops:
        if op.kind == "custom":  # its author's tests know what it must do; no oracle does
            continue
        if op.kind not in ORACLE or not is_plain(op):
            cases += machine_cases(kernels, op, package, blobs)
            continue
        build = {
            "append": _append_cases,
            "seal": _seal_cases,
            "gather": _gather_cases,
            "decode": _decode_cases,
            "extend": _extend_cases,
        }[op.kind]
        cases += build(kernels, op, blobs)
    return cases, blobs


def _append_cases(kernels: KernelSet, op: Any, blobs: Blobs) -> list[Case]:
    top = boundary_totals(kernels)
    five = [max(top[1], 4), max(top[1], 4), 4, 5, 4]
    plans = [
        ("small", _batch(kernels, 1, (3, top[1]), (3, 2), strided=False), False),
        ("ragged", _batch(kernels, 2, [*top, 4], [*(min(n, 3) for n in top), 0], padding=3), False),
        ("shared", _batch(kernels, 3, (top[-1], top[-1]), (1, 1), shared=True), False),
        ("hostile", _batch(kernels, 4, five, (2, 2, 2, 3, 2), padding=1), True),
    ]
    cases = [_append_case(kernels, op, blobs, name, batch, bad) for name, batch, bad in plans]
    if op.rows != "slots":
        batch = _batch(kernels, 5, (4, 5, 4), (2, 2, 2))
        cases.append(_append_case(kernels, op, blobs, "offsets", batch, False, bad_offset=True))
    return cases


def _append_case(
    kernels: KernelSet, op: Any, blobs: Blobs, name: str, batch: Batch, bad: bool, *, bad_offset: bool = False
) -> Case:
    before = [n - new for n, new in zip(batch.totals, batch.new, strict=True)]
    scene = QuarterScene(kernels, batch, batch.totals if kernels.cache.lengths == "after" else before)
    scene.fill(before)
    count = sum(batch.new) + batch.padding
    places: dict[str, Raw] = {}
    if op.rows == "slots":
        places["slots"] = _slots(scene, op, before, count, bad)
    else:
        places["row_offsets"] = _offsets(kernels, op, batch.new)
        if bad_offset:
            places["row_offsets"][2] = 90
    if bad:
        spoil(scene)
    case = Builder(scene, blobs, op.name, name, golden=name == "small")
    new = _new_rows(case, scene, count)
    for n, array in places.items():
        case.argument(n, array)
    if scene.residual:  # seal comes first in a step; its own cases check what it does
        seal(scene.view, scene.rows(), new, **places)
    expected = scene.snapshot()
    case.errors(append(scene.view, scene.rows(expected), new, **places))
    return case.done(expected)


def _new_rows(case: Builder, scene: Scene, count: int) -> list[Raw]:
    """k and v of `count` new tokens; of all sizes where they are quantized."""
    cache = scene.cache
    values = scene.wild if any(q is not None for q in cache.quants.values()) else scene.values
    return [
        case.rows(n, count, (r.heads, r.dim), cache.dtype, values(count, r.heads, r.dim))
        for n, r in zip("kv", scene.rows(), strict=False)
    ]


def _seal_cases(kernels: KernelSet, op: Any, blobs: Blobs) -> list[Case]:
    top, group = boundary_totals(kernels), kernels.cache.storage.residual
    five = [max(top[1], 4), max(top[1], 4), 4, 5, 4]
    found = []
    for name, totals, new, padding in (
        ("small", (group, group + 1), (3, 2), 0),
        ("ragged", [*top, 4 * group], [*(min(n, 3) for n in top), 0], 3),
        ("many", (3 * group + 1, 2 * group), (2 * group + 2, 2 * group), 0),
        ("hostile", [-(-n // group) * group for n in five], (2, 2, 2, 3, 2), 1),
        ("offsets", (group, group, group), (2, 2, 2), 0),
    ):
        before = [n - rows for n, rows in zip(totals, new, strict=True)]
        batch = _batch(kernels, 8, totals, new, padding=padding, strided=name != "small")
        scene = QuarterScene(kernels, batch, totals if kernels.cache.lengths == "after" else before)
        scene.fill(before)
        offsets = _offsets(kernels, op, new)
        if name == "hostile":
            spoil(scene)
        if name == "offsets":
            offsets[2] = 90
        case = Builder(scene, blobs, op.name, name, golden=name == "small")
        count, keys = sum(new) + padding, scene.rows()[0]
        k = case.rows("k", count, (keys.heads, keys.dim), kernels.cache.dtype, scene.wild(count, keys.heads, keys.dim))
        case.argument("row_offsets", offsets)
        expected = scene.snapshot()
        case.errors(seal(scene.view, scene.rows(expected), [k], row_offsets=offsets))
        found.append(case.done(expected))
    return found


def _slots(scene: Scene, op: Any, before: Sequence[int], count: int, bad: bool) -> Raw:
    """Where the table puts each new row; padding skips; some of them impossible if `bad`."""
    slots = np.full(count, -1, dtype(op.index_dtype or "i64").numpy())
    row = 0
    for b, (start, new) in enumerate(zip(before, scene.batch.new, strict=True)):
        for position in range(start, start + new):
            page, token = divmod(position, scene.tokens)
            ids = scene.view.page(b, page)
            assert isinstance(ids, tuple)
            slots[row] = ids[0] * scene.tokens + token
            row += 1
    if bad:
        limits = np.iinfo(slots.dtype)
        slots[:5] = [scene.pages * scene.tokens, -2, limits.max, limits.min, -1]
    return slots


def _gather_cases(kernels: KernelSet, op: Any, blobs: Blobs) -> list[Case]:
    top = boundary_totals(kernels)
    ring = isinstance(kernels.cache.page_table, Ring)
    five = [max(top[1], 4), max(top[1], 4), 4, 5, 4]
    found = []
    for name, totals, counts, starts, padding in (
        ("small", (3, top[1]), (3, min(top[1], 5)), None, 0),
        ("boundaries", [*top, 4], [*(min(n, 40) for n in top[:-1]), 0, 4], None, 2),
        ("starts", [*top, 4], [*(min(n, 3) for n in top), 0], [*(n - min(n, 3) for n in top), 2], 1),
        ("hostile", five, (3, 3, 3, 3, 3), None, 1),
        ("offsets", (4, 5, 4), (2, 2, 2), None, 1),
    ):
        scene = QuarterScene(kernels, _batch(kernels, 6, totals, [0] * len(totals), strided=name != "small"), totals)
        scene.fill(totals)
        if name == "hostile":
            spoil(scene)
        offsets = _offsets(kernels, op, counts)
        if name == "offsets":
            offsets[2] = 90
        if starts is None and ring and name == "boundaries":
            # A ring forgets: only the window's tokens can be had.
            starts = [scene.view.first_token(n) for n in totals]
        case = Builder(scene, blobs, op.name, name, golden=name == "small")
        count = sum(counts) + padding
        names = ("k_out", "v_out")
        outs = [
            case.rows(n, count, (r.heads, r.dim), kernels.cache.dtype)
            for n, r in zip(names, scene.rows(), strict=False)
        ]
        case.argument("row_offsets", offsets)
        from_tokens = None if starts is None else np.array(starts, offsets.dtype)
        if from_tokens is not None:
            case.argument("starts", from_tokens)
        wanted = gather(scene.view, scene.rows(), outs, row_offsets=offsets, starts=from_tokens)
        failed = tuple(int(i) for i in np.flatnonzero(wanted.failed))
        for n, right, role in zip(names, wanted.outputs, scene.rows(), strict=False):
            after, memory = rows_array(count, (role.heads, role.dim), kernels.cache.dtype, strided=scene.batch.strided)
            after[...] = right
            case.expect(n, memory)
            case.nan_rows[n] = failed
        case.errors(wanted.errors)
        found.append(case.done())
    return found


def _decode_cases(kernels: KernelSet, op: Any, blobs: Blobs) -> list[Case]:
    """Of a decode whose mask and score take nothing from the call; it may take sinks."""
    top, most = boundary_totals(kernels), op.rows
    before = kernels.cache.lengths == "before"
    empty = [] if before else [0]
    five = [max(top[1], 4), max(top[1], 4), 4, 5, 4]
    found = []
    for name, totals, ragged, padding in (
        ("small", (3, top[1]), False, 0),
        ("boundaries", [*top, *empty], False, 3),
        ("rows", [*top, *empty], True, 2),
        ("hostile", five, False, 1),
        ("conversions", (1, 2, 2, 1, 2), False, 0),
    ):
        rows = [b % (most + 1) if ragged else most for b in range(len(totals))]
        totals = [max(n, r) if before else n for n, r in zip(totals, rows, strict=True)]
        counts = [n - r * before for n, r in zip(totals, rows, strict=True)]
        scene = QuarterScene(kernels, _batch(kernels, 7, totals, [0] * len(totals), strided=name != "small"), counts)
        scene.fill(totals)
        count = sum(rows) + padding
        case = Builder(scene, blobs, op.name, name, golden=name in ("small", "conversions"))
        shape = (kernels.q_heads, kernels.cache.head_dim)
        q, memory = rows_array(count, shape, kernels.cache.dtype, strided=scene.batch.strided)
        q[...] = 0 if name == "conversions" else scene.values(count, *shape)
        if name == "conversions" and any(quant is not None for quant in kernels.cache.quants.values()):
            _all_sizes(scene, totals)
        elif name == "conversions":
            _bit_patterns(scene, totals)
        elif not ragged:
            raise_edges(scene, q, totals, rows=list(pairwise(range(0, sum(rows) + 1, most))))
        case.argument("q", q, memory)
        if name == "hostile":
            spoil(scene)
        arguments = _sinks(scene, op, level=name == "conversions")
        for n, array in arguments.items():
            case.argument(n, array)
        given = terms(kernels, op, arguments)
        offsets = _offsets(kernels, op, rows) if ragged else None
        if offsets is not None:
            case.argument("row_offsets", offsets)
        case.rows("out", count, (kernels.q_heads, kernels.cache.v_dim), given.out)
        lse, memory = rows_array(count, (kernels.q_heads,), "f32", strided=False)
        case.argument("lse", lse, memory)
        wanted = decode(scene.view, scene.rows(), q, row_offsets=offsets, **given.oracle())
        _close(case, given, kernels.cache.storage, q, wanted)
        case.errors(wanted.errors)
        found.append(case.done())
    return found


def _extend_cases(kernels: KernelSet, op: Any, blobs: Blobs) -> list[Case]:
    """Of an extend whose mask and score take nothing from the call; it may take sinks. `machine_cases` has the others."""
    top = boundary_totals(kernels)
    most = _most_tokens(kernels)
    before = kernels.cache.lengths == "before"
    five = [max(top[1], 4), max(top[1], 4), 4, 5, 4]
    # A page that is not there costs rows of its tile, but for those that see none of it: rows that all see the first one.
    everyone = op.mask.window is None and op.mask.chunk is None
    found = []
    for name, totals, rows, padding in (
        ("small", (3, top[1]), (3, 2), 0),
        ("boundaries", top, [min(3, n) for n in top], 3),
        ("prompts", (min(PROMPTS, most), min(70, most), 1), (min(PROMPTS, most), 1, 1), 2),
        *([("hostile", five, (2, 2, 4, 3, 1), 1)] if everyone else []),
        ("conversions", (1, 2, 2, 1, 2), (1,) * 5, 0),
    ):
        counts = [n - r * before for n, r in zip(totals, rows, strict=True)]
        scene = QuarterScene(kernels, _batch(kernels, 8, totals, [0] * len(totals), strided=name != "small"), counts)
        scene.fill(totals)
        count = sum(rows) + padding
        case = Builder(scene, blobs, op.name, name, golden=name in ("small", "conversions"))
        shape = (kernels.q_heads, kernels.cache.head_dim)
        q, memory = rows_array(count, shape, kernels.cache.dtype, strided=scene.batch.strided)
        q[...] = 0 if name == "conversions" else scene.values(count, *shape)
        if name == "conversions" and any(quant is not None for quant in kernels.cache.quants.values()):
            _all_sizes(scene, totals)
        elif name == "conversions":
            _bit_patterns(scene, totals)
        case.argument("q", q, memory)
        if name == "hostile":
            spoil(scene)
        arguments = _sinks(scene, op, level=name == "conversions")
        for n, array in arguments.items():
            case.argument(n, array)
        given = terms(kernels, op, arguments)
        offsets = _offsets(kernels, op, rows)
        case.argument("row_offsets", offsets)
        case.rows("out", count, (kernels.q_heads, kernels.cache.v_dim), given.out)
        lse, memory = rows_array(count, (kernels.q_heads,), "f32", strided=False)
        case.argument("lse", lse, memory)
        how = {n: value for n, value in given.oracle().items() if n != "rows"}
        wanted = extend(scene.view, scene.rows(), q, row_offsets=offsets, **how)
        _close(case, given, kernels.cache.storage, q, wanted)
        case.errors(wanted.errors)
        found.append(case.done())
    return found


def _most_tokens(kernels: KernelSet) -> int:
    """The longest request that a case has."""
    cache = kernels.cache
    if isinstance(cache, Continuous):
        return cache.max_tokens or OPEN_TOKENS
    return cache.page_table.window if isinstance(cache.page_table, Ring) else PROMPTS


def _sinks(scene: Scene, op: Any, *, level: bool) -> dict[str, Raw]:
    """What a decode with sinks takes; `level`: scores of 0, as all tokens have where q is 0, so that weights stay exact."""
    if op.sinks is None:
        return {}
    heads = scene.kernels.q_heads
    scores = np.zeros(heads) if level else np.round(4 * scene.rng.normal(1, 2, heads)) / 4
    return {"sinks": scores.astype(np.float32)}


def _all_sizes(scene: Scene, totals: Sequence[int]) -> None:
    """Quantized blocks of many sizes, zeros among them: their mean is a dequantization each, and a rounding."""
    for b, count in enumerate(totals):
        rows = [scene.wild(count, r.heads, r.dim) for r in scene.rows()]
        for position in range(count):
            scene.write(b, position, [values[position] for values in rows])


def _bit_patterns(scene: Scene, totals: Sequence[int]) -> None:
    """Values all over their type, the smallest included: their mean is a conversion each way, and a rounding."""
    element = dtype(scene.cache.dtype)
    words = np.dtype(f"u{element.bytes}")
    exponents = {"f32": (23, 255), "f16": (10, 31), "bf16": (7, 255)}[scene.cache.dtype]
    for b, count in enumerate(totals):
        for position in range(count):
            k, v = (scene.values(r.heads, r.dim) for r in scene.rows())
            bits = scene.rng.integers(0, 2 ** (8 * words.itemsize), v.shape, np.uint64).astype(words)
            # Two of the largest would overflow the sum; infinities and NaN are other cases' business.
            too_large = (bits >> exponents[0] & exponents[1]) >= exponents[1] - 2
            bits = np.where(too_large, np.arange(v.size).reshape(v.shape).astype(words), bits)
            v.view(words)[...] = bits
            scene.write(b, position, [k, v])


def _close(case: Builder, given: Terms, storage: Storage, q: Raw, wanted: Decoded) -> None:
    """How far the result may be off, a row and head (tests.support.tolerance)."""
    kind = given.out
    # Its values have all magnitudes: a row's largest error says nothing. Scales round once more, on tensor cores in f16.
    scaled = any(part.scales is not None for part in storage.segments)
    whole = case.name == "conversions" and (given.compute == "f32" or not scaled)
    # Its weights are all alike, and exact in any type.
    rule = replace(given, compute="f32") if whole else given
    out_slack, lse_slack = np.zeros(wanted.out.shape if whole else wanted.lse.shape), np.zeros(wanted.lse.shape)
    for row, seen in enumerate(wanted.seen):
        if seen is None or not len(seen.k):
            continue
        allowed, off = limits(wanted, rule, q, row)
        beyond = allowed - HALF_ULP[kind] * np.abs(wanted.out[row])
        out_slack[row] = beyond if whole else beyond.max(axis=1)
        lse_slack[row] = off
    add = case.blobs.floats
    for name, values, slack, relative in (
        ("out", wanted.out, out_slack, HALF_ULP[kind]),
        ("lse", wanted.lse, lse_slack, 0.0),
    ):
        key = f"{case.op}.{case.name}.{name}"
        # Half the file is these numbers; beside half an ulp of a 16-bit type, float32 is exact.
        stored = "f64" if kind == "f32" or name == "lse" else "f32"
        if stored == "f32":
            relative += 2.0**-24
        case.close[name] = Close(stored, add(f"{key}.wanted", values, stored), add(f"{key}.slack", slack), relative)
