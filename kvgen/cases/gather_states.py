"""gather_states: states of a layer, by id, to rows of bytes."""

from __future__ import annotations

from kvgen.cases.comparison import Comparison
from kvgen.cases.page_ids import PageIdsCases, states_of
from kvgen.ops import GatherStates
from kvgen.reference import gather_states


class GatherStatesCases(PageIdsCases[GatherStates]):
    """All states."""

    ids = "ids"

    def compare(self, j: Comparison) -> int:
        return gather_states(states_of(j.wanted.pools), j.arrays["ids"], j.wanted.arrays["states_out"])
