"""Data that is wrong, as a bug or an attacker leaves it in page tables, lengths and index arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.contents import Call, Case
from kvgen.cases.operation import cases_of

Raw = NDArray[Any]
# Index arguments whose entries each stand for themselves: slots of rows, ids of pages, positions, counts.
LISTED: Final = (
    "slots",
    "pairs",
    "scale_pairs",
    "page_ids",
    "scale_page_ids",
    "ids",
    "indices",
    "candidates",
    "topk_lengths",
    "page_lists",
    "page_counts",
    "positions",
    "starts",
    "row_begins",
    "src",
    "dst",
    "row_counts",
    "valid_lengths",
    "parents",
    "new_tokens",
    "cache_offsets",
    "entries_begin",
    "tokens_begin",
    "state_ids",
    "state_table",
    "buffer_row_offsets",
    "fresh",
    "kept",
    "moves",
    "new_ids",
    "num_ids",
    "num_moves",
    "num_page_ids",
    "num_pairs",
)


@dataclass(frozen=True)
class Damage:
    """Wrong data, and how it gets into a case. Requests 0 and 2 of five are left as they are by damage of tables."""

    name: str
    apply: Callable[[Case], None]


def damages(call: Call, arrays: dict[str, Raw], tables: Collection[str], *, quick: bool) -> list[Damage]:
    """The ways in which an operation's data can be wrong, the cache's `tables` by their names; with `quick` the first alone."""
    found = []
    if (
        call.launcher.KERNEL.tables and not cases_of(call.op).sparse
    ):  # lists of a sparse attention name places, and no table does
        if "state_ids" in tables:
            found.append(Damage("state ids", _page_ids))
        else:
            found += [Damage("page ids and lengths", _page_ids), Damage("lengths past the table", _long_lengths)]
    taken = [p.name for p in call.launcher.KERNEL.arguments if p.name in arrays and p.access == "in"]
    if "row_offsets" in arrays:
        found += [
            Damage("row offsets past the rows", _offsets_past),
            Damage("row offsets that decrease", _offsets_decrease),
        ]
    lists = [
        f"{argument.removesuffix('cache')}{name}" for argument in call.others for name in ("indices", "topk_lengths")
    ]
    found += [Damage(name, partial(_entries, name=name)) for name in (*LISTED, *lists) if name in taken]
    if "lora_end_idx" in arrays:
        found.append(Damage("lora_end_idx", lambda case: _put(case.before.arrays["lora_end_idx"], 0, -1)))
    return found[:1] if quick else found


def _put(array: Raw, at: Any, value: int) -> None:
    """`value` as the array's type has it: -1 is the largest number of an unsigned one."""
    array[at] = np.array(value, np.int64).astype(array.dtype)


def _page_ids(case: Case) -> None:
    """Request 1 has an id of -1, request 3 the first one past the pool, request 4 a length of -1. Where scales have a table
    of their own, request 2 has -1 in it. Of states -1 says that a request has none: there it is -2."""
    tables, scene = cases_of(case.call.op).damaged(case)
    table = scene.cache.page_table
    past = -(-scene.pages // table.id_multiplier)
    if "state_ids" in tables:
        for b, value in ((1, -2), (3, past), (4, -1)):
            _put(tables["state_ids"], b, value)
        cases_of(case.call.op).follow(case)
        return
    if "page_indices" in tables:
        for b, value in ((1, -1), (3, past)):
            _put(tables["page_indices"], int(tables["page_indptr"][b]), value)
    elif "req_to_token" in tables:
        _put(tables["request_ids"], 1, -1)
        _put(tables["req_to_token"], (int(tables["request_ids"][3]), slice(None)), scene.pages)
    elif "idx_mapping" in tables:
        _put(tables["idx_mapping"], 1, -1)
        _put(tables["page_table"], (int(tables["idx_mapping"][3]), slice(None)), past)
    elif "kv_offsets" in tables:  # lengths are their differences, ids their values
        _put(tables["kv_offsets"], 2, -1)
        return
    else:
        for b, value in ((1, -1), (3, past)):
            _put(tables["page_table"], b if tables["page_table"].ndim == 1 else (b, ..., slice(None)), value)
    _put(tables["lengths" if "lengths" in tables else "last_page_len"], 4, -1)
    if "scales_page_table" in tables:
        _put(tables["scales_page_table"], (2, slice(None)), -1)
    cases_of(case.call.op).follow(case)


def _long_lengths(case: Case) -> None:
    """Request 1 has more tokens than any table holds, request 3 as many as the type of lengths counts."""
    tables, scene = cases_of(case.call.op).damaged(case)
    name = next(n for n in ("lengths", "last_page_len", "kv_offsets") if n in tables)
    most = 2**31 - 1
    if name == "kv_offsets":
        _put(tables[name], -1, most)
        return
    _put(tables[name], 1, (scene.columns * scene.tokens + scene.tokens + 1) * scene.cache.entry_tokens)
    _put(tables[name], 3, most)


def _offsets_past(case: Case) -> None:
    _put(case.before.arrays["row_offsets"], 2, 2**30)


def _offsets_decrease(case: Case) -> None:
    """Offsets that decrease, to a negative one."""
    _put(case.before.arrays["row_offsets"], 3, -1)
    _put(case.before.arrays["row_offsets"], -1, 1)


def _entries(case: Case, name: str) -> None:
    """Negative numbers and numbers past everything, over the first entries of a list."""
    flat = case.before.arrays[name].reshape(-1)
    limits = np.iinfo(flat.dtype)
    values = (-2, int(min(limits.max, 2**62)), int(max(limits.min, -(2**62))), case.scene.pages * case.scene.tokens, -1)
    for at, value in enumerate(values[: len(flat)]):
        _put(flat, at, value)
