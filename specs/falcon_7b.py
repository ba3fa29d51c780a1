"""FalconForCausalLM: bf16 cache in 16-token pages, 71 query heads over 1 KV heads of 64.

Written by `kvgen init --from tests/models/configs/falcon_7b.json`.
"""

from kvgen import KernelSet, Model, Paged, Rope, ops

kernels = KernelSet(
    q_heads=71,
    cache=Paged(dtype="bf16", kv_heads=1, head_dim=64, page_size=16),
    ops=[ops.Append(rope="model"), ops.Gather(), ops.Extend(), ops.Decode(split="balanced")],
    arch=["sm_80", "sm_90a"],
    model=Model(architecture="FalconForCausalLM", layers=32, rope=Rope(style="neox", theta=10_000.0)),
)
