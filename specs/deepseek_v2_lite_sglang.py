"""DeepSeek V2 Lite in SGLang's fp8 latent pool: rows of 576 e4m3, RoPE part included, a slot a token."""

import math

from kvgen import KernelSet, ops, presets

# Of 128 + 64 dims a head before absorption, times YaRN's factor squared.
SCALE = (128 + 64) ** -0.5 * (0.1 * 0.707 * math.log(40.0) + 1.0) ** 2

kernels = KernelSet(
    q_heads=16,
    cache=presets.sglang_mla(fp8=True),
    ops=[ops.Append(), ops.Gather(), ops.MlaDecode(scale=SCALE, split="balanced")],
    arch=["sm_80", "sm_90a"],
)
