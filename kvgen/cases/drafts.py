"""Several launches over one memory: drafts are appended, some are taken back, other tokens come in their place, all are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvgen.cases.contents import Case
from kvgen.cases.operation import OPEN_TOKENS, cases_of
from kvgen.cases.workload import Launch, Workload
from kvgen.lowering.lowered import lower
from kvgen.ops import Append
from kvgen.schema.kernel_set import KernelSet

LOUD: Final = 8  # times the numbers of other tokens: scales of drafts are larger than those of what replaces them


def drafts(kernels: KernelSet, op: Append) -> tuple[Launch, ...]:
    """The launches of the batch "drafts" of an append: drafts, what takes the place of those that are taken back, then every
    operation of the set that reads all tokens. () where the cache cannot take tokens back: a
    residual cache seals groups of tokens.

    Request b keeps some tokens from before, then gets drafts, of which a few stay. The tokens behind them are fewer than the
    drafts in some requests, so that drafts lie behind the length, and more in others. They begin in the middle of a page, at its
    end and in the next one.
    """
    if op.inputs == "q" or kernels.cache.states or kernels.cache.storage.residual:
        return ()
    cache = kernels.kv
    rate, allocation = cache.entry_tokens, lower(cache).allocation
    most = cache.page_tokens if allocation.one_page else OPEN_TOKENS if cache.ragged else None
    page = (OPEN_TOKENS if most else cache.page_tokens or OPEN_TOKENS) * rate
    readers = [other for other in kernels.ops if cases_of(other).reads_all]
    least = max((cases_of(reader).rows_each for reader in readers), default=1)
    kept = (max(page - 2, least), max(rate, least), max(2 * page, least), max(page + 1, least))
    drafts, stay, others = (4, 5, 3, page + 2), (1, 2, 0, 1), (2, rate + 3, 3, 2)
    first, second = list[int](), list[int]()
    for b, n in enumerate(kept):
        n = n if most is None else min(n, most - max(drafts[b], stay[b] + others[b]))
        if n < least:
            return ()  # a block that holds no more than the rows of a reader
        first.append(n + drafts[b])
        second.append(n + stay[b] + others[b])
    after = Workload("drafts", tuple(second), others)
    return (
        Launch(op, Workload("drafts", tuple(first), drafts)),
        Launch(op, after),
        *(Launch(r, after) for r in readers),
    )


def room(taken: Sequence[Launch]) -> Workload | None:
    """The batch with the most tokens that a request ever has; None without steps."""
    if not taken:
        return None
    totals = tuple(max(lengths) for lengths in zip(*(step.workload.totals for step in taken), strict=True))
    return Workload("drafts", totals, (1,) * len(totals))


def louden(case: Case) -> None:
    """Make the new rows of an append LOUD."""
    for name, array in case.before.arrays.items():
        given = next((p for p in case.call.launcher.KERNEL.arguments if p.name == name), None)
        rows = given is not None and "T" in given.shape and given.access == "in"
        if rows and array.dtype.kind not in "iub" and (name == "qkv" or not name.startswith("q")):
            array[...] = (array.astype(np.float32) * LOUD).astype(array.dtype)
