"""Qwen3VLForConditionalGeneration: bf16 cache in 16-token pages, 16 query heads over 8 KV heads of 128.

Qwen3-VL-2B-Instruct. Its M-RoPE has three positions a token, whose pairs go round time, height and width (`mrope_section`
[24, 20, 20], `mrope_interleaved`); text tokens have three equal ones. `append_text` is of Qwen3-0.6B and Qwen3-1.7B, whose heads,
cache and decode are the same: 28 layers, one position a token, theta 1e6; the set serves both, so each append states its RoPE.
Written by `kvgen init --from tests/models/configs/qwen3_vl_2b.json`.
"""

from kvgen import KernelSet, Model, Paged, RmsNorm, Rope, ops

kernels = KernelSet(
    q_heads=16,
    cache=Paged(dtype="bf16", kv_heads=8, head_dim=128, page_size=16),
    ops=[
        ops.Append(
            rope=Rope(style="neox", theta=5_000_000.0),
            positions="given",
            sections=(24, 20, 20),
            sections_order="interleaved",
            q_norm=RmsNorm(),
            k_norm=RmsNorm(),
        ),
        ops.Append(name="append_text", rope=Rope(style="neox", theta=1_000_000.0), q_norm=RmsNorm(), k_norm=RmsNorm()),
        ops.Gather(),
        ops.Extend(),
        ops.Decode(split="balanced"),
    ],
    arch=["sm_80", "sm_90a"],
    model=Model(
        architecture="Qwen3VLForConditionalGeneration",
        layers=28,
        qk_norm="head",
    ),
)
