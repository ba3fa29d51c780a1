"""Which form of latent attention costs fewer products."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.errors import ArgumentError
from kvgen.runtime import mla_form


@pytest.mark.parametrize(("prefix", "first"), [(10**7, 171), (0, 341)])
def test_it_pays_from_so_many_rows_on(prefix: int, first: int) -> None:
    """A token costs 512 * 256 products once, and saves 1088 - 320 a row that sees it: all rows, or half of them."""
    forms = [mla_form(rows, prefix) for rows in range(400)]
    assert forms == ["absorbed"] * first + ["decompressed"] * (400 - first)


def test_other_dims() -> None:
    """Where an absorbed row is no longer than the others, nothing is to be decompressed for."""
    assert mla_form(5000, 0, latent_dim=128, rope_dim=64, nope_dim=128, v_dim=128) == "absorbed"


@pytest.mark.parametrize("given", [(-1, 0), (1, -1), (True, 0), (1.0, 0)])
def test_what_counts_no_tokens(given: Any) -> None:
    with pytest.raises(ArgumentError, match="got"):
        mla_form(*given)
