"""Gemma3ForConditionalGeneration: bf16 cache in 16-token pages, 8 query heads over 4 KV heads of 256.

Written by `kvgen init --from tests/models/configs/gemma_3_4b_it.json`.
"""

from kvgen import KernelSet, LinearScaling, Mask, Model, Paged, RmsNorm, Rope, ops

kernels = KernelSet(
    q_heads=8,
    cache=Paged(dtype="bf16", kv_heads=4, head_dim=256, page_size=16),
    ops=[
        ops.Append(
            rope="model",
            q_norm=RmsNorm(weight_offset=1.0, multiply="before"),
            k_norm=RmsNorm(weight_offset=1.0, multiply="before"),
        ),
        ops.Append(
            name="append_local",
            rope="local",
            q_norm=RmsNorm(weight_offset=1.0, multiply="before"),
            k_norm=RmsNorm(weight_offset=1.0, multiply="before"),
        ),
        ops.Gather(),
        ops.Extend(),
        ops.Extend(name="extend_local", mask=Mask(window=1024)),
        ops.Decode(split="balanced"),
        ops.Decode(name="decode_local", mask=Mask(window=1024), split="balanced"),
    ],
    arch=["sm_80", "sm_90a"],
    model=Model(
        architecture="Gemma3ForConditionalGeneration",
        layers=34,
        rope=Rope(style="neox", theta=1_000_000.0, scaling=LinearScaling(factor=8.0), local_theta=10_000.0),
        window=1024,
        window_pattern=("local", "local", "local", "local", "local", "full"),
        qk_norm="head",
        query_pre_attn_scalar=256.0,
    ),
)
