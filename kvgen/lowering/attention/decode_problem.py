"""decode and its twin over listed pages: the call as kernels see it, its grid, its workspace and its planner."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.expr.nodes import Expr, var
from kvgen.lowering.attention.problem import AttentionCall, Fit
from kvgen.lowering.attention.split_kv import Split, plan_digest, planner
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Param
from kvgen.plan.split_plan import SplitPlan
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet


@dataclass(frozen=True)
class DecodeProblem:
    """A decode. `scale` multiplies q . k, `elementwise`: scores are looked at one by one. A request has at most `max_seen`
    tokens that its rows see (0: all); `chunk` is 0 unless requests are cut at multiples of it. `index` is the dtype of
    index arrays. `cross`: rows are no tokens of the cache."""

    name: str
    kernels: KernelSet
    call: AttentionCall
    params: tuple[Param, ...]
    scale: float
    elementwise: bool
    split: Split
    chunk: int
    max_seen: int
    index: str
    cross: bool
    reads_tables: bool = True

    @property
    def cache(self) -> Cache:
        """The set's cache."""
        return self.kernels.kv

    def grid(self, fit: Fit, call: AttentionCall) -> Expr:
        """A block for each request or SM part, kv head and tile of columns."""
        return var("num_sm_parts" if call.planned else "T") * call.column_blocks

    def split_plan(self, fit: Fit) -> SplitPlan | None:
        """None with split="none"."""
        if self.split == "none":
            return None
        division = fit.division
        columns = self.cache.kv_heads // division.heads * division.tiles
        return SplitPlan(
            columns=columns,
            blocks_per_sm=division.blocks,
            partial_bytes=columns * fit.partial_bytes,
            chunk_tokens=self.chunk,
            max_seen=self.max_seen,
        )

    def digest(self, fit: Fit, split: SplitPlan | None) -> int:
        """A digest of the operation, its split and the planner's unit."""
        call = self.call
        return plan_digest(self.kernels, self.name, split, call.attend, call.rows, fit.tile, self.cross)

    def planner(self, fit: Fit, call: AttentionCall) -> KernelPlan:
        """The planner of requests, a tile `fit.tile` tokens."""
        return planner(
            self.kernels,
            self.name,
            attend=call.attend,
            rows=call.rows,
            tile=fit.tile,
            chunk_tokens=self.chunk,
            columns=call.column_blocks,
            index=self.index,
            digest=call.plan_digest,
            cross=self.cross,
        )
