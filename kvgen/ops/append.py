"""append: store the new tokens' K and V in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from kvgen.dtypes import dtype
from kvgen.expr import ceil_div, const, var
from kvgen.ops.cache import ERRORS, RoleContext, entry_name, roles, rows_per_block
from kvgen.plan import KernelPlan, Param
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.spec.table import IndexName, PerKV

THREADS = 256


@dataclass(frozen=True)
class AppendContext:
    """Everything ops/append.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    elem: str
    heads: int
    roles: tuple[RoleContext, ...]
    threads: int
    rows: int
    by_slot: bool
    lengths: str


class Append(Op):
    """Store k and v `[T, kv_heads, head_dim]` of the step's tokens.

    `rows="ragged"`: `row_offsets[B + 1]` says which rows are whose; row t of request b goes to position
    `length + t` ("before" lengths) or ends at `length` ("after"). Rows at or past `row_offsets[B]` are padding.
    `rows="slots"`: `slots[T]` names each row's place, `page * page_size + offset`; -1 skips the row.
    """

    kind: ClassVar[str] = "append"
    rows: Literal["ragged", "slots"] = "ragged"
    index_dtype: IndexName | None = Field(default=None)

    def check(self, kernels: KernelSet) -> None:
        if self.rows == "slots" and isinstance(kernels.cache.page_table, PerKV):
            raise ValueError("rows: got 'slots' with table=PerKV(), where K and V lie in different pages; use 'ragged'")

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache, parts = kernels.cache, roles(kernels.cache)
        elem = dtype(cache.dtype)
        params: list[Param] = []
        for r in parts:
            doc = f"new {r.title} rows"
            params.append(
                Param(
                    r.name,
                    elem,
                    ("T", cache.kv_heads, r.dim),
                    align=r.vector * elem.bytes,
                    strided=True,
                    doc=doc,
                    field="dtype",
                    fields=(None, "kv_heads", r.field),
                )
            )
        if self.rows == "slots":
            index = dtype(self.index_dtype or "i64")
            doc = "place of each row, or -1 to skip it"
            params.append(Param("slots", index, ("T",), untrusted=True, doc=doc, field="index_dtype"))
        else:
            index = dtype(self.index_dtype or cache.lengths_dtype)
            doc = "first row of each request"
            params.append(Param("row_offsets", index, ("B+1",), untrusted=True, doc=doc, field="index_dtype"))
        params += [Param(f"{r.name}_stride", dtype("i64"), value=f"{r.name}.stride") for r in parts]
        params.append(Param("num_rows", dtype("u32"), value="T"))
        params.append(ERRORS)
        rows = rows_per_block(cache, THREADS)
        context = AppendContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            elem=elem.c,
            heads=cache.kv_heads,
            roles=parts,
            threads=THREADS,
            rows=rows,
            by_slot=self.rows == "slots",
            lengths=cache.lengths,
        )
        grid = (ceil_div(var("T"), rows), const(1), const(1))
        plan = KernelPlan(
            self.name, context.entry, "ops/append.cu.j2", context, tuple(params), grid, THREADS, writes_pool=True
        )
        return (plan,)
