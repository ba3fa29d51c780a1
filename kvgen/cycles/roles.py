"""Roles that a loop's text does not tell: who arrives at which mbarrier, and who waits for it.

A word says where an mbarrier lies, by registers and an offset, not which phase of which it means. What is written here is the
order in which a template's warps meet, as the comment at its main loop has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from kvgen.cycles.core import Mbarrier, ReplayError, Role
from kvgen.cycles.words import Word

_OFFSET: Final = re.compile(r"\+(0x[0-9a-f]+)\]")
_WARPS: Final = 4  # of a warpgroup


def taking_turns(trip: Sequence[Word]) -> tuple[tuple[Role, ...], Mapping[str, Mbarrier]]:
    """Two warpgroups, one at even tiles and one at odd ones, whose loop is the same (mla_decode_wgmma).

    `landed`: all warps have fetched their part of a tile; in a trip a warpgroup arrives for the next two tiles, and waits for its
    own next one. `weights`: a warpgroup's are there, for which the other one waits; the first tile has none before it.
    """
    offsets = sorted({_offset(word) for word in trip if word.base == "SYNCS"})
    if len(offsets) != 2:
        raise ReplayError(
            f"replay: mbarriers at {', '.join(map(hex, offsets))}; a loop of two warpgroups has two kinds"
        )
    landed = offsets[0]

    def name(word: Word, group: int) -> str:
        if _offset(word) == landed:
            return "landed"
        return f"weights of {group if 'ARRIVE' in word.modifiers else 1 - group}"

    roles = tuple(
        Role(
            name=f"warpgroup {group}",
            trip=tuple(trip),
            warps=_WARPS,
            mbarriers={word.address: name(word, group) for word in trip if word.base == "SYNCS"},
            # The odd one has fetched a tile more before its first trip.
            before={"landed": group},
            first={"landed": 1 + group},
            step={"landed": 2},
        )
        for group in (0, 1)
    )
    weights = Mbarrier(_WARPS)
    ahead = Mbarrier(_WARPS, ahead=1)
    return roles, {"landed": Mbarrier(2 * _WARPS), "weights of 0": weights, "weights of 1": ahead}


def _offset(word: Word) -> int:
    found = _OFFSET.search(word.text)
    return int(found[1], 16) if found else 0
