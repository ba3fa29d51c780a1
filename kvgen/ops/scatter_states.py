"""scatter_states: rows of the caller's to states of one layer, the inverse of gather_states."""

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
class ScatterStatesContext:
    """Everything ops/scatter_states.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    states: PagesContext


class ScatterStates(Op):
    """Copy contiguous rows to states of one layer: state `ids[i]` becomes row i of `states [N, bytes]`.

    The inverse of gather_states. -1 skips the row, a bad id is reported (PAIR, at i) and skipped. Where two rows have the
    same id, every 16 bytes of the state are those of one of them. `num_ids` is device data, so one captured graph serves
    any number: rows past it are skipped; a negative one skips all of them and is reported.
    """

    kind: ClassVar[str] = "scatter_states"
    moves_states: ClassVar[bool] = True
    index_dtype: PairIndex = "i32"
    """Element type of `ids`, signed: -1 skips a row."""

    def check(self, kernels: KernelSet) -> None:
        check_states(self.kind, kernels.cache, "scatter")

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        params = state_rows(kernels.cache, "states", self.index_dtype, access="in", doc="the states, as bytes")
        context = ScatterStatesContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            states=states_of(kernels.cache),
        )
        grid = (tiles(page_runs(kernels.cache), var("N")), const(1), const(1))
        plan = KernelPlan(
            self.name,
            context.entry,
            "ops/scatter_states.cu.j2",
            context,
            params,
            grid,
            THREADS,
            writes_pool=True,
            reads_tables=False,
        )
        return (plan,)
