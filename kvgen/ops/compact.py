"""compact: move pages so that the used ones are the first ones (defragment)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.lowered import lower_pages
from kvgen.lowering.page_runs import (
    THREADS,
    MaxLayers,
    PagesContext,
    PairIndex,
    page_runs,
    pages_context,
    pool_param,
    tiles,
    with_id,
)
from kvgen.lowering.tables import EntryList
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Size
from kvgen.schema.kernel_set import KernelSet, Op

PLAN_THREADS = 1024
# Pages a thread of the planner has in flight.
HELD = 8
REQUESTS = THREADS // 32  # a warp each


@dataclass(frozen=True)
class CompactContext:
    """Everything ops/compact.cu.j2 reads; `table_template` knows where entries lie."""

    entry: str
    params: tuple[str, ...]
    pool: PagesContext
    table_template: str
    entries: tuple[EntryList, ...]
    requests: int
    multiplier: int


@dataclass(frozen=True)
class CompactStatesContext:
    """Everything ops/compact_states.cu.j2 reads; `element` is the C type of state ids."""

    entry: str
    params: tuple[str, ...]
    pool: PagesContext
    element: str


@dataclass(frozen=True)
class CompactPlanContext:
    """Everything ops/compact_plan.cu.j2 reads; `table_template` knows where entries lie."""

    entry: str
    params: tuple[str, ...]
    pool: PagesContext
    table_template: str
    entries: tuple[EntryList, ...]
    element: str
    index: str
    threads: int
    held: int
    multiplier: int


class Compact(Op):
    """Move the pages in use to the front of the pool, in every layer, and write the page table for it.

    It takes two launches: `compact.plan(cache, new_ids, moves, num_moves)`, then `compact(cache, moves, num_moves, new_ids,
    new table)`.

    Pages that no request of the batch holds count as free and are written over, those of prefix caches and waiting requests
    too. Name such pages in `kept[K]` (optional; -1 skips an entry), and look up in `new_ids` where they are afterwards.

    The plan. The pages of the requests' tokens are in use, shared ones count once; `lengths` must count the tokens that are
    stored, so call it between steps. With U pages in use, the r-th of them from id U on moves to the r-th free one below U.
    Moves only go into free pages, so all may be made at once. `moves[Q, 2]` gets them, -1 behind the last, and
    `num_moves[1]` their number; if Q is too small, the first Q are made and the other pages stay. `new_ids[P]` says where
    each page is afterwards, -1: it is free; P is the number of pages that the table can name, pages / id_multiplier rounded
    up. `num_used[1]` (optional) gets U.

    The table. The new one may be the old one. Entries of the requests' tokens are replaced; entries past a request's end,
    and bad ones, which are reported, stay. A request whose length cannot be is reported, and its pages count as free. Scales
    with a table of their own stay where they are. A negative `num_moves` moves nothing, keeps all entries and is reported.

    The plan is one block and takes about 4 us, and 3 us more for every 64 Ki pages of the pool.
    """

    kind: ClassVar[str] = "compact"
    moves_states: ClassVar[bool] = True
    index_dtype: PairIndex = "i64"
    """Element type of `new_ids`, `moves`, `num_moves`, `num_used` and `kept`, signed."""
    max_layers: MaxLayers = 128
    """Most layers of the cache that a call may bring. The kernel's arguments have room for so many layer pointers."""

    def kernel_names(self) -> tuple[str, ...]:
        return (self.name, f"{self.name}_plan")

    def check(self, kernels: KernelSet) -> None:
        pool_param(kernels.cache, "pages", self.max_layers)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.cache
        pool, index = pool_param(cache, "pages", self.max_layers), dtype(self.index_dtype)
        entries, field = dtype(cache.page_table.dtype), "index_dtype"
        runs = with_id(page_runs(cache), 0)
        form = lower_pages(cache).table
        lists = tuple(e for e in form.entries if e.id != "scale_id")
        table_field = lower_pages(cache).allocation.table_field
        params = (
            Array("moves", index.name, ("Q", 2), untrusted=True, doc="pages to move from and to", field=field),
            Array("num_moves", index.name, (1,), untrusted=True, doc="how many there are", field=field),
            Array(
                "new_ids", entries.name, ("P",), untrusted=True, doc="where each page is afterwards", field=table_field
            ),
            *form.new_table(f"{form.array.replace('_', ' ')} afterwards; may be the cache's own", in_place=True),
            Size("max_moves", "u32", "Q"),
            Size("num_ids", "u32", "P"),
            pool,
            ERRORS,
        )
        entry, declared = entry_name(kernels, self.name), tuple(p.declaration for p in params)
        context: CompactContext | CompactStatesContext
        if cache.states:
            template, requests = "ops/compact_states.cu.j2", THREADS
            context = CompactStatesContext(entry, declared, pages_context(pool, runs), entries.c)
        else:
            template, requests = "ops/compact.cu.j2", REQUESTS
            context = CompactContext(
                entry=entry,
                params=declared,
                pool=pages_context(pool, runs),
                table_template=form.template,
                entries=lists,
                requests=requests,
                multiplier=cache.page_table.id_multiplier,
            )
        grid = (tiles(runs, var("Q")) + ceil_div(var("B"), requests), var("all_layers"), const(1))
        move = KernelPlan(
            self.name,
            entry,
            template,
            context,
            params,
            grid,
            THREADS,
            writes_pool=True,
            all_layers=True,
        )
        return (move, self._planner(kernels, lists, table_field))

    def _planner(self, kernels: KernelSet, lists: tuple[EntryList, ...], table_field: str) -> KernelPlan:
        cache, name, field = kernels.cache, f"{self.name}_plan", "index_dtype"
        pool = pool_param(cache, "pages", self.max_layers)
        index, entries = dtype(self.index_dtype), dtype(cache.page_table.dtype)
        params = (
            Array(
                "new_ids", entries.name, ("P",), access="out", doc="where each page is afterwards", field=table_field
            ),
            Array("moves", index.name, ("Q", 2), access="out", doc="pages to move from and to", field=field),
            Array("num_moves", index.name, (1,), access="out", doc="how many there are", field=field),
            Array(
                "num_used", index.name, (1,), access="out", optional=True, doc="how many pages are used", field=field
            ),
            Array("kept", index.name, ("K",), optional=True, untrusted=True, doc="pages in use besides", field=field),
            Size("num_ids", "u32", "P"),
            Size("max_moves", "u32", "Q"),
            Size("num_kept", "u32", "K"),
            pool,
            ERRORS,
        )
        context = CompactPlanContext(
            entry=entry_name(kernels, name),
            params=tuple(p.declaration for p in params),
            pool=pages_context(pool, page_runs(cache)),
            table_template=lower_pages(cache).table.template,
            entries=lists,
            element=entries.c,
            index=index.c,
            threads=PLAN_THREADS,
            held=HELD,
            multiplier=cache.page_table.id_multiplier,
        )
        grid = (const(1), const(1), const(1))
        return KernelPlan(
            name, context.entry, "ops/compact_plan.cu.j2", context, params, grid, PLAN_THREADS, all_layers=True
        )
