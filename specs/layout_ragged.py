"""Keys and values of requests one after another, as an encoder leaves them, and cross attention to them."""

from kvgen import KernelSet, Mask, ops, presets

kernels = KernelSet(
    q_heads=16,
    cache=presets.flash_attention_varlen(dtype="bf16", kv_heads=16, head_dim=64),
    ops=[ops.Gather(), ops.Extend(mask=Mask(causal=False), cross=True), ops.Decode(rows=8, mask=Mask(causal=False))],
)
