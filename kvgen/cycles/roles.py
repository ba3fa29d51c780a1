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
_LANDED: Final = 1 << 12  # tiles that no run of trips asks for


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


def in_turns(trip: Sequence[Word]) -> tuple[tuple[Role, ...], Mapping[str, Mbarrier]]:
    """Two warpgroups that begin their products in turns, in a loop that is the same (extend_wgmma).

    At a named barrier a warpgroup waits for its turn, at another it ends it: the other one's. The first turn is warpgroup 0's.
    Tiles have landed before anybody asks: copies, of warps with another loop, are a budget beside the trip.
    """
    barriers = [word for word in trip if word.base == "BAR"]
    kinds = [word.modifiers[0] for word in barriers]
    if kinds != ["SYNC", "ARV"]:
        raise ReplayError(f"replay: named barriers {', '.join(kinds)}; a loop in turns waits for one and ends it")
    roles = tuple(
        Role(
            name=f"warpgroup {group}",
            trip=tuple(trip),
            warps=_WARPS,
            mbarriers={
                barriers[0].address: f"turn of {group}",
                barriers[1].address: f"turn of {1 - group}",
                **{w.address: "landed" if "PHASECHK" in w.modifiers else "read" for w in trip if w.base == "SYNCS"},
            },
            before={f"turn of {1 - group}": group},
        )
        for group in (0, 1)
    )
    return roles, {"landed": Mbarrier(1, ahead=_LANDED), "read": Mbarrier(2 * _WARPS)}


def _offset(word: Word) -> int:
    found = _OFFSET.search(word.text)
    return int(found[1], 16) if found else 0
