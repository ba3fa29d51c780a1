"""Every variant: tokens have memory of their own, nothing else is touched, and what comes back is what quantizing allows."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvgen.reference
from kvgen.expr.nodes import const, evaluate
from kvgen.layout.dtypes import dtype
from kvgen.reference import Rows, TableView, append, cache_rows, gather, seal
from kvgen.reference.elements import Elements
from kvgen.reference.quant import LARGEST, code_dtype
from kvgen.reference.segments import Coded
from kvgen.runtime.faults import NO_FAULT
from kvgen.schema.cache import Cache
from tests.reference.variants import PAGES, VARIANTS, arrays_of, bits, memory_of

LAYER = 1
PLACED = [n for n in VARIANTS if "residual" not in n]


def random_rows(cache: Cache, count: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    dims = {"k": cache.head_dim, "v": cache.v_dim}
    sizes = [(count, cache.kv_heads, dims[role]) for role in cache.roles]
    return [(rng.standard_normal(s) * 2.0 ** rng.integers(-3, 4)).astype(dtype(cache.dtype).numpy()) for s in sizes]


def scale_page(cache: Cache, role: str, page: int) -> int:
    """Where tables of their own are, scales lie in other pages than values."""
    quant = cache.quants[role]
    return PAGES + 1 - page if quant is not None and quant.own_table else page


@pytest.mark.parametrize("name", [n for n in PLACED if n != "per_kv"])  # there K and V are pages of the same kind
def test_tokens_do_not_overlap(name: str) -> None:
    """All tokens of a layer, written one after the other, read back as right after writing; other layers stay as they were."""
    cache = VARIANTS[name]
    arrays = arrays_of(cache)
    pools = cache_rows(cache, arrays, LAYER)
    other = [[r.read(1, t) for t in range(min(r.tokens, 4))] for r in cache_rows(cache, arrays, 0)]
    first: dict[tuple[int, int, int], np.ndarray] = {}
    tokens = range(0, pools[0].tokens, max(1, pools[0].tokens // 16))
    for page in range(PAGES):
        for token in tokens:
            for r, (pool, row) in enumerate(zip(pools, random_rows(cache, 1, page * 997 + token), strict=True)):
                scales = scale_page(cache, "kv"[r], page)
                pool.write(page, token, row[0], scales)
                first[r, page, token] = pool.read(page, token, scales)
    for (r, page, token), row in first.items():
        found = pools[r].read(page, token, scale_page(cache, "kv"[r], page))
        np.testing.assert_array_equal(bits(found), bits(row))
    for was, pool in zip(other, cache_rows(cache, arrays, 0), strict=True):
        for token, row in enumerate(was):
            np.testing.assert_array_equal(bits(pool.read(1, token)), bits(row))


def stored_bytes(pool: Rows) -> int:
    """Bytes that one token of a role takes, its scales included."""
    total = 0
    for part in pool.parts:
        if not isinstance(part, Coded):
            total += part.heads * part.dim * 2 * (1 + (part.elements._view.dtype.itemsize == 4))
            continue
        total += part.heads * part.dim * (part.codes.packed or 8) // 8
        if part.scales is not None:
            total += part.scales.heads * part.scales.dim * part.scales._view.dtype.itemsize
    return total


@pytest.mark.parametrize("name", PLACED)
def test_a_write_touches_its_own_bytes_only(name: str) -> None:
    """Writing one token twice, with rows of different bytes everywhere, changes no more bytes than it takes."""
    cache = VARIANTS[name]
    arrays = arrays_of(cache)
    memory = memory_of(arrays)
    given = {"k_scale", "v_scale", "k_global_scale", "v_global_scale"}
    pools = cache_rows(cache, arrays, LAYER)
    before = {n: [a.copy() for a in m] for n, m in memory.items()}
    for r, pool in enumerate(pools):
        pool.write(1, 1, random_rows(cache, 1, 5)[r][0], scale_page(cache, "kv"[r], 1))
    changed = sum(
        int((bits(now) != bits(was)).sum())
        for n, m in memory.items()
        if n not in given
        for now, was in zip(m, before[n], strict=True)
    )
    assert changed <= sum(map(stored_bytes, pools))
    for name_ in given & memory.keys():
        for now, was in zip(memory[name_], before[name_], strict=True):
            np.testing.assert_array_equal(now, was)


@pytest.mark.parametrize("name", VARIANTS)
def test_places_are_the_spec_s(name: str) -> None:
    """The oracle's views and the spec's expressions, which know nothing of each other, name the same bytes."""
    cache = VARIANTS[name]
    arrays = arrays_of(cache)
    storage = cache.storage
    for role, pool in zip(cache.roles, cache_rows(cache, arrays, LAYER), strict=True):
        for part, segment in zip(pool.parts, storage.roles[role], strict=True):
            values = part.codes if isinstance(part, Coded) else part.elements
            element, region = segment.region.dtype, segment.region
            for token in sorted({0, 1, pool.tokens - 1, pool.tokens // 3}):
                for head in range(pool.heads):
                    for dim in range(part.dim):
                        index = {"token": const(token), "head": const(head), "dim": const(dim)}
                        place = evaluate(region.offset(index), {}) * element.place // 8 + region.byte_offset
                        start = base_address(arrays, storage, segment.base, 1)
                        at = address_of(values, 1, token, head, dim)
                        assert at - start == place, (role, token, head, dim)
                        if isinstance(part, Coded) and part.scales is not None and segment.scales is not None:
                            scales = segment.scales
                            assert scales.region is not None
                            where = evaluate(scales.offset(index["token"], index["head"], index["dim"]), {})
                            where = where * scales.dtype.bytes + scales.region.byte_offset
                            _, heads, dims = part.block
                            group = dim // dims * (1 + scales.zero)
                            at = address_of(part.scales, 1, token // part.block[0], head // heads, group)
                            assert at - base_address(arrays, storage, scales.base, 1) == where


def address_of(elements: Elements, page: int, token: int, head: int, dim: int) -> int:
    """The address of the byte that an element lies in."""
    width = elements._width
    inner = head * width + dim * (elements.packed or 8) // 8
    if elements._places is not None:
        flat = elements._flat
        place = int(elements._places[token].reshape(-1)[inner])
        return int(flat.__array_interface__["data"][0]) + page * flat.strides[0] + place * flat.strides[1]
    index = (*elements._index(page, token), *np.unravel_index(inner, elements._row_shape))
    view = elements._view
    return int(view.__array_interface__["data"][0]) + sum(int(i) * s for i, s in zip(index, view.strides, strict=True))


def base_address(arrays: dict[str, Any], storage: Any, name: str, page: int) -> int:
    """Where a page's part for a base begins, from the tensor's strides alone."""
    base = storage.base(name)
    tensor, array = storage.tensor(base.tensor), arrays[base.tensor]
    array = array[LAYER] if isinstance(array, list) else array
    steps = dict(zip(tensor.axes, array.strides, strict=False)) | {"page": array.strides[tensor.axes.index("page")]}
    place = page * steps["page"] + LAYER * steps.get("layer", 0) + base.kv * steps.get("kv", 0)
    return int(array.__array_interface__["data"][0]) + place


# --- round trips ----------------------------------------------------------------------------------------------------------


def table_for(cache: Cache, lengths: list[int]) -> TableView:
    """Two requests in a pool of 12 pages, scattered; scales elsewhere where they have a table of their own."""
    ids, kind = np.array([[5, 2, 4], [1, 0, 3]]), type(cache.page_table).__name__
    arrays: dict[str, np.ndarray] = {"lengths": np.array(lengths)}
    tokens = cache.page_tokens or 3
    if cache.page_tokens is None:
        arrays["page_table"] = ids[:, 0]
    elif kind == "CSR":
        arrays |= {"page_indices": ids.reshape(-1), "page_indptr": np.array([0, 3, 6])}
    elif kind == "PerKV":
        arrays["page_table"] = np.stack([ids, 11 - ids], axis=1)
    else:
        arrays["page_table"] = ids
    arrays["scales_page_table"] = 13 - ids
    return TableView(cache, arrays, 12, tokens, scale_pages=14)


def allowed(cache: Cache, role: str, rows: np.ndarray, tokens: int) -> np.ndarray:
    """How far each value may be off: half the widest step of its codes times its scale, and some rounding."""
    quant, x = cache.quants[role], rows.astype(np.float64)
    found = np.zeros(x.shape)
    if quant is None:
        return found
    dims = x.shape[2] - (cache.plain_dims if role == "k" else 0)
    steps = {"e4m3": 32, "e5m2": 8192, "i8": 1, "u8": 1, "i4": 1, "u4": 1, "e2m1": 2}
    codes = code_dtype(quant.dtype, quant.zero)
    heads, group = quant.block.head or x.shape[1], quant.block.dim or dims
    for t in range(0, len(x), tokens):
        for h in range(0, x.shape[1], heads):
            for d in range(0, dims, group):
                at = np.s_[t : t + tokens, h : h + heads, d : min(d + group, dims)]
                span = x[at].max() - x[at].min() if quant.zero else np.abs(x[at]).max()
                scale = span / LARGEST[codes] * (1 + (quant.recipe == "pow2"))
                if quant.scale_dtype is None:
                    scale = 2.0 ** np.floor(np.log2(max(np.abs(x[at]).max(), 1e-9))) / 256
                most = np.abs(x[at]).max() / 64 if quant.zero or quant.scale_dtype in ("f16", "bf16") else 0
                if quant.scale_dtype == "e4m3":
                    scale, most = scale * 1.07, np.abs(x[at]).max() / 14  # the scale itself is off by 1/16
                found[at] = (scale * steps[codes] / 2 + most) * 1.01 + np.abs(x[at]).max() / 128 + 2e-3
    return found


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "given"])
@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 10_000), steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4)
)
def test_round_trip(name: str, seed: int, steps: list[tuple[int, int]]) -> None:
    """Append in steps (sealing first), gather it all: every token comes back, as well as its codes can say it."""
    cache = VARIANTS[name]
    most = 3 * (cache.page_tokens or 3) if cache.page_tokens else 3
    arrays = arrays_of(cache, pages=12, scale_pages=14)
    pools = cache_rows(cache, arrays, LAYER)
    lengths = [0, 0]
    history: list[list[np.ndarray]] = [[], []]
    counts: list[list[int]] = []
    for i, step in enumerate(steps):
        new = [min(n, most - have) for n, have in zip(step, lengths, strict=True)]
        rows = random_rows(cache, sum(new), seed + i)
        table, offsets = table_for(cache, lengths), np.cumsum([0, *new])
        assert seal(table, pools, rows, row_offsets=offsets) == NO_FAULT
        assert append(table, pools, rows, row_offsets=offsets) == NO_FAULT
        for r, row in enumerate(rows):
            history[r].append(row)
        lengths = [n + have for n, have in zip(new, lengths, strict=True)]
        counts.append(new)
    table, total = table_for(cache, lengths), sum(lengths)
    before = [np.zeros((total, p.heads, p.dim), dtype(cache.dtype).numpy()) for p in pools]
    found = gather(table, pools, before, row_offsets=np.cumsum([0, *lengths]))
    assert found.errors == NO_FAULT and not found.failed.any()
    for r, role in enumerate(cache.roles):
        wanted = in_order(history[r], counts)
        quant = cache.quants[role]
        group = quant.residual if quant is not None and quant.residual else 1
        begin = 0
        for b in range(2):
            part, end = wanted[b], begin + lengths[b]
            full = lengths[b] // group * group
            error = np.abs(found.outputs[r][begin:end].astype(np.float64) - part.astype(np.float64))
            assert (error[:full] <= allowed(cache, role, part[:full], group)).all()
            if quant is not None and quant.residual:
                np.testing.assert_array_equal(found.outputs[r][begin + full : end], part[full:])
            begin = end


def in_order(steps: list[np.ndarray], counts: list[list[int]]) -> list[np.ndarray]:
    """Each request's rows, step after step."""
    first = [rows[: n[0]] for rows, n in zip(steps, counts, strict=True)]
    second = [rows[n[0] :] for rows, n in zip(steps, counts, strict=True)]
    return [np.concatenate(first), np.concatenate(second)]


# --- independence ---------------------------------------------------------------------------------------------------------


def test_oracles_know_nothing_of_what_they_check() -> None:
    """No import of expressions, layouts, templates or operations, and no word of a storage's regions and offsets."""
    folder = Path(kvgen.reference.__file__).parent
    allowed_from = (
        "kvgen.reference",
        "kvgen.runtime.faults",
        "kvgen.schema.any_cache",
        "kvgen.schema.cache",
        "kvgen.schema.interleave",
        "kvgen.schema.model",
        "kvgen.schema.norm",
        "kvgen.schema.position_scale",
        "kvgen.schema.quant",
        "kvgen.schema.tables",
    )
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvgen"):
                assert (node.module or "").startswith((*allowed_from, "kvgen.layout.dtypes")), (path.name, node.module)
            if isinstance(node, ast.Attribute) and ast.unparse(node) != "scale.offset":  # PositionScale's
                assert node.attr not in ("offset", "region", "segments", "bases"), (path.name, node.attr)
