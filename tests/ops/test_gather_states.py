"""gather_states against the oracle: rows get states, zeros where there is none, 0xff for a bad id."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.reference import gather_states
from kvgen.runtime import Fault, describe
from tests.ops.test_states import LAYERS, PAGES, SETS, SIZES, Pools, check_rows, launch
from tests.support.harness import package


@pytest.mark.parametrize("nbytes", SIZES)
@settings(max_examples=5)
@given(data=st.data())
def test_rows(nbytes: int, data: Any) -> None:
    check_rows("gather_states", gather_states, "i32", nbytes, data.draw)


def test_the_state_of_every_request_is_gathered_by_the_table() -> None:
    """An empty cache's requests have no state; ids of the table are ids of the operation."""
    generated = package(SETS[48])
    cache = generated.Cache.empty(layers=LAYERS, requests=3, pages=5)
    assert cache.state_ids.tolist() == [2**32 - 1] * 3 and [p.shape for p in cache.pools] == [(5, 48)] * LAYERS
    cache.pools[1][...] = np.arange(5)[:, None]
    later = cache.step(np.array([4, 2**32 - 1, 2], np.uint32))
    out = np.full((3, 48), 9, np.uint8)
    ids = later.state_ids.astype(np.int32)
    assert launch(48, "gather_states", later[1], ids, out) == 0
    assert out[:, 0].tolist() == [4, 0, 2]
    assert repr(later) == "states_48.Cache(2 layers, 3 requests, 'cpu')"


def test_reports_say_which_row() -> None:
    pools = Pools(36, 0)
    cache = package(SETS[36]).Cache(pools.layers)
    out = np.zeros((3, 36), np.uint8)
    found = describe(launch(36, "gather_states", cache[0], np.array([0, PAGES, -1], np.int32), out))
    assert found is not None and (found.code, found.position) == (Fault.PAIR, 1)
    assert out[1].tolist() == [255] * 36 and out[2].tolist() == [0] * 36
