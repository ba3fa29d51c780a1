"""lora_add: what LoRA adapters add to K and V of the step's first tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvgen.expr.nodes import Expr, ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.lowered import lower
from kvgen.lowering.new_rows import NewRows
from kvgen.lowering.row_adds import THREADS, AdderContext, adders, check_addable
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Count, Param, Size
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.tables import IndexName

End = Literal["host", "device"]


@dataclass(frozen=True)
class LoraAddContext:
    """Everything ops/lora_add.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    value: str
    adders: tuple[AdderContext, ...]
    threads: int
    rows: int
    search_lanes: int
    parts: int
    after: bool
    on_device: bool


def end_param(end: End, doc: str, *, most: tuple[str, ...], each: int = 1) -> Param:
    """How many rows have something added: a count on the host that sizes the grid, or a number on the device. It takes
    `each` of the rows that the dimensions `most` have."""
    if end == "host":
        return Count("lora_end_idx", doc=doc, max_count=most, rows_each=each)
    return Array("lora_end_idx", "i64", (1,), untrusted=True, doc=doc, rows="T")


class LoraAdd(Op):
    """Add a LoRA adapter's K and V to the step's first m = `lora_end_idx` tokens, in the cache.

    kv is `[T, kv_heads * head_dim]` in the 2m layout: row r < m is added to K of token r, row m <= r < 2m to V of token r -
    m; rows from 2m on are not read. Tokens count through `row_offsets[B + 1]`, so requests with an adapter come first. Call
    it after the append of the same step. Sums are f32, rounded once. Quantized values are dequantized, added to and
    quantized again, with a new scale where scales are computed.

    `end="host"` takes m as an int or a host array of one, and raises for an m below 0 or above T / 2. `end="device"` reads m
    on the device, so that one captured graph serves every m; a bad m adds nothing and is reported. Without rows (T = 0)
    neither looks at it. Tokens past the batch's are skipped and reported. Source: Modular MAX, kv_cache_2m_iadd_dispatch.
    """

    kind: ClassVar[str] = "lora_add"
    end: End = "host"
    """Where `lora_end_idx` is read: "host", an int or a host array of one; "device", i64 `[1]` on the device, so that
    one captured graph works for every value.
    """
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""

    def check(self, kernels: KernelSet) -> None:
        cache = kernels.kv
        check_addable(self.kind, cache)
        if cache.v_dim != cache.head_dim:
            raise ValueError(
                f"v_head_dim: got {cache.v_dim} with head_dim={cache.head_dim}; rows of the 2m layout are K's or V's, of one "
                "width; use ops.RowsAdd, whose rows hold both"
            )

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.kv
        value, new = dtype(cache.dtype), NewRows(self.name, index_dtype=self.index_dtype)
        found = adders(lower(cache), side_by_side=False)
        params = (
            Array(
                "kv",
                value.name,
                ("T", cache.kv_heads * cache.head_dim),
                align=found.align * value.bytes,
                strided=True,
                doc="what is added: m rows of K, m rows of V",
                field="dtype",
                fields=(None, "kv_heads * head_dim"),
            ),
            new.places_param(cache),
            end_param(self.end, "tokens that have something added, m", most=("T",), each=2),
            Size("kv_stride", "i64", "kv.stride"),
            Size("num_rows", "u32", "T"),
            ERRORS,
        )
        context = LoraAddContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            value=value.c,
            adders=found.roles,
            threads=THREADS,
            rows=found.rows,
            search_lanes=new.search_lanes(found.rows, THREADS),
            parts=found.parts,
            after=new.after(cache),
            on_device=self.end == "device",
        )
        # One block also where m is too large for the rows: it reports that.
        tokens: Expr = var("lora_end_idx") if self.end == "host" else ceil_div(var("T"), 2)
        grid = (ceil_div(tokens, found.rows) * found.parts, const(2), const(1))
        plan = KernelPlan(
            self.name, context.entry, "ops/lora_add.cu.j2", context, params, grid, THREADS, writes_pool=True
        )
        return (plan,)
