"""What the sets of these tests cover between them."""

from __future__ import annotations

import inspect

from kvgen import presets
from tests.ops.sets import PRESETS, SETS


def test_every_preset_has_a_set() -> None:
    public = {
        n
        for n, f in inspect.getmembers(presets, inspect.isfunction)
        if n[0] != "_" and f.__module__ == presets.__name__
    }
    assert {s.name for s in PRESETS} == public


def test_every_shape_the_kernels_promise() -> None:
    caches = [s.cache for s in SETS.values()]
    assert {c.dtype for c in caches} == {"f32", "f16", "bf16"}
    assert {c.page_table.kind for c in caches} == {"dense", "csr", "per_kv", "indirect", "ring"}
    assert {c.page_table.dtype for c in caches} == {c.lengths_dtype for c in caches} == {"u32", "i32", "i64"}
    assert {c.lengths for c in caches} == {"before", "after"}
    assert {1, 3, 64, 80, 96, 128, 256, 576} <= {c.head_dim for c in caches}
    assert {1, 3, 16, 64} <= {c.page_tokens for c in caches}
    assert {1, 3, 4, 7, 8, 71} <= {s.group for s in SETS.values()}
