"""Page tables as data, a module a form: which page holds logical page i of request b, and how many tokens there are."""

from __future__ import annotations

from kvgen.reference.tables.base import LIMIT, Entry, Laid, index
from kvgen.reference.tables.rows import RowRange, bad_total, request_of_row
from kvgen.reference.tables.view import Place, TableView

__all__ = ["LIMIT", "Entry", "Laid", "Place", "RowRange", "TableView", "bad_total", "index", "request_of_row"]
