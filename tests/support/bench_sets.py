"""Appends that do more than store, small, as a spec file's text: what the tools must cope with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

NAMES: Final = ("llama", "qwen", "qkv", "padded", "mla", "mla_row", "mrope", "fp8", "window")
# Those whose kernels are compiled and run: one of every operation, of quantized and latent rows, of padded rows, K beside q,
# given positions, norms, biases and RoPE in both styles (tests/verify/test_families.py counts them); in a campaign all.
FEWER: Final = ("llama", "qwen", "padded", "mla_row", "mrope", "fp8")
RUN: Final = NAMES if "KVGEN_FAMILY" in os.environ else FEWER
SPEC: Final = '''"""Fused appends, and operations beside them."""

from typing import Any

from kvgen import Block, KernelSet, Latent, Layout, Paged, Quant, RmsNorm, Ring, Rope, YarnScaling, ops

SIZES: dict[str, Any] = {"dtype": "bf16", "kv_heads": 2, "head_dim": 32, "page_size": 8}
NEOX = Rope(style="neox", theta=10_000.0)
YARN = Rope(
    style="interleaved", theta=10_000.0, scaling=YarnScaling(factor=40.0, original_max_positions=64, mscale_all_dim=0.5)
)
LATENT: dict[str, Any] = {"dtype": "bf16", "latent_dim": 64, "rope_dim": 16, "page_size": 8}
FP8 = Quant(dtype="e4m3", scale_dtype="f32", block=Block(dim=32), place="row", recipe="pow2")
I8 = Quant(dtype="i8", scale_dtype="f32")
READ: list[Any] = [ops.Gather(), ops.Decode()]


def one(name: str, cache: Any, append: Any, *more: Any) -> KernelSet:
    return KernelSet(name=name, q_heads=4, cache=cache, ops=[append, *more], arch=["sm_80", "sm_90a"])


kernels = [
    one(
        "llama",
        Paged(**SIZES),
        ops.Append(rope=NEOX),
        *READ,
        ops.Gather(name="raw", raw=True),
        ops.Scatter(),
        ops.GatherRows(roles="kv"),
        ops.CopyPages(),
        ops.ZeroPages(),
        ops.LoraAdd(),
        ops.NormCache(),
        ops.RotateCache(rope=NEOX),
        ops.Convert(source=Paged(**{**SIZES, "kv_heads": 4}, quant=I8), heads=1),
    ),
    one(
        "qwen",
        Paged(**SIZES, quant=I8),
        ops.Append(rope=NEOX, q_norm=RmsNorm(), k_norm=RmsNorm(), angles="halves"),
        ops.Gather(),
        ops.Gather(name="raw", raw=True, layers="all"),
        ops.Scatter(raw=True, rows="slots", layers="all"),
        ops.LoraAdd(end="device"),
    ),
    one("qkv", Paged(**SIZES), ops.Append(inputs="qkv", rope=NEOX, bias=True), *READ),
    one("padded", Paged(**SIZES, lengths="after"), ops.Append(rows="padded", rope=NEOX, bias=True), ops.Gather()),
    one("mla", Latent(**LATENT), ops.Append(rope=YARN, k_norm=RmsNorm(), q_dim=24), ops.Gather()),
    one(
        "mla_row",
        Latent(**LATENT, quant=FP8, layout=Layout(k="page token dim", layers="pointers")),
        ops.Append(rope=YARN, k_norm=RmsNorm(), inputs="parts"),
        ops.Gather(),
    ),
    one(
        "mrope",
        Paged(**SIZES),
        ops.Append(rope=NEOX, positions="given", sections=(4, 6, 6), angles="pairs"),
        ops.Append(name="store", rows="slots", rope=NEOX, positions="given"),
        ops.Gather(),
    ),
    one(
        "fp8",
        Paged(**SIZES, quant=Quant(dtype="e4m3")),
        ops.Append(inputs="qkv", rope=Rope(style="interleaved", theta=1e4, dim=16, part="last"), q_out="e4m3"),
        ops.Gather(),
    ),
    one("window", Paged(**SIZES, table=Ring(window=20)), ops.Append(rope=NEOX, k_norm=RmsNorm(over="row")), *READ),
]
'''


def write_project(folder: Path, names: tuple[str, ...] = NAMES) -> None:
    """The spec of these sets in a project of its own, not built."""
    (folder / "specs").mkdir(parents=True)
    (folder / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
    (folder / "specs" / "fused.py").write_text(
        f"{SPEC}\nkernels = [k for k in kernels if k.name in {names}]\n", encoding="utf-8"
    )
