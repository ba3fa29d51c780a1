"""The table of families: which config.json belongs to which row, and each family's facts.

A field that published configs leave out takes the value transformers 5.23 gives it (the default of its config class),
written in the row; heads, layers and the hidden size are required. A row is the one above it `but` for some columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvgen.models.family import (
    HYBRID,
    SLIDING,
    Family,
    FamilyRope,
    Index,
    KvHeads,
    Norms,
    Pattern,
    Refusal,
    Rows,
    Scale,
)

_HEADS: Final = Norms()
_HEADS_F32: Final = Norms(multiply="before")
_GEMMA_HEADS: Final = Norms(offset=1.0, multiply="before")
_ROWS_F32: Final = Norms(over="row", multiply="before")
_HALVES: Final = FamilyRope()
_PAIRS: Final = FamilyRope(style="interleaved")
_TWO_WAYS: Final = Refusal(
    "use_bidirectional_attention", "kvgen's decode is causal; a model that looks both ways keeps no cache; valid: false"
)
_BOTH_WAYS: Final = Refusal("use_bidirectional_attention", _TWO_WAYS.rule, when="all")
_CLIPPED: Final = Refusal(
    "clip_qkv", "q and k are clipped between their norm and RoPE, in append; valid: null", when="set"
)


def _all(default: int | None) -> KvHeads:
    return KvHeads(default=default)


# Llama and models with its attention ----------------------------------------------------------------------------------

_LLAMA: Final = Family("llama", "LlamaForCausalLM")
_QWEN_PATTERN: Final = Pattern(special="local", from_layer=28)
_DENSE: Final = (
    _LLAMA,
    _LLAMA.but("internlm3", "LlamaForCausalLM", kv=_all(2), head_dim=128, positions=32768),
    _LLAMA.but("iquestcoder", "LlamaForCausalLM", kv=_all(8), head_dim=128, positions=131072),
    _LLAMA.but("arcee", "ArceeForCausalLM", positions=4096),
    _LLAMA.but("aria_text", "AriaTextForCausalLM"),
    _LLAMA.but("deepseek_ocr2_text", "DeepseekOcr2ForCausalLM", divided=True),
    _LLAMA.but("jais2", "Jais2ForCausalLM", positions=8192),
    _LLAMA.but("bitnet", "BitNetForCausalLM", kv=_all(5), rope=FamilyRope(theta=500_000.0)),
    _LLAMA.but("emu3_text_model", "Emu3ForCausalLM", kv=_all(8), positions=9216, rope=FamilyRope(theta=1e6)),
    _LLAMA.but("seed_oss", "SeedOssForCausalLM", kv=_all(8), head_dim=128, positions=524288),
    _LLAMA.but(
        "solar_open",
        "SolarOpenForCausalLM",
        kv=_all(8),
        head_dim=128,
        positions=131072,
        rope=FamilyRope(theta=1e6, share=1.0),
    ),
    _LLAMA.but(
        "helium",
        "HeliumForCausalLM",
        kv=_all(20),
        head_dim=128,
        positions=4096,
        rope=FamilyRope(style="interleaved", theta=1e5),
    ),
    _LLAMA.but(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        kv=_all(2),
        head_dim=128,
        positions=131072,
        rope=FamilyRope(style="interleaved", theta=5e5),
    ),
    _LLAMA.but(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        kv=_all(4),
        positions=131072,
        rope=FamilyRope(style="interleaved", theta=5e5),
    ),
    _LLAMA.but(
        "glm",
        "GlmForCausalLM",
        kv=_all(2),
        head_dim=128,
        positions=131072,
        rope=FamilyRope(style="interleaved", share=0.5),
    ),
    _LLAMA.but(
        "glm4",
        "Glm4ForCausalLM",
        kv=_all(2),
        head_dim=128,
        positions=131072,
        rope=FamilyRope(style="interleaved", share=0.5),
    ),
    _LLAMA.but("nemotron", "NemotronForCausalLM", positions=4096, rope=FamilyRope(share=0.5)),
    _LLAMA.but("olmo", "OlmoForCausalLM"),
    _LLAMA.but("gemma", "GemmaForCausalLM", kv=_all(16), head_dim=256, positions=8192, refuses=(_TWO_WAYS,)),
    _LLAMA.but(
        "chameleon",
        "ChameleonForConditionalGeneration",
        kv=_all(32),
        divided=True,
        positions=4096,
        norms=Norms(kind="layer", eps=1e-5, bias=True, per_head=True),
    ),
    _LLAMA.but(
        *("phimoe", "PhimoeForCausalLM"),
        kv=_all(8),
        positions=131072,
        rope=FamilyRope(theta=1e6, mscales=True),
        pattern=Pattern(common="local", types=()),
    ),
    _LLAMA.but(
        *("apertus", "ApertusForCausalLM"),
        norms=_HEADS,
        eps=1e-5,
        positions=65536,
        rope=FamilyRope(
            theta=12e6,
            default={
                "rope_theta": 12e6,
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
    ),
    _LLAMA.but(
        "hy_v3",
        "HYV3ForCausalLM",
        kv=_all(8),
        head_dim=128,
        norms=_HEADS,
        eps=1e-5,
        positions=131072,
        rope=FamilyRope(theta=11158840.0),
    ),
    _LLAMA.but(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        kv=_all(8),
        norms=Norms(when="use_qk_norm", default=False),
        eps=1e-5,
        positions=131072,
        rope=FamilyRope(share=0.5),
    ),
    _LLAMA.but("olmo2", "Olmo2ForCausalLM", norms=_ROWS_F32, eps=1e-5),
    _LLAMA.but("flex_olmo", "FlexOlmoForCausalLM", norms=_ROWS_F32, positions=4096, rope=FamilyRope(theta=5e5)),
    _LLAMA.but("olmoe", "OlmoeForCausalLM", norms=Norms(over="row"), eps=1e-5, positions=4096, refuses=(_CLIPPED,)),
    _LLAMA.but(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        kv=_all(8),
        head_dim=128,
        norms=Norms(over="row"),
        positions=196608,
        rope=FamilyRope(theta=5e6, share=1.0, dims="rotary_dim"),
    ),
    _LLAMA.but(
        *("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM"),
        kv=_all(4),
        head_dim=128,
        norms=_GEMMA_HEADS,
        positions=524288,
        rope=FamilyRope(theta=5e6, share=1.0),
        refuses=(
            Refusal(
                "sparse_attention_config",
                "an indexer picks blocks of tokens for each KV head, which kvgen's decode does not take; valid: null",
            ),
        ),
    ),
    _LLAMA.but(
        "phi",
        "PhiForCausalLM",
        divided=True,
        norms=Norms(kind="layer", when="qk_layernorm", default=False, bias=True),
        eps=1e-5,
        names={"rms_norm_eps": ("layer_norm_eps",)},
        rope=FamilyRope(share=0.5),
    ),
    _LLAMA.but(
        "stablelm",
        "StableLmForCausalLM",
        kv=_all(32),
        divided=True,
        norms=Norms(kind="layer", when="qk_layernorm", default=False, per_head=True),
        eps=1e-5,
        names={"rms_norm_eps": ("layer_norm_eps",)},
        positions=4096,
        rope=FamilyRope(share=0.25),
    ),
    _LLAMA.but(
        "persimmon",
        "PersimmonForCausalLM",
        kv=KvHeads(always_all=True),
        divided=True,
        norms=Norms(kind="layer", when="qk_layernorm", bias=True),
        eps=1e-5,
        names={"rms_norm_eps": ("layer_norm_eps",)},
        positions=16384,
        rope=FamilyRope(share=0.5),
    ),
    _LLAMA.but(
        "cohere",
        "CohereForCausalLM",
        norms=Norms(kind="layer", when="use_qk_norm", default=False, per_head=True),
        eps=1e-5,
        names={"rms_norm_eps": ("layer_norm_eps",)},
        positions=8192,
        rope=FamilyRope(style="interleaved", theta=5e5),
    ),
    _LLAMA.but(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        kv=KvHeads(always_all=True),
        divided=True,
        rope=FamilyRope(thetas=("rotary_emb_base",), share=0.25, shares=("rotary_pct",)),
    ),
    _LLAMA.but(
        "gpt_neox_japanese",
        "GPTNeoXJapaneseForCausalLM",
        kv=KvHeads(always_all=True),
        divided=True,
        rope=FamilyRope(thetas=("rotary_emb_base",), share=1.0, shares=("rotary_pct",)),
    ),
    _LLAMA.but(
        "jetmoe",
        "JetMoeForCausalLM",
        kv=_all(16),
        head_dim=128,
        names={"head_dim": ("kv_channels",)},
        heads_of=("num_experts_per_tok", 2),
        positions=4096,
        notes=("Query head h attends to KV head h modulo the number of KV heads: order the query heads by KV head.",),
    ),
    _LLAMA.but(
        "hrm_text",
        "HrmTextForCausalLM",
        cycles=("num_layers_per_stack", ("H_cycles", 2), ("L_cycles", 3)),
        kv=KvHeads(always_all=True),
        head_dim=128,
        notes=("A prompt's tokens see each other both ways where prefix_lm is true; decode is causal.",),
    ),
    _LLAMA.but(
        "molmo2_text",
        "",
        kv=_all(8),
        head_dim=128,
        norms=Norms(over_when=("qk_norm_type", {"qwen3": "head", "olmo": "row"})),
        positions=36864,
        rope=FamilyRope(unscaled_field="rope_scaling_layers"),
    ),
    _LLAMA.but(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        norms=Norms(order="after"),
        eps=1e-5,
        rope=FamilyRope(alpha=True),
    ),
    _LLAMA.but(
        "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", norms=Norms(order="after"), eps=1e-5, rope=FamilyRope(alpha=True)
    ),
    _LLAMA.but("granite", "GraniteForCausalLM", scale=Scale(given="attention_multiplier", default=1.0)),
    _LLAMA.but("granite4_vision_text", "", scale=Scale(given="attention_multiplier", default=1.0)),
    _LLAMA.but("granitemoe", "GraniteMoeForCausalLM", scale=Scale(given="attention_multiplier", default=1.0)),
    _LLAMA.but(
        "granitemoeshared", "GraniteMoeSharedForCausalLM", scale=Scale(given="attention_multiplier", default=1.0)
    ),
    _LLAMA.but(
        "granite_docling_text",
        "",
        kv=_all(4),
        positions=32768,
        scale=Scale(given="attention_multiplier", default=0.015625),
    ),
    _LLAMA.but("hyperclovax", "HyperCLOVAXForCausalLM", scale=Scale(given="attention_multiplier")),
)

# One window on every layer, or a pattern of windows -------------------------------------------------------------------

_MISTRAL: Final = Family(
    "mistral",
    "MistralForCausalLM",
    kv=_all(8),
    positions=131072,
    pattern=Pattern(common="local", types=()),
    window=4096,
)
_QWEN2: Final = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    kv=_all(32),
    positions=32768,
    pattern=_QWEN_PATTERN,
    window=4096,
    window_when="use_sliding_window",
)
_GEMMA2: Final = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    kv=_all(4),
    head_dim=256,
    positions=8192,
    pattern=Pattern(common="local", every=2),
    window=4096,
    scale=Scale(rsqrt="query_pre_attn_scalar", default=256.0),
    softcap=("attn_logit_softcapping", 50.0),
    refuses=(_TWO_WAYS,),
)
_GEMMA3: Final = _GEMMA2.but(
    "gemma3_text",
    "Gemma3ForCausalLM Gemma3ForConditionalGeneration",
    heads=8,
    norms=_GEMMA_HEADS,
    positions=131072,
    pattern=Pattern(common="local", every=6, every_field="sliding_window_pattern _sliding_window_pattern"),
    softcap=("attn_logit_softcapping", None),
    rope=FamilyRope(kinds={"full": (1e6, "rope_theta"), "local": (1e4, "rope_local_base_freq")}, flat=False),
)
_GEMMA4: Final = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    kv=_all(4),
    head_dim=256,
    heads=8,
    positions=131072,
    norms=Norms(multiply="before", v=True),
    pattern=Pattern(common="local", every=6),
    window=512,
    scale=Scale(fixed=1.0),
    rope=FamilyRope(
        shares=(),
        kinds={"full": (1e6, ""), "local": (1e4, "")},
        default={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    global_heads=True,
    shared=True,
    last_full=True,
    refuses=(_BOTH_WAYS,),
)
_COHERE2: Final = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    positions=8192,
    rope=_PAIRS,
    pattern=Pattern(common="local", every=4, every_field="sliding_window_pattern"),
    window=4096,
    rotary="windowed",
)
_EXAONE4: Final = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    kv=_all(32),
    eps=1e-5,
    norms=_HEADS,
    pattern=Pattern(common="local", every=4, every_field="sliding_window_pattern"),
    window=4096,
    rotary="local",
)
_LAGUNA: Final = Family(
    "laguna",
    "LagunaForCausalLM",
    kv=_all(8),
    head_dim=128,
    positions=131072,
    norms=_HEADS,
    pattern=Pattern(),
    window=512,
    rope=FamilyRope(
        shares=(),
        share=1.0,
        kinds={"full": (500_000.0, ""), "local": (10_000.0, "")},
        default={
            "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        },
    ),
    head_lists="num_attention_heads_per_layer",
)
_WINDOWED: Final = (
    _MISTRAL,
    _MISTRAL.but("mixtral", "MixtralForCausalLM", rope=FamilyRope(theta=1e6), window=None),
    _MISTRAL.but("starcoder2", "Starcoder2ForCausalLM", kv=_all(2), positions=4096, window=None),
    _MISTRAL.but("voxtral_realtime_text", "", window=4096),
    _MISTRAL.but(  # windows of what the cache keeps, in these two: the masks of a prompt show all of it
        "moshi", "MoshiForCausalLM", kv=_all(None), positions=3000, window=3000, pattern=Pattern(common="local")
    ),
    _MISTRAL.but(
        *("kyutai_speech_to_text", "KyutaiSpeechToTextForConditionalGeneration"),
        kv=_all(None),
        positions=750,
        window=375,
        pattern=Pattern(common="local"),
    ),
    _MISTRAL.but(
        *("ministral3", "Ministral3ForCausalLM"),
        head_dim=128,
        positions=262144,
        window=None,
        q_scale="ministral",
        rope=FamilyRope(
            default={
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        ),
    ),
    _MISTRAL.but("ministral", "MinistralForCausalLM", pattern=Pattern(common="local")),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        positions=4096,
        pattern=Pattern(common="local", types=()),
        rope=FamilyRope(share=1.0, original_first=4096),
    ),
    Family(
        "phi4_multimodal",
        "Phi4MultimodalForCausalLM",
        kv=_all(8),
        positions=131072,
        pattern=Pattern(common="local", types=()),
        rope=FamilyRope(share=1.0, original_first=4096),
    ),
    _QWEN2,
    _QWEN2.but(
        "qwen2_moe", "Qwen2MoeForCausalLM", kv=_all(16), pattern=Pattern(special="local", every=2, at=0, until_layer=28)
    ),
    _QWEN2.but("qwen3", "Qwen3ForCausalLM", head_dim=128, norms=_HEADS),
    _QWEN2.but("qwen3_moe", "Qwen3MoeForCausalLM", kv=_all(4), norms=_HEADS, pattern=Pattern(common="local", types=())),
    _QWEN2.but(
        "dots1",
        "Dots1ForCausalLM",
        positions=2048,
        norms=_HEADS,
        pattern=Pattern(special="local", from_layer=62),
        window_when="",
    ),
    _QWEN2.but(
        *("smollm3", "SmolLM3ForCausalLM"),
        kv=_all(4),
        rope=FamilyRope(theta=2e6),
        pattern=Pattern(by_flags=("full", "local"), every=4, every_field="no_rope_layer_interval"),
        window=None,
        rotary="flags",
    ),
    Family(
        *("cwm", "CwmForCausalLM"),
        kv=_all(8),
        head_dim=128,
        positions=131072,
        pattern=Pattern(common="local", every=4, at=0),
        window=8192,
        rope=FamilyRope(
            theta=1e6,
            default={
                "rope_theta": 1e6,
                "rope_type": "llama3",
                "factor": 16.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
    ),
    _GEMMA2,
    _GEMMA2.but("vaultgemma", "VaultGemmaForCausalLM", refuses=()),
    _GEMMA3,
    Family(
        *("gemma3n_text", "Gemma3nForCausalLM"),
        kv=_all(2),
        head_dim=256,
        positions=32768,
        norms=Norms(multiply="before", v=True),
        pattern=Pattern(common="local", every=5),
        window=512,
        scale=Scale(fixed=1.0),
        rope=FamilyRope(kinds={"full": (1e6, "rope_theta"), "local": (1e4, "rope_local_base_freq")}, flat=False),
        shared=True,
    ),
    _GEMMA4,
    _GEMMA4.but("gemma4_unified_text", "Gemma4UnifiedForCausalLM", positions=262144, window=1024),
    Family(
        *("gpt_oss", "GptOssForCausalLM"),
        kv=_all(8),
        head_dim=64,
        positions=131072,
        pattern=Pattern(common="local", every=2),
        window=128,
        sinks=("full", "local"),
        rope=FamilyRope(
            theta=150_000.0,
            default={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
    ),
    Family(
        *("olmo3", "Olmo3ForCausalLM"),
        eps=1e-5,
        norms=_ROWS_F32,
        pattern=Pattern(common="local", every=4),
        window=4096,
        rope=FamilyRope(kinds={"full": (5e5, "rope_theta"), "local": (5e5, "")}, flat=False),
    ),
    Family(
        *("modernbert-decoder", "ModernBertDecoderForCausalLM"),
        kv=KvHeads(always_all=True),
        divided=True,
        positions=8192,
        names={"sliding_window": ("local_attention",)},
        pattern=Pattern(common="local", every=3, every_field="global_attn_every_n_layers", at=0),
        window=128,
        window_over=2,
        rope=FamilyRope(
            kinds={"full": (160_000.0, "global_rope_theta"), "local": (1e4, "local_rope_theta")},
            scales=("full", "local"),
            flat=False,
        ),
    ),
    Family(
        *("mellum", "MellumForCausalLM"),
        kv=_all(4),
        head_dim=128,
        positions=131072,
        norms=_HEADS,
        pattern=Pattern(),
        window=1024,
        rope=FamilyRope(
            shares=(),
            share=1.0,
            kinds={"full": (500_000.0, ""), "local": (10_000.0, "")},
            default={"full_attention": {"rope_theta": 500_000.0}, "sliding_attention": {"rope_theta": 10_000.0}},
        ),
    ),
    _LAGUNA,
    Family(
        *("step3p5", "Step3p5ForCausalLM Step3p7ForCausalLM"),
        kv=_all(8),
        head_dim=128,
        eps=1e-5,
        positions=128000,
        names={"num_key_value_heads": ("num_key_value_heads", "num_attention_groups")},
        norms=_GEMMA_HEADS,
        pattern=Pattern(),
        scale=Scale(rsqrt="query_pre_attn_scalar"),
        local_heads=("num_sliding_attention_heads", "attention_other_setting.num_attention_heads"),
        refuses=(_TWO_WAYS,),
        rope=FamilyRope(
            share=1.0,
            shares=("partial_rotary_factors",),
            kinds={"full": (1e4, "rope_theta"), "local": (1e4, "rope_theta")},
            flat=False,
            beside=False,
        ),
    ),
    Family(
        *("afmoe", "AfmoeForCausalLM"),
        head_dim=128,
        eps=1e-5,
        positions=16384,
        norms=_HEADS_F32,
        pattern=Pattern(common="local", every=4, every_field="global_attn_every_n_layers"),
        window=1024,
        rotary="sliding",
    ),
    _COHERE2,
    _COHERE2.but(
        *("cohere2_moe", "Cohere2MoeForCausalLM"),
        head_dim=128,
        refuses=(
            Refusal(
                "rope_scaling", "transformers' code does not use it; valid: null, with rope_parameters", when="set"
            ),
            Refusal("first_k_dense_replace", "its dense layers rotate and mask by rules of their own; valid: 0"),
            Refusal(
                "mlp_layer_types",
                "its dense layers rotate and mask by rules of their own; valid: no 'dense'",
                when="has:dense",
            ),
        ),
    ),
    _COHERE2.but(
        *("cohere_compass_text", "CohereCompassForCausalLM"),
        pattern=Pattern(),
        rotary="always",
        rope=FamilyRope(
            shares=(), kinds={"full": (0.0, ""), "local": (0.0, "")}, sections=(24, 20, 20), layout="cycle"
        ),
    ),
    _EXAONE4,
    _EXAONE4.but("exaone_moe", "ExaoneMoeForCausalLM"),
    _EXAONE4.but(
        "kolibri1",
        "Kolibri1ForCausalLM",
        kv=_all(4),
        head_dim=128,
        eps=1e-6,
        positions=262144,
        pattern=Pattern(common="local", every=5),
        window=513,
    ),
    Family(
        *("flint", "FlintForCausalLM"),
        kv=_all(4),
        head_dim=128,
        positions=262144,
        norms=_HEADS_F32,
        pattern=Pattern(common="local", every=4, at=1, first=2, last=True),
        window=513,
        sinks=("full", "local"),
        rotary="windowed",
    ),
    Family(
        *("beam", "BeamForCausalLM"),
        kv=_all(8),
        head_dim=128,
        positions=8192,
        norms=_HEADS_F32,
        pattern=Pattern(common="local", every=6, last=True),
        window=512,
        q_scale="beam",
        rope=FamilyRope(
            shares=(),
            kinds={"full": (0.0, ""), "local": (1e4, "")},
            default={"sliding_attention": {"rope_theta": 10_000.0}, "full_attention": None},
        ),
    ),
    Family(
        *("granite_swa", "GraniteSWAForCausalLM"),
        kv=_all(4),
        positions=8192,
        pattern=Pattern(common="local", every=4, at=0),
        window=128,
        sinks=("full", "local"),
        scale=Scale(given="attention_multiplier", default=1.0),
        rotary="thetas",
    ),
    Family(
        *("granitemoe_swa", "GraniteMoeSWAForCausalLM"),
        pattern=Pattern(common="local", every=4, at=0),
        window=128,
        sinks=("full", "local"),
        scale=Scale(given="attention_multiplier", default=1.0),
        rotary="thetas",
    ),
    Family(
        *("muse_glimmer_text", ""),
        kv=_all(2),
        head_dim=128,
        eps=1e-5,
        positions=131072,
        norms=Norms(weight=False, multiply="before"),
        pattern=Pattern(common="local", every=4, from_end=True),
        window=2048,
        rotary="thetas",
        rope=FamilyRope(zero_on_special=True),
        q_factor=("qk_scale_factor", 3.87),
        notes=("The scale of decode has the factor of q, qk_scale_factor, in it.",),
    ),
    Family(
        *("muse_spark_text", ""),
        kv=_all(16),
        head_dim=64,
        eps=1e-5,
        positions=1048576,
        norms=Norms(weight=False, multiply="before"),
        pattern=Pattern(common="local", every=4, from_end=True),
        window=2048,
        rotary="thetas",
        rope=FamilyRope(default={"rope_theta": 500_000.0}, zero_on_special=True),
        q_factor=("qk_scale_factor", 5.4730064863875),
        notes=("The scale of decode has the factor of q, qk_scale_factor, in it.",),
    ),
    Family(
        *("mimo_v2_flash", "MiMoV2FlashForCausalLM"),
        kv=KvHeads(default=4, local_times=2),
        head_dim=192,
        v_head_dim=("v_head_dim", 128),
        positions=131072,
        pattern=Pattern(common="local", every=6, first=1),
        window=129,
        window_before="sliding_window_size",
        sinks=("local",),
        rope=FamilyRope(
            shares=(),
            share=1.0,
            plain_share=0.334,
            kinds={"full": (5e6, ""), "local": (1e4, "")},
            default={
                "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.334},
            },
        ),
        notes=("V is multiplied by attention_value_scale before append.",),
    ),
    Family(
        *("llama4_text", "Llama4ForCausalLM"),
        kv=_all(8),
        head_dim=128,
        eps=1e-5,
        positions=131072,
        norms=Norms(weight=False, order="after", multiply="before", when="use_qk_norm", roped=True),
        rope=FamilyRope(style="interleaved", theta=500_000.0),
        pattern=Pattern(
            by_flags=("chunked", "full"),
            every=4,
            every_field="no_rope_layer_interval",
            words={**SLIDING, "chunked_attention": "chunked"},
        ),
        chunk=8192,
        rotary="flags",
        q_scale="llama4",
    ),
    Family(
        *("gpt_neo", "GPTNeoForCausalLM"),
        names={
            "num_attention_heads": ("num_heads", "num_attention_heads"),
            "num_hidden_layers": ("num_layers", "num_hidden_layers"),
            "sliding_window": ("window_size",),
        },
        kv=KvHeads(always_all=True),
        divided=True,
        rope=None,
        pattern=Pattern(
            types=(),
            expanded="attention_types",
            words={"global": "full", "local": "local"},
            whole=("full", "local") * 12,
        ),
        window=256,
        scale=Scale(fixed=1.0),
    ),
)

# Three positions a token ----------------------------------------------------------------------------------------------

_QWEN2_VL: Final = _QWEN2.but(
    "qwen2_vl_text",
    "",
    kv=_all(8),
    divided=True,
    rope=FamilyRope(theta=1e6, sections=(16, 24, 24)),
    pattern=Pattern(special="local", from_layer=80),
)
_QWEN3_VL: Final = Family(
    "qwen3_vl_text",
    "Qwen3VLForCausalLM",
    kv=_all(32),
    head_dim=128,
    positions=128000,
    norms=_HEADS,
    rope=FamilyRope(theta=5e5, sections=(24, 20, 20), layout="cycle"),
)
_GLM4V: Final = Family(
    "glm4v_text",
    "",
    kv=_all(2),
    divided=True,
    positions=32768,
    rope=FamilyRope(style="interleaved", share=1.0, sections=(8, 12, 12)),
)
_MROPE: Final = (
    _QWEN2_VL,
    _QWEN2_VL.but("qwen2_5_vl_text", ""),
    _QWEN2_VL.but("qwen2_5_omni_text", "", kv=_all(4), divided=False, pattern=_QWEN_PATTERN, window=32768),
    _QWEN3_VL,
    _QWEN3_VL.but("qwen3_vl_moe_text", "", kv=_all(16), head_dim=None),
    _QWEN3_VL.but(
        "qwen3_omni_moe_text",
        "",
        kv=_all(4),
        head_dim=None,
        positions=32768,
        rope=FamilyRope(theta=1e6, sections=(24, 20, 20), layout="cycle"),
    ),
    _QWEN3_VL.but(
        "cosmos3_edge_text",
        "",
        kv=_all(8),
        norms=None,
        positions=131072,
        rope=FamilyRope(theta=1e8, default={"rope_theta": 1e8}, sections=(24, 20, 20), layout="cycle"),
    ),
    _GLM4V,
    _GLM4V.but("glm_ocr_text", "", kv=_all(8), divided=False, positions=131072),
    _GLM4V.but(
        "glm4v_moe_text",
        "",
        kv=_all(8),
        divided=False,
        positions=65536,
        rope=FamilyRope(share=0.5, sections=(8, 12, 12)),
    ),
    Family(
        "paddleocr_vl_text",
        "PaddleOCRVLForCausalLM",
        kv=_all(2),
        head_dim=128,
        positions=131072,
        rope=FamilyRope(theta=5e5, sections=(16, 24, 24)),
    ),
    Family(
        "ernie4_5_vl_moe_text",
        "",
        kv=_all(4),
        positions=131072,
        rope=FamilyRope(style="interleaved", theta=5e5, sections=(22, 22, 20), layout="hw_t"),
    ),
)

# Hybrids: layers with attention among layers that keep a state --------------------------------------------------------

_QWEN3_NEXT: Final = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    kv=_all(2),
    head_dim=256,
    positions=32768,
    norms=_GEMMA_HEADS,
    rope=FamilyRope(share=0.25),
    pattern=Pattern(common="linear", every=4, every_field="full_attention_interval", words=HYBRID),
)
_QWEN3_5: Final = _QWEN3_NEXT.but(
    "qwen3_5_text", "Qwen3_5ForCausalLM", kv=_all(4), rope=FamilyRope(share=0.25, sections=(11, 11, 10), layout="cycle")
)
_GRANITE_ROPE: Final = FamilyRope(when=("position_embedding_type", "rope"))
_BLOCKS: Final = ("layer_types", "layers_block_type")
_ZAMBA: Final = {"hybrid": "full", "mamba": "mamba", "linear_attention": "linear"}  # no other word stands for attention
_HYBRIDS: Final = (
    _QWEN3_NEXT,
    _QWEN3_5,
    _QWEN3_5.but("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", kv=_all(2)),
    _LLAMA.but(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        norms=_ROWS_F32,
        positions=65536,
        pattern=Pattern(common="linear", every=4, words=HYBRID),
    ),
    Family(
        "bamba",
        "BambaForCausalLM",
        kv=_all(8),
        positions=262144,
        rope=FamilyRope(share=0.5),
        pattern=Pattern(common="linear", types=(), lists="attn_layer_indices"),
    ),
    Family(
        "falcon_h1",
        "FalconH1ForCausalLM",
        kv=_all(8),
        positions=8192,
        pattern=Pattern(types=()),
        notes=("Every layer keeps a state beside its cache; K is multiplied by key_multiplier before append.",),
    ),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        rope=_GRANITE_ROPE,
        pattern=Pattern(common="linear", special="linear", types=_BLOCKS, words=HYBRID),
        scale=Scale(given="attention_multiplier", default=1.0),
    ),
    Family(
        "jamba",
        "JambaForCausalLM",
        kv=_all(8),
        positions=262144,
        rope=None,
        pattern=Pattern(
            common="mamba",
            every=8,
            every_field="attn_layer_period",
            at=4,
            at_field="attn_layer_offset",
            types=(),
            words=HYBRID,
        ),
    ),
    Family(
        *("lfm2", "Lfm2ForCausalLM"),
        kv=_all(8),
        eps=1e-5,
        names={"rms_norm_eps": ("norm_eps",)},
        positions=128000,
        norms=_HEADS,
        rope=FamilyRope(theta=1e6),
        pattern=Pattern(common="conv", lists="full_attn_idxs", words=HYBRID, every=1),
    ),
    Family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        kv=_all(8),
        eps=1e-5,
        names={"rms_norm_eps": ("norm_eps",)},
        positions=128000,
        norms=_HEADS,
        rope=FamilyRope(theta=1e6),
        pattern=Pattern(words=HYBRID),
    ),
    Family(
        *("lfm3", "Lfm3ForCausalLM"),
        kv=_all(4),
        head_dim=128,
        eps=1e-5,
        names={"rms_norm_eps": ("norm_eps", "rms_norm_eps")},
        positions=128000,
        norms=_HEADS,
        window=256,
        pattern=Pattern(common="conv", every=4, at=2, also=0, words=HYBRID),
        rope=FamilyRope(
            shares=(),
            kinds={"full": (1e6, ""), "local": (1e4, "")},
            default={
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_theta": 10_000.0},
            },
        ),
    ),
    Family(
        "minimax",
        "MiniMaxForCausalLM",
        kv=_all(8),
        positions=131072,
        rope=FamilyRope(theta=1e6),
        pattern=Pattern(common="linear", special="local", every=2, at=0, words={**HYBRID, "full_attention": "local"}),
        window=None,
    ),
    Family(
        *("nemotron_h", "NemotronHForCausalLM"),
        kv=_all(8),
        head_dim=128,
        positions=4096,
        rope=None,
        pattern=Pattern(
            types=("layer_types", "layers_block_type"),
            words=HYBRID,
            letters=("hybrid_override_pattern", {"M": "mamba", "E": "moe", "*": "full", "-": "mlp"}),
            whole=("linear", "moe", "full", "mlp"),
        ),
    ),
    Family(
        *("recurrent_gemma", "RecurrentGemmaForCausalLM"),
        names={"sliding_window": ("attention_window_size", "sliding_window")},
        rope=FamilyRope(share=0.5),
        window=2048,
        pattern=Pattern(
            types=(),
            units="block_types",
            words={"recurrent": "recurrent", "attention": "local"},
            whole=("recurrent", "recurrent", "local"),
        ),
    ),
    Family(
        *("zamba", "ZambaForCausalLM"),
        kv=_all(16),
        names={"head_dim": ("attention_head_dim",)},
        hidden_times=2,
        positions=4096,
        rope=None,
        scale=Scale(halved=True),
        pattern=Pattern(
            common="linear",
            every=6,
            every_field="attn_layer_period",
            at=4,
            at_field="attn_layer_offset",
            lead=("linear", "linear", "full"),
            types=_BLOCKS,
            words=_ZAMBA,
        ),
    ),
    Family(
        *("zamba2", "Zamba2ForCausalLM"),
        names={"head_dim": ("attention_head_dim",)},
        hidden_times=2,
        positions=4096,
        rope=FamilyRope(when=("use_mem_rope", "true")),
        scale=Scale(halved=True),
        pattern=Pattern(
            types=_BLOCKS,
            words=_ZAMBA,
            whole=(
                "linear",
                *("linear",) * 5,
                "full",
                *((*("linear",) * 5, "full") * 6),
                *("linear",) * 4,
                "full",
                *("linear",) * 3,
                "full",
                "linear",
                "linear",
            ),
        ),
    ),
    Family(
        *("kimi_linear", "KimiLinearForCausalLM"),
        positions=1048576,
        rope=None,
        rows=Rows(
            defaults={"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 512},
            interleaved=False,
        ),
        pattern=Pattern(
            common="linear", every=4, at=0, first=-1, lists="linear_attn_config.full_attn_layers", base=1, words=HYBRID
        ),
    ),
    Family(
        *("bailing_hybrid", "BailingHybridForCausalLM BailingMoeV2_5ForCausalLM"),
        positions=262144,
        rope=FamilyRope(theta=6e6),
        rows=Rows(
            defaults={"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 512},
            interleaved=True,
        ),
        pattern=Pattern(common="linear", every=6, every_field="layer_group_size", words=HYBRID),
    ),
)

# Latent rows ----------------------------------------------------------------------------------------------------------

_DEEPSEEK: Final = Family(
    "deepseek_v3 kimi_k2",
    "DeepseekV3ForCausalLM",
    kv=KvHeads(always_all=True),
    positions=4096,
    rows=Rows(),
    pattern=Pattern(types=()),
)
_INDEXED: Final = {"deepseek_sparse_attention": "indexed", "indexed_attention": "indexed", "full_attention": "indexed"}
_LATENT: Final = (
    _DEEPSEEK,
    _DEEPSEEK.but("deepseek_v2", "DeepseekV2ForCausalLM", positions=2048, rows=Rows(interleaved=True)),
    _DEEPSEEK.but("axk1", "AXK1ForCausalLM", positions=32768),
    _DEEPSEEK.but("glm4_moe_lite", "Glm4MoeLiteForCausalLM", positions=202752),
    _DEEPSEEK.but("youtu", "YoutuForCausalLM", positions=131072),
    _DEEPSEEK.but(
        *("longcat_flash", "LongcatFlashForCausalLM"),
        names={"num_hidden_layers": ("num_layers",)},
        positions=131072,
        rope=FamilyRope(theta=1e7),
        rows=Rows(interleaved=True, factor=True),
        layers_times=2,
    ),
    _DEEPSEEK.but("minicpm3", "MiniCPM3ForCausalLM", positions=32768, rows=Rows(interleaved=False)),
    _DEEPSEEK.but(
        *("mistral4", "Mistral4ForCausalLM"),
        positions=1048576,
        q_scale="ministral",
        rope=FamilyRope(
            default={
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        ),
    ),
    _DEEPSEEK.but(
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        positions=163840,
        rows=Rows(interleaved=True, index=Index(heads=64)),
        pattern=Pattern(common="indexed", special="indexed", words=_INDEXED),
    ),
    _DEEPSEEK.but(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        positions=202752,
        rows=Rows(interleaved=True, index=Index(heads=32, interleaved=True, shared=True, schedule=True)),
        pattern=Pattern(common="indexed", special="indexed", words=_INDEXED),
    ),
    _DEEPSEEK.but(
        "axk2",
        "AXK2ForCausalLM",
        positions=131072,
        rows=Rows(interleaved=True, index=Index(heads=16)),
        pattern=Pattern(common="indexed", special="indexed", words=_INDEXED),
    ),
    _DEEPSEEK.but(
        "hy_v4",
        "HYV4ForCausalLM",
        positions=262144,
        rows=Rows(interleaved=False, index=Index(heads=16, part="last", eps=None, f32=True, shared=True, every=4)),
        pattern=Pattern(common="indexed", special="indexed", words=_INDEXED),
        sinks=("indexed",),
    ),
)

# A window of rows and compressed entries ------------------------------------------------------------------------------

_COMPRESSED: Final = (
    Family("deepseek_v4", "DeepseekV4ForCausalLM", positions=1048576, compressed="own"),
    Family("deepseek_v41_text", "DeepseekV41ForCausalLM", positions=1048576, compressed="shared"),
)

# Absolute positions and ALiBi -----------------------------------------------------------------------------------------

_GPT2_NAMES: Final = {"num_attention_heads": ("n_head",), "hidden_size": ("n_embd",), "num_hidden_layers": ("n_layer",)}
_GPT2: Final = Family(
    "gpt2 gpt-sw3", "GPT2LMHeadModel", names=_GPT2_NAMES, kv=KvHeads(always_all=True), divided=True, rope=None
)
_ABSOLUTE: Final = (
    _GPT2.but(
        *("gpt2 gpt-sw3", "GPT2LMHeadModel"),
        refuses=(
            Refusal("scale_attn_by_inverse_layer_idx", "every layer has a scale of its own; valid: false"),
            Refusal("scale_attn_weights", "scores without a scale are not read; valid: true", when="false"),
        ),
    ),
    _GPT2.but("openai-gpt", "OpenAIGPTLMHeadModel"),
    _GPT2.but("ctrl", "CTRLLMHeadModel"),
    _GPT2.but(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        kv=KvHeads(field="", one_if="multi_query"),
        refuses=(Refusal("scale_attn_weights", "scores without a scale are not read; valid: true", when="false"),),
    ),
    _GPT2.but(
        "codegen",
        "CodeGenForCausalLM",
        rope=FamilyRope(style="interleaved", thetas=(), share=1.0, dims="rotary_dim", default={"rotary_dim": 64}),
    ),
    _GPT2.but(
        "gptj",
        "GPTJForCausalLM",
        rope=FamilyRope(style="interleaved", thetas=(), share=1.0, dims="rotary_dim", default={"rotary_dim": 64}),
    ),
    _GPT2.but("opt", "OPTForCausalLM", names={}),
    _GPT2.but("biogpt", "BioGptForCausalLM", names={}),
    _GPT2.but(
        "xglm",
        "XGLMForCausalLM",
        names={
            "num_attention_heads": ("attention_heads",),
            "hidden_size": ("d_model",),
            "num_hidden_layers": ("num_layers",),
        },
    ),
    _GPT2.but(
        "kosmos_2_text_model",
        "",
        names={
            "num_attention_heads": ("attention_heads",),
            "hidden_size": ("embed_dim",),
            "num_hidden_layers": ("layers",),
        },
    ),
    _GPT2.but(
        "kosmos_2_5_text_model",
        "",
        names={
            "num_attention_heads": ("attention_heads",),
            "hidden_size": ("embed_dim",),
            "num_hidden_layers": ("layers",),
        },
    ),
    _GPT2.but(
        *("bloom", "BloomForCausalLM"),
        names={
            "num_attention_heads": ("n_head", "num_attention_heads"),
            "hidden_size": ("n_embed", "hidden_size"),
            "num_hidden_layers": ("n_layer", "num_hidden_layers"),
        },
        alibi=True,
    ),
    _GPT2.but(
        *("mpt", "MPTForCausalLM MptForCausalLM"),
        names={"num_attention_heads": ("n_heads",), "hidden_size": ("d_model",), "num_hidden_layers": ("n_layers",)},
        kv=KvHeads(
            field="attn_config.kv_n_heads",
            words=(
                "attn_config.attn_type",
                {"multihead_attention": "heads", "multiquery_attention": "one", "grouped_query_attention": "field"},
            ),
        ),
        alibi="attn_config.alibi",
        scale=Scale(given="attn_config.softmax_scale"),
        refuses=(Refusal("attn_config.qk_ln", "append has RMS norms of q and k, no layer norms; valid: false"),),
    ),
    Family(
        *("falcon", "FalconForCausalLM"),
        names={"hidden_size": ("n_embed", "hidden_size")},
        kv=KvHeads(field="num_kv_heads", one_if="multi_query", unless="new_decoder_architecture"),
        divided=True,
        alibi="alibi",
        alibi_note="alibi_slopes are to be multiplied by head_dim ** -0.5: Falcon scales them together with q . k.",
    ),
    Family(
        *("dbrx", "DbrxForCausalLM"),
        names={
            "num_attention_heads": ("n_heads",),
            "hidden_size": ("d_model",),
            "num_hidden_layers": ("n_layers",),
            "max_position_embeddings": ("max_seq_len",),
        },
        kv=KvHeads(field="attn_config.kv_n_heads", default=1),
        divided=True,
        rope=FamilyRope(thetas=("rope_theta", "attn_config.rope_theta")),
    ),
)

FAMILIES: Final = (*_DENSE, *_WINDOWED, *_MROPE, *_HYBRIDS, *_LATENT, *_COMPRESSED, *_ABSOLUTE)
BY_TYPE: Final[Mapping[str, Family]] = {name: family for family in FAMILIES for name in family.types.split()}
BY_CLASS: Final[Mapping[str, tuple[Family, ...]]] = {
    name: tuple(family for family in FAMILIES if name in family.classes.split())
    for name in dict.fromkeys(name for family in FAMILIES for name in family.classes.split())
}
