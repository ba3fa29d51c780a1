"""scatter_states against the oracle: states get rows; -1 and bad ids store nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.reference import scatter_states
from tests.ops.test_states import SIZES, check_rows


@pytest.mark.parametrize("nbytes", SIZES)
@settings(max_examples=5)
@given(data=st.data())
def test_rows(nbytes: int, data: Any) -> None:
    check_rows("scatter_states", scatter_states, "i64", nbytes, data.draw)
