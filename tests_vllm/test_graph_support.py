"""What the builders say of CUDA graphs, and what vLLM makes of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport

from kvgen.integrations.vllm.v0_32 import KvgenMetadataBuilder
from kvgen.integrations.vllm.v0_32_mla import KvgenMLAMetadataBuilder

UNIFORM, SINGLE = AttentionCGSupport.UNIFORM_BATCH, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


@pytest.mark.parametrize(
    ("builder", "drafts", "wanted"),
    [
        (KvgenMetadataBuilder, None, UNIFORM),
        (KvgenMetadataBuilder, 15, UNIFORM),
        (KvgenMLAMetadataBuilder, None, UNIFORM),
        (KvgenMLAMetadataBuilder, 7, UNIFORM),
        (KvgenMLAMetadataBuilder, 8, SINGLE),  # a window of 9 rows is cut
    ],
)
def test_what_is_said(builder: type, drafts: int | None, wanted: AttentionCGSupport) -> None:
    speculative = None if drafts is None else SimpleNamespace(num_speculative_tokens=drafts)
    found = builder.get_cudagraph_support(SimpleNamespace(speculative_config=speculative), None)  # type: ignore[attr-defined]
    assert found is wanted


@pytest.mark.parametrize(
    ("support", "window", "mode"),
    [
        (UNIFORM, 1, "FULL_AND_PIECEWISE"),
        (UNIFORM, 4, "FULL_AND_PIECEWISE"),
        (SINGLE, 1, "FULL_AND_PIECEWISE"),
        (SINGLE, 9, "PIECEWISE"),
    ],
)
@pytest.mark.parametrize("asked", ["FULL_AND_PIECEWISE", "FULL"])
def test_the_graphs_that_vllm_captures(asked: str, support: AttentionCGSupport, window: int, mode: str) -> None:
    """Whole forwards for steps without prompts, pieces between attention layers for all others; docs/vllm.md says so."""
    config = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode[asked])
    config.splitting_ops = list(CompilationConfig._attention_ops)
    config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = [4, 36, 72], 72
    found = config.resolve_cudagraph_mode_and_sizes(support, "KVGEN", uniform_decode_query_len=window)
    assert found is CUDAGraphMode[mode]
