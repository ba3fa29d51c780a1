"""Appends that change their rows first: one set for every option, over caches that store them in every way."""

from __future__ import annotations

from typing import Any, Final

from kvgen import (
    CSR,
    Block,
    KernelSet,
    Latent,
    Layout,
    Llama3Scaling,
    Model,
    Paged,
    PerKV,
    Quant,
    Ring,
    Rope,
    YarnScaling,
    ops,
    presets,
)
from kvgen.spec.norm import RmsNorm
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
        _set("six", Paged(dtype="f32", head_dim=6, **_SIZES), rope=Rope(style="interleaved", theta=1e4)),
    )
}
