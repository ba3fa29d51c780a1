"""A case compared with its oracle: the memory that a launch must leave, the one that it left, and how far the two are apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.contents import Case, Contents
from kvgen.cases.scene import LAYERS
from kvgen.cases.tolerance import Distance
from kvgen.reference import Rows, TableView

Raw = NDArray[Any]
At = int | slice


@dataclass
class Comparison:
    """A case compared with its oracle: the memory that the launch must leave, the one that it left, how far computed numbers
    are off, and what is wrong."""

    case: Case
    wanted: Contents
    got: Contents
    distance: Distance = field(default_factory=Distance)
    wrong: list[str] = field(default_factory=list)

    @property
    def view(self) -> TableView:
        """The oracle's reading of the tables."""
        return self.case.scene.view(self.case.before.tables)

    @property
    def arrays(self) -> dict[str, Raw]:
        """The call's arrays before the launch."""
        return self.case.before.arrays

    def places(self, *names: str) -> dict[str, Raw]:
        """Index arrays that the call brings."""
        return {name: self.arrays[name] for name in names if name in self.arrays}

    def record(self, what: str, distance: Distance) -> None:
        """Count a difference in; one past its bound is wrong."""
        self.distance.add(distance)
        if not distance.share <= 1:
            self.wrong.append(f"{what}: off by {distance.error:.3g}, {distance.share:.3g} times its bound")

    def take_nan(self, name: str, failed: NDArray[np.bool_], at: At = slice(None)) -> None:
        """Rows of an output, or of its part `at`, that must be NaN, whatever its bits."""
        got = self.got.arrays[name][at][failed]
        if not np.isnan(got.astype(np.float32)).all():
            self.wrong.append(f"{name}: rows of requests with wrong data must be NaN, and are not")
        else:
            self.wanted.arrays[name][at][failed] = got

    def copied(self) -> list[tuple[tuple[Rows, ...], At]]:
        """Data of an operation that copies rows: K and V of every layer, and the part of the call's arrays that are its rows."""
        if not self.case.call.launcher.KERNEL.all_layers:
            return [(self.wanted.rows(self.case.scene), slice(None))]
        return [(self.wanted.rows(self.case.scene, layer), layer) for layer in range(LAYERS)]
