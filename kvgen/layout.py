"""Where an element lives: regions, split axes, swizzles and sub-byte elements, as expressions.

A region is a tensor's axes from the slowest to the fastest, written like einops: `"page kv layer token head dim"`, or with
a split axis `"page head dim/8 token dim%8"`. The outer axes `page`, `kv` and `layer` have strides known only at run time
(an engine pads pages, interleaves layers, keeps K and V apart); `token`, `head` and `dim` get compile-time strides, so
that an element's place inside its page is a constant expression.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, Literal

from kvgen.dtypes import DType
from kvgen.errors import SpecError
from kvgen.expr import Expr, const, var

Role = Literal["k", "v", "kv"]
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


def parse_axes(text: str) -> tuple[Axis, ...]:
    """The axes of `text`, slowest first; raises SpecError for a word that is no axis."""
    axes: list[Axis] = []
    for word in text.split():
        match = _TERM.fullmatch(word)
        name = "page" if match and match[1] == "block" else match[1] if match else ""
        if match is None or name not in OUTER + INNER:
            raise SpecError(
                f"layout: got the axis {word!r} in {text!r}; axes are page (or block), kv, layer, token, head and dim, "
                "split as dim/8 ... dim%8"
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


def _check_factors(name: str, factors: list[Axis], extent: int | None, text: str) -> None:
    """The factors of one axis must count every index exactly once."""
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


@dataclass(frozen=True)
class Region:
    """A typed part of a page: K, V, or both along a `kv` axis.

    `extents` holds kv (2), token, head and dim; token may be None where its extent is a run-time matter (continuous
    caches), page and layer are never in it. `byte_offset` is the region's start inside its page; `pitch` is how many of
    its elements the innermost axis takes in memory where the region is a part of wider rows (0: just its extent). `ragged`:
    there are no pages, and token counts the rows of all requests, which begin at any of them.
    """

    role: Role
    dtype: DType
    axes: tuple[Axis, ...]
    extents: tuple[tuple[str, int | None], ...]
    byte_offset: int = 0
    swizzle: Swizzle | None = None
    pitch: int = 0
    ragged: bool = False

    def __post_init__(self) -> None:
        extents, text = dict(self.extents), self.text
        for name in dict.fromkeys(a.name for a in self.axes):
            factors = [a for a in self.axes if a.name == name]
            if len(set(factors)) != len(factors):
                raise SpecError(f"layout: the axis {name} stands twice in {text!r}; each axis once, or split")
            _check_factors(name, factors, extents.get(name), text)
        present = {a.name for a in self.axes}
        if self.ragged:
            self._check_ragged()
        for name in INNER:
            if name not in present and extents[name] != 1:
                raise SpecError(f"layout: {text!r} has no {name} axis, but {name} has {extents[name]} elements; add it")
        if "page" not in present and not self.ragged:
            raise SpecError(f"layout: {text!r} has no page axis; add page (or block)")
        for axis, stride in zip(self.axes, self.strides, strict=True):
            if axis.name in INNER and stride is None:
                rule = "move page, layer and a continuous cache's token to the left"
                if self.ragged:
                    rule = "move layer and token to the left, or give total_tokens, the rows that a tensor has room for"
                raise SpecError(
                    f"layout: {axis} lies outside an axis whose extent is known only at run time in {text!r}; {rule}"
                )
        if self.swizzle:
            self._check_swizzle(self.swizzle)
        if self.byte_offset * 8 % self.dtype.bits:
            raise SpecError(f"layout: byte offset {self.byte_offset} is no multiple of a {self.dtype.name} element")

    def _check_ragged(self) -> None:
        """A request may begin at any row: rows are alike, and nothing but their number tells one from the next."""
        if "page" in (a.name for a in self.axes):
            raise SpecError(
                f"layout: {self.text!r} has a page axis, but requests lie one after another without pages; drop it, e.g. "
                "'token head dim'"
            )
        if Axis("token") not in self.axes:
            raise SpecError(
                f"layout: got {self.text!r} for requests that begin at any row; token is one whole axis, e.g. 'token head dim'"
            )
        if self.swizzle:
            raise SpecError(
                "swizzle: got one for requests that begin at any row; a swizzle permutes the elements of a page; leave it out"
            )

    def _check_swizzle(self, swizzle: Swizzle) -> None:
        """A swizzle permutes whole blocks of 2^(base + bits) elements: a page must be made of them, without gaps."""
        unit, text = 2 ** (swizzle.base + swizzle.bits), self.text
        inner = [i for i, a in enumerate(self.axes) if a.name in INNER]
        if inner and any(a.name in OUTER for a in self.axes[inner[0] :]):
            raise SpecError(
                f"swizzle: got the layout {text!r}, where page, kv or layer lies inside a page's own axes; move them to the "
                "left, or give no swizzle"
            )
        size = math.prod(e for n, e in self.extents if n in INNER and e is not None)
        if size % unit:
            raise SpecError(
                f"swizzle: got bits={swizzle.bits}, base={swizzle.base} for {size} elements in {text!r}; they must be a "
                f"multiple of 2^(base + bits) = {unit}, or elements would leave their page"
            )

    @property
    def text(self) -> str:
        """The axes as written in a spec."""
        return " ".join(str(a) for a in self.axes)

    @cached_property
    def strides(self) -> tuple[int | None, ...]:
        """Compile-time strides in elements, one an axis; None where a run-time extent lies further in."""
        extents = dict(self.extents)
        strides: list[int | None] = []
        product: int | None = 1
        for axis in reversed(self.axes):
            strides.append(product)
            whole = self.pitch if self.pitch and len(strides) == 1 else extents.get(axis.name)
            product = None if product is None or whole is None else product * axis.extent(whole)
        return tuple(reversed(strides))

    @property
    def fixed_strides(self) -> tuple[int | None, ...]:
        """`strides` of token, head and dim; None for page, kv and layer, whose strides the tensor brings at run time."""
        return tuple(s if a.name in INNER else None for a, s in zip(self.axes, self.strides, strict=True))

    @property
    def shape(self) -> tuple[int | str, ...]:
        """The tensor's shape: numbers, and the names of the extents known at run time."""
        names = {"page": "pages", "layer": "layers", "token": "rows" if self.ragged else "tokens"}
        extents = dict(self.extents)
        result: list[int | str] = []
        for axis in self.axes:
            whole = None if self.ragged and axis.name == "token" else extents.get(axis.name)
            result.append(names[axis.name] if whole is None else axis.extent(whole))
        return tuple(result)

    def stride_of(self, name: str) -> int | None:
        """The compile-time stride of the first factor of axis `name`, in elements."""
        return next((s for a, s in zip(self.axes, self.strides, strict=True) if a.name == name), None)

    def index_vars(self) -> dict[str, Expr]:
        """Variables for token, head and dim, bounded by the extents."""
        open_ended = ("token",) if self.ragged else ()
        return {n: var(n, (e - 1) if e and n not in open_ended else 2**32 - 1) for n, e in self.extents if n in INNER}

    def offset(self, index: Mapping[str, Expr] | None = None) -> Expr:
        """Element offset inside the page of (token, head, dim); by default over variables of those names."""
        index = self.index_vars() if index is None else index
        total: Expr = const(0)
        for axis, stride in zip(self.axes, self.strides, strict=True):
            if axis.name in INNER and stride is not None:
                total = total + axis.index(index[axis.name]) * stride
        return self.swizzle.apply(total) if self.swizzle else total

    @property
    def span(self) -> int | None:
        """Elements from a page's first to one past its last, inner axes only; None if the token extent is open."""
        extents, last = dict(self.extents), 0
        for axis, stride in zip(self.axes, self.strides, strict=True):
            if axis.name in INNER and stride is not None:
                whole = extents[axis.name]
                if whole is None:
                    return None
                last += (axis.extent(whole) - 1) * stride
        return last + 1

    @cached_property
    def run(self) -> int:
        """Consecutive dim elements that are neighbours in memory."""
        innermost, stride = self.axes[-1], self.strides[-1]
        whole = dict(self.extents)["dim"]
        assert whole is not None
        if innermost.name != "dim" or innermost.divide != 1 or stride != 1:
            return 1
        length = innermost.extent(whole)
        return min(length, 2**self.swizzle.base) if self.swizzle else length

    @cached_property
    def vector(self) -> int:
        """Elements of the widest access (up to 16 bytes) that never straddles a run, given aligned outer strides."""
        limit = max(16 * 8 // self.dtype.bits, 1)
        strides = [
            s for a, s in zip(self.axes, self.strides, strict=True) if a.name in INNER and s is not None and s > 1
        ]
        width = 1
        starts = [*strides, self.byte_offset * 8 // self.dtype.bits]
        while width < limit and self.run % (2 * width) == 0 and all(s % (2 * width) == 0 for s in starts):
            width *= 2
        return width

    def byte_of(self, offset: Expr) -> tuple[Expr, Expr]:
        """(byte, bit within it) of an element offset: sub-byte elements fill a byte from its low bits up."""
        bits = offset * self.dtype.bits
        return bits // 8 + self.byte_offset, bits % 8
