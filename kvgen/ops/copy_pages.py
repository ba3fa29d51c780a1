"""copy_pages: copy pages of the pool onto others, in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvgen.expr.nodes import Expr, ceil_div, const, var
from kvgen.layout.dtypes import DType, dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.page_runs import (
    THREADS,
    MaxLayers,
    PageRun,
    PagesContext,
    PairIndex,
    page_runs,
    pages_context,
    pool_param,
    tiles,
    with_id,
)
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Size
from kvgen.spec.cache import Cache
from kvgen.spec.kernel_set import KernelSet, Op

COMPARED = 1024  # pairs that a block compares its own with


@dataclass(frozen=True)
class PairList:
    """One list of pairs: its array, the array that counts it, the pages it moves, and the pool's sizes, as C."""

    title: str
    pairs: str
    count: str
    live: str
    pages: PagesContext
    size: str


@dataclass(frozen=True)
class CopyPagesContext:
    """Everything ops/copy_pages.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    pool: PagesContext
    lists: tuple[PairList, ...]
    multiplier: int


@dataclass(frozen=True)
class CopyPagesCheckContext:
    """Everything ops/copy_pages_check.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    lists: tuple[PairList, ...]
    multiplier: int
    threads: int
    compared: int


def lists_of(cache: Cache) -> tuple[tuple[str, tuple[PageRun, ...]], ...]:
    """(name of the list, runs) of what has ids of its own: pages, and scales with a table of their own."""
    runs = page_runs(cache)
    found = [("pairs", with_id(runs, 0)), ("scale_pairs", with_id(runs, 1))]
    return tuple((name, each) for name, each in found if each)


def pair_params(cache: Cache, index: DType, docs: dict[str, str]) -> tuple[Param, ...]:
    """The lists of pairs, how many there are, and how many of them count."""
    found: list[Param] = []
    for name, _ in lists_of(cache):
        dim, optional = _dim(name), name != "pairs"
        found.append(
            Array(name, index.name, (dim, 2), optional=optional, untrusted=True, doc=docs[name], field="index_dtype")
        )
    for name, _ in lists_of(cache):
        doc = f"how many of the {name.replace('_', ' ')} count; default: all"
        found.append(
            Array(f"num_{name}", index.name, (1,), optional=True, untrusted=True, doc=doc, field="index_dtype")
        )
        found.append(Size(f"max_{name}", "u32", _dim(name)))
    return tuple(found)


def _dim(name: str) -> str:
    return {"pairs": "N", "scale_pairs": "NS"}[name]


def pair_lists(cache: Cache, pool: PagesContext, contexts: dict[str, PagesContext]) -> tuple[PairList, ...]:
    """The lists as templates see them."""
    return tuple(
        PairList(
            title={"pairs": "Value", "scale_pairs": "Scale"}[name],
            pairs=name,
            count=f"max_{name}",
            live=f"num_{name}",
            pages=contexts[name],
            size="num_pages" if name == "pairs" else "num_scale_pages",
        )
        for name, _ in lists_of(cache)
    )


def copy_tiles(cache: Cache) -> Expr:
    """Blocks of a layer: tiles of every list."""
    total: Expr = const(0)
    for name, runs in lists_of(cache):
        total = total + tiles(runs, var(_dim(name)))
    return total


class CopyPages(Op):
    """Copy page `pairs[i, 0]` onto page `pairs[i, 1]` in every layer; -1 in either skips the pair.

    A page is all that its id names: K and V of its tokens, and scales in pages of the same id; with `own_table`, scales
    have ids of their own and `scale_pairs`. Ids are entries of the page table: times id_multiplier they number the
    pool's pages. Pairs past `num_pairs` (device data: one captured graph serves any number) are skipped, and all of them
    under a count that cannot be (negative), which is reported; bad ids are reported and skipped; a page onto itself is
    left alone.

    All pairs are copied at once: where two write to one page, or one reads what another writes, every 16 bytes written
    are those of one of the pages involved, before or after, and nothing else changes. `check=True` reports such pairs
    first (OVERLAP), in a launch of its own that compares every pair with every other one: for lists up to some 64 Ki.
    Newest tokens in a tail (residual) belong to requests, not to pages.
    """

    kind: ClassVar[str] = "copy_pages"
    index_dtype: PairIndex = "i64"
    max_layers: MaxLayers = 128

    def kernel_names(self) -> tuple[str, ...]:
        return (self.name, f"{self.name}_check")

    def check(self, kernels: KernelSet) -> None:
        pool_param(kernels.cache, "pages", self.max_layers)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.cache
        pool = pool_param(cache, "pages", self.max_layers)
        docs = {"pairs": "ids of the pages to copy from and to", "scale_pairs": "the same of pages of scales"}
        params = (*pair_params(cache, dtype(self.index_dtype), docs), pool, ERRORS)
        shown = pages_context(pool, page_runs(cache))
        lists = pair_lists(cache, shown, {n: pages_context(pool, r) for n, r in lists_of(cache)})
        context = CopyPagesContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            pool=shown,
            lists=lists,
            multiplier=cache.page_table.id_multiplier,
        )
        grid = (copy_tiles(cache), var("all_layers"), const(1))
        copy = KernelPlan(
            self.name,
            context.entry,
            "ops/copy_pages.cu.j2",
            context,
            params,
            grid,
            THREADS,
            writes_pool=True,
            whole=True,
        )
        return (copy, self._check(kernels, lists, docs))

    def _check(self, kernels: KernelSet, lists: tuple[PairList, ...], docs: dict[str, str]) -> KernelPlan:
        cache, name = kernels.cache, f"{self.name}_check"
        params = (*pair_params(cache, dtype(self.index_dtype), docs), ERRORS)
        context = CopyPagesCheckContext(
            entry=entry_name(kernels, name),
            params=tuple(p.declaration for p in params),
            lists=lists,
            multiplier=cache.page_table.id_multiplier,
            threads=THREADS,
            compared=COMPARED,
        )
        sizes: list[Expr] = [const(0), const(0)]
        for which, _ in lists_of(cache):
            sizes[0] = sizes[0] + ceil_div(var(_dim(which)), THREADS)
            sizes[1] = sizes[1] + ceil_div(var(_dim(which)), COMPARED)
        grid = (sizes[0], sizes[1], const(1))
        return KernelPlan(name, context.entry, "ops/copy_pages_check.cu.j2", context, params, grid, THREADS, whole=True)
