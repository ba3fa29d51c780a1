"""Kimi K2 as FlashInfer's MLA has it: latent and RoPE part in a tensor each, per layer."""

import math

from kvgen import KernelSet, ops, presets

# Of 128 + 64 dims a head before absorption, times YaRN's factor squared.
SCALE = (128 + 64) ** -0.5 * (0.1 * math.log(32.0) + 1.0) ** 2

kernels = KernelSet(
    q_heads=64,
    cache=presets.flashinfer_mla(dtype="bf16"),
    ops=[ops.Append(), ops.Gather(), ops.MlaDecode(scale=SCALE, split="balanced")],
    arch=["sm_80", "sm_90a"],
)
