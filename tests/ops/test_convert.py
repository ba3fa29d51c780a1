"""convert against the oracle: preset to preset, the whole target pool byte for byte, bad data on both sides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import Block, KernelSet, Layout, Paged, Quant, Ring, ops, presets
from kvgen.reference.segments import Coded
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from kvgen.schema.cache import Cache
from kvgen.schema.codebooks import lloyd_max
from tests.support.batches import PLAIN, batches, capacity
from tests.support.cache_matrix import CHOSEN
from tests.support.conversions import check, op_of, scenes
from tests.support.harness import package
from tests.support.memory import aligned
from tests.support.scenes import Scene

_SMALL: Final[dict[str, Any]] = {"kv_heads": 2, "head_dim": 64}
_PAGED: Final[dict[str, Any]] = {"page_size": 16, **_SMALL}
_TURNED: Final = presets.vllm_turboquant(dtype="bf16", kv_cache_dtype="turboquant_3bit_nc", **_PAGED)
_NORM: Final = Quant(dtype="i2", scale_dtype="f16", codebook=lloyd_max(2, 64), recipe="norm")
_NORMS: Final = Paged(dtype="bf16", quant=_NORM, **_PAGED)
_F16: Final = Paged(dtype="f16", kv_heads=2, head_dim=40, page_size=4)
# (source, target)
PAIRS: Final[dict[str, tuple[Cache, Cache]]] = {
    "vllm_flashinfer": (presets.vllm(dtype="bf16", **_PAGED), presets.flashinfer_hnd(dtype="bf16", **_PAGED)),
    "xpacked_max": (presets.vllm_xpacked(dtype="bf16", **_PAGED), presets.max_paged(dtype="bf16", **_PAGED)),
    "max_scaled": (
        presets.max_paged(dtype="f16", **_PAGED),
        presets.max_paged_scaled(dtype="bf16", granularity=32, **_PAGED),
    ),
    "fp8_max": (presets.max_paged_fp8(dtype="bf16", **_PAGED), presets.max_paged(dtype="bf16", **_PAGED)),
    "nvfp4_vllm": (presets.max_nvfp4(dtype="bf16", **_PAGED), presets.vllm(dtype="bf16", **_PAGED)),
    "mla_flashmla": (presets.max_mla(page_size=16), presets.flashmla_fp8(page_size=64)),
    "flashmla_mla_rope": (presets.flashmla_fp8(page_size=64), presets.flashinfer_mla(page_size=16)),
    # Codes and scales of neighbouring tokens side by side.
    "max_columns": (
        presets.max_paged(dtype="bf16", **_PAGED),
        Paged(
            dtype="bf16",
            quant=Quant(dtype="i8", scale_dtype="f32", block=Block(dim=32)),
            layout=Layout(kv="page kv layer head dim token", scales="page kv layer head dim token"),
            **_PAGED,
        ),
    ),
    # The same codes in other places.
    "int8_own_table": (CHOSEN["int8_own_table"], CHOSEN["int8_own_table"].model_copy(update={"page_size": 16})),
    "int4_int8": (CHOSEN["int4_in_page"].model_copy(update={"lengths": "before"}), CHOSEN["int8_own_table"]),
    "kivi_f16": (CHOSEN["kivi"], Paged(dtype="f16", kv_heads=2, head_dim=24, page_size=3)),
    "given_swizzled": (CHOSEN["given"], CHOSEN["swizzled"]),
    "ring_dense": (CHOSEN["ring"], _F16),
    "dense_ring": (_F16, CHOSEN["ring"]),
    "continuous_sglang": (CHOSEN["continuous"], CHOSEN["indirect"]),
    # Codes of few bits: anew, and strided ones as they are; norms that readers correct are others than those of the same name.
    "turboquant_lmdeploy": (_TURNED, presets.lmdeploy_int4(dtype="bf16", **_PAGED)),
    "lmdeploy_pages": (
        presets.lmdeploy_int4(dtype="bf16", **_PAGED),
        presets.lmdeploy_int4(dtype="bf16", page_size=3, **_SMALL),
    ),
    "lmdeploy_neighbours": (
        presets.lmdeploy_int4(dtype="bf16", **_PAGED),
        Paged(dtype="bf16", quant=Quant(dtype="i4", scale_dtype="bf16", zero=True), lengths="after", **_PAGED),
    ),
    "norms_corrected": (
        _NORMS,
        _NORMS.model_copy(update={"quant": _NORM.model_copy(update={"norm_correction": True})}),
    ),
    # Codes of a codebook as they are; a corrected norm of a block that ends within bytes.
    "norms_pages": (_NORMS, _NORMS.model_copy(update={"page_size": 3})),
    "norms_within_bytes": (
        Paged(
            dtype="f16",
            quant=Quant(
                dtype="i3",
                scale_dtype="f32",
                block=Block(dim=2),
                recipe="norm",
                codebook=lloyd_max(3, 2),
                norm_correction=True,
            ),
            **_SMALL,
            page_size=4,
        ),
        Paged(dtype="f16", page_size=3, **_SMALL),
    ),
    "varlen_max": (presets.flash_attention_varlen(dtype="bf16", **_SMALL), presets.max_paged(dtype="bf16", **_PAGED)),
}


def _set(name: str, pair: tuple[Cache, Cache], **options: Any) -> KernelSet:
    source, target = pair
    return KernelSet(
        name=name, q_heads=target.kv_heads, cache=target, ops=(ops.Convert(source=source, **options),), arch=("sm_90a",)
    )


SETS: Final = {f"convert_{name}": _set(f"convert_{name}", pair) for name, pair in PAIRS.items()}


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=4)
@given(data=st.data())
def test_pairs(name: str, data: Any) -> None:
    kernels = SETS[name]
    other = KernelSet(name="source", q_heads=kernels.q_heads, cache=op_of(kernels).source, ops=(ops.Gather(),))
    batch = data.draw(batches(min(kernels, other, key=capacity)))
    target, source = scenes(kernels, replace(batch, arch=None))
    assert describe(check(target, source)) is None


@pytest.mark.parametrize("same", [False, True])
def test_scales_of_the_caller(same: bool) -> None:
    """Codes under a factor of the caller's are copied where the spec says that it is the same, else quantized anew."""
    pair = (
        presets.tensorrt_llm_nvfp4(dtype="bf16", **_SMALL),
        presets.flashinfer_nvfp4(dtype="bf16", **_SMALL),
    )
    kernels = _set(f"convert_nvfp4_{same}".lower(), pair, same_scales=same)
    target, source = scenes(kernels, replace(PLAIN, totals=(3, 21), new=(0, 0)))
    for name in ("k_global_scale", "v_global_scale"):
        target.arrays()[name][target.layer] = source.arrays()[name][source.layer]
    check(target, source)
    place, there = target.view.places(1, 20 // target.tokens), source.view.places(1, 20 // source.tokens)
    assert isinstance(place, tuple) and isinstance(there, tuple)
    codes = []
    for scene, at in ((target, place), (source, there)):
        (part,) = scene.rows()[0].parts
        assert isinstance(part, Coded)
        codes.append(part.codes.read(at[0].page, 20 % scene.tokens))
    assert not same or (codes[0] == codes[1]).all()


BAD: Final = {"minus_one": -1, "huge": 2**31 - 1, "count": None}


@pytest.mark.parametrize("label", BAD)
@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("name", ["convert_vllm_flashinfer", "convert_int8_own_table", "convert_continuous_sglang"])
def test_bad_pages(name: str, side: str, label: str) -> None:
    """A page that is none, on either side: its tokens stay where they are, and the request is named."""
    target, source = scenes(SETS[name], replace(PLAIN, totals=(3, 20, 5), new=(0, 0, 0), seed=8))
    scene = target if side == "target" else source
    key = next(k for k in ("page_indices", "req_to_token", "page_table") if k in scene.tables)
    at: Any = 1
    if key == "page_indices":
        at = int(scene.tables["page_indptr"][1])
    elif key == "req_to_token":
        at = (int(scene.tables["request_ids"][1]), 2)
    value = scene.pages if BAD[label] is None else BAD[label]
    scene.tables[key][at] = np.array(value, np.int64).astype(scene.tables[key].dtype)
    report = describe(check(target, source))
    assert report is not None and report.request == 1 and report.code is Fault.PAGE_ID


@pytest.mark.parametrize("length", [-1, 2**31 - 1, 300])
@pytest.mark.parametrize("name", ["convert_fp8_max", "convert_ring_dense"])
def test_bad_lengths(name: str, length: int) -> None:
    """A request whose length its table cannot hold is left alone; the others move."""
    target, source = scenes(SETS[name], replace(PLAIN, totals=(3, 20, 5), new=(0, 0, 0), seed=8))
    lengths = source.tables["lengths"]
    lengths[1] = np.array(length, np.int64).astype(lengths.dtype)
    report = describe(check(target, source))
    assert report is not None and report.request == 1
    assert isinstance(source.cache.page_table, Ring) or report.code is Fault.LENGTH


def test_more_tokens_than_the_launch_has_room_for() -> None:
    """max_cache_length bounds the launch: a longer request is reported and left alone."""
    target, source = scenes(SETS["convert_fp8_max"], replace(PLAIN, totals=(3, 20, 5), new=(0, 0, 0)))
    report = describe(check(target, source, max_tokens=19))
    assert report is not None and (report.code, report.request) == (Fault.LENGTH, 1)


def test_target_without_room() -> None:
    """Tokens past the target's table are reported; those before it are there."""
    target, source = scenes(SETS["convert_xpacked_max"], replace(PLAIN, totals=(40, 20, 40), new=(0, 0, 0)))
    target.trim(2)
    report = describe(check(target, source))
    assert report is not None and (report.code, report.request, report.position) == (Fault.POSITION, 0, 32)


def test_refusals() -> None:
    for update, words in (
        ({"kv_heads": 4}, "source: got kv_heads=4 for a cache with kv_heads=2"),
        ({"head_dim": 32}, "source: got head_dim=32"),
    ):
        source = presets.vllm(**{"dtype": "bf16", **_PAGED, **update})
        with pytest.raises(ValueError, match=words):
            _set("x", (source, PAIRS["vllm_flashinfer"][1]))
    with pytest.raises(ValueError, match="source: got stores='kv'"):
        _set("x", (Paged(dtype="bf16", kv_heads=1, head_dim=576, page_size=1), presets.max_mla(page_size=16)))
    with pytest.raises(ValueError, match="residual=8"):
        _set("x", (PAIRS["kivi_f16"][1], CHOSEN["kivi"]))


def test_wrong_caches() -> None:
    """Each cache in its place, and of the same batch."""
    target, source = scenes(SETS["convert_vllm_flashinfer"], replace(PLAIN, totals=(3,), new=(0,)))
    generated = package(target.kernels)
    cache, other = generated.Cache(**target.arguments()), generated.ConvertSource(**source.arguments())
    with pytest.raises(ValueError, match=r"source: got a layer of a cache of convert_vllm_flashinfer; it must be"):
        generated.convert(cache[0], source=cache[0])
    with pytest.raises(ValueError, match=r"cache: got a layer of a cache of convert_vllm_flashinfer.ConvertSource"):
        generated.convert(other[0], source=other[0])
    two, _ = scenes(SETS["convert_vllm_flashinfer"], replace(PLAIN, totals=(3, 4), new=(0, 0)))
    with pytest.raises(ValueError, match="source: got a batch of 1 requests; the cache has 2"):
        generated.convert(generated.Cache(**two.arguments())[0], source=other[0])


TOKENS: Final = 4096
BULK: Final = {
    "bulk_copy": (
        presets.vllm(dtype="bf16", kv_heads=4, head_dim=128, page_size=16),
        presets.flashinfer_hnd(dtype="bf16", kv_heads=4, head_dim=128, page_size=64),
    ),
    "bulk_fp8": (
        presets.max_paged(dtype="bf16", kv_heads=4, head_dim=128, page_size=64),
        presets.max_paged_fp8(dtype="bf16", kv_heads=4, head_dim=128, page_size=16),
    ),
    "bulk_scaled": (
        presets.max_paged(dtype="bf16", kv_heads=4, head_dim=128, page_size=64),
        presets.max_paged_scaled(dtype="bf16", granularity=128, kv_heads=4, head_dim=128, page_size=64),
    ),
    "bulk_xpacked": (
        presets.max_paged(dtype="bf16", kv_heads=2, head_dim=128, page_size=16),
        presets.vllm_xpacked(dtype="bf16", kv_heads=2, head_dim=128, page_size=16),
    ),
}


def _packed(scene: Scene) -> dict[str, Any]:
    """The scene's arguments with pools that have no gaps, as engines allocate them."""

    def copy(array: Any) -> Any:
        memory = aligned(array.nbytes).view(array.dtype).reshape(array.shape)
        memory[...] = array
        return memory

    found = scene.arguments()
    for name in scene.tensors:
        found[name] = [copy(a) for a in found[name]] if isinstance(found[name], list) else copy(found[name])
    return found


@pytest.mark.parametrize("name", BULK)
def test_no_sector_is_moved_twice(name: str) -> None:
    """4096 tokens, one launch: the target's sectors are written once, and the source's read once by plain layouts."""
    kernels = _set(name, BULK[name])
    batch = replace(PLAIN, totals=(TOKENS,), new=(0,))
    target = Scene(kernels, batch, batch.totals)
    own = KernelSet(name="source", q_heads=kernels.q_heads, cache=BULK[name][0], ops=(ops.Gather(),))
    source = Scene(own, replace(batch, fill="bytes"), batch.totals)
    errors = np.zeros(1, np.uint64)
    generated = package(kernels)
    with machine(arch="sm_90a", mode="check") as log:
        cache = generated.Cache(**_packed(target))[target.layer]
        generated.convert(cache, source=generated.ConvertSource(**_packed(source))[source.layer], errors=errors)
    assert describe(errors) is None
    (launched,) = log.launches
    traffic = launched.counters.per_buffer
    heads = kernels.cache.kv_heads
    written = {n: c.store_sectors for n, c in traffic.items() if not n.startswith("source.")}
    stored = sum(count for n, count in written.items() if "pool" in n)
    loaded = sum(c.load_sectors for n, c in traffic.items() if "pool" in n and n.startswith("source."))
    bits = kernels.cache.storage.segments[0].region.dtype.bits
    least = TOKENS * 2 * heads * 128 // 32
    assert least * bits // 8 <= stored <= 1.02 * least * bits // 8
    if name == "bulk_scaled":
        assert written["scales"] <= 1.02 * (TOKENS * 2 * heads * 4 // 32)
    if name != "bulk_xpacked":
        assert least * 2 <= loaded <= 1.02 * least * 2
