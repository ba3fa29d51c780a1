"""Qwen3_5ForConditionalGeneration: bf16 cache in 16-token pages, 24 query heads over 4 KV heads of 256.

Qwen3.6-27B, and Qwen3.5-27B, whose attention is the same. Its linear layers keep states, which this set does not hold.
Written by `kvgen init --from tests/models/configs/qwen3_6_27b.json`.
"""

from kvgen import KernelSet, Kind, Model, Paged, RmsNorm, Rope, ops

kernels = KernelSet(
    q_heads=24,
    cache=Paged(dtype="bf16", kv_heads=4, head_dim=256, page_size=16),
    ops=[
        ops.Append(
            rope=Rope(style="neox", theta=10_000_000.0, dim=64),
            positions="given",
            sections=(11, 11, 10),
            sections_order="interleaved",
            q_norm=RmsNorm(weight_offset=1.0, multiply="before"),
            k_norm=RmsNorm(weight_offset=1.0, multiply="before"),
        ),
        ops.Gather(),
        ops.Extend(),
        ops.Decode(split="balanced"),
    ],
    arch=["sm_80", "sm_90a"],
    model=Model(
        architecture="Qwen3_5ForConditionalGeneration",
        layers=64,
        kinds=(
            Kind(name="linear", cache=False),
            Kind(
                name="full",
                q_heads=24,
                kv_heads=4,
                head_dim=256,
                rope=Rope(style="neox", theta=10_000_000.0, dim=64),
                qk_norm="head",
            ),
        ),
        pattern=("linear", "linear", "linear", "full"),
    ),
    layers={"full": ("append", "extend", "decode")},
)
