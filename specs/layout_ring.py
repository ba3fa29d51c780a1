"""A sliding window of 128 tokens kept in a ring of 16-token pages, bf16."""

from kvgen import KernelSet, Paged, Ring, ops

kernels = KernelSet(
    q_heads=64,
    cache=Paged(dtype="bf16", kv_heads=8, head_dim=64, page_size=16, table=Ring(window=128)),
    ops=[ops.Append(), ops.Gather(), ops.Decode()],
    arch=["sm_80", "sm_90a"],
)
