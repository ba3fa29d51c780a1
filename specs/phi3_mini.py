"""Phi3ForCausalLM: bf16 cache in 16-token pages, 32 query heads over 32 KV heads of 96.

Written by `kvgen init --from tests/models/configs/phi_3_mini_4k.json`.
"""

from kvgen import KernelSet, Mask, Model, Paged, Rope, ops

kernels = KernelSet(
    q_heads=32,
    cache=Paged(dtype="bf16", kv_heads=32, head_dim=96, page_size=16),
    ops=[
        ops.Append(rope="model"),
        ops.Gather(),
        ops.Extend(mask=Mask(window=2047)),
        ops.Decode(mask=Mask(window=2047), split="balanced"),
    ],
    arch=["sm_80", "sm_90a"],
    model=Model(architecture="Phi3ForCausalLM", layers=32, rope=Rope(style="neox", theta=10_000.0), window=2047),
)
