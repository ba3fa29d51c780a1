"""Gemma4ForConditionalGeneration: bf16 caches in 16-token pages, one for each shape of heads:

- `full`: 16 query heads over 2 KV heads of 512
- `local`: 16 query heads over 8 KV heads of 256

Gemma 4 26B-A4B. V of a full layer is the projection of K, without its weights and RoPE; the two are stored apart.

Written by `kvgen init --from tests/models/configs/gemma_4_26b_a4b.json`.
"""

from kvgen import KernelSet, Kind, Mask, Model, Paged, RmsNorm, Rope, ops

model = Model(
    architecture="Gemma4ForConditionalGeneration",
    layers=30,
    kinds=(
        Kind(
            name="local",
            q_heads=16,
            kv_heads=8,
            head_dim=256,
            window=1024,
            rope=Rope(style="neox", theta=10_000.0),
            qk_norm="head",
            scale=1.0,
        ),
        Kind(
            name="full",
            q_heads=16,
            kv_heads=2,
            head_dim=512,
            rope=Rope(style="neox", theta=1_000_000.0, dim=128, proportional=True),
            qk_norm="head",
            scale=1.0,
        ),
    ),
    pattern=("local", "local", "local", "local", "local", "full"),
)

kernels = [
    KernelSet(
        name="gemma_4_26b_a4b_full",
        q_heads=16,
        cache=Paged(dtype="bf16", kv_heads=2, head_dim=512, page_size=16),
        ops=[
            ops.Append(
                rope=Rope(style="neox", theta=1_000_000.0, dim=128, proportional=True),
                q_norm=RmsNorm(multiply="before"),
                k_norm=RmsNorm(multiply="before"),
                v_norm=RmsNorm(weight=False),
            ),
            ops.Gather(),
            ops.Extend(scale=1.0),
            ops.Decode(scale=1.0, split="balanced"),
        ],
        arch=["sm_80", "sm_90a"],
        model=model,
        layers={"full": ("append", "extend", "decode")},
    ),
    KernelSet(
        name="gemma_4_26b_a4b_local",
        q_heads=16,
        cache=Paged(dtype="bf16", kv_heads=8, head_dim=256, page_size=16),
        ops=[
            ops.Append(
                rope=Rope(style="neox", theta=10_000.0),
                q_norm=RmsNorm(multiply="before"),
                k_norm=RmsNorm(multiply="before"),
                v_norm=RmsNorm(weight=False),
            ),
            ops.Gather(),
            ops.Extend(scale=1.0, mask=Mask(window=1024)),
            ops.Decode(scale=1.0, mask=Mask(window=1024), split="balanced"),
        ],
        arch=["sm_80", "sm_90a"],
        model=model,
        layers={"local": ("append", "extend", "decode")},
    ),
]
