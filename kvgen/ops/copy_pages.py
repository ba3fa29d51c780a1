"""copy_pages: copy pages of the pool onto others, in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvgen.expr.nodes import Expr, ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.id_lists import IdList, IdLists
from kvgen.lowering.page_runs import THREADS, MaxLayers, PagesContext, PairIndex, page_runs, pages_context, pool_param
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Param
from kvgen.schema.kernel_set import KernelSet, Op

COMPARED = 1024  # pairs that a block compares its own with


@dataclass(frozen=True)
class CopyPagesContext:
    """Everything ops/copy_pages.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    pool: PagesContext
    lists: tuple[IdList, ...]
    multiplier: int


@dataclass(frozen=True)
class CopyPagesCheckContext:
    """Everything ops/copy_pages_check.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    lists: tuple[IdList, ...]
    multiplier: int
    threads: int
    compared: int


class CopyPages(Op):
    """Copy pages within the pool, in every layer: page `pairs[i, 0]` onto page `pairs[i, 1]`.

    -1 in either place skips the pair. Ids are entries of the page table: times id_multiplier they number the pool's pages. A
    page is all that its id names: K and V of its tokens, and scales in pages of the same id. With `own_table`, scales have
    ids of their own, in `scale_pairs`. The newest tokens in a tail (residual) belong to requests and are not copied.

    `num_pairs` is device data, so one captured graph serves any number: pairs past it are skipped. A negative one skips all
    pairs and is reported. Bad ids are reported and skipped. A page copied onto itself is left alone.

    All pairs are copied at once. Where two write to one page, or one reads what another writes, each 16 bytes written are
    those of one of the pages involved, before or after; nothing else changes. `check=True` (default False) looks for such
    pairs first and reports them (OVERLAP), in a launch of its own that compares all pairs: use it for lists up to some 64
    Ki.
    """

    kind: ClassVar[str] = "copy_pages"
    moves_states: ClassVar[bool] = True
    at_rates: ClassVar[bool] = True
    index_dtype: PairIndex = "i64"
    """Element type of `pairs`, signed: -1 skips an entry."""
    max_layers: MaxLayers = 128
    """Most layers of the cache that a call may bring. The kernel's arguments have room for so many layer pointers."""

    def kernel_names(self) -> tuple[str, ...]:
        return (self.name, f"{self.name}_check")

    def check(self, kernels: KernelSet) -> None:
        pool_param(kernels.cache, "pages", self.max_layers)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.cache
        pool = pool_param(cache, "pages", self.max_layers)
        pairs = IdLists(cache, "pairs", (2,))
        ids = pairs.params(
            dtype(self.index_dtype), ("ids of the pages to copy from and to", "the same of pages of scales")
        )
        params, lists = (*ids, pool, ERRORS), pairs.contexts(pool)
        context = CopyPagesContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            pool=pages_context(pool, page_runs(cache)),
            lists=lists,
            multiplier=cache.page_table.id_multiplier,
        )
        grid = (pairs.tiles, var("all_layers"), const(1))
        copy = KernelPlan(
            self.name,
            context.entry,
            "ops/copy_pages.cu.j2",
            context,
            params,
            grid,
            THREADS,
            writes_pool=True,
            all_layers=True,
            reads_tables=False,
        )
        return (copy, self._check(kernels, pairs, ids, lists))

    def _check(
        self, kernels: KernelSet, pairs: IdLists, ids: tuple[Param, ...], lists: tuple[IdList, ...]
    ) -> KernelPlan:
        name, params = f"{self.name}_check", (*ids, ERRORS)
        context = CopyPagesCheckContext(
            entry=entry_name(kernels, name),
            params=tuple(p.declaration for p in params),
            lists=lists,
            multiplier=kernels.cache.page_table.id_multiplier,
            threads=THREADS,
            compared=COMPARED,
        )
        sizes: list[Expr] = [const(0), const(0)]
        for count in pairs.dims.values():
            sizes[0] = sizes[0] + ceil_div(count, THREADS)
            sizes[1] = sizes[1] + ceil_div(count, COMPARED)
        grid = (sizes[0], sizes[1], const(1))
        return KernelPlan(
            name,
            context.entry,
            "ops/copy_pages_check.cu.j2",
            context,
            params,
            grid,
            THREADS,
            all_layers=True,
            reads_tables=False,
        )
