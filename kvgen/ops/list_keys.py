"""list_keys: the keys that each row sees, as rows of the pool, for attention over lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from pydantic import Field

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.model_facts import check_listed_window
from kvgen.lowering.new_rows_rules import check_one_place
from kvgen.lowering.partners import check_window
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Size
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.tables import IndexName

THREADS: Final = 256

# Keys of a list that a warp has time for; longer lists, or those of any length, are a block's.
_WARP_KEYS: Final = 512


@dataclass(frozen=True)
class ListKeysContext:
    """Everything ops/list_keys.cu.j2 reads: `lanes` share a row's list, each with `batch` keys on their way; `window` 0: all."""

    entry: str
    params: tuple[str, ...]
    threads: int
    lanes: int
    batch: int
    rate: int
    window: int
    after: bool


class ListKeys(Op):
    """List the keys that each row sees, as rows of the pool, page * page_size + place: `keys[T, K]` and `counts[T]`, i32.

    For attention over lists: once a step for all layers of a kind. A row at position p sees tokens 0 to p of its request, or,
    where an entry of the cache stands for `rate` tokens, entries j < (p + 1) // rate; with `window`, the newest `window` of
    these. `row_offsets[B + 1]` says which rows are whose, as append takes them, and lengths where they stand. The list is in
    ascending order from column 0 on, -1 behind it; columns past it, K may be a multiple of what a kernel wants, and rows any
    distance apart, so two lists may lie side by side in one array.

    `counts[t]` is the number of keys, 0 for rows of no request; -1, and a report, where the list cannot be known: contradicting
    offsets, a length that cannot be, ids outside the pool, rows of the pool past 2^31 - 1, tokens that a ring has lost, more keys
    than K. MlaDecode gives NaN for such a row. Sources: vLLM's sliding-window and compressed index lists of DeepSeek V4.
    """

    kind: ClassVar[str] = "list_keys"
    at_rates: ClassVar[bool] = True
    window: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Keys of a row at most, the newest ones, its own token's included. None: all."""
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""

    def check(self, kernels: KernelSet) -> None:
        check_one_place(kernels, self.kind)
        check_window(self, "window", self.window, kernels)
        check_listed_window(self, self.window, kernels)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.kv
        index = dtype(self.index_dtype or cache.lengths_dtype)
        doc = "first row of each request"
        params = (
            Array("row_offsets", index.name, ("B+1",), untrusted=True, doc=doc, field="index_dtype"),
            Array(
                "keys", "i32", ("T", "K"), access="out", strided=True, doc="rows of the pool that each row sees, or -1"
            ),
            Array("counts", "i32", ("T",), access="out", doc="keys of each row, or -1"),
            Size("keys_stride", "i64", "keys.stride"),
            Size("num_rows", "u32", "T"),
            Size("columns", "u32", "K"),
            ERRORS,
        )
        lanes = 32 if self.window is not None and self.window <= _WARP_KEYS else THREADS
        context = ListKeysContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            threads=THREADS,
            lanes=lanes,
            batch=4,
            rate=cache.entry_tokens,
            window=self.window or 0,
            after=cache.lengths != "before",
        )
        grid = (ceil_div(var("T"), THREADS // lanes), const(1), const(1))
        return (KernelPlan(self.name, context.entry, "ops/list_keys.cu.j2", context, params, grid, THREADS),)
