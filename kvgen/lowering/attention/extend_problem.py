"""extend: the call as kernels see it, its grid, its workspace and its planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgen.expr.nodes import Expr, ceil_div, const, maximum, minimum, var
from kvgen.lowering.attention.masks_scores import AttentionContext
from kvgen.lowering.attention.operand import operands
from kvgen.lowering.attention.problem import AttentionCall, Fit
from kvgen.lowering.attention.split_kv import (
    OVERHEAD,
    PLAN_THREADS,
    SIZES,
    WORKSPACE,
    new_in_length,
    plan_digest,
    row_offsets,
)
from kvgen.lowering.cache_struct import entry_name
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Param, Size
from kvgen.plan.split_plan import SplitPlan
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.mask import TREE_ROWS

# Tokens that an entry has at least where a tile's keys are cut.
LEAST_TOKENS: Final = 512
# Slots of an SM part: pieces of tiles that are cut; where cuts are fixed there are more of them, and one is its own.
SLOTS: Final = 2
FIXED_SLOTS: Final = 9
# Bytes of K and V that stay in L2 beside all else.
_TOGETHER: Final = 16 << 20


@dataclass(frozen=True)
class ExtendPlanContext:
    """Everything ops/extend_plan.cu.j2 reads: `cols` columns a tile of rows, `tile` tokens a tile of keys, which are cut at
    multiples of `chunk_tokens` (0: where balance asks). An entry of up to `narrow_cols` columns takes half a tile's time."""

    entry: str
    attends: str
    params: tuple[str, ...]
    attend: AttentionContext
    threads: int
    cols: int
    group: int
    kv_heads: int
    most_rows: int
    tile: int
    narrow_cols: int
    chunk_tokens: int
    overhead: int
    least_tokens: int
    token_bytes: int
    together_bytes: int
    new_in_length: bool
    digest: int


@dataclass(frozen=True)
class ExtendProblem:
    """An extend. `scale` multiplies q . k; sums begin anew at multiples of `chunk` tokens (0: they do not). `index` is the dtype
    of index arrays. `cross`: rows are no tokens of the cache. `scored`: something is done to scores before the softmax;
    `masked`: rows do not see all tokens up to their own, or all."""

    name: str
    kernels: KernelSet
    call: AttentionCall
    params: tuple[Param, ...]
    scale: float
    chunk: int
    index: str
    cross: bool
    scored: bool
    masked: bool
    reads_tables: bool = True

    @property
    def cache(self) -> Cache:
        """The set's cache."""
        return self.kernels.kv

    def grid(self, fit: Fit, call: AttentionCall) -> Expr:
        """Blocks that take work until none is left are one a multiprocessor, or one a slot; others have a tile of rows each, for
        each kv head, and there are as many more where keys are cut as SM parts."""
        parts, heads = var("num_sm_parts"), self.cache.kv_heads
        if self.chunk or fit.persistent:
            return parts
        cols = fit.division.columns
        rows = var("T") * tiles_a_row(call.group, cols)
        tiles = minimum(rows, ceil_div(var("T") * call.group, cols) + var("B")) * heads
        return tiles + maximum(parts, heads)

    def split_plan(self, fit: Fit) -> SplitPlan:
        """An entry has a tile of rows and the keys that they see, or a part of them."""
        heads = self.cache.kv_heads
        return SplitPlan(
            columns=heads,
            blocks_per_sm=fit.division.blocks,
            partial_bytes=heads * fit.partial_bytes,
            chunk_tokens=0,
            slots_a_part=FIXED_SLOTS if self.chunk else SLOTS,
            tiles_a_row=tiles_a_row(self.call.group, fit.division.columns),
        )

    def digest(self, fit: Fit, split: SplitPlan | None) -> int:
        """A digest of the operation, its split and the planner's unit."""
        return plan_digest(self.kernels, self.name, split, self.call.attend, self.chunk, fit.tile, self.cross)

    def planner(self, fit: Fit, call: AttentionCall) -> KernelPlan:
        """The planner of tiles of rows: one block, once a step."""
        attend = call.attend
        params = (
            WORKSPACE,
            row_offsets(self.index),
            *(p for p in attend.params if p.name == "valid_tokens"),
            Size("num_rows", "u32", "planned_rows"),
            *SIZES,
        )
        context = ExtendPlanContext(
            entry=entry_name(self.kernels, f"{self.name}_plan"),
            attends=call.entry,
            params=tuple(p.declaration for p in params),
            attend=attend,
            threads=PLAN_THREADS,
            cols=fit.division.columns,
            group=call.group,
            kv_heads=call.kv_heads,
            most_rows=TREE_ROWS if attend.packed else (2**32 - 1) // call.group,
            tile=fit.tile,
            narrow_cols=fit.narrow_columns,
            chunk_tokens=self.chunk,
            overhead=OVERHEAD,
            least_tokens=LEAST_TOKENS,
            token_bytes=sum(operand.bytes for operand in operands(self.cache)),
            together_bytes=_TOGETHER,
            new_in_length=new_in_length(self.kernels, self.cross),
            digest=call.plan_digest,
        )
        one = const(1)
        return KernelPlan(
            f"{self.name}_plan", context.entry, "ops/extend_plan.cu.j2", context, params, (one, one, one), PLAN_THREADS
        )


def tiles_a_row(group: int, cols: int) -> int:
    """Blocks' columns that a row's query heads of a kv head take at most."""
    return -(-group // cols)
