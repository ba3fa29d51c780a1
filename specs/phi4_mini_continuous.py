"""Phi-4 mini in a block per request: int8 with an f32 scale per token and head."""

from kvgen import Continuous, KernelSet, Quant, ops

kernels = KernelSet(
    q_heads=24,
    cache=Continuous(dtype="f16", kv_heads=8, head_dim=128, quant=Quant(dtype="i8", scale_dtype="f32")),
    ops=[ops.Append(), ops.Gather(), ops.Decode()],
    arch=["sm_80", "sm_90a"],
)
