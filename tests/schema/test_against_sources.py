"""Presets beside the sources of engines: shapes, strides and floors that their callers have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvgen
from kvgen import KernelSet, ops, presets
from kvgen.errors import ArgumentError
from kvgen.runtime.cpu import machine


@pytest.mark.parametrize("tokens", [61, 69, 64])
def test_flashmla_pages_of_any_number_of_rows(tokens: int) -> None:
    """FlashMLA's callers: `[N, P, 1, 584]` over pages a multiple of 576 bytes apart, as `[N, P * 584]`. Pages side by side are
    refused with the distance that is taken."""
    cache = presets.flashmla_v4(page_size=tokens)
    module: Any = kvgen.load(KernelSet(name="pages", q_heads=16, cache=cache, ops=[ops.Gather()], arch=["sm_80"]))
    nbytes, apart = tokens * 584, -(-tokens * 584 // 576) * 576
    pages = np.zeros((3, apart), np.uint8)[:, :nbytes]
    tables = {"lengths": np.zeros(1, np.int32), "page_table": np.zeros((1, 1), np.int32)}
    names = {table.name: tables[table.name] for table in module.Cache.TABLES}
    module.Cache([pages], **names)
    with pytest.raises(
        ArgumentError, match=rf"a multiple of 16|with a page stride of {apart} bytes|a multiple of that"
    ):
        module.Cache([np.zeros((3, nbytes), np.uint8)], **names)


@pytest.mark.parametrize("recipe", ["amax", "pow2"])
def test_the_floor_of_sglang_s_index_keys(recipe: Any) -> None:
    """SGLang's writers count amax as 1e-4 at least: scale 1e-4 / 448, or the power of two above, for rows of small numbers."""
    cache = presets.sglang_indexer(recipe=recipe, page_size=4)
    module: Any = kvgen.load(KernelSet(name="floor", q_heads=1, cache=cache, ops=[ops.Append()], arch=["sm_80"]))
    pool = np.full((2, 4 * 132), 255, np.uint8)
    k = np.zeros((3, 1, 128), np.float32)
    k[1], k[2, 0, 5] = 5e-5, 2.0
    rows = {"k": k.astype(kvgen.layout.dtypes.dtype("bf16").numpy()), "row_offsets": np.array([0, 3], np.int64)}
    with machine(arch="sm_80", mode="check"):
        layer = module.Cache([pool], lengths=np.array([3], np.int64), page_table=np.array([[1]], np.int32))[0]
        module.append(layer, **rows)
    floor = np.float32(1e-4) / np.float32(448)
    scale = floor if recipe == "amax" else np.exp2(np.ceil(np.log2(floor)))
    large = np.float32(2) / np.float32(448) if recipe == "amax" else np.float32(2.0**-7)
    scales = pool[1, 4 * 128 :].view(np.float32)
    np.testing.assert_allclose(scales[:3], [scale, scale, large], rtol=2e-7)
    assert (pool[1, :128] == 0).all() and (pool[0] == 255).all()
