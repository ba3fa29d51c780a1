"""What a usual trip round a kernel's main loop executes, from its machine code alone.

A main loop holds blocks that few trips enter: copies of tiles that a chunk cuts off, masks at its ends, sums that shrink because
a maximum rises, reports of faults. Counting the loop's text would count them too. So the loop is cut into basic blocks, those
with a mark of such work are taken out, and what is counted is the *longest* way that is left from the loop's head back to it:
no trip without that work executes more. Branches on what never happens together make the figure too large, never too small;
only of loops within the loop (`holds_loops`) it has one trip, however many they make.

The marks: an atomic; a copy that may write zeros instead; -infinity put in the place of a score; shuffles that reduce; the
out-of-line code of diverged warps. A mark counts only where some way round is without it: a kernel that reduces by shuffles in
every trip, or whose copies are all conditional, has them counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Final

_LINE: Final = re.compile(r"^(\.L_x_\d+):|^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", re.M)
_TARGET: Final = re.compile(r"`\((\.L_x_\d+)\)")
_GUARD: Final = re.compile(r"^@!?U?P\w+\s+")
_MASKS: Final = re.compile(r"\b(FSEL|SEL|MOV|IMAD\.MOV\.U32)\b.*(-INF|0x800000\b|0xff800000)")
_MAY_WRITE_ZEROS: Final = re.compile(r"LDGSTS.*,\s*!?P\d$")

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


def opcode(instruction: str) -> str:
    """With its modifiers, without its guard."""
    return _GUARD.sub("", instruction).split()[0]


def class_of(instruction: str) -> str:
    """One of CLASSES, or "addresses, moves": integers, selects, copies of registers."""
    if ".UNPACK_B" in instruction:
        return "widening"
    base = opcode(instruction).partition(".")[0]
    return next((name for name, bases in CLASSES.items() if base in bases), "addresses, moves")


@dataclass(frozen=True)
class Block:
    """A basic block: its instructions, and the blocks that may follow."""

    code: tuple[str, ...]
    next: tuple[int, ...]
    diverged: bool = False

    def has(self, *bases: str) -> bool:
        """Whether an instruction's name begins so."""
        return any(opcode(x).startswith(bases) for x in self.code)


@dataclass(frozen=True)
class Loop:
    """A natural loop of `graph`: the numbers of its blocks, and of the one it begins with."""

    graph: tuple[Block, ...]
    head: int
    members: frozenset[int]

    @cached_property
    def text(self) -> tuple[str, ...]:
        """Everything in it."""
        return tuple(x for n in sorted(self.members) for x in self.graph[n].code)

    @cached_property
    def usual(self) -> tuple[str, ...]:
        """The longest way once round it without rare work."""
        left, best = set(self.members), self._longest(self.members)
        for mark in _MARKS:
            fewer = {n for n in left if not mark(self.graph[n])}
            way = self._longest(fewer)
            if way is not None:  # else every trip does such work
                left, best = fewer, way
        assert best is not None, "a loop has a way round"
        return best

    def _longest(self, allowed: Set[int]) -> tuple[str, ...] | None:
        """The longest way round through these blocks, loops within this one entered and left at once."""
        best: dict[int, tuple[str, ...] | None] = {}
        above: set[int] = set()

        def way(n: int) -> tuple[str, ...] | None:
            if n not in best:
                above.add(n)
                ends: list[tuple[str, ...]] = [()] if self.head in self.graph[n].next else []
                inner = [m for m in self.graph[n].next if m in allowed and m != self.head and m not in above]
                ends += [found for m in inner if (found := way(m)) is not None]
                above.discard(n)
                best[n] = (*self.graph[n].code, *max(ends, key=len)) if ends else None
            return best[n]

        return way(self.head) if self.head in allowed else None

    @cached_property
    def holds_loops(self) -> bool:
        """Whether a loop lies within it, of which `usual` has one trip only."""
        inside = (x for x in loops(self.graph) if x.head != self.head and x.members < self.members)
        return any(True for _ in inside)

    def classes(self) -> dict[str, int]:
        """A usual trip's instructions by class, the most frequent first."""
        return dict(Counter(map(class_of, self.usual)).most_common())


def _copies(block: Block) -> bool:
    return any(_MAY_WRITE_ZEROS.search(x) for x in block.code)


# Rare work, each kind where there is a way round without it.
_MARKS: Final[tuple[Callable[[Block], bool], ...]] = (
    lambda block: block.diverged,
    lambda block: block.has("ATOM", "RED", "TRAP", "BPT"),
    _copies,
    lambda block: any(_MASKS.search(x) for x in block.code),
    lambda block: block.has("SHFL.BFLY"),
)


def blocks(sass: str) -> tuple[Block, ...]:
    """The basic blocks of a disassembled kernel, in the order of its text."""
    cut: list[list[str]] = [[]]
    at: dict[str, int] = {}
    for match in _LINE.finditer(sass):
        if match[1]:
            if cut[-1]:
                cut.append([])
            at[match[1]] = len(cut) - 1
        else:
            cut[-1].append(match[2])
            if opcode(match[2]).startswith(("BRA", "EXIT", "RET", "BRX")):
                cut.append([])
    diverged = {
        at[t[1]] for code in cut for x in code if opcode(x) == "BRA.DIV" and (t := _TARGET.search(x)) and t[1] in at
    }
    found = []
    for number, code in enumerate(cut):
        last = code[-1] if code else ""
        follows, target = [], _TARGET.search(last)
        name = opcode(last) if last else ""
        if name.startswith("BRA") and target and target[1] in at:
            follows.append(at[target[1]])
        ends = name.startswith(("EXIT", "RET")) or (name.startswith("BRA") and not _conditional(last))
        if number + 1 < len(cut) and (not ends or (name.startswith("EXIT") and _GUARD.match(last))):
            follows.append(number + 1)
        found.append(Block(tuple(code), tuple(dict.fromkeys(follows)), number in diverged))
    return tuple(found)


def _conditional(branch: str) -> bool:
    """`@P0 BRA ...`, `BRA.DIV UR4, ...`, `BRA P1, ...`: a guard, or an operand before the target."""
    return bool(_GUARD.match(branch)) or "," in branch.partition("`")[0]


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
    return [Loop(tuple(graph), head, frozenset(inside)) for head, inside in sorted(members.items())]


def main_loop(sass: str, bases: Iterable[str] = ("HMMA",)) -> Loop:
    """The loop that does the kernel's work: the innermost of those with the most instructions named so."""
    wanted = tuple(bases)
    found = loops(blocks(sass))
    if not found:
        raise ValueError("the kernel has no loop")

    def weight(loop: Loop) -> tuple[int, int]:
        return sum(opcode(x).startswith(wanted) for x in loop.text), -len(loop.members)

    return max(found, key=weight)
