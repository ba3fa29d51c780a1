"""Models that kvgen does not read: what each would need, and whether that lies in kvgen's scope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_STATES: Final = (
    "no layer has keys and values; a spec written by hand has a state per request (a State cache), and no reader writes "
    "one"
)
_BY_HAND: Final = (
    "a spec written by hand has cross attention (a Ragged cache, or cross=True of ops.Decode and ops.Extend), and no reader "
    "writes one"
)
_ENCODER: Final = f"an encoder, or a decoder that attends to one; {_BY_HAND}"
_CROSS: Final = f"some layers attend to another model's output; {_BY_HAND}"

# model_type -> why not.
MISSING: Final[Mapping[str, str]] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _STATES),
    **dict.fromkeys(
        (
            *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small"),
            *(
                "blip_text_model",
                "camembert",
                "data2vec-text",
                "electra",
                "ernie",
                "git",
                "marian",
                "mbart",
                "megatron-bert",
            ),
            *("mvp", "pegasus", "plbart", "pp_formulanet_text", "prophetnet", "reformer", "rembert", "roberta"),
            *(
                "roberta-prelayernorm",
                "roc_bert",
                "roformer",
                "t5gemma2_decoder",
                "trocr",
                "whisper",
                "xlm",
                "xlm-roberta",
            ),
            *("xlm-roberta-xl", "xlnet", "xmod", "pix2struct_text_model", "udop", "musicgen", "musicgen_melody", "pi0"),
        ),
        _ENCODER,
    ),
    **dict.fromkeys(("mllama", "mllama_text_model", "idefics", "evolla", "blt"), _CROSS),
    "diffllama": "the difference of two softmaxes over halves of V; rare, no operation has it",
    "doge": "a mask computed from V; rare, no operation has it",
    "cpmant": "a learned bias per bucket of distances and segments; rare, no operation has it",
    "nanochat": "RoPE that rotates backwards, by the opposite angle; Rope has no such field yet: give "
    "ops.Append a table of negated sines (angles='halves')",
    "hunyuan_vl_text": "sections of positions that are of a head's elements, so that the two of a pair rotate by different ones; "
    "ops.Append deals pairs alone",
    "glm5_next_text": "pooled keys of an indexer whose scores and top-k no operation computes yet",
    "qwen4_exp_text": "compressed keys of an indexer whose scores and top-k no operation computes yet",
    "dots3_note_text": "latent rows with a norm of their RoPE part, windows and an indexer; ops.MlaDecode has no window yet",
    "mistral_large4_text": "latent rows that layers share, an indexer, q scaled per head; ops.Append has no such scale yet",
    "inkling_text": "a bias per distance computed from q, and a convolution before K and V; ops.Append has none yet",
    "inkling2_text": "a bias per distance computed from q, and a convolution before K and V; ops.Append has none yet",
    "zaya": "a convolution over q, K and V before the cache; ops.Append has none yet",
    "unlimited_ocr_text": "a window over what was generated beside the whole prompt; ops.Decode's Mask has no such window yet",
    "diffusion_gemma_text": "a canvas of tokens that see each other, which Mask(block=) has; no reader tells its blocks yet",
}
MISSING_CLASSES: Final[Mapping[str, str]] = {
    "MambaForCausalLM": "mamba",
    "Mamba2ForCausalLM": "mamba2",
    "FalconMambaForCausalLM": "falcon_mamba",
    "RwkvForCausalLM": "rwkv",
    "xLSTMForCausalLM": "xlstm",
    "MllamaForConditionalGeneration": "mllama",
    "IdeficsForVisionText2Text": "idefics",
    "BltForCausalLM": "blt",
    "DiffLlamaForCausalLM": "diffllama",
    "DogeForCausalLM": "doge",
    "CpmAntForCausalLM": "cpmant",
    "NanoChatForCausalLM": "nanochat",
    "Qwen4ExpForCausalLM": "qwen4_exp_text",
    "Dots3NoteForCausalLM": "dots3_note_text",
    "InklingForCausalLM": "inkling_text",
    "Inkling2ForCausalLM": "inkling2_text",
    "ZayaForCausalLM": "zaya",
}
