"""Axes as a spec writes them: "page kv layer token head dim", or split as in "page head dim/8 token dim%8"; and swizzles.

The outer axes `page`, `kv` and `layer` have strides known only at run time (an engine pads pages, interleaves layers, keeps
K and V apart); `token`, `head` and `dim` have extents known when the kernel is written, and may be split.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from kvgen.errors import SpecError
from kvgen.expr.nodes import Expr

OUTER: Final = ("page", "kv", "layer")
INNER: Final = ("token", "head", "dim")
_TERM: Final = re.compile(r"([a-z_]+)(?:/(\d+))?(?:%(\d+))?")


@dataclass(frozen=True)
class Axis:
    """One factor of a logical axis: index `(i / divide) % modulo`; modulo 0 means "no remainder taken"."""

    name: str
    divide: int = 1
    modulo: int = 0

    def __str__(self) -> str:
        return self.name + (f"/{self.divide}" if self.divide > 1 else "") + (f"%{self.modulo}" if self.modulo else "")

    def index(self, value: Expr) -> Expr:
        """This factor's coordinate of the logical index `value`."""
        part = value // self.divide
        return part % self.modulo if self.modulo else part

    def extent(self, whole: int) -> int:
        """How many coordinates the factor has when the logical axis has `whole`."""
        return self.modulo or whole // self.divide


@dataclass(frozen=True)
class Swizzle:
    """A bijection of the element offset inside a page: `offset ^= ((offset >> shift) & (2^bits - 1)) << base`.

    With shift >= bits the xor's source bits are left alone, so it undoes itself.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if self.bits < 1 or self.base < 0 or self.shift < self.bits:
            raise SpecError(
                f"swizzle: got bits={self.bits}, base={self.base}, shift={self.shift}; bits >= 1, base >= 0 and "
                "shift >= bits, or two elements would share a place"
            )

    def apply(self, offset: Expr) -> Expr:
        """The swizzled offset."""
        source = (offset // (1 << (self.shift + self.base))) % (1 << self.bits)
        return offset ^ source * (1 << self.base)


@functools.lru_cache(maxsize=1024)
def parse_axes(text: str) -> tuple[Axis, ...]:
    """The axes of `text`, slowest first; raises SpecError for a word that is no axis."""
    axes: list[Axis] = []
    for word in text.split():
        match = _TERM.fullmatch(word)
        name = "page" if match and match[1] == "block" else match[1] if match else ""
        if match is None or name not in OUTER + INNER:
            raise SpecError(
                f"layout: got the axis {word!r} in {text!r}; axes are page (or block), kv, layer, token, head and dim, "
                f"split as dim/8 ... dim%8{_spelled_out(word)}"
            )
        axis = Axis(name, int(match[2] or 1), int(match[3] or 0))
        if axis.divide < 1 or (match[3] is not None and axis.modulo < 1) or (name in OUTER and axis != Axis(name)):
            raise SpecError(
                f"layout: got the axis {word!r} in {text!r}; only token, head and dim split, by numbers >= 1"
            )
        axes.append(axis)
    if not axes:
        raise SpecError("layout: got no axes; e.g. 'page kv layer token head dim'")
    return tuple(axes)


def _spelled_out(word: str) -> str:
    """The axes that an engine's name for a layout means."""
    axes = {"NHD": "token head dim", "HND": "head token dim"}.get(word.upper())
    if axes is None:
        return ""
    return f"; {word.upper()} is layout='page kv {axes}', or the engine's own: presets.flashinfer_{word.lower()}"


def check_factors(name: str, factors: list[Axis], extent: int | None, text: str) -> None:
    """Raise SpecError unless the factors of one axis count every index exactly once."""
    ordered = sorted(factors, key=lambda a: -a.divide)
    expected = ", then ".join(str(a) for a in ordered)
    if ordered[-1].divide != 1 or ordered[0].modulo:
        raise SpecError(
            f"layout: {name} is split as {expected} in {text!r}; the factors must cover the axis, like {name}/8 and {name}%8"
        )
    for coarse, fine in pairwise(ordered):
        if fine.modulo * fine.divide != coarse.divide:
            raise SpecError(
                f"layout: {name} is split as {expected} in {text!r}; {fine} must count {coarse.divide // fine.divide}, "
                f"as {name}{f'/{fine.divide}' if fine.divide > 1 else ''}%{coarse.divide // fine.divide}"
            )
    if ordered[0].divide > 1 and (extent is None or extent % ordered[0].divide):
        raise SpecError(
            f"layout: {name}/{ordered[0].divide} in {text!r} does not divide the extent of {name}, {extent}"
        )
