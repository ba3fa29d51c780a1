"""slot_mapping: the place of each new row in the pool, for engines that name places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.new_rows_rules import check_one_place
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Size
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.spec.tables import IndexName

THREADS: Final = 256


@dataclass(frozen=True)
class SlotMappingContext:
    """Everything ops/slot_mapping.cu.j2 reads; `narrow`: slots of 32 bits, which some may not fit; `rate` tokens an entry."""

    entry: str
    params: tuple[str, ...]
    threads: int
    narrow: bool
    after: bool
    rate: int


class SlotMapping(Op):
    """Compute each new row's place in the pool, `page * page_size + offset`, as append with `rows="slots"` takes it.

    `slots[T]` is the result; `row_offsets[B + 1]` says which rows are whose, as append takes them. -1 stands for rows of no
    request, for rows whose place a later row of the step takes (in a ring), and for bad rows, which are reported:
    contradicting offsets, a length that cannot be, a token past the page table, an id outside the pool, a slot that
    `slots_dtype` cannot hold. In a cache of `rate` r the slot of a row is that of the entry which its token ends, where
    (position + 1) % r == 0, and -1 elsewhere (vLLM's compressed slot mapping).
    """

    kind: ClassVar[str] = "slot_mapping"
    at_rates: ClassVar[bool] = True
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""
    slots_dtype: Literal["i32", "i64"] = "i64"
    """Element type of `slots[T]`, signed: -1 where a row has no place."""

    def check(self, kernels: KernelSet) -> None:
        check_one_place(kernels, self.kind)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.kv
        index, slots = dtype(self.index_dtype or cache.lengths_dtype), dtype(self.slots_dtype)
        doc = "first new row of each request"
        params = (
            Array("row_offsets", index.name, ("B+1",), untrusted=True, doc=doc, field="index_dtype"),
            Array("slots", slots.name, ("T",), access="out", doc="place of each row, or -1", field="slots_dtype"),
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
        )
        grid = (ceil_div(var("T"), THREADS), const(1), const(1))
        return (KernelPlan(self.name, context.entry, "ops/slot_mapping.cu.j2", context, params, grid, THREADS),)
