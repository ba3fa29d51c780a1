"""gather_states: states of one layer to rows of the caller's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvgen.expr.nodes import const, var
from kvgen.lowering.cache_struct import entry_name
from kvgen.lowering.page_runs import THREADS, PagesContext, PairIndex, page_runs, tiles
from kvgen.lowering.state_rows import check_states, state_rows, states_of
from kvgen.plan.kernel import KernelPlan
from kvgen.schema.kernel_set import KernelSet, Op


@dataclass(frozen=True)
class GatherStatesContext:
    """Everything ops/gather_states.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    states: PagesContext


class GatherStates(Op):
    """Copy states of one layer to contiguous rows: row i of `states_out [N, bytes]` becomes state `ids[i]`.

    -1 makes the row zeros, the state of a request that begins. A bad id is reported (PAIR, at i) and its row becomes 0xff
    bytes, NaN in every float. `num_ids` is device data, so one captured graph serves any number: rows past it are left
    alone; a negative one leaves all of them alone and is reported. The cache's `state_ids` are ids as well, where every
    request's state is wanted.
    """

    kind: ClassVar[str] = "gather_states"
    moves_states: ClassVar[bool] = True
    index_dtype: PairIndex = "i32"
    """Element type of `ids`, signed: -1 is no state."""

    def check(self, kernels: KernelSet) -> None:
        check_states(self.kind, kernels.cache, "gather")

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        params = state_rows(kernels.cache, "states_out", self.index_dtype, access="out", doc="the states, as bytes")
        context = GatherStatesContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            states=states_of(kernels.cache),
        )
        grid = (tiles(page_runs(kernels.cache), var("N")), const(1), const(1))
        plan = KernelPlan(
            self.name,
            context.entry,
            "ops/gather_states.cu.j2",
            context,
            params,
            grid,
            THREADS,
            reads_tables=False,
        )
        return (plan,)
