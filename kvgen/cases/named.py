"""The tokens of a request that lists name, and their places in the pool."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.scene import Scene


def selected(scene: Scene) -> int:
    """Tokens that a query or a list names."""
    return min(scene.workload.listed, *(scene.alive(b) for b in range(len(scene.workload.totals))))


def tokens_of_query(scene: Scene, b: int, count: int) -> NDArray[np.int64]:
    """The tokens of request b that its query of gather_rows, or its list, names, in no order."""
    first = scene.entries(scene.workload.totals[b]) - scene.alive(b)
    return first + np.random.default_rng(b).permutation(scene.alive(b))[:count]


def places(scene: Scene, b: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The slots of tokens (entries) of request b; -1 for a token that a ring has lost."""
    alive = (
        positions >= (-(-scene.entries(scene.workload.totals[b]) // scene.tokens) - len(scene.ids[b])) * scene.tokens
    )
    column = (positions // scene.tokens) % scene.columns
    ids = scene.matrix(scene.ids)[b, 0, column] * scene.cache.page_table.id_multiplier
    return np.where(alive, ids * scene.tokens + positions % scene.tokens, -1)


def new_places(scene: Scene, b: int) -> NDArray[np.int64]:
    """The places of the new tokens of request b; -1 for those that end no entry, where one stands for several tokens."""
    total, rate = scene.workload.totals[b], scene.cache.entry_tokens
    tokens = np.arange(total - scene.workload.new[b], total)
    return np.where((tokens + 1) % rate == 0, places(scene, b, tokens // rate), -1)


def alive_places(scene: Scene) -> NDArray[np.int64]:
    """The places of all tokens that are alive, request by request."""
    ends = [(scene.entries(total), scene.alive(b)) for b, total in enumerate(scene.workload.totals)]
    return np.concatenate([places(scene, b, np.arange(end - count, end)) for b, (end, count) in enumerate(ends)])
