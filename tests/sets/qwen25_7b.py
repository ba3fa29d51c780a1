"""Qwen2ForCausalLM: bf16 cache in 16-token pages, 28 query heads over 4 KV heads of 128.

Written by `kvgen init --from tests/models/configs/qwen2_5_7b.json`.
"""

from kvgen import KernelSet, Model, Paged, Rope, ops

kernels = KernelSet(
    q_heads=28,
    cache=Paged(dtype="bf16", kv_heads=4, head_dim=128, page_size=16),
    ops=[ops.Append(rope="model"), ops.Gather(), ops.Extend(), ops.Decode(split="balanced")],
    arch=["sm_80", "sm_90a"],
    model=Model(architecture="Qwen2ForCausalLM", layers=28, rope=Rope(style="neox", theta=1_000_000.0)),
)
