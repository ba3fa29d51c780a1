"""Operations that write new tables: what they begin with, and which they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases, O
from kvgen.cases.scene import Scene

Raw = NDArray[Any]


class NewTablesCases(Cases[O]):
    """The new tables begin as copies of the old ones, lengths as zeros."""

    def fill(self, scene: Scene, arrays: dict[str, Raw], tables: Mapping[str, Raw]) -> None:
        super().fill(scene, arrays, tables)
        for name, table in tables.items():
            if f"new_{name}" in arrays:
                arrays[f"new_{name}"][...] = 0 if name == "lengths" else table


def new_tables(j: Comparison) -> dict[str, Raw]:
    """The new tables that the call writes, lengths left out, by the names of the old ones."""
    found = j.wanted.arrays
    return {name: found[f"new_{name}"] for name in j.case.before.tables if name != "lengths" and f"new_{name}" in found}
