"""reorder: requests that continue other requests' tokens (beam search)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvgen.expr.nodes import Expr, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.lowered import lower_pages
from kvgen.lowering.page_runs import THREADS, MaxLayers, PagesContext, chunks, page_runs, pages_context, pool_param
from kvgen.lowering.tables import EntryList, TableForm
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.tables import IndexName


@dataclass(frozen=True)
class ReorderContext:
    """Everything ops/reorder.cu.j2 reads.

    `whole`: every page is copied, not just a last one that is not full; `ring`: page i lies in column i % columns.
    `table_template` knows where entries lie.
    """

    entry: str
    params: tuple[str, ...]
    pool: PagesContext
    table_template: str
    entries: tuple[EntryList, ...]
    length: str
    multiplier: int
    whole: bool
    ring: bool


@dataclass(frozen=True)
class ReorderStatesContext:
    """Everything ops/reorder_states.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    pool: PagesContext


class Reorder(Op):
    """Let request b continue the tokens of request `parents[b]`, as beam search does: a new page table, and copies of pages.

    Full pages are shared: the new row of the table has the parent's ids. A last page that is not full stays with the first
    child of a parent, the one with the lowest b. For each other child it is copied, in every layer, to page `fresh[b]`. In a
    ring, whose columns are written again, and in a block that holds a whole request, every page is copied in this way.

    - `parents[B]`: -1 ends request b; its row is left alone, and its pages may become another request's. A request that goes
      on alone names itself.
    - `fresh[B]`: a free page for every request, used where one is copied; `[B, 2]` with PerKV, for K and for V; in a ring one
      for every column. `fresh_scales` is the same where scales have a page table of their own.
    - The new tables may not be the memory of the old ones, which are read meanwhile. Entries past a request's last page are
      left as they are. `new_lengths[B]` (optional) gets the parents' lengths.

    `lengths` must count the tokens that are stored, so call it between steps. Before the call no two requests may share a
    page that is not full; in a ring or a block, no page at all. A parent outside the batch and a length that cannot be are
    reported, and the row is left alone. Entries of shared pages are passed on as they are. A page id outside the pool is
    reported where that page has to be copied; the new row has the id from `fresh` all the same.
    """

    kind: ClassVar[str] = "reorder"
    moves_states: ClassVar[bool] = True
    index_dtype: IndexName | None = None
    """Element type of `parents`, where -1 ends a request. None: the cache's `lengths_dtype`."""
    max_layers: MaxLayers = 128
    """Most layers of the cache that a call may bring. The kernel's arguments have room for so many layer pointers."""

    def check(self, kernels: KernelSet) -> None:
        cache = kernels.cache
        if lower_pages(cache).table.slices:
            raise ValueError(
                f"ops: reorder got table={type(cache.page_table).__name__}(), a list in which a request's slice cannot change "
                "its length; convert the table with ops.ToDense() and reorder a cache with table=Dense()"
            )
        if cache.storage.residual:
            raise ValueError(
                "ops: reorder got a cache with residual, whose newest tokens lie in a tail of each request and not in pages; "
                "beam search takes a cache without"
            )
        pool_param(cache, "pages", self.max_layers)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.cache
        form, pool = lower_pages(cache).table, pool_param(cache, "pages", self.max_layers)
        index = dtype(self.index_dtype or cache.index_type)
        runs = page_runs(cache, ids="table")
        doc = "the request whose tokens each one continues; -1: it ends here"
        params: list[Param] = [
            Array("parents", index.name, ("B",), untrusted=True, doc=doc, field="index_dtype"),
            *_fresh(cache, form),
        ]
        params += form.new_table("page ids of each request afterwards; not the memory of the old ones")
        if cache.storage.own_table:
            params += form.new_table("page ids of each request's scales afterwards", scales=True)
        doc, length = "tokens of each request afterwards", "" if cache.states else cache.index_type
        if length:
            params.append(
                Array("new_lengths", length, ("B",), access="inout", optional=True, doc=doc, field="lengths_dtype")
            )
        params += [pool, ERRORS]
        entry, declared = entry_name(kernels, self.name), tuple(p.declaration for p in params)
        context: ReorderContext | ReorderStatesContext
        if cache.states:
            template = "ops/reorder_states.cu.j2"
            context = ReorderStatesContext(entry, declared, pages_context(pool, runs, share=False))
        else:
            template = "ops/reorder.cu.j2"
            context = ReorderContext(
                entry=entry,
                params=declared,
                pool=pages_context(pool, runs, share=False),
                table_template=form.template,
                entries=form.entries,
                length=dtype(length).c,
                multiplier=cache.page_table.id_multiplier,
                whole=form.copied_whole,
                ring=form.wraps,
            )
        blocks: Expr = var("B") * chunks(runs)
        if form.wraps:
            blocks = blocks * var("M")
        # Pages of one token are never partly full: where full ones are shared, only the table is written.
        layers = var("all_layers") if form.copied_whole or cache.page_tokens != 1 else const(1)
        grid = (blocks, layers, const(1))
        plan = KernelPlan(
            self.name,
            entry,
            template,
            context,
            tuple(params),
            grid,
            THREADS,
            writes_pool=True,
            all_layers=True,
        )
        return (plan,)


def _fresh(cache: AnyCache, form: TableForm) -> list[Array]:
    """The free pages."""
    entries, field = dtype(cache.page_table.dtype), lower_pages(cache).allocation.table_field
    found = [Array("fresh", entries.name, form.fresh, untrusted=True, doc="free pages for each request", field=field)]
    if cache.storage.own_table:
        doc = "free pages of scales for each request"
        found.append(Array("fresh_scales", entries.name, ("B",), untrusted=True, doc=doc, field=field))
    return found
