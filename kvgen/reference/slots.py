"""Where a token is, counted through the whole pool."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvgen.reference.tables import TableView
from kvgen.runtime.faults import Fault


def slot_of(table: TableView, b: int, token: int, kind: np.dtype[Any]) -> int | Fault:
    """The page of a token times a page's tokens, and its place in the page."""
    found = table.page(b, token // table.tokens)
    if isinstance(found, Fault):
        return found
    place = found[0] * table.tokens + token % table.tokens
    return place if place <= np.iinfo(kind).max else Fault.SLOT
