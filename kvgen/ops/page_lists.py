"""to_dense and to_csr: page tables from one form to another, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from pydantic import Field, model_validator

from kvgen.expr.nodes import ceil_div, const, maximum, var
from kvgen.layout.dtypes import DType, dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.ops.lengths import counts_before, step_offsets
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Param
from kvgen.spec.cache import Cache, Continuous
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.spec.table import CSR, Dense, IndexName, Indirect

WARPS: Final = 8
# Ids of a request that a warp copies: enough for the trips to overlap, few enough to share a long request out.
COLUMNS: Final = 512


@dataclass(frozen=True)
class ToDenseContext:
    """Everything ops/to_dense.cu.j2 reads: `pages` counts those of request b; lists that are `counted` say lengths too."""

    entry: str
    params: tuple[str, ...]
    warps: int
    columns: int
    pages: str
    counted: bool
    element: str
    length: str
    fill: str
    divided: str


@dataclass(frozen=True)
class ToCsrContext:
    """Everything ops/to_csr.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    warps: int
    columns: int
    before: bool
    element: str
    fill: str
    divided: str


def _divided(cache: Cache) -> str:
    """What makes an entry of the table out of an id, as C."""
    multiplier = cache.page_table.id_multiplier
    return f" / {multiplier}" if multiplier > 1 else ""


class _PageLists(Op):
    """What both have: the type of the entries, and the entry that is no page."""

    table_dtype: IndexName
    index_dtype: IndexName | None = None
    fill: int | None = Field(default=None, ge=-1, le=2**31 - 1)

    @model_validator(mode="after")
    def _fill_fits(self) -> _PageLists:
        if self.fill == -1 and self.table_dtype == "u32":
            raise ValueError("fill: got -1 with table_dtype='u32', which has no sign; use 'i32' or 'i64', or None")
        return self

    def _null_entry(self, cache: Cache) -> str:
        """The entry that names no page, as C: by default the first one past the pool."""
        multiplier = cache.page_table.id_multiplier
        if self.fill is not None:
            return str(self.fill)
        return (
            "cache.num_pages" if multiplier == 1 else f"((uint64_t)cache.num_pages + {multiplier - 1}) / {multiplier}"
        )

    def _index(self, cache: Cache) -> DType:
        return dtype(self.index_dtype or cache.lengths_dtype)


class ToDense(_PageLists):
    """Write the page ids of a CSR or an Indirect cache as `page_table[B, C]`, a row a request.

    Entries are copied as they are; those past a request's pages, and ids outside the pool, which are reported, become
    `fill` (None: the first entry past the pool, Modular MAX's null page). A request has the pages of its slice (CSR) or of
    its tokens, `row_offsets[B + 1]`'s rows included (Indirect). What C columns do not hold is reported and left out. With
    last_page_len, `lengths[B]` gets the tokens of each request, 0 where its slice is wrong.
    """

    kind: ClassVar[str] = "to_dense"
    table_dtype: IndexName = "u32"

    def check(self, kernels: KernelSet) -> None:
        table = kernels.cache.page_table
        if not isinstance(table, CSR | Indirect):
            raise ValueError(
                f"ops: got to_dense with table={type(table).__name__}(); it makes rows of CSR's lists and of Indirect's slots"
            )

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache, entries = kernels.cache, dtype(self.table_dtype)
        table, lengths = cache.page_table, dtype(cache.lengths_dtype)
        sliced, before = isinstance(table, CSR), "true" if counts_before(cache) else "false"
        counted = isinstance(table, CSR) and table.last_page_len
        doc = "page ids of each request"
        params = [
            Param("page_table", entries, ("B", "C"), access="out", strided=True, doc=doc, field="table_dtype"),
            Param("page_table_stride", dtype("i64"), value="page_table.stride"),
            Param("columns", dtype("u32"), value="C"),
        ]
        if counted:
            doc = "tokens of each request"
            params.append(
                Param("lengths", lengths, ("B",), access="out", optional=True, doc=doc, field="lengths_dtype")
            )
        if not sliced:
            params.append(step_offsets(self._index(cache)))
        params.append(ERRORS)
        context = ToDenseContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            warps=WARPS,
            columns=COLUMNS,
            pages="pages_of_slice(cache, b)" if sliced else f"pages_of_tokens<{before}>(cache, row_offsets, b)",
            counted=counted,
            element=entries.c,
            length=lengths.c,
            fill=self._null_entry(cache),
            divided=_divided(cache),
        )
        # A row of no columns has its pages reported too.
        grid = (ceil_div(var("B"), WARPS), maximum(ceil_div(var("C"), COLUMNS), 1), const(1))
        plan = KernelPlan(self.name, context.entry, "ops/to_dense.cu.j2", context, tuple(params), grid, WARPS * 32)
        return (plan,)


class ToCsr(_PageLists):
    """Write the requests' page ids as `page_indices[J]`, `page_indptr[B + 1]` and `last_page_len[B]`, as FlashInfer takes them.

    A request has the pages of its tokens, `row_offsets[B + 1]`'s rows included where lengths come before the step;
    last_page_len is 0 without pages. Entries are copied as they are; ids outside the pool are reported and become `fill`
    (None: the first entry past the pool). Requests whose lengths or offsets cannot be, or that the table has no pages for,
    are reported and have none. Ids that page_indices has no room for are left out, and the first such request is reported;
    page_indptr has them, up to the largest index (2^31 - 1 in i32, else 2^32 - 2). Indices behind the last one are left alone.
    """

    kind: ClassVar[str] = "to_csr"
    table_dtype: IndexName = "i32"

    def check(self, kernels: KernelSet) -> None:
        cache = kernels.cache
        if isinstance(cache, Continuous) or not isinstance(cache.page_table, Dense | Indirect):
            which = (
                "a Continuous cache" if isinstance(cache, Continuous) else f"table={type(cache.page_table).__name__}()"
            )
            raise ValueError(f"ops: got to_csr with {which}; it makes lists of Dense's rows and of Indirect's slots")

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache, entries = kernels.cache, dtype(self.table_dtype)
        field = "table_dtype"
        params = (
            Param("page_indices", entries, ("J",), access="out", doc="page ids of all requests", field=field),
            Param("page_indptr", entries, ("B+1",), access="out", doc="where each request's ids begin", field=field),
            Param(
                "last_page_len",
                entries,
                ("B",),
                access="out",
                optional=True,
                doc="tokens in each last page",
                field=field,
            ),
            Param("num_indices", dtype("u32"), value="J"),
            step_offsets(self._index(cache)),
            ERRORS,
        )
        context = ToCsrContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            warps=WARPS,
            columns=COLUMNS,
            before=counts_before(cache),
            element=entries.c,
            fill=self._null_entry(cache),
            divided=_divided(cache),
        )
        # The first id may lie anywhere in its sector of 32 bytes.
        grid = (ceil_div(var("B") + 1, WARPS), ceil_div(var("M") + (32 // entries.bytes - 1), COLUMNS), const(1))
        return (KernelPlan(self.name, context.entry, "ops/to_csr.cu.j2", context, params, grid, WARPS * 32),)
