"""swap_pages: copy pages between the cache and another pool, in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvgen.expr.nodes import const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.id_lists import IdList, IdLists
from kvgen.lowering.page_runs import THREADS, MaxLayers, PagesContext, PairIndex, page_runs, pages_context, pool_param
from kvgen.plan.kernel import KernelPlan
from kvgen.schema.kernel_set import KernelSet, Op


@dataclass(frozen=True)
class SwapPagesContext:
    """Everything ops/swap_pages.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    pool: PagesContext
    lists: tuple[IdList, ...]
    source: str
    target: str
    source_scale: int
    target_scale: int
    outwards: bool


class SwapPages(Op):
    """Copy pages between the cache and another pool, in every layer: page `pairs[i, 0]` onto page `pairs[i, 1]`.

    `direction="out"` copies from the cache to `other`, "in" from `other` to the cache. `other` is `Pages(...)` of the
    generated module, memory of the same layout with any number of pages: pinned and mapped host memory, or memory of the
    GPU; or it is another `Cache`. Ids of the cache are entries of its page table, times id_multiplier; ids of `other` number
    its pages as they are. -1 in either place skips the pair. Everything else is as in copy_pages: what a page is,
    `scale_pairs`, `num_pairs`, bad ids.
    """

    kind: ClassVar[str] = "swap_pages"
    moves_states: ClassVar[bool] = True
    at_rates: ClassVar[bool] = True
    direction: Literal["out", "in"]
    """"out": from the cache to `other`. "in": from `other` to the cache."""
    index_dtype: PairIndex = "i64"
    """Element type of `pairs`, signed: -1 skips an entry."""
    max_layers: MaxLayers = 128
    """Most layers of the cache that a call may bring. The kernel's arguments have room for so many layer pointers."""

    def model_post_init(self, context: Any) -> None:
        """The default name says which way."""
        if not self.name:
            object.__setattr__(self, "name", f"swap_{self.direction}")

    def check(self, kernels: KernelSet) -> None:
        pool_param(kernels.cache, "pages", self.max_layers)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache, outwards = kernels.cache, self.direction == "out"
        pool = pool_param(cache, "pages", self.max_layers)
        other = pool_param(
            cache, "other", self.max_layers, given=True, writes=outwards, doc="the pool that the cache swaps with"
        )
        where = ("the cache", "`other`") if outwards else ("`other`", "the cache")
        pairs, multiplier = IdLists(cache, "pairs", (2,)), cache.page_table.id_multiplier
        doc = f"ids of the pages to copy from {where[0]} and to {where[1]}".replace("`", "")
        ids = pairs.params(dtype(self.index_dtype), (doc, "the same of pages of scales"))
        params = (other, *ids, pool, ERRORS)
        context = SwapPagesContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            pool=pages_context(pool, page_runs(cache)),
            lists=pairs.contexts(pool),
            source="pages" if outwards else "other",
            target="other" if outwards else "pages",
            source_scale=multiplier if outwards else 1,
            target_scale=1 if outwards else multiplier,
            outwards=outwards,
        )
        grid = (pairs.tiles, var("all_layers"), const(1))
        plan = KernelPlan(
            self.name,
            context.entry,
            "ops/swap_pages.cu.j2",
            context,
            params,
            grid,
            THREADS,
            writes_pool=not outwards,
            all_layers=True,
            reads_tables=False,
        )
        return (plan,)
