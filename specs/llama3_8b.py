"""LlamaForCausalLM: bf16 cache in 16-token pages, 32 query heads over 8 KV heads of 128.

Written by `kvgen init --from tests/models/configs/llama_3_1_8b.json`.
"""

from kvgen import KernelSet, Llama3Scaling, Model, Paged, Rope, ops

kernels = KernelSet(
    q_heads=32,
    cache=Paged(dtype="bf16", kv_heads=8, head_dim=128, page_size=16),
    ops=[ops.Append(rope="model"), ops.Gather(), ops.Extend(), ops.Decode(split="balanced")],
    arch=["sm_80", "sm_90a"],
    model=Model(
        architecture="LlamaForCausalLM",
        layers=32,
        rope=Rope(
            style="neox",
            theta=500_000.0,
            scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192),
        ),
    ),
)
