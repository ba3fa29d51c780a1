"""Multimodal models: where a config.json has the text model's own config, and which text model it is where it does not say.

Any config with an object at one of `PLACES` is read by that object, whose model_type names the family; in older files the
text model's fields stand beside the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PLACES: Final = (
    ("text_config",),
    ("thinker_config", "text_config"),
    ("language_config",),
    ("llm_config",),
    ("language_model_config",),
    ("decoder",),
    ("transformer_layer_config",),  # drafts of vLLM's speculators
)

# Text type -> the multimodal model_types and class names that hold one, as transformers 5.23 has them.
HOLDERS: Final[Mapping[str, str]] = {
    "aria_text": "aria:AriaForConditionalGeneration",
    "cohere2": "aya_vision:AyaVisionForConditionalGeneration cohere2_vision:Cohere2VisionForConditionalGeneration",
    "cohere_compass_text": "cohere_compass:CohereCompassForConditionalGeneration",
    "cosmos3_edge_text": "cosmos3_edge:Cosmos3EdgeForConditionalGeneration",
    "deepseek_ocr2_text": "deepseek_ocr2:DeepseekOcr2ForConditionalGeneration",
    "deepseek_v41_text": "deepseek_v41:DeepseekV41ForCausalLM",
    "deepseek_v3": "kimi_k25:Kimi_K25ForConditionalGeneration",
    "diffusion_gemma_text": "diffusion_gemma:DiffusionGemmaForBlockDiffusion",
    "dots3_note_text": "dots3_note:Dots3NoteForCausalLM",
    "emu3_text_model": "emu3:Emu3ForCausalLM",
    "ernie4_5_vl_moe_text": "ernie4_5_vl_moe:Ernie4_5_VLMoeForConditionalGeneration",
    "exaone4": "exaone4_5:Exaone4_5_ForConditionalGeneration",
    "gemma": "paligemma:PaliGemmaForConditionalGeneration",
    "gemma3_text": "gemma3:Gemma3ForConditionalGeneration shieldgemma2:Gemma3ForConditionalGeneration",
    "gemma3n_text": "gemma3n:Gemma3nForConditionalGeneration",
    "gemma4_text": "gemma4:Gemma4ForConditionalGeneration",
    "gemma4_unified_text": (
        "gemma4_unified:Gemma4UnifiedForConditionalGeneration "
        "gemma4_unified_assistant:Gemma4UnifiedAssistantForCausalLM"
    ),
    "glm4v_moe_text": "glm4v_moe:Glm4vMoeForConditionalGeneration",
    "glm4v_text": (
        "glm46v:Glm46VForConditionalGeneration glm4v:Glm4vForConditionalGeneration glmga:Glm46VForConditionalGeneration"
    ),
    "glm5_next_text": "glm5_next:Glm5NextForConditionalGeneration",
    "glm_ocr_text": "glm_ocr:GlmOcrForConditionalGeneration",
    "granite": (
        "granite_speech:GraniteSpeechForConditionalGeneration "
        "granite_speech_plus:GraniteSpeechPlusForConditionalGeneration"
    ),
    "granite4_vision_text": "granite4_vision:Granite4VisionForConditionalGeneration",
    "granite_docling_text": "granite_docling:GraniteDoclingForConditionalGeneration",
    "hunyuan_vl_text": "hunyuan_vl:HunYuanVLForConditionalGeneration",
    "hyperclovax": "hyperclovax_vision_v2:HyperCLOVAXVisionV2ForConditionalGeneration",
    "inkling2_text": "inkling2:Inkling2ForConditionalGeneration",
    "inkling_text": "inkling_mm_model:InklingForConditionalGeneration",
    "kosmos_2_5_text_model": "kosmos-2.5:Kosmos2_5ForConditionalGeneration",
    "kosmos_2_text_model": "kosmos-2:Kosmos2ForConditionalGeneration",
    "lfm2": "lfm2_vl:Lfm2VlForConditionalGeneration",
    "lfm3": "lfm3_vl:Lfm3VlForConditionalGeneration",
    "llama": (
        "deepseek_vl:DeepseekVLForConditionalGeneration "
        "deepseek_vl_hybrid:DeepseekVLHybridForConditionalGeneration glmasr:GlmAsrForConditionalGeneration "
        "idefics3:Idefics3ForConditionalGeneration janus:JanusForConditionalGeneration "
        "llava:LlavaForConditionalGeneration llava_next:LlavaNextForConditionalGeneration "
        "llava_next_video:LlavaNextVideoForConditionalGeneration "
        "perception_lm:PerceptionLMForConditionalGeneration smolvlm:SmolVLMForConditionalGeneration "
        "video_llava:VideoLlavaForConditionalGeneration vipllava:VipLlavaForConditionalGeneration "
        "voxtral:VoxtralForConditionalGeneration"
    ),
    "llama4_text": "llama4:Llama4ForConditionalGeneration",
    "minimax_m3_vl_text": "minimax_m3_vl:MiniMaxM3SparseForConditionalGeneration",
    "mistral": "idefics2:Idefics2ForConditionalGeneration mistral3:Mistral3ForConditionalGeneration",
    "mistral_large4_text": "mistral_large4:MistralLarge4ForConditionalGeneration",
    "mllama_text_model": "mllama:MllamaForCausalLM",
    "molmo2_text": "molmo2:Molmo2ForConditionalGeneration",
    "muse_glimmer_text": "muse_glimmer:MuseGlimmerForConditionalGeneration",
    "muse_spark_text": "muse_spark:MuseSparkForConditionalGeneration",
    "nemotron_h": (
        "nemo_speechlm:Nemotron3_5TranscribeForConditionalGeneration nemotron_h_omni:NemotronH_Omni_Reasoning_V3"
    ),
    "opt": (
        "blip-2:Blip2ForConditionalGeneration instructblip:InstructBlipForConditionalGeneration "
        "instructblipvideo:InstructBlipVideoForConditionalGeneration"
    ),
    "paddleocr_vl_text": "paddleocr_vl:PaddleOCRVLForConditionalGeneration",
    "persimmon": "fuyu:FuyuForCausalLM",
    "pix2struct_text_model": "pix2struct:Pix2StructForConditionalGeneration",
    "qwen2": (
        "fast_vlm:FastVlmForConditionalGeneration got_ocr2:GotOcr2ForConditionalGeneration "
        "internvl:InternVLForConditionalGeneration llava_onevision:LlavaOnevisionForConditionalGeneration "
        "ovis2:Ovis2ForConditionalGeneration pp_chart2table:GotOcr2ForConditionalGeneration "
        "qwen2_audio:Qwen2AudioForConditionalGeneration vibevoice_asr:VibeVoiceAsrForConditionalGeneration "
        "video_llama_3:VideoLlama3ForConditionalGeneration"
    ),
    "qwen2_5_omni_text": (
        "qwen2_5_omni:Qwen2_5OmniForConditionalGeneration "
        "qwen2_5_omni_thinker:Qwen2_5OmniThinkerForConditionalGeneration"
    ),
    "qwen2_5_vl_text": "qwen2_5_vl:Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl_text": "qwen2_vl:Qwen2VLForConditionalGeneration",
    "qwen3": (
        "fun_asr_nano:FunAsrNanoForConditionalGeneration lighton_ocr:LightOnOcrForConditionalGeneration "
        "moss_transcribe_diarize:MossTranscribeDiarizeForConditionalGeneration "
        "qianfan_ocr:QianfanOCRForConditionalGeneration qwen3_asr:Qwen3ASRForConditionalGeneration"
    ),
    "qwen3_5_moe_text": "qwen3_5_moe:Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_text": (
        "minicpm_ocr:MiniCPMOcrForConditionalGeneration minicpmv4_6:MiniCPMV4_6ForConditionalGeneration "
        "minicpmv4_7:MiniCPMV4_7ForConditionalGeneration qwen3_5:Qwen3_5ForConditionalGeneration"
    ),
    "qwen3_omni_moe_text": (
        "qwen3_omni_moe:Qwen3OmniMoeForConditionalGeneration "
        "qwen3_omni_moe_thinker:Qwen3OmniMoeThinkerForConditionalGeneration"
    ),
    "qwen3_vl_moe_text": "qwen3_vl_moe:Qwen3VLMoeForConditionalGeneration",
    "qwen3_vl_text": "cosmos3_omni:Cosmos3OmniForConditionalGeneration qwen3_vl:Qwen3VLForConditionalGeneration",
    "qwen4_exp_text": "qwen4_exp:Qwen4ExpForCausalLM",
    "step3p5": "step3p7:Step3p7ForConditionalGeneration",
    "t5gemma2_decoder": "t5gemma2:T5Gemma2ForConditionalGeneration",
    "unlimited_ocr_text": "unlimited_ocr:UnlimitedOcrForConditionalGeneration",
    "voxtral_realtime_text": "voxtral_realtime:VoxtralRealtimeForConditionalGeneration",
}

TEXT_OF_TYPE: Final[Mapping[str, str]] = {
    pair.partition(":")[0]: text for text, pairs in HOLDERS.items() for pair in pairs.split()
}
TEXT_OF_CLASS: Final[Mapping[str, str]] = {
    pair.partition(":")[2]: text for text, pairs in HOLDERS.items() for pair in pairs.split()
}
