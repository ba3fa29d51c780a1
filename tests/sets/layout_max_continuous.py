"""MAX's continuous-batching cache: bf16, a block of up to 2048 tokens per request."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=32,
    cache=presets.max_continuous(dtype="bf16", kv_heads=8, head_dim=128, max_tokens=2048),
    ops=[ops.Append(), ops.Gather(), ops.Decode()],
    arch=["sm_80", "sm_90a"],
)
