"""DeepSeek V3 in Modular MAX's fp8 latent rows: 512 e4m3 + 64 bf16, 640 bytes, an f32 scale each in a pool of their own."""

import math

from kvgen import KernelSet, ops, presets

# Of 128 + 64 dims a head before absorption, times YaRN's factor squared.
SCALE = (128 + 64) ** -0.5 * (0.1 * math.log(40.0) + 1.0) ** 2

kernels = KernelSet(
    q_heads=128,
    cache=presets.max_mla_fp8(),
    ops=[ops.Append(), ops.Gather(), ops.MlaDecode(scale=SCALE, split="balanced")],
    arch=["sm_80", "sm_90a"],
)
