"""Appends that change their rows first: one set for every option, over caches that store them in every way."""

from __future__ import annotations

from typing import Any, Final

from kvgen import (
    CSR,
    Block,
    KernelSet,
    Latent,
    LayerNorm,
    Layout,
    Llama3Scaling,
    Model,
    Paged,
    PerKV,
    PositionScale,
    Quant,
    Ring,
    Rope,
    YarnScaling,
    ops,
    presets,
)
from kvgen.schema.norm import RmsNorm
from tests.support.cache_matrix import CHOSEN

NEOX: Final = Rope(style="neox", theta=10_000.0)
LLAMA3: Final = Rope(
    style="neox",
    theta=500_000.0,
    scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64),
)
YARN: Final = Rope(
    style="interleaved",
    theta=10_000.0,
    scaling=YarnScaling(factor=40.0, original_max_positions=64, mscale=1.0, mscale_all_dim=0.5),
)
GEMMA: Final = RmsNorm(weight_offset=1.0, multiply="before")
L2: Final = RmsNorm(weight=False)
LLAMA4: Final = PositionScale(scale=0.1, period=5, offset=1)
_SIZES: Final[dict[str, Any]] = {"kv_heads": 2, "page_size": 16}
_SCALED: Final = Quant(dtype="i8", scale_dtype="f16", zero=True)
_FP8: Final = Quant(dtype="e4m3", scale_dtype="f32")
_GIVEN: Final = Quant(dtype="e4m3", scale_dtype="f32", scale="given", block=Block(token=None, dim=4))
_GIVEN4: Final = Quant(dtype="i4", scale_dtype="f32", scale="given", block=Block(token=None, dim=2))
_APART: Final = Layout(k="page layer token head dim", v="layer page token head dim")


def _set(name: str, cache: Any, group: int = 2, model: Model | None = None, **options: Any) -> KernelSet:
    return KernelSet(
        name=f"fused_{name}", q_heads=cache.kv_heads * group, cache=cache, ops=[ops.Append(**options)], model=model
    )


SETS: Final = {
    s.name.removeprefix("fused_"): s
    for s in (
        _set("llama", CHOSEN["dense"], 3, rope=LLAMA3),
        _set("qwen3", Paged(dtype="f16", head_dim=64, **_SIZES), rope=NEOX, q_norm=RmsNorm(), k_norm=RmsNorm()),
        _set(
            "gemma",
            Paged(dtype="f32", kv_heads=1, head_dim=40, page_size=3, table=Ring(window=10)),
            model=Model(
                window=10, window_pattern=("local", "full"), rope=Rope(style="neox", theta=1e6, local_theta=1e4)
            ),
            rope="local",
            q_norm=GEMMA,
            k_norm=GEMMA,
        ),
        _set("latent", CHOSEN["latent"], 5, rope=YARN, k_norm=RmsNorm(weight_dtype="f32"), q_dim=40),
        _set(
            "latent_row",
            CHOSEN["latent_row"],
            4,
            rope=YARN,
            k_norm=RmsNorm(),
            inputs="parts",
        ),
        _set(  # a norm of all of a latent row, and one of q's heads without weights (DeepSeek V4)
            "latent_whole",
            CHOSEN["latent"],
            3,
            rope=YARN.model_copy(update={"style": "interleaved"}),
            q_norm=RmsNorm(weight=False),
            k_norm=RmsNorm(over="row", weight_dtype="f32"),
            q_dim=40,
            q_out_heads=16,
        ),
        _set(
            "latent_rope",
            Latent(dtype="bf16", latent_dim=32, rope_dim=8, page_size=8, quant=_SCALED, quant_rope=True),
            rope=YARN,
        ),
        _set(
            "phi",
            Paged(dtype="bf16", head_dim=24, layout="page kv layer head token dim", **_SIZES),
            rope=Rope(style="neox", theta=1e4, dim=12),
            angles="halves",
        ),
        _set(
            "max_qkv",
            presets.max_paged_fp8(dtype="bf16", head_dim=64, kv_heads=2, page_size=16),
            inputs="qkv",
            rope=Rope(style="interleaved", theta=1e4, dim=32, part="last"),
            angles="pairs",
            angles_dtype="same",
            q_out="e4m3",
        ),
        _set(
            "padded",
            Paged(dtype="f16", head_dim=40, table=CSR(), lengths="after", **_SIZES),
            rows="padded",
            rope=NEOX,
            bias=True,
        ),
        _set(
            "padded_qkv",
            Paged(dtype="bf16", head_dim=16, quant=_SCALED, **_SIZES),
            rows="padded",
            inputs="qkv",
            bias=True,
        ),
        _set(
            "mrope_slots",
            CHOSEN["xpacked"],
            rows="slots",
            rope=NEOX,
            positions="given",
            sections=(4, 10, 6),
        ),
        _set(
            "row_norm",
            CHOSEN["flashinfer"],
            rope=NEOX,
            q_norm=RmsNorm(over="row"),
            k_norm=RmsNorm(over="row"),
            bias=True,
        ),
        # One of several GPUs: the call brings the mean square of the row of all their heads.
        _set(
            "row_given",
            Paged(dtype="bf16", head_dim=16, **_SIZES),
            rope=NEOX,
            q_norm=RmsNorm(over="row", mean_square="given"),
            k_norm=RmsNorm(over="row", mean_square="given", multiply="before"),
        ),
        _set(
            "nvfp4",
            CHOSEN["nvfp4"]
            if "nvfp4" in CHOSEN
            else presets.max_nvfp4(dtype="bf16", kv_heads=2, head_dim=64, page_size=16),
            rope=NEOX,
            k_norm=RmsNorm(dim=32),
            q_norm=RmsNorm(dim=32),
        ),
        _set(
            "own",
            Paged(dtype="bf16", head_dim=24, quant=Quant(dtype="i8", scale_dtype="f16", own_table=True), **_SIZES),
            rope=NEOX,
        ),
        _set(
            "tiles",
            Paged(
                dtype="bf16",
                kv_heads=2,
                head_dim=64,
                page_size=128,
                quant=Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global", order="swizzled"),
            ),
            rope=NEOX,
        ),
        _set("per_kv", CHOSEN["per_kv"], bias=True, q_out="none"),
        _set(
            "channels",
            Paged(
                dtype="f16",
                head_dim=40,
                table=PerKV(),
                layout=Layout(k="page layer token head dim", v="page layer head dim token"),
                quant=Quant(dtype="e4m3", scale_dtype="f32", scale="given", block=Block(token=None, dim=1)),
                **_SIZES,
            ),
            rope=NEOX,
            positions="given",
        ),
        _set("k_only", CHOSEN["k_only"], k_norm=RmsNorm()),
        # Found wrong once: a bias in a flat row's norm, parts that begin anywhere, two sinks for one segment, rows that do not
        # fit the cache's vectors, blocks of 2 and of 3 heads, tables of angles for padded rows.
        _set(
            "row_norm_qkv",
            Paged(dtype="bf16", head_dim=16, **_SIZES),
            inputs="qkv",
            bias=True,
            k_norm=RmsNorm(over="row"),
        ),
        _set(
            "odd_parts",
            Latent(dtype="f32", latent_dim=5, rope_dim=8, page_size=8, quant=_FP8, quant_rope=True),
            inputs="parts",
            rope=NEOX,
        ),
        _set(
            "given_parts",
            Latent(dtype="bf16", latent_dim=6, rope_dim=8, page_size=8, quant=_GIVEN, quant_rope=True),
            inputs="parts",
            rope=NEOX,
        ),
        _set(
            "packed_parts",
            Latent(dtype="bf16", latent_dim=32, rope_dim=6, page_size=8, quant=_GIVEN4, quant_rope=True),
            rope=NEOX,
        ),
        _set(
            "flat_misfit",
            Paged(dtype="bf16", kv_heads=1, head_dim=36, v_head_dim=64, page_size=8, layout=_APART),
            inputs="qkv",
            rope=NEOX,
        ),
        _set(
            "heads_2_and_3",
            Paged(
                dtype="bf16",
                kv_heads=6,
                head_dim=16,
                page_size=8,
                k_quant=Quant(dtype="i8", scale_dtype="f32", block=Block(head=2)),
                v_quant=Quant(dtype="i8", scale_dtype="f32", block=Block(head=3)),
                layout=Layout(k="page layer head token dim", v="page layer head token dim"),
            ),
            rope=NEOX,
        ),
        _set("padded_table", Paged(dtype="f16", head_dim=40, **_SIZES), rows="padded", rope=NEOX, angles="pairs"),
        # What the models of 2025 and 2026 do: Llama 4, Qwen3-VL and 3.5, Gemma 4 and its layers without K and V, Cohere,
        # StableLM, Phi, Ministral 3, Hunyuan; each over another way of storing.
        _set(
            "llama4",
            presets.max_paged_fp8(dtype="bf16", head_dim=64, kv_heads=2, page_size=16),
            inputs="qkv",
            rope=Rope(style="interleaved", theta=5e5),
            norm_order="after",
            q_norm=L2,
            k_norm=L2,
        ),
        _set("llama4_nope", Paged(dtype="bf16", head_dim=32, **_SIZES), q_out="e4m3", position_scale=LLAMA4),
        _set(
            "hunyuan_slots",
            CHOSEN["xpacked"],
            rows="slots",
            rope=NEOX,
            positions="given",
            norm_order="after",
            q_norm=RmsNorm(),
            k_norm=RmsNorm(dim=24),
            position_scale=PositionScale(scale=0.25, period=7),
        ),
        _set(
            "scaled_slots",
            Paged(dtype="f16", head_dim=24, quant=_SCALED, **_SIZES),
            rows="slots",
            positions="given",
            position_scale=LLAMA4,
            v_norm=RmsNorm(over="row", weight=False),
        ),
        _set(
            "qwen3_vl",
            Paged(dtype="bf16", head_dim=32, table=CSR(), **_SIZES),
            rope=NEOX,
            positions="given",
            sections=(6, 5, 5),
            sections_order="interleaved",
            q_norm=RmsNorm(),
            k_norm=RmsNorm(),
        ),
        _set(
            "qwen35_table",
            Paged(dtype="f16", head_dim=48, quant=_FP8, **_SIZES),
            rope=Rope(style="neox", theta=1e7, dim=12),
            angles="halves",
            positions="given",
            sections=(3, 2, 1),
            sections_order="interleaved",
            q_norm=GEMMA,
            k_norm=GEMMA,
        ),
        _set(
            "gemma4_full",
            Paged(dtype="bf16", kv_heads=1, head_dim=64, page_size=16),
            4,
            rope=Rope(style="neox", theta=1e6, dim=16, proportional=True),
            q_norm=RmsNorm(multiply="before"),
            k_norm=RmsNorm(multiply="before"),
            v_norm=RmsNorm(weight=False),
        ),
        _set(
            "gemma4_table",
            Paged(dtype="f32", head_dim=40, quant=Quant(dtype="i8", scale_dtype="f32"), **_SIZES),
            rope=Rope(style="neox", theta=1e6, dim=20, proportional=True),
            angles="halves",
            v_norm=LayerNorm(bias=True),
        ),
        _set(
            "proportional_pairs",
            Paged(dtype="f16", head_dim=24, **_SIZES),
            rope=Rope(style="interleaved", theta=1e4, dim=8, proportional=True),
            angles="pairs",
            rows="padded",
        ),
        _set(
            "cohere",
            CHOSEN["flashinfer"],
            3,
            rope=Rope(style="interleaved", theta=1e4),
            q_norm=LayerNorm(per_head=True),
            k_norm=LayerNorm(per_head=True),
        ),
        _set(
            "cohere_split",
            CHOSEN["xpacked"],
            rope=NEOX,
            q_norm=LayerNorm(per_head=True, bias=True),
            k_norm=LayerNorm(per_head=True, bias=True),
            norm_order="after",
            bias=True,
            q_out_heads=7,
        ),
        _set(
            "persimmon",
            Paged(dtype="f16", head_dim=20, lengths="after", **_SIZES),
            rows="padded",
            inputs="qkv",
            bias=True,
            rope=Rope(style="neox", theta=25e3, dim=12),
            q_norm=LayerNorm(bias=True, weight_dtype="f32"),
            k_norm=LayerNorm(bias=True, weight_dtype="f32"),
        ),
        _set(
            "indexer",
            Latent(dtype="bf16", latent_dim=32, rope_dim=16, page_size=8, quant=_FP8),
            rope=YARN,
            k_norm=LayerNorm(bias=True, eps=1e-6),
            q_dim=48,
            position_scale=PositionScale(scale=0.1, period=16),
        ),
        _set(
            "q_alone",
            Paged(dtype="bf16", kv_heads=1, head_dim=64, page_size=16, quant=Quant(dtype="i8", scale_dtype="f32")),
            4,
            inputs="q",
            rope=Rope(style="neox", theta=1e6, dim=16, proportional=True),
            q_norm=RmsNorm(multiply="before"),
        ),
        _set(
            "q_alone_kivi",
            CHOSEN["kivi"],
            3,
            inputs="q",
            rows="padded",
            rope=NEOX,
            angles="pairs",
            angles_dtype="same",
            bias=True,
            q_norm=LayerNorm(per_head=True),
            norm_order="after",
            q_out_heads=8,
            q_out="e4m3",
        ),
        _set(
            "q_alone_row",
            Paged(
                dtype="f32", head_dim=20, table=PerKV(), lengths="after", layout="page layer token head dim", **_SIZES
            ),
            inputs="q",
            positions="given",
            q_norm=RmsNorm(over="row", weight=False),
            position_scale=LLAMA4,
        ),
        _set("kivi_v_norm", CHOSEN["kivi"], v_norm=RmsNorm(weight=False), q_norm=LayerNorm()),
        # An entry for several tokens: the last one's row, turned by the first one's position.
        KernelSet(
            name="fused_rate",
            q_heads=4,
            cache=Latent(dtype="bf16", latent_dim=24, rope_dim=8, page_size=5, rate=4, lengths="after"),
            ops=[ops.Append(rope=YARN, k_norm=RmsNorm(), q_out="none"), ops.SlotMapping(), ops.Gather()],
            arch=["sm_90a"],
        ),
        _set(
            "rate_padded",
            Paged(dtype="f16", head_dim=16, table=CSR(), rate=3, quant=_FP8, kv_heads=2, page_size=4),
            rows="padded",
            rope=NEOX,
            angles="halves",
            positions="given",
            q_out="none",
        ),
        # Hadamard transforms: heads of q, k and v share lanes in their own ways; RoPE turns all, the first or the last quarter.
        _set(
            "hadamard",
            Paged(
                dtype="bf16",
                head_dim=64,
                v_head_dim=128,
                quant=Quant(dtype="i4", scale_dtype="f16", block=Block(dim=16)),
                layout=_APART,
                **_SIZES,
            ),
            rope=NEOX,
            hadamard="qkv",
        ),
        # Codes of a byte that are no neighbours, of rows turned before they are quantized; K's have a sign's bit.
        _set(
            "hadamard_signs",
            presets.lmdeploy_turboquant(dtype="f16", kv_heads=2, head_dim=64, page_size=16),
            rope=NEOX,
            hadamard="qkv",
        ),
        _set(
            "hadamard_quarter",
            Paged(dtype="f16", head_dim=128, **_SIZES),
            3,
            rope=Rope(style="neox", theta=1e7, dim=32),
            q_norm=RmsNorm(),
            k_norm=RmsNorm(),
            hadamard="qkv",
        ),
        _set(
            "hadamard_indexer",
            presets.vllm_indexer(head_dim=128, page_size=16),
            4,
            rope=Rope(style="interleaved", theta=1e4, dim=32, part="last"),
            hadamard="qk",
        ),
        _set(
            "hadamard_q",
            Paged(dtype="f32", kv_heads=1, head_dim=64, page_size=16),
            2,
            inputs="q",
            rope=Rope(style="interleaved", theta=1e4, dim=16),
            hadamard="qk",
            q_out="e4m3",
        ),
        _set("six", Paged(dtype="f32", head_dim=6, **_SIZES), rope=Rope(style="interleaved", theta=1e4)),
    )
}
