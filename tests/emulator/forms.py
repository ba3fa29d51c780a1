"""Every form of an instruction that its handler translates, found by answering the handler's questions in every way.

A form is the opcode, its modifiers in alphabetical order and its types in their own: "cvt.rn.satfinite e4m3x2.f32".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvgen.emulator.context import Handler, Instruction, Modifiers, Register
from kvgen.emulator.errors import TranslateError
from kvgen.emulator.ptxtypes import TYPES, PtxType


class _Answers:
    """A path through the questions of one translation: what was chosen, and out of how many."""

    def __init__(self, path: Sequence[int]) -> None:
        self.path = list(path)
        self.widths: list[int] = []

    def choose(self, width: int) -> int:
        if len(self.widths) == len(self.path):
            self.path.append(0)
        self.widths.append(width)
        return self.path[len(self.widths) - 1]

    def next_path(self) -> list[int] | None:
        for at in reversed(range(len(self.path))):
            if self.path[at] + 1 < self.widths[at]:
                return [*self.path[:at], self.path[at] + 1]
        return None


class _AnyModifiers(Modifiers):
    def __init__(self, answers: _Answers) -> None:
        super().__init__([], TranslateError)
        self.answers = answers
        self.chosen: list[str] = []

    def flag(self, word: str) -> bool:
        return self.optional((word,)) is not None

    def optional(self, choices: Sequence[str]) -> str | None:
        at = self.answers.choose(len(choices) + 1)
        return None if at == 0 else self.take(choices[at - 1])

    def choice(self, choices: Sequence[str]) -> str:
        return self.take(choices[self.answers.choose(len(choices))])

    def type(self, allowed: str) -> PtxType:
        names = allowed.split()
        return TYPES[self.take(names[self.answers.choose(len(names))])]

    def take(self, word: str) -> str:
        self.chosen.insert(0, word)
        return word


class _AnyInstruction(Instruction):
    def count(self, least: int, most: int | None = None) -> None:
        assert isinstance(self.modifiers, _AnyModifiers)
        self.operands = ["%x"] * (least + self.modifiers.answers.choose((most or least) - least + 1))


class _AnyContext:
    """Stands in for a Context: every operand is what the handler wants."""

    def __init__(self, answers: _Answers) -> None:
        self.answers = answers

    def vector(self, operand: str) -> list[str]:
        return ["%x"] * (1, 2, 4, 8)[self.answers.choose(4)]

    def find(self, name: str) -> Register:
        return Register("x", TYPES["b64"])

    def pair(self, ins: Instruction, operand: str) -> tuple[str, str | None]:
        return "%x", (None, "%y")[self.answers.choose(2)]

    def integer(self, ins: Instruction, operand: str) -> int:
        return (0, 128)[self.answers.choose(2)]

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: "0"


CACHE_OPERATORS = ("ca", "cg", "cs", "lu", "cv", "wb", "wt")


def form(opcode: str, words: Sequence[str]) -> str:
    if opcode in ("ld", "ldu", "st", "atom", "red"):  # without what only caches see
        words = [w for w in words if w not in CACHE_OPERATORS and not w.startswith(("L1::", "L2::"))]
    modifiers = [opcode, *sorted(w for w in words if w not in TYPES)]
    return ".".join(modifiers) + " " + ".".join(w for w in words if w in TYPES)


ORDERS = {"weak", "volatile", "mmio", "relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys"}
SHARED = {"shared", "shared::cta", "shared::cluster"}
SPACES = {"global", "local", "const", "param", "param::entry", "param::func"} | SHARED


def pairs(text: str) -> Iterator[tuple[str, ...]]:
    """What tests of every pair of words must meet; of a comparison, for every type of operands.

    Memory orders and scopes change no value, so they need to meet only each other and the state spaces.
    """
    modifiers, _, types = text.partition(" ")
    *results, operand = types.split(".")
    opcode, *words = modifiers.split(".")
    words += [f"{t} result" for t in results]
    base = (opcode, operand) if opcode in ("set", "setp") else (opcode,)
    if len(base) == 1:
        words.append(operand)
    # With what each word must meet: everything but orders, everything, or orders and spaces.
    kinds = [(w, 1 if w in ORDERS else 3 if w in SPACES else 2) for w in words]
    for i, (first, kind) in enumerate(kinds):
        for second, other in kinds[i:]:
            if kind & other:
                yield (*base, first, second)


def pairwise(texts: Iterable[str]) -> Iterator[str]:
    """Enough of the forms to meet every pair that any of them has."""
    met: set[tuple[str, ...]] = set()
    for text in texts:
        new = set(pairs(text)) - met
        if new:
            met |= new
            yield text


def accepted(opcode: str, handler: Handler) -> Iterator[str]:
    """Forms may come more than once, with other numbers of operands."""
    path: list[int] | None = []
    while path is not None:
        answers = _Answers(path)
        modifiers = _AnyModifiers(answers)
        ins = _AnyInstruction(opcode, modifiers, [], opcode, 0, None, lambda: "0")
        try:
            handler(_AnyContext(answers), ins)
            yield form(opcode, modifiers.chosen)
        except TranslateError:
            pass
        path = answers.next_path()
