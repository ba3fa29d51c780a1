"""gather: copy cached tokens into contiguous rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvgen.dtypes import dtype
from kvgen.expr import ceil_div, const, var
from kvgen.ops.cache import ERRORS, RoleContext, entry_name, roles, rows_per_block
from kvgen.plan import KernelPlan, Param
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.spec.table import IndexName

THREADS = 256


@dataclass(frozen=True)
class GatherContext:
    """Everything ops/gather.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    elem: str
    heads: int
    roles: tuple[RoleContext, ...]
    threads: int
    rows: int


class Gather(Op):
    """Copy cached tokens to k_out and v_out `[T, kv_heads, head_dim]`.

    Row t of request b, counted from `row_offsets[b]`, is token `starts[b] + t` (`starts` optional: 0). Rows at or past
    `row_offsets[B]` are left alone; a row whose token has no valid page becomes NaN. In a
    ring, `lengths` says which tokens are stored: the last `window` before `length`.
    """

    kind: ClassVar[str] = "gather"
    index_dtype: IndexName | None = None

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache, parts = kernels.cache, roles(kernels.cache)
        elem, index = dtype(cache.dtype), dtype(self.index_dtype or cache.lengths_dtype)
        doc = "first row of each request"
        params = [Param("row_offsets", index, ("B+1",), untrusted=True, doc=doc, field="index_dtype")]
        params += [
            Param(
                f"{r.name}_out",
                elem,
                ("T", cache.kv_heads, r.dim),
                access="out",
                align=r.vector * elem.bytes,
                strided=True,
                doc=f"{r.title} of the gathered tokens",
                field="dtype",
                fields=(None, "kv_heads", r.field),
            )
            for r in parts
        ]
        doc = "first token to take of each request"
        params.append(Param("starts", index, ("B",), optional=True, untrusted=True, doc=doc, field="index_dtype"))
        params += [Param(f"{r.name}_stride", dtype("i64"), value=f"{r.name}_out.stride") for r in parts]
        params += [Param("num_rows", dtype("u32"), value="T"), ERRORS]
        rows = rows_per_block(cache, THREADS)
        context = GatherContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            elem=elem.c,
            heads=cache.kv_heads,
            roles=parts,
            threads=THREADS,
            rows=rows,
        )
        grid = (ceil_div(var("T"), rows), const(1), const(1))
        return (KernelPlan(self.name, context.entry, "ops/gather.cu.j2", context, tuple(params), grid, THREADS),)
