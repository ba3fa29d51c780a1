"""Lists of tokens that rows name: some of those that are alive, the last entry none."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.scene import Scene

LISTED: Final = 6  # tokens that a row names


def token_lists(scene: Scene, like: NDArray[Any], rng: np.random.Generator) -> NDArray[np.int64]:
    """A list for each row of the step, of its request's entries in no order; -1 where it has none."""
    found = np.full(like.shape, -1, np.int64)
    begins = np.cumsum([0, *scene.workload.new])
    for b, entries in enumerate(scene.entries(total) for total in scene.workload.totals):
        rows = found[begins[b] : begins[b + 1]]
        if scene.alive(b):
            rows[...] = rng.integers(entries - scene.alive(b), entries, rows.shape)
    found[:, -1] = -1
    return found
