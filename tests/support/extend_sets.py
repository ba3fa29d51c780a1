"""The sets that tests of extend build: kinds of cache and size, masks, scores, quantizations."""

from __future__ import annotations

import os
from typing import Any, Final

from kvgen import (
    CSR,
    Block,
    Continuous,
    Dense,
    KernelSet,
    Layout,
    Mapped,
    Mask,
    Paged,
    PerKV,
    Quant,
    Ragged,
    Ring,
    Score,
    ops,
    presets,
)
from kvgen.architectures import Arch
from tests.support.sets import ALL


def _set(name: str, cache: Any, group: int, arch: Arch = "sm_80", **fields: Any) -> KernelSet:
    op = ops.Extend(**fields)
    return KernelSet(name=f"extend_{name}", q_heads=cache.kv_heads * group, cache=cache, ops=(op,), arch=(arch,))


def _paged(kind: str, heads: int, dim: int, page: int, **fields: Any) -> Paged:
    return Paged(dtype=kind, kv_heads=heads, head_dim=dim, page_size=page, **fields)


def _mx(codes: Any, dim: int | None) -> Quant:
    return Quant(dtype=codes, scale_dtype="e8m0", recipe="pow2", block=Block(dim=dim))


_APART = Layout(k="page layer token head dim", v="page layer token head dim")


def hides(s: Any, at: Any) -> Any:
    """Every eleventh token is hidden, for one query head by another count."""
    from kvgen import score

    return score.where((at.token + at.q_head) % 11 == 5, float("-inf"), s * 0.5)


_LOCAL = Mask(causal=False, window=33, ahead=20)
# What every run has.
SETS: Final = {
    s.name.removeprefix("extend_"): s
    for s in (
        _set("paged", _paged("bf16", 2, 32, 16), 4),
        _set("sglang", presets.sglang(dtype="bf16", kv_heads=2, head_dim=32), 3, index_dtype="i32", lse_base="2"),
        _set("codes", _paged("bf16", 2, 32, 16), 4, q_dtype="e4m3", out_dtype="e4m3"),
        _set(
            "dims",
            _paged("f16", 1, 48, 8, v_head_dim=40, layout=_APART, lengths="after"),
            7,
            out_dtype="f32",
            mask=Mask(causal=False, window=33, ahead=2),
            score=Score(softcap=8.0),
        ),
        _set("window", _paged("bf16", 1, 32, 16), 6, mask=Mask(window=33), sinks="lse", lse_empty="inf"),
        _set("tree", _paged("bf16", 2, 32, 16), 4, mask=Mask(tree="packed"), score=Score(softcap=8.0)),
        _set(
            "function",
            _paged("f16", 2, 32, 16),
            4,
            mask=Mask(causal=False, padding=True),
            cross=True,
            score=Score(function=hides),
        ),
        _set("invariant", _paged("bf16", 1, 32, 16), 4, split="invariant", chunk=64),
        _set(
            "fp8",
            _paged("bf16", 2, 64, 16, quant=Quant(dtype="e4m3", scale_dtype="f32")),
            4,
            split="invariant",
            chunk=128,
        ),
        _set("f32", _paged("f32", 1, 32, 16), 4, mask=Mask(causal=False, ahead=2), split="invariant", chunk=64),
        _set("kivi", presets.kivi(dtype="f16", group_size=32, page_size=64, kv_heads=1, head_dim=64), 4),
        _set(
            "int4",
            _paged("bf16", 1, 64, 16, quant=Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(dim=32))),
            4,
        ),
        _set("mxfp4", _paged("bf16", 2, 64, 16, quant=_mx("e2m1", 32)), 3, mask=Mask(window=50)),
    )
}
# What a campaign has besides.
MORE: Final = {
    s.name.removeprefix("extend_"): s
    for s in (
        _set("wide", presets.vllm_hnd(dtype="bf16", kv_heads=1, head_dim=256, page_size=16), 5, "sm_89", sinks="out"),
        _set("encoder", Ragged(dtype="bf16", kv_heads=2, head_dim=32, v_head_dim=48), 1, mask=_LOCAL, out_dtype="f32"),
        _set("nvfp4_max", presets.max_nvfp4(dtype="bf16", kv_heads=2, head_dim=48, page_size=16), 2),
        _set("falcon", _paged("bf16", 1, 64, 16, layout="page kv layer token dim"), 71),
        _set("twelve", _paged("f16", 1, 128, 16), 12, mask=Mask(chunk=48)),
        _set("llama", _paged("bf16", 2, 128, 16), 4),
        _set("mla", _paged("bf16", 1, 192, 64, v_head_dim=128, layout=_APART), 1),
        _set("ragged", Ragged(dtype="bf16", kv_heads=2, head_dim=32), 4),
        _set(
            "cross", Ragged(dtype="f16", kv_heads=1, head_dim=64, v_head_dim=32), 3, mask=Mask(causal=False), cross=True
        ),
        _set("ragged_heads", ALL["ragged_heads"].kv, 2, mask=Mask(causal=False), cross=True, q_dtype="e4m3"),
        _set("ragged_fp8", ALL["ragged_fp8"].kv, 3, mask=_LOCAL),
        _set("csr", _paged("f16", 1, 40, 16, table=CSR(dtype="u32")), 3),
        _set("csr_last", _paged("bf16", 2, 32, 16, table=CSR(last_page_len=True), lengths="after"), 4),
        _set("mapped", _paged("bf16", 2, 32, 16, table=Mapped()), 4),
        _set("mha", _paged("bf16", 2, 96, 16), 1, mask=Mask(window=40)),
        _set("dims_of_12", _paged("bf16", 2, 12, 3), 4),
        _set("ada", _paged("bf16", 2, 128, 16, quant=Quant(dtype="e4m3", scale_dtype=None)), 4, "sm_89"),
        _set("ring", _paged("bf16", 2, 32, 16, table=Ring(window=40, dtype="i64"), lengths="after"), 4),
        _set("block", Continuous(dtype="f16", kv_heads=2, head_dim=40, max_tokens=310, table_dtype="i64"), 4),
        _set("page_3", _paged("f16", 2, 40, 3, table=Dense(dtype="i64", id_multiplier=2), lengths="after"), 5),
        _set(
            "per_kv",
            Paged(
                dtype="f16",
                kv_heads=2,
                head_dim=32,
                v_head_dim=64,
                page_size=16,
                layout=Layout(k="page token head dim", v="page token head dim", layers="pointers"),
                table=PerKV(dtype="u32", id_multiplier=2),
            ),
            2,
        ),
        _set("blocks", _paged("bf16", 1, 32, 16), 4, mask=Mask(block=24)),
        _set("full", _paged("bf16", 2, 64, 256), 4, mask=Mask(causal=False)),
        _set(
            "window_open", _paged("bf16", 1, 32, 16), 7, mask=Mask(causal=False, window=20), split="invariant", chunk=64
        ),
        _set("chunk_open", _paged("f16", 1, 32, 16), 4, mask=Mask(chunk=24, causal=False)),
        _set("mask", _paged("bf16", 1, 32, 16), 7, mask=Mask(tree="mask")),
        _set("tree_window", _paged("bf16", 2, 32, 16, lengths="after"), 3, mask=Mask(tree="packed", window=20)),
        _set("bias", _paged("f16", 2, 32, 16), 2, score=Score(bias=True, alibi=True)),
        _set(
            "relative", _paged("bf16", 2, 32, 16), 2, score=Score(relative=9, softcap=5.0), split="invariant", chunk=64
        ),
        _set(
            "fp8_codes",
            _paged("f16", 2, 64, 16, quant=Quant(dtype="e4m3", scale_dtype=None)),
            3,
            q_dtype="e4m3",
            out_dtype="e4m3",
            score=Score(softcap=9.0),
        ),
        _set("fp8_plain", _paged("bf16", 2, 128, 16, quant=Quant(dtype="e4m3", scale_dtype=None)), 4),
        _set(
            "fp8_given",
            _paged(
                "f16", 2, 64, 16, quant=Quant(dtype="e5m2", scale="given", scale_dtype="f32", block=Block(token=None))
            ),
            4,
        ),
        _set(
            "int8",
            _paged("f16", 2, 64, 16, quant=Quant(dtype="i8", scale_dtype="f16"), lengths="after"),
            3,
            mask=Mask(window=50),
        ),
        _set(
            "nvfp4",
            _paged(
                "bf16", 2, 64, 16, quant=Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global", block=Block(dim=16))
            ),
            4,
            "sm_90a",
        ),
        _set("mxfp8", _paged("bf16", 2, 128, 16, quant=_mx("e4m3", 32)), 4),
        _set("mxfp8_halves", _paged("bf16", 1, 128, 8, quant=_mx("e5m2", 64)), 4, "sm_89", split="invariant", chunk=64),
        _set("mxfp8_whole", _paged("bf16", 2, 64, 16, quant=_mx("e4m3", None)), 4),
        _set("mxfp4_sixteens", presets.sglang(dtype="bf16", kv_heads=2, head_dim=64, kv_cache_dtype="fp4_e2m1"), 4),
        _set(
            "mxfp4_tree",
            _paged("bf16", 2, 40, 16, quant=_mx("e2m1", 16)),
            4,
            mask=Mask(tree="packed"),
            score=Score(softcap=8.0),
        ),
        _set("mx_of_v", _paged("bf16", 2, 64, 16, v_quant=_mx("e4m3", 32), layout=_APART), 4),
        # On CUDA cores.
        _set("mxfp8_half", _paged("f16", 2, 64, 16, quant=_mx("e4m3", 32)), 4),
        _set("xpacked", presets.vllm_xpacked(dtype="bf16", kv_heads=2, head_dim=40, page_size=16), 3, sinks="out"),
        _set("f32_paged", _paged("f32", 2, 128, 16), 4),
        _set("f32_open", presets.max_continuous(dtype="f32", kv_heads=2, head_dim=24), 7, mask=Mask(causal=False)),
        _set("f32_inside", _paged("f32", 2, 20, 3, layout="page layer token head kv dim", table=CSR()), 3),
        _set("f32_tree", _paged("f32", 2, 32, 16), 4, mask=Mask(tree="packed"), score=Score(softcap=8.0)),
        _set("f32_mask", _paged("f32", 1, 32, 16), 3, mask=Mask(tree="mask"), lse_empty="inf"),
        _set(
            "f32_function",
            _paged("f32", 2, 32, 16),
            4,
            mask=Mask(causal=False, padding=True),
            score=Score(function=hides),
            split="invariant",
            chunk=64,
        ),
        _set("f32_window", _paged("f32", 1, 32, 16), 6, mask=Mask(window=33), sinks="lse"),
        _set("f32_ragged", Ragged(dtype="f32", kv_heads=2, head_dim=48, v_head_dim=40), 3),
        _set("f32_wide", _paged("f32", 1, 512, 16), 5),
        _set("f32_widest", _paged("f32", 1, 1024, 8), 2, "sm_89"),
        _set("f32_mla", _paged("f32", 1, 192, 16, v_head_dim=128, layout=_APART), 2),
        _set("f32_value", _paged("f32", 1, 16, 16, v_head_dim=300, layout=_APART), 2, split="invariant", chunk=128),
        _set("f32_key", _paged("f32", 1, 700, 16, v_head_dim=5, layout=_APART), 2),
        _set("wide_group", _paged("f16", 1, 256, 16), 71, "sm_89"),
        _set("wide_groups", _paged("f16", 1, 300, 16), 71),
        _set("odd", _paged("bf16", 2, 13, 3), 3),
        _set(
            "swizzled",
            _paged("bf16", 2, 64, 16, layout=Layout(kv="page kv layer head token dim", swizzle=(3, 3, 3))),
            4,
        ),
        _set(
            "varlen",
            Ragged(
                dtype="bf16", kv_heads=2, head_dim=64, layout=Layout(k="layer token head dim", v="layer token dim head")
            ),
            4,
        ),
        _set("kivi_bf16", presets.kivi(dtype="bf16", group_size=8, page_size=16, kv_heads=2, head_dim=24), 3),
        _set("fp8_wide", _paged("bf16", 1, 512, 16, quant=Quant(dtype="e4m3", scale_dtype="f32")), 4),
        _set(
            "int4_f32",
            _paged("f32", 1, 64, 16, quant=Quant(dtype="i4", scale_dtype="f32", zero=True, block=Block(dim=16))),
            4,
        ),
        _set("nvfp4_f32", presets.max_nvfp4(dtype="f32", kv_heads=2, head_dim=64, page_size=16), 2),
        _set("codes_of_k", _paged("bf16", 2, 64, 16, k_quant=Quant(dtype="e4m3", scale_dtype="f32"), layout=_APART), 4),
        _set("codes_of_v", _paged("bf16", 2, 64, 16, v_quant=Quant(dtype="i8", scale_dtype="f32"), layout=_APART), 4),
    )
}


def decoded() -> dict[str, KernelSet]:
    """Every cache that decode's tests read, with an extend; a campaign draws them from all that a spec can say."""
    return {
        name: KernelSet(name=f"e{i}_{name}"[:40], q_heads=found.q_heads, cache=found.cache, ops=(ops.Extend(),))
        for i, (name, found) in enumerate(ALL.items())
        if any(op.kind == "decode" for op in found.ops)
    }


DRAWN: Final = SETS | MORE | decoded() if "KVGEN_FAMILY" in os.environ else SETS
