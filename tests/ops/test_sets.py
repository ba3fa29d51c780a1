"""What the sets of these tests cover between them."""

from __future__ import annotations

import inspect
import os
import random
from collections import Counter

from kvgen import presets
from tests.ops import test_family
from tests.support.engine_sets import ENGINES
from tests.support.family import (
    CACHE_FACTORS,
    QUANT_FACTORS,
    TIMES,
    VALUE_TIMES,
    Factors,
    can_have,
    counts,
    draw,
    is_valid,
    own,
    pairs,
    parse,
)
from tests.support.family_rows import COVER, REST
from tests.support.sets import ALL, FAMILY, PRESETS, RUN, SETS, archs_of


def test_every_preset_has_a_set() -> None:
    public = {
        n
        for n, f in inspect.getmembers(presets, inspect.isfunction)
        if n[0] != "_" and f.__module__.startswith(presets.__name__)
    }
    assert {s.name for s in PRESETS} | set(ENGINES) == public


def test_every_shape_the_kernels_promise() -> None:
    """Dims, pages and groups of all sizes in a campaign, all else in every run."""
    caches = [s.cache for s in RUN.values()]
    assert {c.dtype for c in caches} == {"f32", "f16", "bf16"}
    assert {c.page_table.kind for c in caches} == {"dense", "csr", "per_kv", "indirect", "mapped", "ring", "offsets"}
    assert {c.page_table.dtype for c in caches} == {c.lengths_dtype for c in caches} == {"u32", "i32", "i64"}
    assert {c.lengths for c in caches} == {"before", "after"}
    caches = [s.cache for s in SETS.values()]
    assert {1, 3, 64, 80, 96, 128, 256, 576} <= {c.head_dim for c in caches}
    assert {1, 3, 16, 64} <= {c.page_tokens for c in caches}
    assert {1, 3, 4, 7, 8, 71} <= {s.group for s in SETS.values()}


def test_every_form_runs_on_every_architecture() -> None:
    """A set's tests run on one; the sets of every form share them out."""
    met: dict[tuple[str, str], set[str]] = {}
    for kernels in (RUN | test_family.SETS).values():
        cache = kernels.cache
        forms = {
            "variant": type(cache).__name__,
            "table": cache.page_table.kind,
            "table dtype": cache.page_table.dtype,
            "dtype": cache.dtype,
            "lengths": cache.lengths,
            "lengths dtype": cache.lengths_dtype,
            "layers": cache.layout.layers,
            "quantized": str(any(cache.quants.values())),
            "residual": str(bool(cache.storage.residual)),
        }
        for op in kernels.ops:
            forms |= {f"{op.kind} {getattr(op, 'rows', '')} {getattr(op, 'split', '')}": op.name}
        for form in forms.items():
            met.setdefault(form, set()).update(archs_of(kernels))
    assert not [form for form, archs in met.items() if archs != {"sm_80", "sm_90a"}]


def test_gather_meets_every_way_to_store() -> None:
    """Codes, scales and where they are, layouts, tables and variants."""
    caches = [s.cache for s in ALL.values() if any(o.kind == "gather" for o in s.ops)]
    quants = [q for c in caches for q in c.quants.values() if q is not None]
    assert {q.dtype for q in quants} == {"e4m3", "e5m2", "i8", "i4", "i3", "i2", "e2m1"}
    assert {q.place for q in quants} == {"pool", "page", "row"} and {q.order for q in quants} == {"linear", "swizzled"}
    assert {q.scale for q in quants} == {"computed", "given"} and {q.recipe for q in quants} == {
        "amax",
        "pow2",
        "max",
        "global",
        "min",
        "norm",
        "signs",
    }
    assert {q.own_table for q in quants} == {q.zero for q in quants} == {True, False}
    assert any(q.residual for q in quants) and {c.layout.layers for c in caches} == {"axis", "pointers"}
    assert any(c.layout.swizzle for c in caches) and any("token/" in str(c.layout) for c in caches)
    assert any("dim/" in str(c.layout) for c in caches) and {c.stores for c in caches} == {"kv", "k"}
    assert {c.page_table.kind for c in caches} == {"dense", "csr", "per_kv", "indirect", "mapped", "ring", "offsets"}
    assert {type(c).__name__ for c in caches} == {"Paged", "Continuous", "Latent", "Ragged"}


def _factors(text: str) -> list[Factors]:
    return [factors for factors, _ in parse(text)]


def test_the_family_covers_every_pair() -> None:
    """Every two values that some valid combination has stand together in one of the fixed sets, which are all valid: that none is
    missing is looked for in `make campaign`, which draws combinations. Those two that are the family's own stand together in
    the sets of every run; of the rest (layout x quantization x variant x page table x dtype) the accessor's cover has every pair
    (tests/accessor/test_grid.py)."""
    fixed = _factors(COVER + REST)
    assert all(is_valid(f) for f in fixed)
    covered = {p for f in fixed for p in pairs(f)}
    if "KVGEN_FAMILY" in os.environ:  # every combination of a quantization is tried for it
        rng = random.Random(99)
        missing = {p for _ in range(300) for p in pairs(draw(rng))} - covered
        assert not missing, (
            f"{sorted(missing)[:5]}; run `python -m tests.support.family` into tests/support/family_rows.py"
        )
    assert len(covered) >= 1594
    met = {p for f in _factors(COVER) for p in pairs(f)}
    assert {p for p in covered if own(p)} <= met and len({p for p in met if own(p)}) >= 208 and len(met) >= 1173


def test_the_family_meets_every_value() -> None:
    """Each value of each factor, in at least two of the sets of every run, or in all that have it."""
    met, possible = (Counter(v for f in _factors(t) for v in f.items()) for t in (COVER, COVER + REST))
    assert set(possible) == {(n, v) for n, values in (QUANT_FACTORS | CACHE_FACTORS).items() for v in values}
    assert all(met[value] >= min(VALUE_TIMES, count) for value, count in possible.items())


def test_the_family_meets_every_operation() -> None:
    """Every value of every factor that an operation depends on, where some combination with it can have the operation."""
    fixed = parse(COVER)
    for (_, has), kernels in zip(fixed, FAMILY.values(), strict=True):
        assert {*has, "append"} <= {o.name for o in kernels.ops}
    for op, times in TIMES.items():
        met, possible = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for factors, has in fixed:
            values = [v for v in factors.items() if counts(op, v)]
            possible.update(values if can_have(factors, op) else ())
            met.update(values if op in has else ())
        assert possible and all(met[value] >= min(times, count) for value, count in possible.items()), op
