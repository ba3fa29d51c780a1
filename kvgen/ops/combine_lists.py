"""combine_lists: the entries and the newest tokens that each row attends to, as rows of a buffer that a prefill gathers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from pydantic import Field

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.model_facts import check_listed_window
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Scalar, Size
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.tables import IndexName

THREADS: Final = 256


@dataclass(frozen=True)
class CombineListsContext:
    """Everything ops/combine_lists.cu.j2 reads; `picked`: entries come from lists."""

    entry: str
    params: tuple[str, ...]
    threads: int
    rate: int
    window: int
    after: bool
    picked: bool


class CombineLists(Op):
    """List what each row of a prompt attends to in a buffer: entries of the compressed cache, then its newest tokens.

    For attention over a buffer of rows that was gathered from two caches, DeepSeek V4's prefill: of request b the buffer has
    entry j at row `entries_begin[b] + j` and token i at row `tokens_begin[b] + i`, which may be negative, since only the newest
    tokens are gathered; `buffer_rows` is its size. A row at position p attends to tokens p - window + 1 to p and, before them in
    the list, to entries j < (p + 1) // rate of the set's cache: of these to the first min((p + 1) // rate, J) of `indices[T, J]`,
    in which -1 and entries that the row does not see become -1; or, with `entries="all"`, to every one.

    `keys[T, K]` i32 is the list, -1 behind it; rows may lie any distance apart. `counts[T]` i32 is its length, 0 for rows of no
    request; -1, and a report, where the list cannot be known: contradicting offsets, a length that cannot be, rows outside the
    buffer, more keys than K. MlaDecode gives NaN for such a row. Source: vLLM, combine_topk_swa_indices.
    """

    kind: ClassVar[str] = "combine_lists"
    at_rates: ClassVar[bool] = True
    window: int = Field(ge=1, le=2**31 - 1)
    """Newest tokens that a row attends to, its own included."""
    entries: Literal["picked", "all"] = "picked"
    """"picked": the call brings `indices[T, J]`, i32, numbers of entries. "all": a row attends to all that it sees."""
    begins_dtype: Literal["i32", "i64"] = "i64"
    """Element type of `entries_begin` and `tokens_begin`."""
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""

    def check(self, kernels: KernelSet) -> None:
        check_listed_window(self, self.window, kernels)
        if kernels.kv.page_table.drops_tokens:
            raise ValueError(
                f"ops: got {self.name} with table={type(kernels.kv.page_table).__name__}(), which drops tokens; entries are "
                "those of a cache that keeps them; use it in that cache's set"
            )

    def _params(self, cache: Cache) -> tuple[Param, ...]:
        index, begins = dtype(self.index_dtype or cache.lengths_dtype).name, self.begins_dtype
        picks = Array(
            "indices", "i32", ("T", "J"), strided=True, untrusted=True, doc="entries that each row picked, or -1"
        )
        found: list[Param] = [picks] if self.entries == "picked" else []
        where, field = "row of the buffer", "begins_dtype"
        found += [
            Array("row_offsets", index, ("B+1",), untrusted=True, doc="first row of each request", field="index_dtype"),
            Array(
                "entries_begin", begins, ("B",), untrusted=True, doc=f"{where} with each request's entry 0", field=field
            ),
            Array(
                "tokens_begin", begins, ("B",), untrusted=True, doc=f"{where} for each request's token 0", field=field
            ),
            Scalar("buffer_rows", "u32", doc="rows of the buffer"),
            Array(
                "keys",
                "i32",
                ("T", "K"),
                access="out",
                strided=True,
                doc="rows of the buffer that each row sees, or -1",
            ),
            Array("counts", "i32", ("T",), access="out", doc="keys of each row, or -1"),
        ]
        if self.entries == "picked":
            found += [Size("indices_stride", "i64", "indices.stride"), Size("picks", "u32", "J")]
        sizes = (Size("keys_stride", "i64", "keys.stride"), Size("num_rows", "u32", "T"), Size("columns", "u32", "K"))
        return (*found, *sizes, ERRORS)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        params = self._params(kernels.kv)
        context = CombineListsContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            threads=THREADS,
            rate=kernels.kv.entry_tokens,
            window=self.window,
            after=kernels.kv.lengths != "before",
            picked=self.entries == "picked",
        )
        grid = (ceil_div(var("T"), THREADS // 32), const(1), const(1))
        return (KernelPlan(self.name, context.entry, "ops/combine_lists.cu.j2", context, params, grid, THREADS),)
