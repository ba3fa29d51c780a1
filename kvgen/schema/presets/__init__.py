"""Other engines' caches as specs: one function an engine's layout, named after it.

Each returns a cache whose axes, page table, lengths and quantization are that engine's, so that kvgen's kernels run on the
engine's own memory. In the shapes below, N is the number of pages (or blocks), L of layers, P of tokens a page, H of kv
heads and D the head dim; strides are in elements of a packed pool (in bytes where a row or page is one of bytes). Page, K/V
and layer strides are read from the tensors at run time: padded pages, several layers in a page, and K and V as two views
of one buffer all work without another preset.

fp8 and int8 caches with a scale a tensor (`kv_cache_dtype`) take it as a device array f32 `[1, 1]` a layer, `k_scale` and
`v_scale`, by which codes are multiplied when they are read.
"""

from __future__ import annotations

import difflib
import sys
from typing import Any

from kvgen.schema.presets.flash import (
    flash_attention,
    flash_attention_varlen,
    flashmla,
    flashmla_fp8,
    flashmla_v4,
    flashmla_v41,
    flashmla_v41_fp4,
)
from kvgen.schema.presets.flashinfer import (
    flashinfer_hnd,
    flashinfer_mla,
    flashinfer_nhd,
    flashinfer_nvfp4,
    flashinfer_v4_nvfp4,
)
from kvgen.schema.presets.integer import kivi, lmdeploy_int4, lmdeploy_int8, lmdeploy_turboquant
from kvgen.schema.presets.kvbm import kvbm_operational, kvbm_universal
from kvgen.schema.presets.modular import (
    max_continuous,
    max_indexer,
    max_mla,
    max_mla_fp8,
    max_nvfp4,
    max_paged,
    max_paged_fp8,
    max_paged_scaled,
)
from kvgen.schema.presets.sglang import sglang, sglang_indexer, sglang_mla, sglang_mla_fp8, sglang_v4, sglang_v4_fp4
from kvgen.schema.presets.tensorrt_llm import tensorrt_llm, tensorrt_llm_nvfp4
from kvgen.schema.presets.vllm import (
    vllm,
    vllm_hnd,
    vllm_indexer,
    vllm_indexer_fp4,
    vllm_interleaved,
    vllm_mla,
    vllm_mla_fp8,
    vllm_nvfp4,
    vllm_packed,
    vllm_turboquant,
    vllm_v4,
    vllm_v41,
    vllm_v41_fp4,
    vllm_xpacked,
)

__all__ = [
    "flash_attention",
    "flash_attention_varlen",
    "flashinfer_hnd",
    "flashinfer_mla",
    "flashinfer_nhd",
    "flashinfer_nvfp4",
    "flashinfer_v4_nvfp4",
    "flashmla",
    "flashmla_fp8",
    "flashmla_v4",
    "flashmla_v41",
    "flashmla_v41_fp4",
    "kivi",
    "kvbm_operational",
    "kvbm_universal",
    "lmdeploy_int4",
    "lmdeploy_int8",
    "lmdeploy_turboquant",
    "max_continuous",
    "max_indexer",
    "max_mla",
    "max_mla_fp8",
    "max_nvfp4",
    "max_paged",
    "max_paged_fp8",
    "max_paged_scaled",
    "sglang",
    "sglang_indexer",
    "sglang_mla",
    "sglang_mla_fp8",
    "sglang_v4",
    "sglang_v4_fp4",
    "tensorrt_llm",
    "tensorrt_llm_nvfp4",
    "vllm",
    "vllm_hnd",
    "vllm_indexer",
    "vllm_indexer_fp4",
    "vllm_interleaved",
    "vllm_mla",
    "vllm_mla_fp8",
    "vllm_nvfp4",
    "vllm_packed",
    "vllm_turboquant",
    "vllm_v4",
    "vllm_v41",
    "vllm_v41_fp4",
    "vllm_xpacked",
]


# A module is no preset: `presets.flashinfer(...)` shall say which presets there are.
for _module in ("flash", "flashinfer", "integer", "modular", "quants"):
    globals().pop(_module, None)


def __getattr__(name: str) -> Any:
    prefix = name.partition("_")[0]
    alike = [n for n in __all__ if n.partition("_")[0] == prefix]
    near = [*alike, *(n for n in difflib.get_close_matches(name, __all__, n=3) if n not in alike)]
    said = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(__all__)}"
    raise AttributeError(
        f"presets.{name}: kvgen has no such preset; {said}",
        name=name,
        obj=sys.modules[__name__],
    )
