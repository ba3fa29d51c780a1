"""LlamaForCausalLM: f16 cache in 16-token pages, 32 query heads over 32 KV heads of 128.

Written by `kvgen init --from tests/models/configs/llama_2_7b.json`.
"""

from kvgen import KernelSet, Model, Paged, Rope, ops

kernels = KernelSet(
    q_heads=32,
    cache=Paged(dtype="f16", kv_heads=32, head_dim=128, page_size=16),
    ops=[ops.Append(rope="model"), ops.Gather(), ops.Extend(), ops.Decode(split="balanced")],
    arch=["sm_80", "sm_90a"],
    model=Model(architecture="LlamaForCausalLM", layers=32, rope=Rope(style="neox", theta=10_000.0)),
)
