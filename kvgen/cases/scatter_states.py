"""scatter_states: rows of bytes over states of a layer, by id."""

from __future__ import annotations

from kvgen.cases.comparison import Comparison
from kvgen.cases.page_ids import PageIdsCases, states_of
from kvgen.ops import ScatterStates
from kvgen.reference import scatter_states


class ScatterStatesCases(PageIdsCases[ScatterStates]):
    """All states."""

    ids = "ids"

    def compare(self, j: Comparison) -> int:
        return scatter_states(states_of(j.wanted.pools), j.arrays["ids"], j.arrays["states"])
