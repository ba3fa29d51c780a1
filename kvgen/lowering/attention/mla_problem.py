"""mla_decode: the call as kernels see it, its grid, its workspace and its planner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from kvgen.expr.nodes import Expr, var
from kvgen.lowering.attention.latent_row import LatentRow, latent_row
from kvgen.lowering.attention.mla_lists import ListContext
from kvgen.lowering.attention.problem import AttentionCall, Fit
from kvgen.lowering.attention.split_kv import Split, plan_digest, planner
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Param
from kvgen.plan.split_plan import SplitPlan
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet

# Entries that a chunk of lists is a multiple of.
_LIST_CHUNK: Final = 64


@dataclass(frozen=True)
class MlaProblem:
    """An mla_decode. `qk_scale` turns products into scores in base 2. `lists` name rows of `caches`, of the set's own cache
    first; without lists a request's page table names them. `lengths` are the planner's arguments for lists. A request has at
    most `max_seen` tokens that its rows see (0: all); `chunk` is 0 unless requests are cut at multiples of it."""

    name: str
    kernels: KernelSet
    call: AttentionCall
    params: tuple[Param, ...]
    qk_scale: str
    caches: tuple[Cache, ...]
    lists: tuple[ListContext, ...]
    lengths: tuple[Param, ...]
    split: Split
    chunk: int
    max_seen: int
    index: str

    @property
    def cache(self) -> Cache:
        """The set's cache."""
        return self.kernels.kv

    @property
    def columns(self) -> int:
        """Columns of a request, or of a row that has lists."""
        return self.call.columns

    @property
    def reads_tables(self) -> bool:
        """A request's page table names rows."""
        return not self.lists

    @cached_property
    def row(self) -> LatentRow | str:
        """How a row of the set's cache lies in shared memory as it is stored, or why it cannot lie there."""
        try:
            return latent_row(self.cache)
        except ValueError as error:
            return str(error)

    def grid(self, fit: Fit, call: AttentionCall) -> Expr:
        """A block for each row of q or SM part, and tile of columns."""
        return var("num_sm_parts" if call.planned else "T") * call.tiles

    def split_plan(self, fit: Fit) -> SplitPlan | None:
        """None with split="none"."""
        if self.split == "none":
            return None
        tiles = fit.division.tiles
        return SplitPlan(
            columns=tiles,
            blocks_per_sm=fit.division.blocks,
            partial_bytes=tiles * fit.partial_bytes,
            chunk_tokens=self.chunk,
            max_seen=self.max_seen,
        )

    def digest(self, fit: Fit, split: SplitPlan | None) -> int:
        """A digest of the operation, its split and the planner's unit."""
        return plan_digest(self.kernels, self.name, split, self.call.attend, self.call.rows, fit.tile)

    def planner(self, fit: Fit, call: AttentionCall) -> KernelPlan:
        """The planner of requests, or of lists: each of them takes whole tiles of the kernel that reads it."""
        more: dict[str, Any] = {"tile": fit.tile}
        if self.lists:
            more = {"tile": _LIST_CHUNK, "list_tile": fit.tile, "lengths": self.lengths}
        return planner(
            self.kernels,
            self.name,
            attend=call.attend,
            rows=call.rows,
            chunk_tokens=self.chunk,
            columns=call.tiles,
            index=self.index,
            digest=call.plan_digest,
            **more,
        )
