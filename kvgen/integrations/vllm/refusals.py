"""Why vLLM may not choose kvgen's backends, in sentences: the argument, what it is, what is served. Knows no version of vLLM.

vLLM asks a backend before it loads a model, and prints what the backend answers. Its own reasons, such as "block_size not
supported", say neither what was asked for nor what would do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

OTHER: Final = "choose another --attention-backend"
# vLLM's reason -> the argument that it is about, and the rule. Reasons that are not here stay as they are.
_RULES: Final[dict[str, tuple[str, str]]] = {
    "dtype not supported": ("dtype", "{name} computes in {dtypes}; pass one of these"),
    "kv_cache_dtype not supported": ("kv_cache_dtype", "{name} stores {kv_dtypes}; pass one of these"),
    "block_size not supported": ("block_size", "{name}'s pages hold {pages} tokens; pass such a number"),
    "MLA not supported": ("use_mla", "{name} attends over K and V of heads; pass --attention-backend KVGEN_MLA"),
    "non-MLA not supported": ("use_mla", "{name} attends over latent rows; pass --attention-backend KVGEN"),
    "compute capability not supported": (
        "device_capability",
        f"{{name}}'s kernels run on GPUs of 8.0 to 9.0, 10.x and 12.x; {OTHER}",
    ),
    "attention sinks not supported": ("has_sink", f"{{name}} has no sinks; {OTHER}"),
    "sparse not supported": ("use_sparse", f"{{name}} reads every token; {OTHER}"),
    "partial multimodal token full attention not supported": (
        "use_mm_prefix",
        f"{{name}} attends to earlier tokens only, within an image too; {OTHER}",
    ),
    "per-head quant scales not supported": (
        "use_per_head_quant_scales",
        f"{{name}} has a scale of K and one of V a layer; {OTHER}",
    ),
    "sliding window not supported": ("has_sliding_window", f"{{name}} has no window; {OTHER}"),
    "R-SWA not supported": ("use_rswa", f"{{name}}'s windows move with every token; {OTHER}"),
    "non-causal attention not supported": ("use_non_causal", f"{{name}} attends to earlier tokens only; {OTHER}"),
    "batch invariance not supported": ("VLLM_BATCH_INVARIANT", f"{{name}}'s bits may depend on the batch; {OTHER}"),
    "PCP not supported": (
        "prefill_context_parallel_size",
        f"{{name}} has every token of its heads on one rank; {OTHER}",
    ),
    "DCP not supported": (
        "decode_context_parallel_size",
        f"{{name}} has every token of its heads on one rank; {OTHER}",
    ),
}
_ATTENTION_TYPE: Final = "attention type "


def in_sentences(
    reasons: Sequence[str],
    asked: Mapping[str, Any],
    *,
    name: str,
    kv_dtypes: Sequence[str],
    page_multiple: int,
    dtypes: str = "bfloat16, float16 or float32",
) -> list[str]:
    """vLLM's `reasons` against the backend `name`, as sentences; `asked` are the arguments of its validate_configuration.

    The backend computes in `dtypes`, stores `kv_dtypes`, and its pages hold multiples of `page_multiple` tokens.
    """
    words = {
        "name": name,
        "dtypes": dtypes,
        "kv_dtypes": ", ".join(kv_dtypes),
        "pages": "any number of" if page_multiple == 1 else f"a multiple of {page_multiple}",
    }
    return [_sentence(reason, asked, words) for reason in reasons]


def _sentence(reason: str, asked: Mapping[str, Any], words: Mapping[str, str]) -> str:
    if reason.startswith(_ATTENTION_TYPE):
        kind = getattr(asked.get("attn_type"), "value", asked.get("attn_type"))
        return f"attn_type: got {kind!r}; {words['name']} attends over a decoder's own tokens; {OTHER}"
    if reason not in _RULES:
        return reason
    argument, rule = _RULES[reason]
    got = f"got {asked[argument]!r}; " if argument in asked else ""
    return f"{argument}: {got}{rule.format_map(words)}"
