"""Gemma2ForCausalLM: bf16 cache in 16-token pages, 16 query heads over 8 KV heads of 256.

Written by `kvgen init --from tests/models/configs/gemma_2_9b_it.json`.
"""

from kvgen import KernelSet, Mask, Model, Paged, Rope, Score, ops

kernels = KernelSet(
    q_heads=16,
    cache=Paged(dtype="bf16", kv_heads=8, head_dim=256, page_size=16),
    ops=[
        ops.Append(rope="model"),
        ops.Gather(),
        ops.Extend(score=Score(softcap=50.0)),
        ops.Extend(name="extend_local", mask=Mask(window=4096), score=Score(softcap=50.0)),
        ops.Decode(score=Score(softcap=50.0), split="balanced"),
        ops.Decode(name="decode_local", mask=Mask(window=4096), score=Score(softcap=50.0), split="balanced"),
    ],
    arch=["sm_80", "sm_90a"],
    model=Model(
        architecture="Gemma2ForCausalLM",
        layers=42,
        rope=Rope(style="neox", theta=10_000.0),
        window=4096,
        window_pattern=("local", "full"),
        logit_softcap=50.0,
        query_pre_attn_scalar=256.0,
    ),
)
