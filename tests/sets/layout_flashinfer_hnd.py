"""FlashInfer's HND cache: bf16, CSR page table with last_page_len."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=32,
    cache=presets.flashinfer_hnd(dtype="bf16", kv_heads=8, head_dim=128),
    ops=[ops.Append(), ops.Gather(), ops.Decode()],
    arch=["sm_80", "sm_90a"],
)
