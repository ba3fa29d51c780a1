"""Llama 2 13B: int8 keys with a bf16 scale per token and head, values cast to e4m3."""

from kvgen import KernelSet, Paged, Quant, ops

kernels = KernelSet(
    q_heads=40,
    cache=Paged(
        dtype="f16",
        kv_heads=40,
        head_dim=128,
        page_size=16,
        k_quant=Quant(dtype="i8", scale_dtype="bf16"),
        v_quant=Quant(dtype="e4m3"),
    ),
    ops=[ops.Append(), ops.Gather(), ops.Decode()],
    arch=["sm_80", "sm_90a"],
)
