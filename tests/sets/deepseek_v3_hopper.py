"""DeepSeek V3 for Hopper alone: products of warpgroups (wgmma) for its 128 query heads, 64 at a time."""

import math

from kvgen import KernelSet, Latent, ops

# Of 128 + 64 dims a head before absorption, times YaRN's factor squared.
SCALE = (128 + 64) ** -0.5 * (0.1 * math.log(40.0) + 1.0) ** 2

kernels = KernelSet(
    q_heads=128,
    cache=Latent(dtype="bf16", latent_dim=512, rope_dim=64, page_size=64),
    ops=[ops.MlaDecode(scale=SCALE, split="balanced")],
    arch=["sm_90a"],
)
