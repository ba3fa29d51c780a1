"""zero_pages: fill pages of the pool with zeros, in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvgen.expr.nodes import const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.id_lists import IdList, IdLists
from kvgen.lowering.page_runs import THREADS, MaxLayers, PagesContext, PairIndex, page_runs, pages_context, pool_param
from kvgen.plan.kernel import KernelPlan
from kvgen.schema.kernel_set import KernelSet, Op


@dataclass(frozen=True)
class ZeroPagesContext:
    """Everything ops/zero_pages.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    pool: PagesContext
    lists: tuple[IdList, ...]
    multiplier: int


class ZeroPages(Op):
    """Set every byte of pages to 0, in every layer: page `page_ids[i]`; -1 skips the entry.

    Use it for pages that change hands: a freed page may hold NaN, or another tenant's tokens. A page is all that its id
    names, as in copy_pages: K and V of its tokens (with PerKV too, where they lie in tensors of their own), and scales in
    pages of the same id. With `own_table`, scales have ids of their own, in `scale_page_ids`. Ids are entries of the page
    table: times id_multiplier they number the pool's pages. An id may come twice. `num_page_ids` is device data, so one
    captured graph serves any number: ids past it are skipped. A negative one skips all and is reported; bad ids are reported
    (PAIR) and skipped.

    A zeroed token is 0 when it is dequantized, once the pages of its scales are zeroed as well: code 0 is 0 in every type,
    and with zero points (0 - 0) * 0 is 0. Nothing else is written: no gap between pages, no scale that the caller gives, and
    no tail (residual), which belongs to requests.
    """

    kind: ClassVar[str] = "zero_pages"
    moves_states: ClassVar[bool] = True
    at_rates: ClassVar[bool] = True
    index_dtype: PairIndex = "i64"
    """Element type of `page_ids`, signed: -1 skips an entry."""
    max_layers: MaxLayers = 128
    """Most layers of the cache that a call may bring. The kernel's arguments have room for so many layer pointers."""

    def check(self, kernels: KernelSet) -> None:
        pool_param(kernels.cache, "pages", self.max_layers)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.cache
        pool, ids = pool_param(cache, "pages", self.max_layers), IdLists(cache, "page_ids")
        docs = ("ids of the pages to fill with zeros", "the same of pages of scales")
        params = (*ids.params(dtype(self.index_dtype), docs), pool, ERRORS)
        context = ZeroPagesContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            pool=pages_context(pool, page_runs(cache)),
            lists=ids.contexts(pool),
            multiplier=cache.page_table.id_multiplier,
        )
        grid = (ids.tiles, var("all_layers"), const(1))
        plan = KernelPlan(
            self.name,
            context.entry,
            "ops/zero_pages.cu.j2",
            context,
            params,
            grid,
            THREADS,
            writes_pool=True,
            all_layers=True,
            reads_tables=False,
        )
        return (plan,)
