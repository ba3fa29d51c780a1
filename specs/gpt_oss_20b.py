"""GptOssForCausalLM: bf16 cache in 16-token pages, 64 query heads over 8 KV heads of 64.

Written by `kvgen init --from tests/models/configs/gpt_oss_20b.json`.
"""

from kvgen import KernelSet, Mask, Model, Paged, Rope, YarnScaling, ops

kernels = KernelSet(
    q_heads=64,
    cache=Paged(dtype="bf16", kv_heads=8, head_dim=64, page_size=16),
    ops=[
        ops.Append(rope="model"),
        ops.Gather(),
        ops.Extend(sinks="lse"),
        ops.Extend(name="extend_local", mask=Mask(window=128), sinks="lse"),
        ops.Decode(sinks="lse", split="balanced"),
        ops.Decode(name="decode_local", mask=Mask(window=128), sinks="lse", split="balanced"),
    ],
    arch=["sm_80", "sm_90a"],
    model=Model(
        architecture="GptOssForCausalLM",
        layers=24,
        rope=Rope(
            style="neox",
            theta=150_000.0,
            scaling=YarnScaling(factor=32.0, original_max_positions=4096, truncate=False),
        ),
        window=128,
        window_pattern=("local", "full"),
        sinks=True,
    ),
)
