"""DeepSeek V2 Lite in SGLang's fp8 latent pool: rows of 576 e4m3, RoPE part included, a slot a token."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=16,
    cache=presets.sglang_mla(fp8=True),
    ops=[ops.Append(), ops.Gather()],
    arch=["sm_80", "sm_90a"],
)
