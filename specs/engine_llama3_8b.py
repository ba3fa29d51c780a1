"""An engine's operations over Llama 3.1 8B's pages: LoRA, page movement, beams, defragmentation, vLLM's memory, a cascade."""

from kvgen import KernelSet, Llama3Scaling, Mask, Paged, Rope, ops, presets

ROPE = Rope(
    style="neox",
    theta=500_000.0,
    scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192),
)

kernels = KernelSet(
    q_heads=32,
    cache=Paged(dtype="bf16", kv_heads=8, head_dim=128, page_size=16),
    ops=[
        ops.Append(rope=ROPE),
        ops.Append(name="append_qkv", inputs="qkv", rope=ROPE, angles="halves"),
        ops.Append(name="append_padded", rows="padded", rope=ROPE),
        ops.Append(name="append_slots", rows="slots", rope=ROPE, positions="given"),
        ops.RotateCache(rope=ROPE),
        ops.LoraAdd(end="device"),
        ops.SlicedAdd(end="device"),
        ops.RowsAdd(),
        ops.Gather(),
        ops.Scatter(),
        ops.CopyPages(),
        ops.ZeroPages(),
        ops.SwapPages(direction="out"),
        ops.SwapPages(direction="in"),
        ops.Reorder(),
        ops.Compact(),
        ops.Convert(source=presets.vllm(dtype="bf16", kv_heads=8, head_dim=128, page_size=16)),
        ops.RowOffsets(),
        ops.Advance(),
        ops.ToCsr(),
        ops.SlotMapping(),
        # A cascade: what the batch shares, what each request has itself, and both together.
        ops.Extend(name="prefix", mask=Mask(causal=False), cross=True, out_dtype="f32"),
        ops.Decode(out_dtype="f32", split="balanced"),
        ops.MergeStates(dtype="f32", out_dtype="bf16"),
    ],
    arch=["sm_80", "sm_90a"],
)
