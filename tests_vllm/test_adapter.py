"""What the adapter refuses and does on its own, without an engine."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvgen.errors import ArgumentError, ConfigError
from kvgen.integrations.vllm.v0_32 import KvgenBackend, KvgenImpl, KvgenMetadataBuilder

CONFIG: Any = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4),
    speculative_config=None,
    compilation_config=SimpleNamespace(max_cudagraph_capture_size=None, static_forward_context={}),
)


def builder(**spec: int) -> KvgenMetadataBuilder:
    return KvgenMetadataBuilder(SimpleNamespace(**spec), [], CONFIG, torch.device("cpu"))


def test_values_of_other_dims_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^head_size_v: got 128 beside a head_size of 192; KVGEN's heads of K and V"):
        builder(head_size=192, head_size_v=128)
    builder(head_size=192, head_size_v=192)


@pytest.mark.parametrize("causal", [False, torch.ones(2, dtype=torch.bool)])
def test_rows_that_see_later_tokens_are_refused(causal: Any) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"causal: got {causal!r}; KVGEN attends to earlier tokens only")):
        builder(head_size=64).build(0, SimpleNamespace(causal=causal))


def test_codes_as_output_are_refused() -> None:
    rows = torch.ones(3, 2, 8)
    with pytest.raises(ArgumentError, match=r"^output_scale: KVGEN writes its output in the model's dtype; it is None"):
        KvgenImpl.forward(SimpleNamespace(), None, rows, rows, rows, rows, None, rows, output_scale=torch.ones(1))


def test_a_run_without_a_cache_gives_zeros() -> None:
    """vLLM measures memory before it has pages."""
    rows, out = torch.ones(3, 2, 8), torch.ones(3, 2, 8)
    assert KvgenImpl.forward(SimpleNamespace(), None, rows, rows, rows, rows, None, out) is out
    assert not out.any()


def test_gpus_that_kernels_run_on() -> None:
    def runs(major: int, minor: int) -> bool:
        return KvgenBackend.supports_compute_capability(SimpleNamespace(major=major, minor=minor))

    assert runs(8, 0) and runs(8, 6) and runs(9, 0) and runs(10, 3) and runs(12, 1)
    assert not runs(7, 5)
    (said,) = KvgenBackend.validate_configuration(
        head_size=64,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=None,
        use_mla=False,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=SimpleNamespace(major=7, minor=5),
        attn_type="decoder",
    )
    assert (
        said.startswith("device_capability: got ")
        and "KVGEN's kernels run on GPUs of 8.0 to 9.0, 10.x and 12.x" in said
    )
