"""slot_mapping: the place of each new row in the pool, for engines that name places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.new_rows_rules import check_one_place
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Scalar, Size
from kvgen.schema.interleave import Interleave
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.tables import IndexName

THREADS: Final = 256


@dataclass(frozen=True)
class SlotMappingContext:
    """Everything ops/slot_mapping.cu.j2 reads; `narrow`: slots of 32 bits, which some may not fit; `rate` tokens an entry;
    of tokens dealt to `ranks` in runs of `run` (0: they are not) the type `length` of a rank's counts."""

    entry: str
    params: tuple[str, ...]
    threads: int
    narrow: bool
    after: bool
    rate: int
    ranks: int
    run: int
    length: str


class SlotMapping(Op):
    """Compute each new row's place in the pool, `page * page_size + offset`, as append with `rows="slots"` takes it.

    `slots[T]` is the result; `row_offsets[B + 1]` says which rows are whose, as append takes them. -1 stands for rows of no
    request, for rows whose place a later row of the step takes (in a ring), and for bad rows, which are reported:
    contradicting offsets, a length that cannot be, a token past the page table, an id outside the pool, a slot that
    `slots_dtype` cannot hold. In a cache of `rate` r the slot of a row is that of the entry which its token ends, where
    (position + 1) % r == 0, and -1 elsewhere (vLLM's compressed slot mapping).

    `interleave`: lengths and offsets are those of whole requests, the page table is that of the tokens of one of several ranks,
    which the call names by `rank`. A row has a slot where its token lies on that rank, and -1 elsewhere. `local_lengths[T]`
    are the rank's tokens up to each row's, that row's included: what decode sees for it, as `lengths` of a cache with a row of
    q a request (with table=Mapped() also of several rows); `lse` merges what the ranks make of it.
    """

    kind: ClassVar[str] = "slot_mapping"
    at_rates: ClassVar[bool] = True
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""
    slots_dtype: Literal["i32", "i64"] = "i64"
    """Element type of `slots[T]`, signed: -1 where a row has no place."""
    interleave: Interleave | None = None
    """How tokens are dealt to ranks, of which the cache has one's. None: it has all tokens."""

    def check(self, kernels: KernelSet) -> None:
        check_one_place(kernels, self.kind)
        cache = kernels.kv
        table = cache.page_table
        if self.interleave is not None and (cache.entry_tokens > 1 or table.drops_tokens or table.counts_tokens):
            raise ValueError(
                f"interleave: got ranks={self.interleave.ranks} with table={type(table).__name__}() and rate="
                f"{cache.entry_tokens}; lengths are those of whole requests, whose tokens all have an entry of their own on some "
                "rank; use Dense(), Mapped(), Indirect() or CSR() with lengths, and no rate"
            )

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.kv
        index, slots = dtype(self.index_dtype or cache.lengths_dtype), dtype(self.slots_dtype)
        doc = "first new row of each request"
        dealt, length = self.interleave, dtype(cache.lengths_dtype)
        params: tuple[Param, ...] = (
            Array("row_offsets", index.name, ("B+1",), untrusted=True, doc=doc, field="index_dtype"),
            Array("slots", slots.name, ("T",), access="out", doc="place of each row, or -1", field="slots_dtype"),
            *_of_ranks(dealt, length.name),
            Size("num_rows", "u32", "T"),
            ERRORS,
        )
        context = SlotMappingContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            threads=THREADS,
            narrow=slots.bytes == 4,
            after=cache.lengths != "before",
            rate=cache.entry_tokens,
            ranks=dealt.ranks if dealt else 0,
            run=dealt.size if dealt else 0,
            length=length.c,
        )
        grid = (ceil_div(var("T"), THREADS), const(1), const(1))
        return (KernelPlan(self.name, context.entry, "ops/slot_mapping.cu.j2", context, params, grid, THREADS),)


def _of_ranks(dealt: Interleave | None, kind: str) -> tuple[Param, ...]:
    """What the call brings where tokens are dealt to ranks."""
    if dealt is None:
        return ()
    doc = "the rank's tokens up to each row's; 0 for rows of nobody"
    return (
        Array("local_lengths", kind, ("T",), access="out", doc=doc, field="lengths_dtype"),
        Scalar("rank", "u32", doc="whose tokens the cache has", most=dealt.ranks - 1),
    )
