"""SGLang's token slots: bf16, a tensor pair per layer, found through req_to_token."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=28,
    cache=presets.sglang(dtype="bf16", kv_heads=4, head_dim=128),
    ops=[ops.Append(), ops.Gather(), ops.Extend(), ops.Decode(), ops.ToDense()],
    arch=["sm_80", "sm_90a"],
)
