"""f32 cache in 16-token pages, for comparing with a reference."""

from kvgen import KernelSet, Paged, ops

kernels = KernelSet(
    q_heads=8,
    cache=Paged(dtype="f32", kv_heads=2, head_dim=64, page_size=16),
    ops=[ops.Append(), ops.Gather(), ops.Decode()],
    arch=["sm_80", "sm_90a"],
)
