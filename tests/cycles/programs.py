"""Machine code written by hand, its scheduling in brackets: `[waits:sets:reads:stall]`, `y` behind the stall where it yields."""

from __future__ import annotations

import re
from typing import Final

from kvgen.cycles.device import DEVICES, Device
from kvgen.cycles.words import Word

_LINE: Final = re.compile(r"\[([0-5]*|-):([0-5-]):([0-5-]):(\d+)(y?)\]\s*(.*?)\s*;?")

# Round figures, so that a trip can be worked out on paper: every pipe takes an instruction a cycle unless a test says otherwise.
ROUND: Final[Device] = DEVICES["H200"].at(
    **{
        "ldg": 100,
        "ldgsts": 100,
        "tma": 100,
        "tma_box": 1,
        "lds": 20,
        "operands": 5,
        "mufu": 20,
        "barrier": 10,
        "mbarrier": 10,
        "branch": 1,
    },
    **{
        "shared_accept": 1,
        "mio_interval": 1,
        "mio_queue": 5,
        "alu_interval": 1,
        "imad_interval": 1,
        "uniform_interval": 1,
    },
    **{"hmma_interval": 8, "hgmma": 20, "mufu_interval": 8},
)


def program(text: str) -> tuple[Word, ...]:
    """The words of the lines, 16 bytes each."""
    found = []
    for number, line in enumerate(x.strip() for x in text.strip().splitlines()):
        match = _LINE.fullmatch(line)
        assert match is not None, line
        waits, sets, reads, stall, yields, code = match.groups()
        found.append(
            Word(
                text=code,
                address=16 * number,
                stall=int(stall),
                yields=bool(yields),
                sets=None if sets == "-" else int(sets),
                reads=None if reads == "-" else int(reads),
                waits=tuple(int(n) for n in waits.strip("-")),
            )
        )
    return tuple(found)
