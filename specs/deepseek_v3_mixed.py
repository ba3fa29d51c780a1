"""DeepSeek V3 in Modular MAX's fp8 latent rows: 512 e4m3 + 64 bf16, 640 bytes, an f32 scale each in a pool of their own."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=128,
    cache=presets.max_mla_fp8(),
    ops=[ops.Append(), ops.Gather()],
    arch=["sm_80", "sm_90a"],
)
