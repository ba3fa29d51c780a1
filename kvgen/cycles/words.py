"""One instruction of machine code: its text, and what the compiler wrote beside it for the scheduler.

An instruction of sm_70 and newer has 128 bits, which `nvdisasm -hex` prints as two words. The upper one holds, from bit 41 on:
cycles before the warp may issue again (4 bits), whether the scheduler should stay with this warp (1), the scoreboard that the
result releases (3) and the one that the read of the operands releases (3; 7 is none), and the scoreboards that the instruction
waits for (6, a bit each).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

# A label; or `/*0070*/  @!P0 LDG.E.128 R4, ... ;`, with -hex the two halves of the encoding in comments behind it.
_LINE: Final = re.compile(
    r"^(?P<label>\.L_x_\d+):"
    r"|^\s*/\*(?P<at>[0-9a-f]{4,})\*/\s+(?P<text>.*?)\s*;"
    r"(?:\s*/\* 0x[0-9a-f]{16} \*/\s*\n\s*/\* 0x(?P<upper>[0-9a-f]{16}) \*/)?",
    re.M,
)
_GUARD: Final = re.compile(r"^@(!?U?P\w+)\s+")
_REGISTER: Final = re.compile(r"\b(UR|UP|R|P)(\d+)(?![\w])(\.64)?")
_PREDICATE: Final = re.compile(r"U?P(\d|T)")
_NONE: Final = 7  # in the place of a scoreboard
_WIDTHS: Final = {"64": 2, "128": 4, "WIDE": 2}
_STORES: Final = ("STS", "STG", "STL", "ST")
_NO_RESULT: Final = ("ST", "RED", "BRA", "BAR", "EXIT", "LDGSTS", "LDGDEPBAR", "DEPBAR", "UTMA", "UBLK", "SYNCS.ARRIVE")


@dataclass(frozen=True)
class Word:
    """An instruction. `sets` and `reads` are scoreboards that its result and its operands release, `waits` those it waits for."""

    text: str
    address: int = 0
    stall: int = 1
    yields: bool = False
    sets: int | None = None
    reads: int | None = None
    waits: tuple[int, ...] = ()

    @cached_property
    def guard(self) -> str | None:
        """`P0` or `!UP2`; None where the instruction always runs."""
        found = _GUARD.match(self.text)
        return found[1] if found else None

    @cached_property
    def opcode(self) -> str:
        """With its modifiers, without its guard."""
        return _GUARD.sub("", self.text).split()[0]

    @cached_property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @cached_property
    def modifiers(self) -> tuple[str, ...]:
        """What follows the base, in order."""
        return tuple(self.opcode.split(".")[1:])

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """As written, at commas."""
        _, _, rest = _GUARD.sub("", self.text).partition(" ")
        return tuple(part.strip() for part in rest.split(",")) if rest else ()

    @cached_property
    def _results(self) -> int:
        """How many operands in front are results: one, or with a predicate beside it two."""
        if self.opcode.startswith(_NO_RESULT) or not self.operands:
            return 0
        predicates = [_PREDICATE.fullmatch(x) is not None for x in self.operands[:2]]
        return 2 if any(predicates) and len(predicates) == 2 and not self.operands[1].startswith("[") else 1

    @cached_property
    def writes(self) -> frozenset[str]:
        """The registers and predicates that hold its result."""
        count = max((_WIDTHS.get(m, 1) for m in self.modifiers), default=1)
        return frozenset(name for x in self.operands[: self._results] for name in _registers(x, count))

    @cached_property
    def sources(self) -> frozenset[str]:
        """The registers and predicates that it reads, the guard among them; of what a store writes all registers."""
        parts = [(x, 1) for x in (*self.operands[self._results :], self.guard or "")]
        if self.base in _STORES:
            parts[-2] = parts[-2][0], max((_WIDTHS.get(m, 1) for m in self.modifiers), default=1)
        return frozenset(name for x, count in parts for name in _registers(x, count))


def _registers(text: str, count: int) -> Iterator[str]:
    for kind, number, pair in _REGISTER.findall(text):
        for n in range(2 if pair else count if kind in ("R", "UR") else 1):
            yield f"{kind}{int(number) + n}"


def word(text: str, address: int, upper: int) -> Word:
    """An instruction with the upper half of its encoding."""
    sets, reads = upper >> 46 & 7, upper >> 49 & 7
    return Word(
        text=text,
        address=address,
        stall=upper >> 41 & 15,
        yields=not upper >> 45 & 1,
        sets=None if sets == _NONE else sets,
        reads=None if reads == _NONE else reads,
        waits=tuple(n for n in range(6) if upper >> 52 + n & 1),
    )


def words(listing: str) -> Iterator[Word | str]:
    """The instructions of a listing and the labels between them. Without `-hex` nothing is known of scheduling."""
    for match in _LINE.finditer(listing):
        if match["label"]:
            yield match["label"]
        elif match["upper"]:
            yield word(match["text"], int(match["at"], 16), int(match["upper"], 16))
        else:
            yield Word(match["text"], int(match["at"], 16))
