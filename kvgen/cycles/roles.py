"""Roles that a loop's text does not tell: who arrives at which mbarrier, and who waits for it.

A word says where an mbarrier lies, by registers and an offset, not which phase of which it means. What is written here is the
order in which a template's warps meet, as the comment at its main loop has it; for kernels whose warps run loops of their own,
`told` takes it from the caller.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Final

from kvgen.cycles.core import Mbarrier, ReplayError, Role
from kvgen.cycles.flow import Block, Loop, loops, offset
from kvgen.cycles.words import Word

_WARPS: Final = 4  # of a warpgroup
_LANDED: Final = 1 << 12  # tiles that no run of trips asks for
_BULK: Final = ("UTMALDG", "UBLKCP")


@dataclass(frozen=True)
class Part:
    """Warps of a block that run one loop, as the kernel's source has them.

    `loop`: the innermost loops that hold an instruction whose name begins so, and which of them, in the order of the text.
    `meets`: for each word of a trip that arrives at an mbarrier, asks it, copies for it, or meets at a named barrier whose number
    a register holds: which one, "" for none. `nbytes`: what its bulk copies bring, in their order. `without`: instructions that
    these warps never run, where there is a way round without them. `leads`: its first warp alone asks for bulk copies, and says
    how many bytes will come. `tiles`: of a trip. The rest as in Role.
    """

    name: str
    warps: int
    loop: tuple[str, int]
    meets: tuple[str, ...] = ()
    nbytes: tuple[int, ...] = ()
    without: tuple[str, ...] = ()
    leads: bool = False
    tiles: int = 1
    before: Mapping[str, int] = field(default_factory=dict)
    first: Mapping[str, int] = field(default_factory=dict)

    def found(self, graph: Sequence[Block]) -> Loop:
        """Its loop in the text."""
        holding = [x for x in loops(graph) if any(w.opcode.startswith(self.loop[0]) for w in x.text)]
        inner = [x for x in holding if not any(y.members < x.members for y in holding)]
        if self.loop[1] >= len(inner):
            raise ReplayError(f"replay: {self.name}: {len(inner)} innermost loops hold {self.loop[0]}")
        return inner[self.loop[1]]


def told(graph: Sequence[Block], parts: Sequence[Part]) -> tuple[Role, ...]:
    """The roles of a kernel whose source says who meets whom; a part that leads is two, its first warp and the rest."""
    return tuple(role for part in parts for role in _roles(graph, part))


def ends(graph: Sequence[Block], parts: Sequence[Part]) -> tuple[Role, ...]:
    """Words that the parts with products run once for all trips of their loops, as roles that meet nobody; those of all parts
    where none has products. Parts that run the same are one role."""
    working = [part for part in parts if any(x.base.endswith("MMA") for x in part.found(graph).text)] or parts
    warps: Counter[tuple[Word, ...]] = Counter()
    for part in working:
        warps[tuple(map(_alone, part.found(graph).outside()))] += part.warps
    return tuple(Role(f"ends {n}", trip, count, trips=2) for n, (trip, count) in enumerate(warps.items()))


def _alone(word: Word) -> Word:
    meets = word.base in ("BAR", "SYNCS", "ARRIVES", *_BULK)
    return replace(word, text="NOP") if meets else word


def _roles(graph: Sequence[Block], part: Part) -> tuple[Role, ...]:
    loop = part.found(graph)
    trip = _way(loop, part.without, part.name)
    words = meeting(trip)
    bulk = [word for word in trip if word.base in _BULK]
    if len(words) != len(part.meets) or len(bulk) != len(part.nbytes):
        shown = "; ".join(f"{word.address:04x} {word.text}" for word in words)
        raise ReplayError(
            f"replay: {part.name}: told of {len(part.meets)} words that meet and {len(part.nbytes)} bulk copies, of which there "
            f"are {len(words)} and {len(bulk)}: {shown}"
        )
    first = Role(
        name=part.name,
        trip=trip,
        warps=1 if part.leads else part.warps,
        mbarriers={word.address: name for word, name in zip(words, part.meets, strict=True)},
        nbytes={word.address: size for word, size in zip(bulk, part.nbytes, strict=True)},
        before=part.before,
        first=part.first,
    )
    if not part.leads:
        return (first,)
    others = tuple(map(_of_one_thread, _way(loop, (*part.without, *_BULK), part.name)))
    alike = {name: n for name, n in part.before.items() if name not in _expected(trip, first.mbarriers)}
    return first, replace(first, name=f"{part.name}, others", trip=others, warps=part.warps - 1, before=alike)


def _way(loop: Loop, without: tuple[str, ...], name: str) -> tuple[Word, ...]:
    found = loop.way(without)
    if found is None:
        raise ReplayError(f"replay: {name}: no way round its loop without {', '.join(without)}")
    return found


def meeting(trip: Sequence[Word]) -> list[Word]:
    """The words of a trip of which `Part.meets` tells."""
    return [word for word in trip if _meets(word)]


def _meets(word: Word) -> bool:
    if word.base == "BAR":
        return word.operands[0].startswith("R")
    return word.guard != "!PT" and word.base in ("SYNCS", "ARRIVES", *_BULK)


def _of_one_thread(word: Word) -> Word:
    """As the warps run it that do not lead: without saying what bytes will come."""
    return replace(word, text=f"@!PT {word.text.split(maxsplit=1)[1]}") if _expects(word) and word.guard else word


def _expects(word: Word) -> bool:
    """True: it arrives and says at once how many bytes will come."""
    return word.opcode == "SYNCS.ARRIVE.TRANS64"


def _expected(trip: Sequence[Word], names: Mapping[int, str]) -> frozenset[str]:
    return frozenset(names[word.address] for word in trip if _expects(word))


def even_and_odd_tiles(trip: Sequence[Word]) -> tuple[tuple[Role, ...], Mapping[str, Mbarrier]]:
    """Two warpgroups, one at even tiles and one at odd ones, whose loop is the same (mla_sm90_rows).

    `landed`: all warps have fetched their part of a tile; in a trip a warpgroup arrives for the next two tiles, and waits for its
    own next one. `weights`: a warpgroup's are there, for which the other one waits; the first tile has none before it.
    """
    offsets = sorted({offset(word) for word in trip if word.base == "SYNCS"})
    if len(offsets) != 2:
        raise ReplayError(f"replay: mbarriers at {', '.join(offsets)}; a loop of two warpgroups has two kinds")
    landed = offsets[0]

    def name(word: Word, group: int) -> str:
        if offset(word) == landed:
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


def ping_pong(
    trip: Sequence[Word], producer: Producer | None = None
) -> tuple[tuple[Role, ...], Mapping[str, Mbarrier]]:
    """Two warpgroups in ping-pong, or that begin their products when they like, in a loop that is the same (extend_sm90).

    At a named barrier a warpgroup waits for its turn, at another it ends it: the other one's. The first turn is warpgroup 0's.
    Without a producer tiles have landed before anybody asks.
    """
    barriers = [word for word in trip if word.base == "BAR"]
    kinds = [word.modifiers[0] for word in barriers]
    if kinds not in ([], ["SYNC", "ARV"]):
        raise ReplayError(
            f"replay: named barriers {', '.join(kinds)}; a ping-pong loop waits at one and arrives at one"
        )
    syncs = [w for w in trip if w.base == "SYNCS"]
    if producer is None:
        asked = {w.address: "landed" if "PHASECHK" in w.modifiers else "read" for w in syncs}
    else:
        asked = {w.address: producer.name(w) for w in syncs}
    ahead = {"k_empty": 1, "k_full": 1} if producer else {}  # K of a tile goes before V of the tile before
    roles = tuple(
        Role(
            name=f"warpgroup {group}",
            trip=tuple(trip),
            warps=_WARPS,
            mbarriers={word.address: f"turn of {g}" for word, g in zip(barriers, (group, 1 - group), strict=False)}
            | asked,
            before={f"turn of {1 - group}": group, **{name: n for name, n in ahead.items() if name == "k_empty"}},
            first={name: n for name, n in ahead.items() if name == "k_full"},
        )
        for group in (0, 1)
    )
    turn = Mbarrier(2 * _WARPS)
    turns = {"turn of 0": turn, "turn of 1": turn}
    if producer is None:
        return roles, turns | {"landed": Mbarrier(1, ahead=_LANDED), "read": Mbarrier(2 * _WARPS)}
    copying = producer.role()
    return (*roles, copying), turns | producer.mbarriers((*roles, copying))


@dataclass(frozen=True)
class Producer:
    """Warps that fill rings of tiles for others: `trip` is a tile's, `at` says of an mbarrier's offset which one it is.

    Rings have `stages` tiles. An mbarrier is complete when each warp has arrived as often as its trip says, and all boxes that
    the trip asks for have come; whose name ends in "empty" is so at first, once for each stage.
    """

    trip: tuple[Word, ...]
    at: Mapping[int, str]
    stages: int
    warps: int = 1

    def name(self, word: Word) -> str:
        """Which mbarrier a word means; "" for those that are not a ring's."""
        said = offset(word)
        if not said:
            raise ReplayError(f"replay: {word.address:04x} {word.text!r}: an mbarrier without an offset")
        found = self.at.get(int(said, 0), "")
        return found if found.endswith(("_full", "_empty")) and not found.startswith("q_") else ""

    def role(self) -> Role:
        """K of a tile goes before V of the tile before. A box counts as one, for the mbarrier whose bytes were told of last.
        Copies of cp.async are told of a trip later.
        """
        names: dict[int, str] = {}
        filling = ""
        for word in self.trip:
            if word.base in ("SYNCS", "ARRIVES"):
                names[word.address] = self.name(word)
                filling = names[word.address] if _expects(word) else filling
            elif word.base in _BULK:
                names[word.address] = filling
        boxes = {word.address: 1 for word in self.trip if word.base in _BULK}
        late = 0 if boxes else 1
        first = {"k_empty": 1 + late, "v_empty": late}
        return Role("producer", self.trip, self.warps, mbarriers=names, nbytes=boxes, before={"k_full": 1}, first=first)

    def mbarriers(self, roles: Sequence[Role]) -> dict[str, Mbarrier]:
        """The mbarriers of all rings."""
        arrivals: Counter[str] = Counter()
        boxes: Counter[str] = Counter()
        for role in roles:
            for word in role.trip:
                name = role.mbarriers.get(word.address, "")
                if word.opcode.startswith(("SYNCS.ARRIVE", "ARRIVES")):
                    arrivals[name] += role.warps
                elif word.base in _BULK:
                    boxes[name] += 1
        asked = {name for role in roles for name in role.mbarriers.values() if name.endswith(("_full", "_empty"))}
        if unmet := sorted(name for name in asked if not arrivals[name]):
            raise ReplayError(f"replay: nobody arrives at {', '.join(unmet)}")
        return {
            name: Mbarrier(arrivals[name], boxes[name], self.stages if name.endswith("_empty") else 0) for name in asked
        }


_RINGS: Final = re.compile(r"^ *uint64_t (k_full\[[^;]*);", re.M)


def producer_of(graph: Sequence[Block], source: str) -> Producer | None:
    """The loop of a kernel that copies tiles for others, by its text and its source: a line of that names its mbarriers in their
    order, k_full first; a tile of kTokens comes in boxes of kIssue. None where it has no such loop, where K and V have loops of
    their own, or where it is none without what asks for Q.
    """
    inits = [
        int(offset(w), 0) for block in graph for w in block.code if w.opcode.startswith("SYNCS.EXCH") and offset(w)
    ]
    constants = {name: int(n) for name, n in re.findall(r"\b(kStages|kTokens|kIssue) = (\d+)", source)}
    rings = _RINGS.search(source)
    arrivals = re.search(r"mbarrier_init\(&shared\.k_full\[i\], (\d+)\)", source)
    if not inits or not rings or not arrivals or "kStages" not in constants:
        return None
    at, where = {}, min(inits)
    for declared in rings[1].split(","):
        name, ring, _ = declared.strip().partition("[")
        for _ in range(constants["kStages"] if ring else 1):
            at[where] = name
            where += 8
    once = {
        n
        for n, x in enumerate(graph)
        if any(at.get(int(offset(w) or "0", 0), "").startswith("q_") for w in _syncs(x.code))
    }
    copying = [x for x in loops(graph) if _fills(x, once)]
    if not copying:
        return None
    loop = min(copying, key=lambda x: len(x.members))
    inner = [x for x in loops(graph) if x.members < loop.members and any(w.base in _BULK for w in x.text)]
    boxes = constants["kTokens"] // constants["kIssue"] if "kIssue" in constants else 1
    way = replace(loop, members=loop.members - once).way()
    if way is None:  # Q comes in every trip, or in none that goes round
        return None
    trip: list[Word] = []
    for word in way:
        trip.append(word)
        for x in inner:  # once for each lane that has a page
            if word is x.usual[-1]:
                trip += list(x.usual) * (boxes - 1)
    found = Producer(tuple(trip), at, constants["kStages"], int(arrivals[1]))
    tells = {found.name(word) for word in trip if word.opcode.startswith("SYNCS.ARRIVE")}
    return found if {"k_full", "v_full"} <= tells else None


def _syncs(code: Sequence[Word]) -> list[Word]:
    return [word for word in code if word.base == "SYNCS"]


def _fills(loop: Loop, once: Set[int]) -> bool:
    """True: the loop waits for stages of a ring, copies, and multiplies nothing."""
    text = [w for n in loop.members - once for w in loop.graph[n].code]
    waits = any(w.opcode.startswith("SYNCS.PHASECHK") for w in text)
    return waits and any(w.base in (*_BULK, "LDGSTS") for w in text) and not any(w.base.endswith("MMA") for w in text)


def widening(graph: Sequence[Block]) -> tuple[tuple[Role, ...], Mapping[str, Mbarrier]]:
    """Two warpgroups that multiply, at even and at odd tiles of which each adds all, and warps that widen a tile's two halves
    (mla_sm90). A trip of the first two is two tiles.

    Its mbarriers are full[2][2], empty[2][2], ready[2], by stage and half, and by whose weights they are.
    """
    meeting = [x for x in loops(graph) if any(_asks(w) for w in x.text)]
    adding = _innermost([x for x in meeting if any(w.base in _PRODUCTS for w in x.text)])
    filling = _innermost([x for x in meeting if _stores(x) and not any(w.base in _PRODUCTS for w in x.text)])
    inits = [int(at, 0) for b in graph for w in b.code if w.opcode.startswith("SYNCS.EXCH") and (at := offset(w))]
    if len(adding) != 2 or len(filling) != 1 or not inits:
        raise ReplayError(
            f"replay: {len(adding)} loops with products and {len(filling)} that fill shared memory; two warpgroups that multiply "
            "and warps that widen have two and one"
        )
    trips = [*(loop.usual for loop in adding), _of_one_record(filling[0], min(inits))]
    if _asks_before_it_tells(trips[0], min(inits)):
        trips[:2] = trips[1], trips[0]
    roles = []
    for n, trip in enumerate(trips):
        place = "producer" if n == 2 else f"warpgroup {n}"
        names = _of_halves(trip, n, min(inits))
        adds = {"first": {h: n for h in _FULL}, "step": dict.fromkeys(_FULL, 2)} if n < 2 else {"trips": 16}
        roles.append(Role(place, trip, 2 * _WARPS if n == 2 else _WARPS, mbarriers=names, **adds))
    rings = dict.fromkeys(_FULL, Mbarrier(2 * _WARPS)) | dict.fromkeys(_EMPTY, Mbarrier(_WARPS, ahead=2))
    return tuple(roles), rings | {f"weights of {n}": Mbarrier(_WARPS) for n in (0, 1)}


def _of_one_record(loop: Loop, first: int) -> tuple[Word, ...]:
    """The longest way round which a tile of one record goes, where those of several lie beside each other: it says once of each
    half that it is full, and loads nothing that it writes over unread.
    """
    way = loop.way()
    if way is None:
        return ()
    found = [
        _of_one_record(replace(loop, members=loop.members - {n}), first) for n in _of_two_records(loop, way, first)
    ]
    return max(found, key=len, default=()) or way


def _of_two_records(loop: Loop, way: Sequence[Word], first: int) -> tuple[int, ...]:
    """Two blocks on this way which no tile goes through both; none where it is one record's."""
    block = {word.address: n for n in loop.members for word in loop.graph[n].code}
    told: dict[int, int] = {}
    loaded: dict[str, int] = {}
    for word in way:
        here = block[word.address]
        place = (int(offset(word), 0) - first) // 8 if _arrives(word) and offset(word) else -1
        if 0 <= place < 4 and told.setdefault(place % 2, here) != here:
            return told[place % 2], here
        for name in word.sources:
            loaded.pop(name, None)
        unread = [before for name in word.writes if (before := loaded.pop(name, here)) != here]
        if word.base == "LDG":
            if unread:
                return unread[0], here
            loaded |= dict.fromkeys(word.writes, here)
    return ()


_PRODUCTS: Final = ("HGMMA",)
_FULL: Final = ("left_full", "right_full")
_EMPTY: Final = ("left_empty", "right_empty")


def _innermost(found: Sequence[Loop]) -> list[Loop]:
    return [x for x in found if not any(y.members < x.members for y in found)]


def _stores(loop: Loop) -> bool:
    return any(word.base == "STS" for word in loop.text)


def _asks(word: Word) -> bool:
    return word.opcode.startswith("SYNCS.PHASECHK")


def _arrives(word: Word) -> bool:
    return word.opcode.startswith(("SYNCS.ARRIVE", "ARRIVES"))


def _asks_before_it_tells(trip: Sequence[Word], first: int) -> bool:
    """True: a warpgroup asks for the other one's weights before it has made its own: the one of odd tiles."""
    ready = [w for w in trip if w.base == "SYNCS" and offset(w) and (int(offset(w), 0) - first) // 8 in (8, 9)]
    return bool(ready) and _asks(ready[0])


def _of_halves(trip: Sequence[Word], role: int, first: int) -> dict[int, str]:
    """Which mbarrier each word means. One that is asked twice in a row is asked again; of those who fill a half in several ways,
    each with its arrival, the last counts, and before others one that is made when copies have landed.
    """
    names: dict[int, str] = {}
    before: Word | None = None
    for word in (w for w in trip if w.base in ("SYNCS", "ARRIVES")):
        place = (int(offset(word), 0) - first) // 8 if offset(word) else -1
        name = ""
        if 0 <= place < 4:
            name = _FULL[place % 2]
        elif 4 <= place < 8:
            name = _EMPTY[place % 2 if role == 2 else role]
        elif place in (8, 9):
            name = f"weights of {1 - role if _asks(word) else role}"
        again = before is not None and _asks(word) and _asks(before) and names[before.address] == name
        names[word.address] = "" if again else name
        before = word
    for name in _FULL:
        tells = [w for w in trip if _arrives(w) and names.get(w.address) == name]
        for word in sorted(tells, key=lambda w: (w.base == "ARRIVES", w.address))[:-1]:
            names[word.address] = ""
    return names
