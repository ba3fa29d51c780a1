"""Quantized and latent caches of engines, and ones that single tests are about.

All append. Other operations have those that store in a way that no other one does, and those that single tests are about: what an
engine's cache is made of, the family has with every operation (tests/support/family.py).
"""

from __future__ import annotations

from typing import Any

from kvgen import Block, Latent, Layout, Paged, Quant, Ragged, Ring, presets
from tests.support.family import with_operations

_SMALL: dict[str, Any] = {"kv_heads": 2, "head_dim": 64}
# Named after the preset: MLA rows of 576 values, of 576, 640 and 656 bytes, and in two tensors, at their own sizes.
ENGINES = {
    s.name: s
    for s in (
        with_operations("max_paged_fp8", presets.max_paged_fp8(dtype="bf16", page_size=16, **_SMALL), ()),
        with_operations(
            "max_paged_scaled",
            presets.max_paged_scaled(dtype="f16", granularity=32, page_size=16, own_table=True, **_SMALL),
            ("gather",),
        ),
        with_operations("max_nvfp4", presets.max_nvfp4(dtype="bf16", page_size=16, **_SMALL), ()),
        with_operations("max_mla", presets.max_mla(page_size=16), ()),
        with_operations("max_mla_fp8", presets.max_mla_fp8(page_size=16), ()),
        with_operations("max_indexer", presets.max_indexer(page_size=16), ()),
        with_operations("vllm_mla", presets.vllm_mla(page_size=16), ()),
        with_operations("vllm_mla_fp8", presets.vllm_mla_fp8(page_size=16), ("gather", "append_slots")),
        with_operations("vllm_indexer", presets.vllm_indexer(page_size=16), ("gather",)),
        with_operations("vllm_turboquant", presets.vllm_turboquant(dtype="bf16", page_size=16, **_SMALL), ("gather",)),
        with_operations("vllm_nvfp4", presets.vllm_nvfp4(dtype="bf16", **_SMALL), ("gather",)),
        with_operations("sglang_mla", presets.sglang_mla(fp8=True), ()),
        with_operations("sglang_mla_fp8", presets.sglang_mla_fp8(), ()),
        with_operations("sglang_indexer", presets.sglang_indexer(), ()),
        with_operations("flashinfer_mla", presets.flashinfer_mla(page_size=16), ("gather",)),
        with_operations("flashinfer_nvfp4", presets.flashinfer_nvfp4(dtype="f16", **_SMALL), ()),
        with_operations("flashmla_fp8", presets.flashmla_fp8(page_size=16), ()),
        with_operations("tensorrt_llm_nvfp4", presets.tensorrt_llm_nvfp4(dtype="bf16", **_SMALL), ()),
        with_operations(
            "kvbm_universal", presets.kvbm_universal(dtype="bf16", page_size=16, total_layers=3, **_SMALL), ()
        ),
        with_operations("kvbm_operational", presets.kvbm_operational(dtype="bf16", page_size=16, **_SMALL), ()),
        with_operations("lmdeploy_int4", presets.lmdeploy_int4(dtype="f16", page_size=16, **_SMALL), ("gather",)),
        with_operations(
            "lmdeploy_turboquant", presets.lmdeploy_turboquant(dtype="f16", page_size=16, **_SMALL), ("gather",)
        ),
        with_operations("lmdeploy_int8", presets.lmdeploy_int8(dtype="bf16", page_size=16, **_SMALL), ()),
        with_operations(
            "kivi", presets.kivi(dtype="f16", group_size=8, page_size=16, kv_heads=2, head_dim=16), ("gather",)
        ),
    )
}

# Their records are those of tests/ops/test_records.py, which every run writes and reads; a campaign has them at their own sizes.
RECORDS = {
    s.name: s
    for s in (
        with_operations("flashmla_v4", presets.flashmla_v4(page_size=5), ("gather",)),
        with_operations("flashmla_v41", presets.flashmla_v41(page_size=8), ()),
        with_operations("flashmla_v41_fp4", presets.flashmla_v41_fp4(page_size=8), ()),
        with_operations("flashinfer_v4_nvfp4", presets.flashinfer_v4_nvfp4(page_size=4), ()),
        with_operations("vllm_v4", presets.vllm_v4(block_tokens=8), ()),
        with_operations("vllm_v41", presets.vllm_v41(block_tokens=8), ()),
        with_operations("vllm_v41_fp4", presets.vllm_v41_fp4(block_tokens=8), ()),
        with_operations("vllm_indexer_fp4", presets.vllm_indexer_fp4(page_size=8), ()),
        with_operations("sglang_v4", presets.sglang_v4(page_tokens=8), ()),
        with_operations("sglang_v4_fp4", presets.sglang_v4_fp4(page_tokens=8), ()),
    )
}
ENGINES |= RECORDS

# Keys quantized in groups of tokens, and scales with a table of their own.
_SIZES: dict[str, Any] = {"dtype": "bf16", "kv_heads": 2, "head_dim": 16, "page_size": 8}
_APART = Layout(k="page layer token head dim", v="layer page token head dim")
_PARTS = Layout(k="page layer token dim", rope="page layer token dim")
_PER_TOKEN = Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(dim=8))
_OWN = Quant(dtype="i8", scale_dtype="f16", zero=True, own_table=True)


def _grouped(tokens: int, **more: Any) -> Quant:
    fields = {"dtype": "i4", "scale_dtype": "f16", "zero": True, **more}
    return Quant(**fields, block=Block(token=tokens, dim=1), residual=tokens)


QUANTIZED = {
    s.name: s
    for s in (
        with_operations("grouped", Paged(k_quant=_grouped(4), v_quant=_PER_TOKEN, **_SIZES), ("gather", "decode")),
        with_operations(  # KIVI's codes of 2 bits, and of 3
            "grouped_after",
            Paged(
                k_quant=_grouped(8, dtype="i2"),
                v_quant=_PER_TOKEN.model_copy(update={"dtype": "i3"}),
                layout=_APART,
                lengths="after",
                **_SIZES,
            ),
            ("gather",),
        ),
        with_operations(
            "grouped_ring",
            Paged(k_quant=_grouped(4), table=Ring(window=20), layout=_APART, **_SIZES),
            ("gather", "decode"),
        ),
        with_operations(
            "grouped_own",
            Paged(k_quant=_grouped(4, own_table=True), v_quant=_PER_TOKEN, **_SIZES),
            ("gather", "decode"),
        ),
        with_operations(  # on tensor cores
            "grouped_tiles",
            Paged(
                k_quant=_grouped(16, own_table=True),
                v_quant=_PER_TOKEN,
                **_SIZES | {"dtype": "f16", "head_dim": 32, "page_size": 16},
            ),
            ("gather", "decode"),
        ),
        with_operations("own", Paged(quant=_OWN, **_SIZES), ("gather",)),
        with_operations(
            "own_k",
            Paged(k_quant=_OWN, v_quant=Quant(dtype="e4m3", scale_dtype="f32"), layout=_APART, **_SIZES),
            ("gather", "decode"),
        ),
        # A block of so many values that a thread reads them twice.
        with_operations(
            "wide_block",
            Paged(
                dtype="bf16",
                kv_heads=40,
                head_dim=64,
                page_size=4,
                k_quant=Quant(dtype="i8", scale_dtype="f32", zero=True, block=Block(head=None)),
                v_quant=Quant(dtype="e4m3", scale_dtype="f32", block=Block(head=None)),
                layout=_APART,
            ),
            (),
        ),
        # More blocks of a row than a thread block's lanes take at once.
        with_operations(
            "many_blocks",
            Paged(dtype="bf16", kv_heads=40, head_dim=96, page_size=4, quant=Quant(dtype="e4m3", scale_dtype="f32")),
            (),
        ),
        # RoPE parts that begin in the middle of an access of the caller's rows.
        with_operations(
            "latent_odd", Latent(dtype="bf16", latent_dim=12, rope_dim=16, page_size=4, layout=_PARTS), ("gather",)
        ),
        with_operations(
            "latent_odd_fp8",
            Latent(dtype="bf16", latent_dim=12, rope_dim=64, page_size=4, layout=_PARTS, quant=Quant(dtype="e4m3")),
            (),
        ),
        # No pages: codes alone, scales a token in tensors of the same rows, and scales of the caller's.
        with_operations("ragged_fp8", Ragged(dtype="bf16", kv_heads=2, head_dim=64, quant=Quant(dtype="e4m3")), ()),
        with_operations(
            "ragged_scales",
            Ragged(
                dtype="f16",
                kv_heads=2,
                head_dim=16,
                layout="layer head kv token dim",
                total_tokens=180,
                quant=Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(dim=8)),
            ),
            ("gather", "decode"),
        ),
        with_operations(
            "ragged_given",
            Ragged(
                dtype="bf16",
                kv_heads=2,
                head_dim=16,
                lengths_dtype="i32",
                layout=Layout(k="layer token head dim", v="layer token dim head"),
                quant=Quant(dtype="e4m3", scale_dtype="f32", scale="given", block=Block(token=None, head=None)),
            ),
            (),
        ),
        # Sizes that only one of K and V can have: a lane takes single elements, of bytes that hold two.
        with_operations(
            "half_bytes", Paged(k_quant=_PER_TOKEN, v_head_dim=3, layout=_APART, **_SIZES), ("gather", "decode")
        ),
    )
}
