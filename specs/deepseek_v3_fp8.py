"""DeepSeek V3 in FlashMLA's 656-byte rows: 512 e4m3 | 4 f32 scales | 64 bf16, a tensor per layer."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=128,
    cache=presets.flashmla_fp8(),
    ops=[ops.Append(), ops.Gather()],
    arch=["sm_80", "sm_90a"],
)
