"""Regions: where an element of K, V or their scales lies in its page, as an expression over (token, head, dim).

A region is a tensor's axes from the slowest to the fastest (`kvgen.layout.axes`). `token`, `head` and `dim` have compile-time
strides, so that an element's place, from where its page begins, is a constant expression; where page or layer lies further in,
their extents are known too. Sub-byte elements are counted from a byte's low bits up. Strides and offsets count elements, or bits
where elements begin and end within bytes (`DType.place`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from kvgen.errors import SpecError
from kvgen.expr.nodes import Expr, const, var
from kvgen.layout.axes import INNER, OUTER, Axis, Swizzle, check_factors
from kvgen.layout.dtypes import DType

Role = Literal["k", "v", "kv"]


@dataclass(frozen=True)
class Region:
    """A typed part of a page: K, V, or both along a `kv` axis.

    `extents` holds kv (2), token, head and dim; token may be None where its extent is a run-time matter (continuous
    caches). It holds page and layer where the spec says how many the tensors have room for. `byte_offset` is the region's
    start inside its page; `pitch` is what the innermost axis takes in memory, as strides count it, where the region is a part
    of wider rows (0: just its extent). `ragged`: there are no pages, and token counts the rows of all requests, which begin
    at any of them. `token_step`: from a token to the next one where rows lie in wider ones (0: just their extent). `strided`:
    the packed elements of a byte are not neighbours, but a whole row's bytes apart: byte i of a row has dims i, i + n, ..., n
    bytes a row.
    """

    role: Role
    dtype: DType
    axes: tuple[Axis, ...]
    extents: tuple[tuple[str, int | None], ...]
    byte_offset: int = 0
    swizzle: Swizzle | None = None
    pitch: int = 0
    ragged: bool = False
    strided: bool = False
    token_step: int = 0

    def __post_init__(self) -> None:
        extents, text = dict(self.extents), self.text
        for name in dict.fromkeys(a.name for a in self.axes):
            factors = [a for a in self.axes if a.name == name]
            if len(set(factors)) != len(factors):
                raise SpecError(f"layout: the axis {name} stands twice in {text!r}; each axis once, or split")
            check_factors(name, factors, extents.get(name), text)
        present = {a.name for a in self.axes}
        if self.ragged:
            self._check_ragged()
        for name in INNER:
            if name not in present and extents[name] != 1:
                raise SpecError(f"layout: {text!r} has no {name} axis, but {name} has {extents[name]} elements; add it")
        if "page" not in present and not self.ragged:
            raise SpecError(
                f"layout: got {text!r}; pages need an axis of their own; write page (or block) into it, as in {f'page {text}'!r}"
            )
        for axis, stride in zip(self.axes, self.strides, strict=True):
            if axis.name in INNER and stride is None:
                rule = "move page, layer and a continuous cache's token to the left, or give total_pages, total_layers"
                if self.ragged:
                    rule = "move layer and token to the left, or give total_tokens, the rows that a tensor has room for"
                raise SpecError(
                    f"layout: {axis} lies outside an axis whose extent is known only at run time in {text!r}; {rule}"
                )
        if self.swizzle:
            self._check_swizzle(self.swizzle)
        if self.strided:
            self._check_strided()
        if self.token_step:
            self._check_token_step()
        if self.byte_offset * 8 % self.dtype.place:
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

    def _check_token_step(self) -> None:
        """A row of the tensor holds the region's own."""
        if self.axes[0] != Axis("token") or any(a.name in OUTER for a in self.axes if a.name != "kv"):
            raise SpecError(
                f"row_elements: got {self.token_step} with the layout {self.text!r}; rows that lie in wider ones have token "
                "as their first axis, and a tensor a layer: 'token head dim', layers='pointers'"
            )
        own = replace(self, token_step=0).strides[0]
        if own is not None and self.token_step < own:
            raise SpecError(
                f"row_elements: got {self.token_step} for {self.text!r}, whose own rows have {own} elements; it counts the "
                f"elements from a row to the next one: {own} or more, (q_heads + 2 * kv_heads) * head_dim of packed q | k | v"
            )

    def _check_strided(self) -> None:
        """The bytes of a row are whole, and side by side."""
        kind, dims = self.dtype, dict(self.extents)["dim"]
        if self.axes[-1] != Axis("dim") or self.swizzle or dims is None or dims % kind.together:
            raise SpecError(
                f"layout: got {self.text!r} with {dims} {kind.bits}-bit elements a row, {kind.together} a byte that are no "
                f"neighbours; dim must be innermost, whole, and a multiple of {kind.together}, without a swizzle; or use "
                "packing='neighbours'"
            )

    def _check_swizzle(self, swizzle: Swizzle) -> None:
        """A swizzle permutes whole blocks of 2^(base + bits) elements: a page must be made of them, without gaps."""
        unit, text = 2 ** (swizzle.base + swizzle.bits), self.text
        if self.element > 1:
            raise SpecError(
                f"swizzle: got one for {self.dtype.bits}-bit elements, {self.dtype.packing}; a swizzle moves elements that lie "
                "within a byte each; leave it out"
            )
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
        """Compile-time strides, one an axis; None where a run-time extent lies further in."""
        extents = dict(self.extents)
        strides: list[int | None] = []
        product: int | None = self.element
        for axis in reversed(self.axes):
            if axis.name == "token" and self.token_step:
                product = self.token_step
            strides.append(product)
            whole = extents.get(axis.name)
            if self.pitch and len(strides) == 1:
                product = self.pitch
            else:
                product = None if product is None or whole is None else product * axis.extent(whole)
        return tuple(reversed(strides))

    @property
    def element(self) -> int:
        """The step from an element to the next one, as strides count it."""
        return self.dtype.bits // self.dtype.place

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
            open_ended = axis.name in ("page", "layer") or (self.ragged and axis.name == "token")
            whole = None if open_ended else extents.get(axis.name)
            result.append(names[axis.name] if whole is None else axis.extent(whole))
        return tuple(result)

    def stride_of(self, name: str) -> int | None:
        """The compile-time stride of the first factor of axis `name`."""
        return next((s for a, s in zip(self.axes, self.strides, strict=True) if a.name == name), None)

    def index_vars(self) -> dict[str, Expr]:
        """Variables for token, head and dim, bounded by the extents."""
        open_ended = ("token",) if self.ragged else ()
        return {n: var(n, (e - 1) if e and n not in open_ended else 2**32 - 1) for n, e in self.extents if n in INNER}

    def offset(self, index: Mapping[str, Expr] | None = None) -> Expr:
        """The offset inside the page of (token, head, dim); by default over variables of those names."""
        index = self.index_vars() if index is None else index
        total: Expr = const(0)
        for axis, stride in zip(self.axes, self.strides, strict=True):
            if axis.name == "dim" and self.strided:
                total = total + index["dim"] % self.run * self.dtype.together
                total = total + index["dim"] // self.run
            elif axis.name in INNER and stride is not None:
                total = total + axis.index(index[axis.name]) * stride
        return self.swizzle.apply(total) if self.swizzle else total

    @property
    def span(self) -> int | None:
        """From a page's first element to the end of its last, inner axes only; None if the token extent is open."""
        extents, last = dict(self.extents), 0
        for axis, stride in zip(self.axes, self.strides, strict=True):
            if axis.name in INNER and stride is not None:
                whole = extents[axis.name]
                if whole is None:
                    return None
                last += (axis.extent(whole) - 1) * stride
        return last + self.element

    @cached_property
    def run(self) -> int:
        """Consecutive dim elements that are neighbours in memory, or in neighbouring bytes."""
        innermost, stride = self.axes[-1], self.strides[-1]
        whole = dict(self.extents)["dim"]
        assert whole is not None
        if innermost.name != "dim" or innermost.divide != 1 or stride != self.element:
            return 1
        length = innermost.extent(whole) // (self.dtype.together if self.strided else 1)
        return min(length, 2**self.swizzle.base) if self.swizzle else length

    @cached_property
    def vector(self) -> int:
        """Elements of the widest access (up to 16 bytes) that never straddles a run, given aligned outer strides. Of 3-bit
        elements they are three accesses, of a byte for every 8 of them.
        """
        limit = 16 if self.strided else max(16 * 8 // self.dtype.place, 1)
        strides = [
            s
            for a, s in zip(self.axes, self.strides, strict=True)
            if a.name in INNER and s is not None and s > self.element
        ]
        width, each = 1, self.dtype.together if self.strided else 1
        starts = [*strides, self.byte_offset * 8 // self.dtype.place]
        while width < limit and self.run % (2 * width) == 0 and all(s % (2 * width * each) == 0 for s in starts):
            width *= 2
        return width

    def bytes_of(self, count: int) -> int:
        """Bytes that an access to so many neighbouring elements takes."""
        return count if self.strided else self.dtype.size_of(count)

    def byte_of(self, offset: Expr) -> tuple[Expr, Expr]:
        """(byte, bit within it) of an offset: sub-byte elements fill a byte from its low bits up."""
        bits = offset * self.dtype.place
        return bits // 8 + self.byte_offset, bits % 8
