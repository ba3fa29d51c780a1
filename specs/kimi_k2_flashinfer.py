"""Kimi K2 as FlashInfer's MLA has it: latent and RoPE part in a tensor each, per layer."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=64,
    cache=presets.flashinfer_mla(dtype="bf16"),
    ops=[ops.Append(), ops.Gather()],
    arch=["sm_80", "sm_90a"],
)
