"""Gemma4ForConditionalGeneration: bf16 caches in 16-token pages, one for each shape of heads:

- `full`: 32 query heads over 4 KV heads of 512
- `local`: 32 query heads over 16 KV heads of 256

Gemma 4 31B. V of a full layer is the projection of K, without its weights and RoPE; the two are stored apart.

Written by `kvgen init --from tests/models/configs/gemma_4_31b.json`.
"""

from kvgen import KernelSet, Kind, Mask, Model, Paged, RmsNorm, Rope, ops

model = Model(
    architecture="Gemma4ForConditionalGeneration",
    layers=60,
    kinds=(
        Kind(
            name="local",
            q_heads=32,
            kv_heads=16,
            head_dim=256,
            window=1024,
            rope=Rope(style="neox", theta=10_000.0),
            qk_norm="head",
            scale=1.0,
        ),
        Kind(
            name="full",
            q_heads=32,
            kv_heads=4,
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
        name="gemma_4_31b_full",
        q_heads=32,
        cache=Paged(dtype="bf16", kv_heads=4, head_dim=512, page_size=16),
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
        name="gemma_4_31b_local",
        q_heads=32,
        cache=Paged(dtype="bf16", kv_heads=16, head_dim=256, page_size=16),
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
