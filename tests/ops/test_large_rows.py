"""Rows of many or of large heads: what a block keeps in shared memory fits, on every architecture's 48 KB."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen import Block, KernelSet, Layout, Paged, Quant, ops, presets
from kvgen.codegen.emit import render_all, units_of
from kvgen.compile import compile_many, default_cache
from kvgen.schema.loader import LoadedSet
from kvgen.schema.norm import RmsNorm
from tests.support.append_sets import NEOX

_ONE = Quant(dtype="i8", scale_dtype="f32", block=Block(dim=1))
_APART = Layout(k="page layer token head dim", v="layer page token head dim")
_SCALED: dict[str, Any] = {"dtype": "bf16", "head_dim": 128, "granularity": 128}
CASES: dict[str, tuple[Any, list[Any]]] = {
    "xpacked_256": (presets.vllm_xpacked(dtype="bf16", kv_heads=4, head_dim=256), [ops.Append(rope=NEOX)]),
    "xpacked_512": (presets.vllm_xpacked(dtype="bf16", kv_heads=2, head_dim=512), [ops.Append(rope=NEOX)]),
    "scaled_64": (presets.max_paged_scaled(kv_heads=64, **_SCALED), [ops.Append(rope=NEOX, bias=True)]),
    "scaled_128": (presets.max_paged_scaled(kv_heads=128, **_SCALED), [ops.Append(rope=NEOX)]),
    "nvfp4_128": (presets.max_nvfp4(dtype="bf16", kv_heads=128, head_dim=128), [ops.NormCache(), ops.Scatter()]),
    "a_scale_a_code": (Paged(dtype="bf16", kv_heads=8, head_dim=1024, page_size=16, quant=_ONE), [ops.Append()]),
    # NVRTC 13.5 died of this one.
    "two_heads": (
        Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16, layout=_APART, quant=_ONE),
        [ops.Append()],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_shared_memory(name: str) -> None:
    cache, operations = CASES[name]
    kernels = KernelSet(name=name, q_heads=cache.kv_heads, cache=cache, ops=operations)
    loaded = LoadedSet(kernels, "tests/ops/test_large_rows.py", "")
    jobs: list[Any] = [(unit, "sm_90a", "cubin") for unit in units_of(loaded, render_all([loaded]), "generated")]
    for done in compile_many(jobs, cache=default_cache()):
        assert done.resources is not None
        assert done.resources.static_shared <= 48 << 10 and done.resources.spill_loads == 0, done


def test_a_row_that_no_block_holds() -> None:
    """A norm over a whole row of keys that wait in shared memory, at once."""
    cache = presets.max_paged_scaled(kv_heads=128, **_SCALED)
    with pytest.raises(
        ValueError, match=r"ops: got rows of 128 heads x 128, of which a norm over the whole row needs \d+ bytes"
    ):
        KernelSet(q_heads=128, cache=cache, ops=[ops.Append(k_norm=RmsNorm(over="row"))])
