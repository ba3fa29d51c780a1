"""What a cache says about a token on the CPU machine in check mode, against NumPy: rows, addresses, values, scales, lengths."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from kvgen.schema.cache import Paged
from tests.surface.harness import CACHES, PAGE
from tests.surface.marks import proves
from tests.surface.scenes import COUNT, IDS, LAYER, LAYERS, LENGTHS, MOST, ROWS, SCALE_IDS, SCALES, SLOTS, STORED, Scene

NONE = 2**64 - 1
T, C, P, M = "KVCacheT", "ContinuousBatchingKVCache", "PagedKVCacheCollection", "KVCacheMHAOperand"


@cache
def asked(name: str) -> tuple[Scene, list[tuple[int, tuple[int, int, int, int], dict[str, int], dict[str, float]]]]:
    """A scene, and (role, query, numbers, floats) of all its queries."""
    scene = Scene(name)
    queries = scene.queries()
    answers = scene.ask(queries)
    each = [(role, q) for q in queries for role in range(scene.roles)]
    return scene, [(r, q, n, f) for (r, q), (n, f) in zip(each, answers, strict=True)]


@proves(
    T, "cache_length", "cache_lengths_nd", "empty_cache", "max_prompt_length", "max_context_length", "max_tile_size"
)
@proves(
    C, "cache_length", "cache_lengths_nd", "empty_cache", "max_prompt_length", "max_context_length", "max_tile_size"
)
@proves(C, "max_seq_length", "max_cache_length", "cache_lengths")
@proves(M, "cache_length", "max_context_length")
@pytest.mark.parametrize("name", CACHES)
def test_lengths(name: str) -> None:
    scene, answers = asked(name)
    lengths = scene.tables.get("lengths")
    for _, (b, *_), n, _ in answers:
        assert n["cache_length"] == LENGTHS[b]
        assert n["lengths_nd"] == (0 if lengths is None else lengths.ctypes.data)
        assert (n["empty"], n["max_prompt"], n["max_context"]) == (0, MOST["max_seq_length"], MOST["max_cache_length"])
        assert n["max_tile"] == (PAGE if isinstance(CACHES[name], Paged) else NONE)


@proves(T, "empty_cache")
@proves(C, "empty_cache")
def test_an_empty_cache() -> None:
    scene = Scene("paged", max_seq_length=0, max_cache_length=0)
    assert scene.collection.empty_cache
    (k, _), (v, _) = scene.ask([(0, 0, 0, 0)])
    assert k["empty"] == v["empty"] == 1 and k["max_prompt"] == k["max_context"] == 0


@proves(T, "row_idx", "col_idx")
@proves(C, "row_idx", "num_kv_rows", "get_tma_row")
@proves(M, "row_idx", "num_kv_rows", "get_tma_row")
@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    scene, answers = asked(name)
    # Rows of this view from one page to the next: all that lies between two pages, in rows of a token.
    pool, unit = scene.pool(), scene.heads * scene.dims * scene.pool().itemsize
    step = pool.strides[scene.axes.index("page")] // unit
    for _, (b, token, head, _), n, _ in answers:
        page = scene.page(b, token)
        assert n["row_idx"] == (NONE if page is None else page * step + token % scene.tokens)
        assert n["col_idx"] == head * CACHES[name].head_dim
        assert n["num_kv_rows"] == (COUNT - 1) * step + scene.tokens
        encoded = b * 1000 + token
        paged = encoded // PAGE * step + encoded % PAGE
        assert n["tma_row"] == (encoded if name == "continuous" else paged)
        if page is not None:  # the row is where the pointer points
            start = scene.address(0, 0, 0, 0, 0)
            assert scene.address(0, page, token, 0, 0) == start + n["row_idx"] * unit
    assert scene.axes[1] != "layer" or LAYERS > 1


@pytest.mark.parametrize("name", CACHES)
def test_coordinates_for_every_layout(name: str) -> None:
    scene, answers = asked(name)
    for _, (b, token, _, _), n, _ in answers:
        page = scene.page(b, token)
        assert n["coords_row"] == token % scene.tokens
        assert n["coords_valid"] == (page is not None)
        if page is not None:
            assert n["coords_block"] == page


@pytest.mark.parametrize("name", SCALES)
def test_rows_of_scales(name: str) -> None:
    scene, answers = asked(name)
    assert scene.scales is not None
    step, ids = 2 * LAYERS * PAGE, SCALE_IDS if name == "own" else IDS
    for _, (b, token, _, _), n, _ in answers:
        i = token // PAGE
        good = i < 3 and ids[b][i] < len(scene.scales)
        assert n["scale_row_idx"] == (ids[b][i] * step + token % PAGE if good else NONE)
        assert n["num_scale_rows"] == (len(scene.scales) - 1) * step + PAGE


@proves(T, "block_paged_ptr")
@proves(C, "block_paged_ptr", "scales_block_paged_ptr", "scales_raw_ptr", "blocks", "lookup_table")
@proves(M, "block_paged_ptr", "scales_block_paged_ptr", "scales_raw_ptr")
@pytest.mark.parametrize("name", CACHES)
def test_addresses(name: str) -> None:
    scene, answers = asked(name)
    for role, (b, token, head, dim), n, _ in answers:
        page = scene.page(b, token)
        assert n["pointer"] == (0 if page is None else scene.address(role, page, token, head, dim))
        assert n["base"] == scene.address(role, 0, 0, 0, 0)
        place = scene.scale_at(role, b, token, head, dim) if page is not None else None
        if place is None:
            assert n["scale_pointer"] == 0
        else:
            array, index = place
            steps = sum(i * s for i, s in zip(index, array.strides, strict=True))
            assert n["scale_pointer"] == array.ctypes.data + steps
        whole = scene.given[role] if scene.given else scene.scales
        begin = () if whole is None else (LAYER,) if scene.given else (0, role, LAYER)
        wanted = 0 if whole is None else whole[begin].ctypes.data
        assert n["scales_begin"] == wanted


@proves(T, "load")
@proves(C, "load", "load_scale", "load_quantized")
@proves(M, "load_scale")
@pytest.mark.parametrize("name", CACHES)
def test_values(name: str) -> None:
    """Dequantized values, codes and scales; on caches without scales codes and scales are 0."""
    scene, answers = asked(name)
    good = 0
    for role, (b, token, head, dim), _, f in answers:
        page = scene.page(b, token)
        if page is None:
            assert not any(f.values())
            continue
        good += 1
        pool = scene.pool().view(scene.kind)
        codes = [np.float32(pool[scene.at(role, page, token, head, d)]) for d in (dim, dim + 1)]
        place = scene.scale_at(role, b, token, head, dim)
        scale = np.float32(place[0][place[1]]) if place else np.float32(0)
        # A scale of the caller's that is 0 or negative is none: values are NaN.
        factor = np.float32(np.nan) if scene.given and place and not scale > 0 else scale
        values = [code * factor for code in codes] if place else codes
        np.testing.assert_array_equal([f["value0"], f["value1"]], values)
        np.testing.assert_array_equal([f["page0"], f["page1"]], values)
        assert [f["code0"], f["code1"]] == (codes if place else [0, 0])
        assert (f["scale"], f["zero"]) == (scale, 0)
    assert good > 40


@proves(T, "store")
@proves(C, "store", "store_scale")
@pytest.mark.parametrize("name", CACHES)
def test_stores(name: str) -> None:
    """Two elements and a scale where they belong, and nothing anywhere else; no scale where there is none."""
    scene = Scene(name)
    asked = [(0, 17, 0, 2), (0, 47, scene.heads - 1, 32), (1, 33, 0, 0), (1, 5000, 0, 0)]
    pools = [p.copy() for p in scene.pools]
    scales = None if scene.scales is None else scene.scales.copy()
    given = [g.copy() for g in scene.given]
    scene.ask(asked, stores=True)
    pool = pools[0 if "layer" in scene.axes else LAYER].view(scene.kind)
    for b, token, head, dim in asked:
        page = scene.page(b, token)
        for role in range(scene.roles if page is not None else 0):
            assert page is not None
            pool[scene.at(role, page, token, head, dim)] = 1
            pool[scene.at(role, page, token, head, dim + 1)] = 2
            place = scene.scale_at(role, b, token, head, dim)
            if place is not None and scales is not None:
                scales[place[1]] = 4
    for found, wanted in zip(scene.pools, pools, strict=True):
        assert found.tobytes() == wanted.tobytes()
    if scales is not None:
        assert scene.scales is not None and scene.scales.tobytes() == scales.tobytes()
    for one, other in zip(scene.given, given, strict=True):
        assert one.tobytes() == other.tobytes()


@proves(T, "dtype", "kv_params", "copy", "__copyinit__", "__moveinit__")
@proves(C, "device_type", "dtype", "kv_params", "page_size_", "quantization_enabled", "quantization_granularity")
@proves(C, "scale_dtype", "get_type_name", "dtype_", "kv_params_", "ContinuousBatchingKVCache")
@proves(M, "KVCacheMHAOperand", "cache_t", "cache", "__init__", "device_type", "dtype", "page_size", "scale_dtype")
@proves(M, "quantization_enabled", "quantization_granularity", "get_type_name")
@pytest.mark.parametrize("name", CACHES)
def test_constants(name: str) -> None:
    """The types are asserted in surface.cu; so is that an operand says what its cache says (`operand`)."""
    scene, answers = asked(name)
    spec = CACHES[name]
    for _, _, n, _ in answers:
        assert (n["num_heads"], n["head_size"], n["is_mla"]) == (spec.kv_heads, spec.head_dim, scene.roles == 1)
        assert n["page_size"] == (PAGE if name != "continuous" else 0)
        scaled = bool(scene.given) or scene.scales is not None
        assert n["quantized"] == scaled
        granularity = spec.head_dim // SCALES.get(name, 1) if scaled else 1
        assert n["granularity"] == granularity
        assert n["type_name"] == ord("C" if name == "continuous" else "P")
        assert (n["operand"], n["device_type"], n["copied"]) == (1, 1, 1)
    assert SLOTS > PAGE and set(STORED) < set(CACHES)
