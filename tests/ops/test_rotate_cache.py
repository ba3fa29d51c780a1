"""rotate_cache: the step's rows change where they are stored, everything else stays, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from kvgen import ops
from kvgen.runtime import Fault, describe
from tests.support.batches import PLAIN, batches
from tests.support.stored_rows import SETS, check, having, of_kind, one_launch, stored


@pytest.mark.parametrize("name", having(ops.RotateCache))
@settings(max_examples=2)
@drawn(data=st.data())
def test_drawn_batches(name: str, data: Any) -> None:
    # Where requests share pages, a full one may hold new tokens of two requests.
    batch = replace(data.draw(batches(SETS[name])), errors=True, shared=False)
    for op in of_kind(name, ops.RotateCache):
        check(stored(name, batch), op.name)


STEP = replace(PLAIN, totals=(5, 40, 1), new=(2, 3, 1), padding=1)


@pytest.mark.parametrize("op", ["rotate"])
@pytest.mark.parametrize("value", [-1, 2**31 - 1, 99])
def test_a_bad_page(op: str, value: int) -> None:
    """The request whose page is wrong is left alone and named; the others change."""
    name = next(n for n in SETS if n.endswith("_dense"))
    scene = stored(name, STEP)
    scene.tables["page_table"][1] = np.array(value, np.int64).astype(scene.tables["page_table"].dtype)
    report = describe(check(scene, op))
    assert report is not None and report.request == 1


def test_a_position_without_an_angle() -> None:
    """2^24 and more: named, K left alone, q NaN; the other requests turn."""
    scene = stored(next(n for n in SETS if n.endswith("_dense")), STEP)
    scene.tables["lengths"][1] = 2**24
    report = describe(check(scene, "rotate"))
    assert report is not None and (report.code, report.request) == (Fault.POSITION, 1) and report.position >= 2**24 - 3


def test_one_launch_each() -> None:
    one_launch(ops.RotateCache)
