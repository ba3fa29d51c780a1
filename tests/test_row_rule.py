"""The rule of rows: which requests are decode's where a set has extend too."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from kvgen import KernelSet, Mask, Paged, ops
from kvgen.lowering.attention import row_rule
from kvgen.ops import Extend
from tests.sets import every
from tests.support import decode_steps
from tests.support.batches import PLAIN
from tests.support.extend_steps import step
from tests.support.harness import package

ROOT: Final = Path(__file__).resolve().parents[1]
ALL: Final = {item.kernels.name: item.kernels for item in every()}
PAIRS: Final = [
    (k, op)
    for k in ALL.values()
    for op in k.ops
    if isinstance(op, Extend)
    and op.decode_of(k) is not None
    and not op.choices(k)[row_rule.arch_of(k)].fit.division.lanes
]


def costs(kernels: KernelSet, op: Extend, rows: int) -> tuple[float, float]:
    """Cycles of decode and of extend; decode has no more than 128 rows."""
    arch = row_rule.arch_of(kernels)
    decode = row_rule.decode_cost(kernels, rows, arch) if rows <= row_rule.MOST_ROWS else None
    extend = row_rule.extend_cost(kernels, rows, arch, op.choices(kernels)[arch].fit)
    return float("inf") if decode is None else decode.cycles, extend.cycles


@pytest.mark.parametrize(("kernels", "op"), PAIRS, ids=lambda x: x.name if isinstance(x, KernelSet) else "")
def test_one_number_divides_1_to_256_rows(kernels: KernelSet, op: Extend) -> None:
    """Up to it decode costs no more, from there on extend costs less; neither becomes cheaper with a row more."""
    if op.split == "invariant":
        assert op.decode_rows(kernels, row_rule.MOST_ROWS) == 0
        return
    found = op.decode_rows(kernels, row_rule.MOST_ROWS)
    assert op.decode_rows(kernels) == min(found, op.decode_of(kernels).rows)  # type: ignore[union-attr]
    all_of = [costs(kernels, op, rows) for rows in range(1, 257)]
    assert [rows for rows, (d, e) in enumerate(all_of, 1) if d <= e] == list(range(1, found + 1))
    assert all_of == [(max(d for d, _ in all_of[: n + 1]), max(e for _, e in all_of[: n + 1])) for n in range(256)]


def test_specs_that_serve_have_pairs() -> None:
    assert len(PAIRS) >= 15
    assert package(ALL["llama3_8b"]).extend.DECODE_ROWS == 1  # its decode has no more
    llama = ALL["llama3_8b"]
    (op,) = (op for op in llama.ops if isinstance(op, Extend))
    assert op.decode_rows(llama, 128) == 8


def test_only_a_decode_of_the_same_attention_takes_rows() -> None:
    cache = Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16)

    def rows_of(extend: Extend, decode: ops.Decode) -> int:
        return extend.decode_rows(KernelSet(name="pair", q_heads=8, cache=cache, ops=(decode, extend), arch=("sm_80",)))

    assert rows_of(ops.Extend(), ops.Decode(rows=2)) == 2
    assert rows_of(ops.Extend(mask=Mask(window=64)), ops.Decode(rows=2)) == 0
    assert rows_of(ops.Extend(split="invariant"), ops.Decode(rows=2, split="balanced")) == 0


BOTH: Final = KernelSet(
    name="row_rule_both",
    q_heads=8,
    cache=Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16),
    ops=(ops.Decode(rows=16, split="balanced"), ops.Extend()),
    arch=("sm_90a",),
)


@pytest.mark.parametrize("rows", (1, 8, 16, 17, 128, 256) if "KVGEN_FAMILY" in os.environ else (1, 16, 17))
def test_both_are_right_on_either_side(rows: int) -> None:
    """The oracle's, and so each other's."""
    totals = (300, 270)
    batch = replace(PLAIN, totals=totals, new=(0, 0), seed=rows)
    step(BOTH, batch, (rows, rows)).check()
    if rows <= 16:
        decode_steps.step(BOTH, batch, (rows, rows)).check()
