"""DeepSeek V3 in FlashMLA's 656-byte rows: normalised, turned, quantized and stored in one launch; prefill in chunks."""

from kvgen import KernelSet, Latent, RmsNorm, Rope, YarnScaling, ops, presets

ROPE = Rope(
    style="interleaved",
    theta=10_000.0,
    scaling=YarnScaling(factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0),
)

kernels = KernelSet(
    q_heads=128,
    cache=presets.flashmla_fp8(),
    ops=[
        ops.Append(inputs="parts", rope=ROPE, k_norm=RmsNorm()),
        ops.Append(name="append_slots", rows="slots", inputs="parts", rope=ROPE, positions="given", k_norm=RmsNorm()),
        ops.Gather(),
        ops.Gather(name="gather_raw", raw=True),
        ops.GatherRows(),
        ops.CopyPages(),
        ops.ZeroPages(),
        ops.Convert(source=Latent(dtype="bf16", latent_dim=512, rope_dim=64, page_size=64)),
        ops.SlotMapping(),
        ops.RemapIndices(),
        ops.RemapIndices(name="remap_topk", counts=True, unseen="drop"),
        ops.ListKeys(),
        ops.CombineLists(window=128),
        ops.MlaPlan(buffer_token_size=16384),
        ops.MlaDecompress(),
        ops.MergeStates(states="many", dtype="f32", out_dtype="bf16", lse_empty="inf"),
    ],
    arch=["sm_80", "sm_90a"],
)
