"""DeepSeek V3 in FlashMLA's 656-byte rows: 512 e4m3 | 4 f32 scales | 64 bf16, a tensor per layer."""

import math

from kvgen import KernelSet, ops, presets

# Of 128 + 64 dims a head before absorption, times YaRN's factor squared.
SCALE = (128 + 64) ** -0.5 * (0.1 * math.log(40.0) + 1.0) ** 2

kernels = KernelSet(
    q_heads=128,
    cache=presets.flashmla_fp8(),
    ops=[
        ops.Append(),
        ops.Gather(),
        ops.MlaDecode(scale=SCALE, split="balanced"),
        ops.MlaDecode(name="mla_sparse", sparse=True, scale=SCALE),
    ],
    arch=["sm_80", "sm_90a"],
)
