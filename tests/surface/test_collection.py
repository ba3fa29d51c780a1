"""The names of a collection and of its caches in Python, and tiles loaded through their tensor maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgen.errors import ArgumentError
from kvgen.runtime import RoleCache
from kvgen.runtime.kv_cache import LONGEST
from tests.surface.harness import BF16, CACHES, PAGE, filled, package
from tests.surface.marks import proves
from tests.surface.scenes import COUNT, LAYERS, LENGTHS, MOST, SLOTS, Scene

C, P, M = "ContinuousBatchingKVCache", "PagedKVCacheCollection", "KVCacheMHAOperand"
SIXTH = ("page", "kv", "layer", "token", "head", "dim")


@proves(
    P,
    "PagedKVCacheCollection",
    "blocks",
    "cache_lengths",
    "lookup_table",
    "max_seq_length",
    "max_cache_length",
    "scales",
)
@proves(P, "__init__", "cache_length", "dtype_", "kv_params_", "page_size", "scale_dtype_", "quantization_granularity_")
@proves(C, "__init__")
@pytest.mark.parametrize("name", ["paged", "continuous", "scaled", "own"])
def test_fields_are_what_was_given(name: str) -> None:
    scene = Scene(name)
    found = scene.collection
    assert found.blocks == (scene.pools[0],)
    assert found.scales == (() if scene.scales is None else (scene.scales,))
    assert found.cache_lengths is scene.tables["lengths"] and found.lookup_table is scene.tables["page_table"]
    assert found.scales_lookup_table is scene.tables.get("scales_page_table")
    assert (found.max_seq_length, found.max_cache_length) == (MOST["max_seq_length"], MOST["max_cache_length"])
    assert [found.cache_length(b) for b in range(2)] == list(LENGTHS)
    assert not found.empty_cache and found.page_size == (0 if name == "continuous" else PAGE)
    with pytest.raises(ArgumentError, match="request: got 2; the batch has 2"):
        found.cache_length(2)


def test_lengths_by_default_and_of_an_empty_cache() -> None:
    pool = filled((COUNT, 2, LAYERS, PAGE, 2, 64), BF16)
    tables = {"lengths": np.zeros(2, np.int32), "page_table": np.zeros((2, 3), np.int32)}
    found = package("paged").Cache(pool, **tables)
    assert (found.max_seq_length, found.max_cache_length) == (3 * PAGE, 3 * PAGE)
    assert package("paged").Cache(pool, **tables, max_cache_length=0).empty_cache
    with pytest.raises(ArgumentError, match=f"max_seq_length: got -1; .* from 0 to {LONGEST}"):
        package("paged").Cache(pool, **tables, max_seq_length=-1)


@proves(P, "dtype", "head_dim_granularity", "kv_params", "name_str", "scale_dtype", "CacheType")
@pytest.mark.parametrize(
    ("name", "dtype", "scale", "groups", "granularity", "word"),
    [
        ("paged", "bf16", None, 64, 1, "paged"),
        ("continuous", "bf16", None, 64, 1, "continuous_batching"),
        ("scaled", "e4m3", "f32", 2, 32, "paged"),
        ("own", "i8", "f32", 1, 64, "paged"),
        ("mixed", "e4m3", None, 512, 1, "paged"),
    ],
)
def test_constants(name: str, dtype: str, scale: str | None, groups: int, granularity: int, word: str) -> None:
    found, spec = Scene(name).collection, CACHES[name]
    assert (found.dtype, found.scale_dtype, found.name_str) == (dtype, scale, word)
    assert (found.head_dim_granularity, found.quantization_granularity) == (groups, granularity)
    assert found.kv_params == (spec.kv_heads, spec.head_dim, spec.stores == "k")
    assert type(found.get_key_cache(0)) is found.CacheType is RoleCache


@proves(P, "blocks_layout", "blocks_shape", "scales_layout", "scales_shape")
@proves(C, "blocks_layout", "blocks_shape")
def test_static_shapes() -> None:
    """-1 for what only the pool knows; the K/V axis has extent 1 where only K is stored."""
    assert package("paged").Cache.blocks_shape() == ((-1, 2, -1, PAGE, 2, 64),)
    assert package("continuous").Cache.blocks_shape() == ((-1, 2, -1, -1, 2, 64),)
    assert package("latent").Cache.blocks_shape() == ((-1, 1, -1, PAGE, 1, 576),)
    assert package("scaled").Cache.scales_shape() == ((-1, 2, -1, PAGE, 2, 2),)
    assert package("paged").Cache.scales_shape() == ()
    assert package("paged").Cache.blocks_layout() == ((SIXTH, (-1, 2, -1, PAGE, 2, 64), (-1, -1, -1, 128, 64, 1)),)
    assert package("scaled").Cache.scales_layout() == ((SIXTH, (-1, 2, -1, PAGE, 2, 2), (-1, -1, -1, 4, 2, 1)),)
    assert Scene("continuous").collection.get_key_cache(0).blocks_shape == (-1, -1, 2, 64)
    assert Scene("paged").collection.get_value_cache(1).blocks_shape == (-1, PAGE, 2, 64)


@proves(P, "kv_cache_dynamic_shape", "kv_cache_dynamic_strides")
@proves(P, "kv_cache_scales_dynamic_shape", "kv_cache_scales_dynamic_strides", "get_key_cache", "get_value_cache")
@proves(C, "max_tile_size", "get_type_name")
@pytest.mark.parametrize("name", CACHES)
def test_views_of_a_layer(name: str) -> None:
    """The four dimensions of K and V of a layer have NumPy's strides of the tensor they lie in."""
    scene = Scene(name)
    keys = scene.collection.get_key_cache(1)
    caches = [keys] if scene.roles == 1 else [keys, scene.collection.get_value_cache(1)]
    for found in caches:
        assert found.shape == (COUNT, scene.tokens, scene.heads, CACHES[name].head_dim)
        pool = scene.pool()
        strides = dict(zip(scene.axes, (s // pool.itemsize for s in pool.strides), strict=True))
        assert found.strides[:2] == (strides["page"], strides["token"])
        if name not in ("latent", "mixed"):  # one head: its stride is never taken
            assert found.strides[2:] == (strides["head"], strides["dim"])
        assert found.max_tile_size == (-1 if name == "continuous" else PAGE)
        assert found.get_type_name == ("ContinuousBatchingKVCache" if name == "continuous" else "PagedKVCache")
        if scene.scales is None:
            assert found.scales_shape is None and found.scales_strides is None
        else:
            assert found.scales_shape == (len(scene.scales), PAGE, scene.heads, scene.scales.shape[-1])
            step = [s // 4 for s in scene.scales.strides]
            assert found.scales_strides == (step[0], step[3], step[4], step[5])
    assert scene.collection.get_key_cache(1) is keys and SLOTS > PAGE


@proves(C, "num_kv_rows")
@pytest.mark.parametrize("name", ["paged", "continuous", "latent", "mixed", "csr_last", "own"])
def test_rows_as_the_host_counts_them(name: str) -> None:
    scene = Scene(name)
    found = scene.collection.get_key_cache(0)
    step = scene.pool().strides[scene.axes.index("page")] // (scene.heads * scene.dims * scene.pool().itemsize)
    assert found.num_kv_rows == (COUNT - 1) * step + scene.tokens
    if name == "own":
        assert found.num_scale_rows == 7 * 2 * LAYERS * PAGE + PAGE


def test_v_of_a_latent_cache() -> None:
    with pytest.raises(ArgumentError, match="stores K only; where rows are latent, V is their first dims"):
        Scene("latent").collection.get_value_cache(0)


def plans(found: RoleCache) -> dict[str, Any]:
    return {
        "tile": lambda: found.create_tma_tile(PAGE, 64),
        "gather4": lambda: found.create_gather4_tma_tile(64, tile_height=8, swizzle=128),
        "ragged": lambda: found.create_ragged_tma_tile(8, 64),
    }


@proves("KVCacheT", "create_tma_tile")
@proves(C, "create_tma_tile", "create_gather4_tma_tile", "create_ragged_tma_tile")
@proves(M, "create_tma_tile", "create_gather4_tma_tile", "create_ragged_tma_tile")
@pytest.mark.parametrize("name", ["paged", "continuous"])
def test_tensor_maps(name: str) -> None:
    """Dims, strides in bytes and boxes by hand; tile loads through such maps are in tests/tma."""
    scene = Scene(name)
    found = scene.collection.get_value_cache(1)
    rows, begin = found.num_kv_rows, scene.address(1, 0, 0, 0, 0)
    made = {kind: make().plan for kind, make in plans(found).items()}
    tile = made["tile"]
    assert (tile.address, tile.dims, tile.strides, tile.box) == (begin, (64, 2, rows), (128, 256), (64, 1, PAGE))
    four = made["gather4"]
    assert (four.address, four.dims, four.strides, four.box, four.boxes) == (begin, (128, rows), (256,), (64, 1), 2)
    ragged = made["ragged"]
    assert (ragged.address, ragged.dims, ragged.box) == (begin - 8 * 256, (64, 8, 2 * (rows + 1)), (64, 8, 1))
    assert found.create_tma_tile(PAGE, 64) is found.create_tma_tile(PAGE, 64)
    if name == "paged":
        with pytest.raises(ArgumentError, match=r"rows: got a tile of 24; .* page of 16"):
            found.create_tma_tile(24, 64)


@proves(C, "create_rope_tma_tile", "create_rope_gather4_tma_tile")
@proves(M, "create_rope_tma_tile", "create_rope_gather4_tma_tile")
def test_tensor_maps_of_the_rope_part() -> None:
    """The bf16 part of 640-byte rows: 512 bytes behind the row's first."""
    scene = Scene("mixed")
    found = scene.collection.get_key_cache(1)
    rows, begin = found.num_kv_rows, scene.address(0, 0, 0, 0, 0) + 512
    tile, four = found.create_rope_tma_tile(PAGE).plan, found.create_rope_gather4_tma_tile().plan
    assert (tile.dtype, tile.address, tile.dims, tile.box) == ("bf16", begin, (64, 1, rows), (64, 1, PAGE))
    assert tile.strides[-1] == 640
    assert (four.address, four.dims, four.strides, four.box) == (begin, (64, rows), (640,), (64, 1))
    for name in ("paged", "continuous", "latent"):
        for call in ("create_rope_tma_tile", "create_rope_gather4_tma_tile"):
            arguments = (PAGE,) if call == "create_rope_tma_tile" else ()
            with pytest.raises(ArgumentError, match=r"rope: K of .* has rows of one type"):
                getattr(Scene(name).collection.get_key_cache(0), call)(*arguments)


@proves(M, "create_scale_tma_tile")
def test_tensor_maps_of_scales() -> None:
    scene = Scene("own")
    assert scene.scales is not None
    found = scene.collection.get_value_cache(1)
    begin = scene.scales[0, 1, 1].ctypes.data
    total = found.num_scale_rows * scene.heads
    flat = found.create_scale_tma_tile(32).plan
    assert (flat.dtype, flat.address, flat.dims, flat.box) == ("f32", begin, (total, 1), (32, 1))
    with pytest.raises(ArgumentError, match=r"scales: K of .* has no scales in pages"):
        Scene("paged").collection.get_key_cache(0).create_scale_tma_tile(32)
    with pytest.raises(ArgumentError, match="an index scale tile has one scale a token"):
        found.create_index_scale_tma_tile(PAGE)
    with pytest.raises(ArgumentError, match="a token's heads are no row"):
        Scene("hnd").collection.get_key_cache(0).create_ragged_tma_tile(8, 64)
