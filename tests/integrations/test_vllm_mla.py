"""MLA layers of vLLM without vLLM: their kernel sets, which form attends to how many rows, windows of a step."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from kvgen.integrations.vllm.mla import in_windows
from kvgen.integrations.vllm.mla_shard import MlaShard, absorbed_rows, attended_set, heads_set, stored_set
from kvgen.integrations.vllm.step import Batch
from kvgen.runtime import mla_form

DEEPSEEK: Final[dict[str, Any]] = {
    "heads": 16,
    "latent_dim": 512,
    "rope_dim": 64,
    "nope_dim": 128,
    "v_dim": 128,
    "dtype": "bf16",
    "scale": 0.1,
}


def test_few_rows_take_the_absorbed_form() -> None:
    """As many as `mla_form` has over a long prefix; without one it has more."""
    rows = absorbed_rows(MlaShard(**DEEPSEEK))
    assert (rows, mla_form(rows, 2**24), mla_form(rows + 1, 2**24)) == (170, "absorbed", "decompressed")
    assert mla_form(rows + 1, 0) == "absorbed"


def test_the_absorbed_form_is_never_dearer_where_latent_rows_are_narrow() -> None:
    assert absorbed_rows(MlaShard(**(DEEPSEEK | {"latent_dim": 64}))) >= 8192


@pytest.mark.parametrize(
    ("kind", "row", "quant"), [("auto", 576, None), ("fp8", 576, "e4m3"), ("fp8_ds_mla", 576, "e4m3")]
)
def test_sets(kind: str, row: int, quant: str | None) -> None:
    """The cache as it is written and as it is attended to are the same memory; heads have K's dims and V's."""
    shard = MlaShard(**DEEPSEEK, kv_cache_dtype=kind)
    stored, attended, heads = (make(shard, 32, ("sm_90a",)) for make in (stored_set, attended_set, heads_set))
    assert [op.name for op in attended.ops][-2:] == ["mla_decode", "mla_window"]
    assert [op.name for op in stored.ops][:2] == ["append", "gather"]
    assert [op.name for op in heads.ops] == ["extend", "extend_context", "merge_states"]
    for kernels in (stored, attended):
        cache = kernels.kv
        assert (cache.head_dim, cache.page_tokens, cache.quants["k"] and cache.quants["k"].dtype) == (row, 32, quant)
    rows, same = (kernels.kv.storage.tensors[0] for kernels in (stored, attended))
    assert rows == same
    # Kernels read codes with one scale a layer without it: the scale multiplies q and the output.
    assert (stored.kv.storage.tensors != attended.kv.storage.tensors) == (kind == "fp8")
    assert (heads.q_heads, heads.kv.kv_heads, heads.kv.head_dim, heads.kv.v_dim) == (16, 16, 192, 128)


def numbers(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def test_windows_of_a_step() -> None:
    """Requests of 1, 13 and 8 rows: the second becomes two, of which the first ends 5 tokens earlier."""
    table = numbers([[1, 2], [3, 4], [5, 6]])
    batch = Batch(numbers([0, 1, 14, 22]), numbers([30, 40, 8]), table, 22, 13)
    found = in_windows(batch, [1, 13, 8], numbers)
    assert found.query_start_loc.tolist() == [0, 1, 9, 14, 22]
    assert found.seq_lens.tolist() == [30, 35, 40, 8]
    assert found.block_table.tolist() == [[1, 2], [3, 4], [3, 4], [5, 6]]
    assert (found.rows, found.most_rows) == (22, 8)
    short = Batch(numbers([0, 1, 9]), numbers([30, 40]), table[:2], 9, 8)
    assert in_windows(short, [1, 8], numbers) is short
