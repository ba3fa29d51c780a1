"""DeepseekV3ForCausalLM: bf16 latent rows of 576 in 64-token pages, 128 query heads.

`deepseek_v3_prompts` has the heads of prompts, projected up: docs/extend.md of kvgen.
Written by `kvgen init --from tests/models/configs/deepseek_v3.json`.
"""

from kvgen import KernelSet, Latent, Mask, Mla, Model, Ragged, RmsNorm, Rope, YarnScaling, ops

kernels = [
    KernelSet(
        name="deepseek_v3",
        q_heads=128,
        cache=Latent(dtype="bf16", latent_dim=512, rope_dim=64, page_size=64),
        ops=[ops.Append(rope="model", k_norm=RmsNorm()), ops.Gather(), ops.MlaDecode(split="balanced")],
        arch=["sm_80", "sm_90a"],
        model=Model(
            architecture="DeepseekV3ForCausalLM",
            layers=61,
            rope=Rope(
                style="interleaved",
                theta=10_000.0,
                dim=64,
                scaling=YarnScaling(factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0),
            ),
            mla=Mla(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, q_lora_rank=1536),
        ),
    ),
    KernelSet(
        name="deepseek_v3_prompts",
        q_heads=128,
        cache=Ragged(dtype="bf16", kv_heads=128, head_dim=192, v_head_dim=128),
        ops=[
            ops.Extend(scale=0.1352337788608801),
            ops.Extend(name="extend_prefix", scale=0.1352337788608801, mask=Mask(causal=False), cross=True),
            ops.MergeStates(),
        ],
        arch=["sm_80", "sm_90a"],
    ),
]
