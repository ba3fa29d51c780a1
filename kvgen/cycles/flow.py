"""What a usual trip round a kernel's main loop executes, from its machine code alone.

A main loop holds blocks that few trips enter: copies of tiles that a chunk cuts off, masks at its ends, sums that shrink because
a maximum rises, reports of faults. Counting the loop's text would count them too. So the loop is cut into basic blocks, those
with a mark of such work are taken out, and what is counted is the *longest* way that is left from the loop's head back to it:
no trip without that work executes more. Branches on what never happens together make the figure too large, never too small;
only of loops within the loop (`holds_loops`) it has one trip, however many they make.

The marks: an atomic; a vote of several warps; a copy that may write zeros instead; -infinity put in the place of a score, or -0
in the place of its weight; sums that are multiplied and nothing else; shuffles that reduce, or hand round which tokens a column
sees; the out-of-line code of diverged warps; an mbarrier that is asked once more; rows that registers take past the copies. A
mark counts only where some way round is without it that fetches as well: a kernel that reduces by shuffles in every trip, or
whose copies are all conditional, has them counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from kvgen.cycles.words import Word, words

_OFFSET: Final = re.compile(r"\+(0x[0-9a-f]+)\]")
_TARGET: Final = re.compile(r"`\((\.L_x_\d+)\)")
_MOVES: Final = 2  # words of a block that only leads from one to another
_SUMS: Final = 8  # that a block multiplies, at least, if it does nothing else
_COPIES: Final = ("LDGSTS", "UTMALDG", "UBLKCP")
_MASKS: Final = re.compile(r"\b(FSEL|SEL|MOV|IMAD\.MOV\.U32)\b.*(-INF|0x800000\b|0xff800000)")
_MAY_WRITE_ZEROS: Final = re.compile(r"LDGSTS.*,\s*!?P\d$")
_WEIGHTS_OF_HIDDEN: Final = re.compile(r"\bFSEL\b.*, -RZ,")

CLASSES: Final[Mapping[str, tuple[str, ...]]] = {
    "products": ("HMMA", "IMMA", "QMMA", "OMMA", "HGMMA", "QGMMA", "WARPGROUP"),
    "matrix loads": ("LDSM", "MOVM"),
    "copies": ("LDGSTS", "LDGDEPBAR", "DEPBAR", "UTMALDG"),
    "softmax": (
        *("MUFU", "FFMA", "FADD", "FMUL", "FMNMX", "FMNMX3", "FSETP", "FSEL", "F2FP", "F2F", "VOTE", "SHFL"),
        *("FFMA2", "FADD2", "FMUL2"),
    ),
    "widening": ("HADD2", "HMUL2", "HFMA2", "PRMT", "F2FP.F16.E4M3.UNPACK_B", "I2F", "I2FP"),
    "memory": ("LDS", "STS", "LDG", "STG", "LDC", "ULDC", "LDCU", "ATOMS", "LD", "ST"),
    "control": ("BRA", "BSSY", "BSYNC", "BAR", "WARPSYNC", "NOP", "EXIT", "BREAK", "SYNCS", "CALL", "RET"),
}  # fmt: skip


def class_of(word: Word) -> str:
    """One of CLASSES, or "addresses, moves": integers, selects, copies of registers."""
    if "UNPACK_B" in word.modifiers:
        return "widening"
    return next((name for name, bases in CLASSES.items() if word.base in bases), "addresses, moves")


@dataclass(frozen=True)
class Block:
    """A basic block: its instructions, and the blocks that may follow. `again`: it asks an mbarrier that was not ready before."""

    code: tuple[Word, ...]
    next: tuple[int, ...]
    diverged: bool = False
    again: bool = False

    def has(self, *bases: str) -> bool:
        """Whether an instruction's name begins so."""
        return any(x.opcode.startswith(bases) for x in self.code)


@dataclass(frozen=True)
class Loop:
    """A natural loop of `graph`: the numbers of its blocks, and of the one it begins with."""

    graph: tuple[Block, ...]
    head: int
    members: frozenset[int]

    @cached_property
    def text(self) -> tuple[Word, ...]:
        """Everything in it."""
        return tuple(x for n in sorted(self.members) for x in self.graph[n].code)

    @cached_property
    def usual(self) -> tuple[Word, ...]:
        """The longest way once round it without rare work."""
        found = self.way()
        assert found is not None, "a loop has a way round"
        return found

    def way(self, without: tuple[str, ...] = ()) -> tuple[Word, ...] | None:
        """The same by those who never run an instruction whose name begins so; None where there is none."""
        left = {n for n in self.members if not (without and self.graph[n].has(*without))}
        best = self._longest(left)
        if best is None:
            return None
        for mark in _MARKS:
            fewer = {n for n in left if not mark(self.graph[n])}
            way = self._longest(fewer)
            # Else every trip does such work, or every trip that fetches anything.
            if way is not None and (_fetches(way) or not _fetches(best)) and not _goes_past(best, way):
                left, best = fewer, way
        return best

    @cached_property
    def _last(self) -> frozenset[int]:
        """The blocks that end a trip. A branch back to ask an mbarrier of the loop's beginning once more ends none."""
        back = frozenset(n for n in self.members if self.head in self.graph[n].next)
        return frozenset(n for n in back if not _only_asks(self.graph[n].code)) or back

    def _longest(self, allowed: Set[int]) -> tuple[Word, ...] | None:
        """The longest way round through these blocks, loops within this one entered and left at once."""
        best: dict[int, tuple[Word, ...] | None] = {}
        above: set[int] = set()

        def way(n: int) -> tuple[Word, ...] | None:
            if n not in best:
                above.add(n)
                ends: list[tuple[Word, ...]] = [()] if n in self._last else []
                after = [m for m in self.graph[n].next if m in allowed and m != self.head]
                ends += [found for m in after if m not in above and (found := way(m)) is not None]
                above.discard(n)
                if not ends and above & set(after):
                    return None  # from here, because the way to here is where it would go on; from elsewhere there may be one
                best[n] = (*self.graph[n].code, *max(ends, key=len)) if ends else None
            return best[n]

        return way(self.head) if self.head in allowed else None

    def outside(self) -> tuple[Word, ...]:
        """What runs once for all of its trips: the longest way to it from the head of the loop around it, or where there is none
        from the kernel's first block, and from it back to there or to the end. Of loops beside it none with the same products is
        gone through where a way leads past it.
        """
        around = min(
            (x for x in loops(self.graph) if self.members < x.members),
            key=lambda x: len(x.members),
            default=Loop(self.graph, 0, frozenset(range(len(self.graph)))),
        )
        allowed = {n for n in around.members if not self.graph[n].again}
        beside = [x for x in loops(self.graph) if not x.members & self.members and x.members < around.members]
        own = {x.base for x in self.text if x.base.endswith("MMA")}
        other = {n for x in beside if own & {w.base for w in x.text} for n in x.members}
        found: tuple[Word, ...] = ()
        ways = [(around.head, {self.head})] if around.head != self.head else []
        for start, ends in (*ways, (None, {around.head})):
            for left in (allowed - other, allowed):
                way = self._between(start, ends, left if start is not None else left - self.members)
                if way is not None:
                    found += way
                    break
        return found

    def _between(self, start: int | None, ends: Set[int], allowed: Set[int]) -> tuple[Word, ...] | None:
        """The longest way from a block to one of `ends`, which is not part of it; without a start from what follows the loop, and
        to the kernel's end as well. Branches back are not taken.
        """
        from_loop = start is None
        follows = {n: [m for m in self.graph[n].next if m in ends or m in allowed] for n in allowed}
        firsts = (
            [m for n in self.members for m in self.graph[n].next if m not in self.members] if start is None else [start]
        )
        best: dict[int, tuple[Word, ...] | None] = {}
        above: set[int] = set()

        def way(n: int) -> tuple[Word, ...] | None:
            if n in best:
                return best[n]
            above.add(n)
            options: list[tuple[Word, ...]] = [() for m in follows[n] if m in ends]
            options += [()] if from_loop and not self.graph[n].next else []
            options += [w for m in follows[n] if m not in ends and m not in above and (w := way(m)) is not None]
            above.discard(n)
            best[n] = (*self.graph[n].code, *max(options, key=len)) if options else None
            return best[n]

        found = [() if m in ends else way(m) if m in allowed else None for m in dict.fromkeys(firsts)]
        return max((w for w in found if w is not None), key=len, default=None)

    @cached_property
    def holds_loops(self) -> bool:
        """Whether a loop lies within it, of which `usual` has one trip only."""
        inside = (x for x in loops(self.graph) if x.head != self.head and x.members < self.members)
        return any(True for _ in inside)

    def classes(self) -> dict[str, int]:
        """A usual trip's instructions by class, the most frequent first."""
        return dict(Counter(map(class_of, self.usual)).most_common())


def _fetches(way: Iterable[Word]) -> bool:
    return any(x.base in _COPIES for x in way)


def _goes_past(best: Sequence[Word], way: Sequence[Word]) -> bool:
    """Whether a way leaves out loads of a loop without copies and products: past the loop's work, as hidden tokens go."""
    loads, fewer = (sum(x.base == "LDG" for x in found) for found in (best, way))
    return fewer < loads and not any(x.base == "LDGSTS" or x.base.endswith("MMA") for x in best)


def _asked(code: Sequence[Word]) -> str | None:
    """By its offset, the mbarrier that a block asks last; None where it asks none."""
    asks = [x for x in code if x.opcode.startswith("SYNCS.PHASECHK")]
    return offset(asks[-1]) if asks else None


def _only_asks(code: Sequence[Word]) -> bool:
    return _asked(code) is not None and {x.base for x in code} <= {"SYNCS", "BRA", "NANOSLEEP", "YIELD"}


def offset(word: Word) -> str:
    """The constant in the address of a word, which tells mbarriers of a kernel apart; empty without one."""
    found = _OFFSET.search(word.text)
    return found[1] if found else ""


def _asks_again(made: Sequence[Block], before: Sequence[Sequence[int]], number: int) -> bool:
    """Whether it is there for an mbarrier that was not ready when asked: by a block before it, with at most moves between."""
    asks = _asked(made[number].code)
    if not _only_asks(made[number].code):
        return False
    seen, waiting = {number}, [number]
    while waiting:
        for n in before[waiting.pop()]:
            if n in seen:
                continue
            if _asked(made[n].code) == asks:
                return True
            if len(made[n].code) <= _MOVES:
                seen.add(n)
                waiting.append(n)
    return False


def _copies(block: Block) -> bool:
    return any(_MAY_WRITE_ZEROS.search(x.text) for x in block.code)


def _shrinks(block: Block) -> bool:
    """Whether it does nothing but multiply sums: products of f32, and what leads on."""
    bases = Counter(x.base for x in block.code)
    return bases["FMUL"] >= _SUMS and bases.keys() <= {"FMUL", "BRA", "BSYNC"}


# Rare work, each kind where there is a way round without it.
_MARKS: Final[tuple[Callable[[Block], bool], ...]] = (
    lambda block: block.diverged,
    lambda block: block.again,
    lambda block: block.has("ATOM", "RED", "TRAP", "BPT"),
    lambda block: block.has("BAR.RED"),
    _copies,
    lambda block: any(_MASKS.search(x.text) for x in block.code),
    lambda block: any(_WEIGHTS_OF_HIDDEN.search(x.text) for x in block.code),
    lambda block: block.has("SHFL.BFLY"),
    _shrinks,
    lambda block: block.has("LDG.E.128"),
    lambda block: block.has("SHFL.IDX"),
)


def blocks(listing: str) -> tuple[Block, ...]:
    """The basic blocks of a disassembled kernel, in the order of its text."""
    cut: list[list[Word]] = [[]]
    at: dict[str, int] = {}
    for found in words(listing):
        if isinstance(found, str):
            if cut[-1]:
                cut.append([])
            at[found] = len(cut) - 1
        else:
            cut[-1].append(found)
            if found.opcode.startswith(("BRA", "EXIT", "RET", "BRX")):
                cut.append([])
    targets = [at[t] for code in cut for x in code if x.opcode == "BRA.DIV" and (t := _target(x)) in at]
    made = []
    for number, code in enumerate(cut):
        follows, ends = [], False
        if code:
            last, target = code[-1], _target(code[-1])
            if last.base == "BRA" and target in at:
                follows.append(at[target])
            ends = last.opcode.startswith(("EXIT", "RET", "BRA")) and not _conditional(last)
        if number + 1 < len(cut) and not ends:
            follows.append(number + 1)
        made.append(Block(tuple(code), tuple(dict.fromkeys(follows)), number in targets))
    before: list[list[int]] = [[] for _ in made]
    for number, block in enumerate(made):
        for after in block.next:
            before[after].append(number)
    return tuple(replace(block, again=_asks_again(made, before, n)) for n, block in enumerate(made))


def _target(branch: Word) -> str:
    found = _TARGET.search(branch.text)
    return found[1] if found else ""


def _conditional(branch: Word) -> bool:
    """`@P0 BRA ...`, `BRA.DIV UR4, ...`, `BRA P1, ...`: a guard, or an operand before the target."""
    return bool(branch.guard) or (branch.base == "BRA" and "," in branch.text.partition("`")[0])


def loops(graph: Sequence[Block]) -> list[Loop]:
    """The natural loops, one a head."""
    before: dict[int, set[int]] = {n: set() for n in range(len(graph))}
    for n, block in enumerate(graph):
        for m in block.next:
            before[m].add(n)
    members: dict[int, set[int]] = {}
    for n, block in enumerate(graph):
        for head in block.next:
            if head <= n:
                inside, waiting = members.setdefault(head, {head}), [n]
                while waiting:
                    m = waiting.pop()
                    if m not in inside and m >= head:
                        inside.add(m)
                        waiting += before[m]
    # Out-of-line code that returns behind the branch to it goes back in the text, and round nothing.
    rounds = {head: inside for head, inside in members.items() if _returns(graph, head, inside)}
    return [Loop(tuple(graph), head, frozenset(inside)) for head, inside in sorted(rounds.items())]


def _returns(graph: Sequence[Block], head: int, inside: Set[int]) -> bool:
    """Whether a way leads from a block back to it."""
    seen, waiting = set[int](), [head]
    while waiting:
        for m in graph[waiting.pop()].next:
            if m == head:
                return True
            if m in inside and m not in seen:
                seen.add(m)
                waiting.append(m)
    return False


def main_loop(listing: str, bases: Iterable[str] = ("HMMA",)) -> Loop:
    """The loop that does the kernel's work: the innermost of those with the most instructions named so."""
    wanted = tuple(bases)
    found = loops(blocks(listing))
    if not found:
        raise ValueError("the kernel has no loop")

    def weight(loop: Loop) -> tuple[int, int]:
        return sum(x.opcode.startswith(wanted) for x in loop.text), -len(loop.members)

    return max(found, key=weight)
