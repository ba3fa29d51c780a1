"""Batches worth trying, drawn by hypothesis: what each request holds, and how the engine laid it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hypothesis import strategies as st

from kvgen import Continuous, KernelSet, Ragged, Ring
from kvgen.architectures import Arch
from tests.support.sets import archs_of, splits_of

CHUNK = 128  # tokens below which a request is not split
OPEN_TOKENS = 37  # what a block of a continuous cache holds where only the pool says so


@dataclass(frozen=True)
class Batch:
    """One step. Request b holds totals[b] tokens after it, new[b] <= totals[b] of them new."""

    totals: tuple[int, ...]
    new: tuple[int, ...]
    padding: int  # rows past the last request's, as CUDA graphs have them
    shared: bool  # requests begin with the first one's pages
    fill: Literal["nan", "inf", "bytes"]  # what lies in the pool where no token does
    strided: bool  # rows of q, k, v and tables further apart than packed
    errors: bool  # whether there is an error word
    schedule: Literal["ascending", "descending"] | int
    seed: int
    leading: int = 0  # rows before the first request's
    arch: Arch | None = None  # None: the set's own (sets.archs_of)


def capacity(kernels: KernelSet) -> int:
    """The most tokens a request of a test has."""
    cache = kernels.cache
    if isinstance(cache, Continuous):
        return cache.max_tokens or OPEN_TOKENS
    if isinstance(cache, Ragged) and cache.total_tokens:
        return cache.total_tokens // 4 - 1
    if splits_of(kernels) > 1:
        return 3 * CHUNK + 70
    if isinstance(cache, Ragged):
        return OPEN_TOKENS
    if isinstance(cache.page_table, Ring):
        return 3 * cache.page_table.window
    return max(5, min(3 * (cache.page_tokens or 1) * cache.entry_tokens + 1, 67))


@st.composite
def _batch(draw: st.DrawFn, length: st.SearchStrategy[int], archs: tuple[Arch, ...]) -> Batch:
    totals = draw(st.lists(length, min_size=0, max_size=4))
    if draw(st.booleans()):
        totals.sort()  # the longest request last: its blocks finish last
    new = [draw(st.sampled_from(sorted({0, 1, n // 2, n} & set(range(n + 1))))) for n in totals]
    return Batch(
        totals=tuple(totals),
        new=tuple(new),
        padding=draw(st.integers(0, 3)),
        shared=draw(st.booleans()),
        fill=draw(st.sampled_from(("nan", "inf", "bytes"))),
        strided=draw(st.booleans()),
        errors=draw(st.sampled_from((True, True, False))),
        arch=draw(st.sampled_from(archs)),
        schedule=draw(st.sampled_from(("ascending", "descending", 7))),
        seed=draw(st.integers(0, 2**32 - 1)),
        leading=draw(st.sampled_from((0, 2))),
    )


def batches(kernels: KernelSet, *, least: int = 0) -> st.SearchStrategy[Batch]:
    """Batches for a set, every request with at least `least` tokens; lengths crowd around page boundaries."""
    page, most = (kernels.cache.page_tokens or OPEN_TOKENS) * kernels.cache.entry_tokens, capacity(kernels)
    edges = {0, 1, 2, most - 1, most} | {page * i + d for i in (1, 2, 3) for d in (-1, 0, 1)}
    if splits_of(kernels) > 1:
        edges |= {CHUNK * i + d for i in (1, 2, 3) for d in (-1, 0, 1)}
    if isinstance(kernels.cache.page_table, Ring):
        edges |= {kernels.cache.page_table.window + d for d in (-1, 0, 1)}
    length = st.one_of(st.sampled_from(sorted(e for e in edges if least <= e <= most)), st.integers(least, most))

    return _batch(length, archs_of(kernels))


PLAIN = Batch(
    totals=(),
    new=(),
    padding=0,
    shared=False,
    fill="nan",
    strided=False,
    errors=True,
    schedule=7,
    seed=1,
)
