"""Llama 3 70B on eight GPUs: one KV head each, long requests divided among all multiprocessors."""

from kvgen import KernelSet, Paged, ops

kernels = KernelSet(
    q_heads=8,
    cache=Paged(dtype="bf16", kv_heads=1, head_dim=128, page_size=64),
    ops=[ops.Append(), ops.Gather(), ops.Decode(split="balanced")],
    arch=["sm_80", "sm_89", "sm_90a", "sm_100f", "sm_120f"],
)
