"""store_scales: scales that another kernel has chosen, stored where the new tokens' are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.storage import Scales
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.lowered import lower
from kvgen.lowering.new_rows import NewRows
from kvgen.lowering.row_adds import THREADS
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Size
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.tables import IndexName

BATCH: Final = 2
MOST_ROWS: Final = 32


@dataclass(frozen=True)
class StoreScalesContext:
    """Everything ops/store_scales.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    role: str
    segment: str
    scale: str
    each: int
    numbers: int
    width: int
    vectors: int
    threads: int
    batch: int
    rows: int
    search_lanes: int
    parts: int
    after: bool


class StoreScales(Op):
    """Store scales that were computed elsewhere, for the step's tokens of K or V; the codes are not touched.

    new_scales is `[T, heads / block.head, groups]`, a group being block.dim dims, the last one of a row maybe fewer. With
    zero points the last axis has two places a group, scale and zero point in turn. `role` is "k" or "v". `row_offsets[B +
    1]` says which rows are whose; scales go where append puts those of the rows' codes. Source: Modular MAX,
    store_k_scales.paged.ragged.
    """

    kind: ClassVar[str] = "store_scales"
    role: Literal["k", "v"] = "k"
    """Whose scales are stored: "k" or "v"."""
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""

    def check(self, kernels: KernelSet) -> None:
        _scales_of(kernels.kv, self.role)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.kv
        scales = _scales_of(kernels.kv, self.role)
        new, kind, each = NewRows(self.name, index_dtype=self.index_dtype), scales.dtype, 1 + scales.zero
        places = scales.groups * each
        segment = lower(cache).segments_of(self.role)[0]
        width = segment.scales[0].vector  # a pool of scales need not be aligned for more
        while places % width:
            width //= 2
        vectors, share = scales.heads * places // width, THREADS * BATCH
        rows, parts = max(1, min(MOST_ROWS, share // vectors)), -(-vectors // share)
        quant = "quant" if cache.quant is not None else f"{self.role}_quant"
        params = (
            Array(
                "new_scales",
                kind.name,
                ("T", scales.heads, places),
                align=width * kind.bytes,
                strided=True,
                doc=f"scales of {self.role.upper()}" + (", a zero point behind each" if scales.zero else ""),
                field=f"{quant}.scale_dtype",
                fields=(None, f"{quant}.block", f"{quant}.block"),
            ),
            new.places_param(cache),
            Size("scales_stride", "i64", "new_scales.stride"),
            Size("num_rows", "u32", "T"),
            ERRORS,
        )
        context = StoreScalesContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            role=self.role.upper(),
            segment=segment.struct,
            scale=kind.c,
            each=each,
            numbers=places,
            width=width,
            vectors=vectors,
            threads=THREADS,
            batch=BATCH,
            rows=rows,
            search_lanes=new.search_lanes(rows, THREADS),
            parts=parts,
            after=new.after(cache),
        )
        grid = (ceil_div(var("T"), rows) * parts, const(1), const(1))
        plan = KernelPlan(
            self.name, context.entry, "ops/store_scales.cu.j2", context, params, grid, THREADS, writes_pool=True
        )
        return (plan,)


def _scales_of(cache: Cache, role: Literal["k", "v"]) -> Scales:
    """The scales of a role's tokens; raises ValueError where it has none that can be stored token by token."""
    parts = cache.storage.roles.get(role)
    if parts is None:
        raise ValueError(f"role: got {role!r} with a cache that stores K alone; use role='k'")
    quant, scales = parts[0].quant, parts[0].scales
    if quant is None or scales is None or not quant.computed:
        why = "has no scales" if scales is None else "has given scales, the same for every token"
        raise ValueError(
            f"role: got {role!r}, which {why}; store_scales writes scales of single tokens; give a Quant with scale_dtype and "
            "scale='computed'"
        )
    if quant.residual:
        raise ValueError(
            f"role: got {role!r} with residual={quant.residual}, whose scales are those of {quant.residual} tokens together; "
            "ops.Seal stores them"
        )
    return scales
