"""sliced_add: what LoRA adapters add to the queries of the step's first tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from pydantic import Field

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.ops.lora_add import End, end_param
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Access, Array, Param, Size
from kvgen.schema.kernel_set import KernelSet, Op

THREADS: Final = 256
BATCH: Final = 2


@dataclass(frozen=True)
class SlicedAddContext:
    """Everything ops/sliced_add.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    value: str
    width: int
    vectors: int
    threads: int
    batch: int
    rows: int
    parts: int
    on_device: bool


class SlicedAdd(Op):
    """Add b to the first m = `lora_end_idx` rows of a, and copy its other rows: c = a + b, c = a.

    a and c are `[T, columns]`, b is `[A, columns]` with A >= m, all of the cache's dtype. c may be a's memory; then only the
    first m rows are touched. A sum is taken in f32 and rounded once.

    `end="host"`, the default, takes m as an int or a host array of one, and raises for an m below 0 or above T or A.
    `end="device"` reads m on the device, so that one captured graph serves every m; such an m adds nothing and is reported.
    Without rows (T = 0) neither looks at it. Source: Modular MAX, sliced_add.
    """

    kind: ClassVar[str] = "sliced_add"
    end: End = "host"
    """Where `lora_end_idx` is read: "host", an int or a host array of one; "device", i64 `[1]` on the device, so that
    one captured graph works for every value.
    """
    columns: int | None = Field(default=None, ge=1, le=2**24)
    """Elements of a row. None: q_heads * head_dim."""

    @property
    def columns_of_all_heads(self) -> int | None:
        return self.columns

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.kv
        value = dtype(cache.dtype)
        columns = self.columns or kernels.q_heads * cache.head_dim
        width = 16 // value.bytes
        while columns % width:
            width //= 2
        vectors, share = columns // width, THREADS * BATCH
        rows, parts = max(1, share // vectors), -(-vectors // share)

        def matrix(name: str, symbol: str, doc: str, access: Access = "in") -> Param:
            fields = (None, "columns" if self.columns else "q_heads * head_dim")
            return Array(
                name,
                value.name,
                (symbol, columns),
                access=access,
                align=width * value.bytes,
                strided=True,
                doc=doc,
                field="dtype",
                fields=fields,
                in_place=("a",) if access == "out" else (),
            )

        params = (
            matrix("a", "T", "what is added to"),
            matrix("b", "A", "what is added to the first rows"),
            matrix("c", "T", "the sum, in memory of its own or in a's", "out"),
            end_param(self.end, "rows that have something added, m", most=("T", "A")),
            *(Size(f"{name}_stride", "i64", f"{name}.stride") for name in "abc"),
            Size("num_rows", "u32", "T"),
            Size("b_rows", "u32", "A"),
            ERRORS,
        )
        context = SlicedAddContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            value=value.c,
            width=width,
            vectors=vectors,
            threads=THREADS,
            batch=BATCH,
            rows=rows,
            parts=parts,
            on_device=self.end == "device",
        )
        grid = (ceil_div(var("T"), rows) * parts, const(1), const(1))
        plan = KernelPlan(
            self.name, context.entry, "ops/sliced_add.cu.j2", context, params, grid, THREADS, reads_tables=False
        )
        return (plan,)
