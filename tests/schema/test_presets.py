"""Every preset's addresses against a formula written from the engine's own convention, over drawn sizes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.expr.nodes import evaluate
from kvgen.layout.dtypes import dtype
from kvgen.layout.storage import PoolTensor, Segment
from kvgen.schema import presets
from kvgen.schema.quant import Quant
from kvgen.schema.tables import CSR, Dense, Indirect, Offsets, PerKV
from tests.schema.engines import ENGINES, Engine, Ints, Sizes

SOME = Sizes(n=3, layers=2, p=8, h=3, d=64)


def functions() -> dict[str, Callable[..., Any]]:
    return {name: getattr(presets, name) for name in presets.__all__}


def test_every_preset_has_an_engine_here() -> None:
    orders = {f"vllm_packed_{order}" for order in ("heads_first", "heads_outermost", "layers_inside", "per_token_head")}
    more = {
        "flashinfer_nvfp4_swizzled",
        "sglang_fp4",
        "kvbm_operational_hnd",
        "vllm_xpacked_fp8",
        "flashmla_v41_footer",
        "flashmla_v41_fp4_footer",
        "vllm_turboquant_4bit",
        "vllm_turboquant_k3v4",
        "vllm_turboquant_3bit",
    }
    assert set(functions()) == set(ENGINES) - more - orders
    found = {n for n, f in inspect.getmembers(presets, inspect.isfunction) if not n.startswith("_")}
    assert found == set(presets.__all__)


def steps(view: Ints, axes: tuple[str, ...]) -> dict[str, int]:
    """Bytes from one entry to the next along the first dimension of each axis."""
    found: dict[str, int] = {}
    for i, axis in enumerate(axes):
        if axis not in found:
            found[axis] = int(np.take(view, 1, i).flat[0] - view.flat[0]) if view.shape[i] > 1 else 0
    return found


def checked(view: Ints, tensor: PoolTensor) -> Ints:
    """The view, if kvgen would take it: its shape, and the strides that are compiled in."""
    itemsize = dtype(tensor.dtypes[0]).bits // 8
    assert view.ndim == len(tensor.axes)
    for i, (want, stride) in enumerate(zip(tensor.shape, tensor.strides, strict=True)):
        assert isinstance(want, str) or want == view.shape[i], tensor.axes[i]
        if stride is not None and view.shape[i] > 1:
            assert np.take(view, 1, i).flat[0] - view.flat[0] == stride * itemsize, tensor.axes[i]
    return view


def start(engine: Engine, base_name: str, layer: int, page: Ints) -> Ints:
    """Where kvgen finds these pages of a layer: the view's own strides, and the base's place along kv."""
    storage = engine.cache.storage
    base = storage.base(base_name)
    tensor = storage.tensor(base.tensor)
    view = checked(engine.view(base.tensor, layer), tensor)
    step = steps(view, tensor.axes)
    pages = page * step["token" if engine.cache.ragged else "page"]
    return np.asarray(view.flat[0] + pages + layer * step.get("layer", 0) + base.kv * step.get("kv", 0))


def check_segment(engine: Engine, kv: int, segment: Segment, layer: int, rng: np.random.Generator) -> None:
    cache, count, bits = engine.cache, 64, segment.region.dtype.bits
    tokens = 1 if cache.ragged else cache.page_tokens
    assert tokens is not None
    pages = engine.pages or engine.view(cache.storage.base(segment.base).tensor, 0).shape[page_axis(engine, segment)]
    page, token, head, dim = (rng.integers(0, n, count) for n in (pages, tokens, cache.kv_heads, segment.size))
    env = {"token": token, "head": head, "dim": dim}
    byte, bit = (evaluate(e, env) for e in segment.region.byte_of(segment.region.offset()))
    place = start(engine, segment.base, layer, page) + byte
    want = engine.value(kv, layer, page, token, head, segment.begin + dim)
    narrow = 8 * place + bit if engine.bits == 1 else 2 * place + bit // 4
    np.testing.assert_array_equal(narrow if engine.bits < 8 and bits < 8 else place, want)
    if segment.scales is None or segment.scales.region is None:
        return
    assert engine.scale is not None
    scales, names = segment.scales, segment.region.index_vars()
    assert scales.region is not None
    inside = evaluate(scales.offset(names["token"], names["head"], names["dim"]), env)
    place = start(engine, scales.base, layer, page) + scales.region.byte_offset + inside * scales.dtype.bytes
    np.testing.assert_array_equal(place, engine.scale(kv, layer, page, token, head, segment.begin + dim))


def page_axis(engine: Engine, segment: Segment) -> int:
    storage = engine.cache.storage
    return storage.tensor(storage.base(segment.base).tensor).axes.index("token" if engine.cache.ragged else "page")


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_addresses_are_the_engines_own(name: str) -> None:
    @given(
        sizes=st.builds(
            Sizes,
            n=st.integers(2, 4),
            layers=st.integers(1, 3),
            p=st.sampled_from([4, 8, 16]),
            h=st.integers(1, 4),
            d=st.sampled_from([64, 128, 192]),
        ),
        seed=st.integers(0, 99),
    )
    @settings(derandomize=True, deadline=None, max_examples=12)
    def drawn(sizes: Sizes, seed: int) -> None:
        engine, rng = ENGINES[name](sizes), np.random.default_rng(seed)
        for kv, segments in enumerate(engine.cache.storage.roles.values()):
            for segment in segments:
                for layer in range(sizes.layers):
                    check_segment(engine, kv, segment, layer, rng)

    drawn()


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_a_tensor_per_layer_unless_it_has_a_layer_axis(name: str) -> None:
    cache = ENGINES[name](SOME).cache
    named = {b.tensor for b in cache.storage.bases}
    for tensor in (t for t in cache.storage.tensors if t.name in named):
        assert ("layer" in tensor.axes) == (cache.layout.layers == "axis")
    assert (cache.layout.layers == "axis") == name.startswith(("max_", "kivi", "kvbm", "vllm_packed_layers"))


TABLES = {
    "max_": (Dense, "u32", "before", "u32"),
    "kivi": (Dense, "i32", "before", "i32"),
    "kvbm": (Dense, "i32", "after", "i32"),
    "vllm": (Dense, "i32", "after", "i32"),
    "flashinfer": (CSR, "i32", "after", "i32"),
    "tensorrt": (PerKV, "i32", "after", "i32"),
    "sglang": (Indirect, "i32", "after", "i64"),
    "sglang_indexer": (Dense, "i32", "after", "i64"),
    "sglang_v4": (Dense, "i32", "after", "i64"),
    "flashinfer_v4": (Dense, "i32", "after", "i32"),
    "flashmla": (Dense, "i32", "after", "i32"),
    "flash_attention": (Dense, "i32", "before", "i32"),
    "flash_attention_varlen": (Offsets, "i32", "after", "i32"),
    "lmdeploy": (Dense, "i32", "after", "i32"),
}


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_tables_and_lengths(name: str) -> None:
    cache = ENGINES[name](SOME).cache
    table, index, lengths, lengths_dtype = TABLES[max((n for n in TABLES if name.startswith(n)), key=len)]
    assert type(cache.page_table) is table
    assert (cache.page_table.dtype, cache.lengths, cache.lengths_dtype) == (index, lengths, lengths_dtype)
    assert cache.page_table.id_multiplier == 1
    if isinstance(cache.page_table, CSR):
        assert cache.page_table.last_page_len == (name != "flashinfer_mla")
    if isinstance(cache.page_table, Indirect):
        assert cache.page_table.request_dtype == "i64"


# codes, scale dtype, scale, recipe, place
GIVEN = ("f32", "given", "amax", "pool")
QUANTS: dict[str, tuple[str, ...]] = {
    "flashinfer_nhd": ("e4m3", *GIVEN),
    "flashinfer_nvfp4": ("e2m1", "e4m3", "computed", "global", "pool"),
    "kvbm_universal": ("e4m3", *GIVEN),
    "flashmla_fp8": ("e4m3", "f32", "computed", "pow2", "row"),
    "lmdeploy_int4": ("u4", "f16", "computed", "amax", "pool"),
    "lmdeploy_int8": ("u8", "f16", "computed", "amax", "pool"),
    "lmdeploy_turboquant": ("u4", "f16", "computed", "signs", "pool"),
    "max_indexer": ("e4m3", "f32", "computed", "amax", "pool"),
    "max_mla_fp8": ("e4m3", "f32", "computed", "amax", "pool"),
    "max_nvfp4": ("e2m1", "e4m3", "computed", "max", "pool"),
    "max_paged_fp8": ("e4m3", "None", "computed", "amax", "pool"),
    "max_paged_scaled": ("e4m3", "f32", "computed", "amax", "pool"),
    "sglang": ("e4m3", *GIVEN),
    "sglang_indexer": ("e4m3", "f32", "computed", "pow2", "page"),
    "sglang_mla_fp8": ("e4m3", "f32", "computed", "amax", "row"),
    "tensorrt_llm": ("i8", *GIVEN),
    "sglang_fp4": ("e2m1", "e8m0", "computed", "pow2", "pool"),
    "tensorrt_llm_nvfp4": ("e2m1", "e4m3", "computed", "global", "pool"),
    "vllm_hnd": ("e5m2", *GIVEN),
    "vllm_indexer": ("e4m3", "f32", "computed", "pow2", "page"),
    "vllm_interleaved": ("e4m3", *GIVEN),
    "vllm_mla": ("e4m3", *GIVEN),
    "vllm_mla_fp8": ("e4m3", "f32", "computed", "amax", "row"),
    "vllm_nvfp4": ("e2m1", "e4m3", "computed", "global", "pool"),
    "vllm_packed_per_token_head": ("i8", "f32", "computed", "amax", "row"),
    "vllm_turboquant": ("u4", "f16", "computed", "min", "row"),
    "vllm_turboquant_4bit": ("u4", "f16", "computed", "norm", "row"),
    "vllm_turboquant_k3v4": ("u3", "f16", "computed", "norm", "row"),
    "vllm_turboquant_3bit": ("u3", "f16", "computed", "norm", "row"),
    "vllm_xpacked_fp8": ("e4m3", *GIVEN),
    "flashinfer_v4_nvfp4": ("e2m1", "e4m3", "computed", "amax", "page"),
    "flashmla_v4": ("e4m3", "e8m0", "computed", "pow2", "page"),
    "flashmla_v41": ("e4m3", "e8m0", "computed", "pow2", "row"),
    "flashmla_v41_footer": ("e4m3", "e8m0", "computed", "pow2", "page"),
    "flashmla_v41_fp4": ("e2m1", "e4m3", "computed", "amax", "row"),
    "flashmla_v41_fp4_footer": ("e2m1", "e4m3", "computed", "amax", "page"),
    "sglang_v4": ("e4m3", "e8m0", "computed", "pow2", "page"),
    "sglang_v4_fp4": ("e2m1", "e8m0", "computed", "pow2", "row"),
    "vllm_indexer_fp4": ("e2m1", "e8m0", "computed", "pow2", "page"),
    "vllm_v4": ("e4m3", "e8m0", "computed", "pow2", "page"),
    "vllm_v41": ("e4m3", "e8m0", "computed", "pow2", "page"),
    "vllm_v41_fp4": ("e2m1", "e4m3", "computed", "amax", "page"),
}
PLAIN = {
    "flash_attention",
    "flash_attention_varlen",
    "flashinfer_hnd",
    "flashinfer_mla",
    "flashmla",
    "kvbm_operational",
    "kvbm_operational_hnd",
    "max_continuous",
    "max_mla",
    "max_paged",
    "sglang_mla",
    "vllm",
    "vllm_packed",
    "vllm_packed_heads_first",
    "vllm_packed_heads_outermost",
    "vllm_packed_layers_inside",
    "vllm_xpacked",
}


def named(quant: Quant) -> tuple[str, ...]:
    return (quant.codes.name, str(quant.scale_dtype), quant.scale, quant.recipe, quant.place)


@pytest.mark.parametrize("name", sorted(set(ENGINES) - {"kivi", "flashinfer_nvfp4_swizzled"}))
def test_quantizations(name: str) -> None:
    cache = ENGINES[name](SOME).cache
    for quant in cache.quants.values():
        assert (quant is None) == (name in PLAIN)
        if quant is not None:
            values = quant.recipe == "min"  # of V, whose codes are no centroids
            turbo = name.startswith("vllm_turboquant") and (quant == Quant(dtype="e4m3") or values)
            turbo = turbo or (
                name == "lmdeploy_turboquant" and named(quant) == ("u2", "f16", "computed", "norm", "pool")
            )
            assert named(quant) == QUANTS[name] or turbo
            assert quant.strided == name.startswith(("lmdeploy_int4", "lmdeploy_turbo"))
            assert quant.norm_correction == (name.startswith("vllm_turboquant_") and not values)
    for role, segments in cache.storage.roles.items():
        scales = segments[0].scales
        if scales is not None and scales.array:
            assert (scales.array, scales.heads, scales.groups) == (f"{role}_scale", 1, 1)
        assert segments[0].global_scale == (
            f"{role}_global_scale" if "nvfp4" in name and "max" not in name and "v4_" not in name else ""
        )


def test_kivi_quantizes_keys_per_channel_and_values_per_token() -> None:
    cache = presets.kivi(dtype="f16", kv_heads=2, head_dim=64, group_size=32, page_size=64)
    keys, values = cache.quants["k"], cache.quants["v"]
    assert keys is not None
    assert values is not None
    assert (keys.codes.name, keys.residual, keys.block.token, keys.block.dim) == ("u4", 32, 32, 1)
    assert (values.codes.name, values.residual, values.block.token, values.block.dim) == ("u4", None, 1, 32)
    assert cache.storage.tensor("k_tail").shape == ("layers", "B", 32, 2, 64)


def test_latent_rows_keep_their_rope_part_in_the_models_dtype() -> None:
    for make in (presets.max_mla_fp8, presets.vllm_mla_fp8, presets.flashmla_fp8, presets.sglang_mla_fp8):
        latent, rope = make().storage.roles["k"]
        assert (latent.size, latent.region.dtype.name, rope.size, rope.region.dtype.name) == (512, "e4m3", 64, "bf16")
    for cache in (presets.vllm_mla(kv_cache_dtype="fp8_e4m3"), presets.sglang_mla(fp8=True)):
        assert [(s.size, s.region.dtype.name) for s in cache.storage.roles["k"]] == [(576, "e4m3")]


def test_signatures_are_keyword_only_and_documented() -> None:
    for name, function in functions().items():
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}, name
        doc = inspect.getdoc(function) or ""
        assert "strides" in doc, name
        assert re.search(r"Source:|\bas\s`|its Python tests", doc), name


def test_x_is_16_bytes_of_what_the_cache_stores() -> None:
    for element, stored, x in (("f32", "auto", 4), ("f16", "auto", 8), ("bf16", "auto", 8), ("bf16", "fp8_e5m2", 16)):
        cache = presets.vllm_xpacked(dtype=element, kv_heads=1, head_dim=64, kv_cache_dtype=stored)  # type: ignore[arg-type]
        assert cache.layout.k == f"page head dim/{x} token dim%{x}"


def test_max_continuous_leaves_the_tokens_to_the_pool() -> None:
    cache = presets.max_continuous(dtype="bf16", kv_heads=2, head_dim=8)
    assert cache.page_tokens is None
    assert cache.regions[0].shape == ("pages", 2, "layers", "tokens", 2, 8)
