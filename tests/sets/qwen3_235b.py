"""Qwen3MoeForCausalLM: bf16 cache in 16-token pages, 64 query heads over 4 KV heads of 128.

Written by `kvgen init --from tests/models/configs/qwen3_235b_a22b.json`.
"""

from kvgen import KernelSet, Model, Paged, RmsNorm, Rope, ops

kernels = KernelSet(
    q_heads=64,
    cache=Paged(dtype="bf16", kv_heads=4, head_dim=128, page_size=16),
    ops=[
        ops.Append(rope="model", q_norm=RmsNorm(), k_norm=RmsNorm()),
        ops.Gather(),
        ops.Extend(),
        ops.Decode(split="balanced"),
    ],
    arch=["sm_80", "sm_90a"],
    model=Model(
        architecture="Qwen3MoeForCausalLM",
        layers=94,
        rope=Rope(style="neox", theta=1_000_000.0),
        qk_norm="head",
    ),
)
