"""Qwen3 30B-A3B in scaled fp8, an f32 scale per token and head: norm, RoPE, quantization and e4m3 q in one launch; raw pages."""

from kvgen import KernelSet, Paged, RmsNorm, Rope, ops, presets

HEADS = {"kv_heads": 4, "head_dim": 128}

kernels = KernelSet(
    q_heads=32,
    cache=presets.max_paged_scaled(dtype="bf16", page_size=64, **HEADS),
    ops=[
        ops.Append(rope=Rope(style="neox", theta=1_000_000.0), q_norm=RmsNorm(), k_norm=RmsNorm(), q_out="e4m3"),
        ops.Extend(q_dtype="e4m3", out_dtype="e4m3"),
        ops.AttentionOutput(block=128, recipe="amax"),
        ops.MoveTokens(),
        ops.NormCache(),
        ops.RotateCache(rope=Rope(style="neox", theta=1_000_000.0)),
        ops.StoreScales(),
        ops.LoraAdd(),
        ops.Gather(name="gather_raw", raw=True),
        ops.Scatter(name="scatter_raw", raw=True),
        ops.CopyPages(),
        ops.ZeroPages(),
        ops.Convert(source=Paged(dtype="bf16", page_size=16, **HEADS)),
    ],
    arch=["sm_80", "sm_90a"],
)
