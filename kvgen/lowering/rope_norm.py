"""What happens to a head between the caller's rows and the cache: bias, RMS norm, RoPE; and how lanes share it."""

from __future__ import annotations

import math
import struct
import textwrap
from dataclasses import dataclass
from typing import Final

from kvgen.layout.dtypes import dtype
from kvgen.lowering.frequencies import cos_sin_factor, inverse_frequencies
from kvgen.spec.model import Rope
from kvgen.spec.norm import RmsNorm

_LINE: Final = 166  # characters of a line of numbers


@dataclass(frozen=True)
class NormContext:
    """An RMS norm, and the struct `name` that a kernel spells out of it: over `count` elements, which are rounded to the C type
    `cast` (float: not at all) before they are multiplied by weights of C type `type`; `eps` and `offset` are decimal texts."""

    name: str
    roles: str
    type: str
    cast: str
    count: int
    eps: str
    offset: str
    whole_row: bool


@dataclass(frozen=True)
class RopeContext:
    """The angles of a row: `pairs` of them, from a `table` (in `halves`, or as pairs of cosine and sine) or from `frequencies`,
    lines of decimal texts, times `factor` (a text, empty for 1).

    `given` says that the caller brings positions, `sections` that each has several, of which section s + 1 begins at pair
    `ends[s]`. A position has an angle below `limit`; with a table, below its number of rows. Angles are stored as heads of the
    struct `head` read them.
    """

    pairs: int
    table: bool
    halves: bool
    frequencies: tuple[str, ...]
    factor: str
    given: bool
    sections: int
    ends: tuple[int, ...]
    limit: int
    head: str


@dataclass(frozen=True)
class HeadContext:
    """How lanes share a head: the struct `name` that a kernel spells out for Head; `roles` says whose heads."""

    name: str
    roles: str
    dim: int
    rotary_dim: int
    rotary_begin: int
    neox: bool
    width: int
    lanes: int


@dataclass(frozen=True)
class PartContext:
    """Dims [begin, begin + dim) of every head of a role: what is done to them, and where they go.

    `given` is the name of the rows that bring them, `row` the elements that a head has there, of which the part's begin at
    `begin`; `count` names the constant of a block's heads. `bias` is the parameter that has it, from `bias_begin` on. They go to
    q_out (`out`; codes of q / q_scale where it is `divided`), to a tile (`tile`, `tile_row` elements a head, from `tile_at` on)
    or to the segment `struct` of the cache, from dim `at` on. `stored`: they come from that segment.
    """

    title: str
    role: str
    head: HeadContext
    given: str
    row: int
    count: str
    heads: int
    begin: int
    bias: str
    bias_begin: int
    norm: NormContext | None
    out: bool
    tile: bool
    struct: str
    at: int = 0
    tile_row: int = 0
    tile_at: int = 0
    divided: bool = False
    stored: bool = False

    @property
    def dim(self) -> int:
        """Elements of a head."""
        return self.head.dim

    @property
    def width(self) -> int:
        """Elements of an access."""
        return self.head.width

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that RoPE rotates."""
        return self.head.rotary_dim


@dataclass(frozen=True)
class InputContext:
    """Rows of the caller's, as `name`: from element `begin` of the array `array` on, of type `type`. `elements` has a token where
    only requests have a stride, `share` a kv head where a block has some of them."""

    name: str
    array: str
    type: str
    begin: int
    elements: int
    share: int


@dataclass(frozen=True)
class TileContext:
    """Rows of K or V that wait in shared memory, `stride` floats apart."""

    role: str
    stride: int


def width_of(element: str, *sizes: int) -> int:
    """Elements of the widest access that all these sizes are whole numbers of."""
    return math.gcd(16 // dtype(element).bytes, *sizes)


def lanes_of(dim: int, width: int) -> int:
    """Lanes that share a head: a pair of vectors each, a warp at most."""
    pairs = -(-dim // (2 * width))
    return min(32, 1 << (pairs - 1).bit_length())


def decimal(x: float) -> str:
    """An f32 in the fewest digits that name it, with a point or an exponent."""
    single = struct.Struct("<f")
    wanted = single.pack(x)
    rounded = single.unpack(wanted)[0]
    text = next(t for n in range(1, 18) if single.pack(float(t := f"{rounded:.{n}g}")) == wanted)
    return text if any(c in text for c in ".e") else text + ".0"


def _lines(numbers: tuple[float, ...]) -> tuple[str, ...]:
    """Decimal texts, as many a line as fit."""
    found = textwrap.wrap(", ".join(map(decimal, numbers)), _LINE)
    return tuple(line.removesuffix(",") for line in found)


def norm_context(norm: RmsNorm, element: str, dim: int, heads: int) -> NormContext:
    """A norm over heads of `dim` elements, of which a row has `heads`; its name comes later."""
    row = norm.over == "row"
    return NormContext(
        name="",
        roles="",
        type=dtype("f32" if norm.weight_dtype == "f32" else element).c,
        cast=dtype(element if norm.multiply == "after" else "f32").c,
        count=heads * dim if row else norm.dim or dim,
        eps=decimal(norm.eps),
        offset=decimal(norm.weight_offset),
        whole_row=row,
    )


def rope_context(
    rope: Rope, dims: int, *, local: bool, table: bool, form: str, given: bool, sections: tuple[int, ...], head: str
) -> RopeContext:
    """The angles of `dims` rotated elements; `form` says how a `table` of them is stored."""
    factor = 1.0 if table else cos_sin_factor(rope, local=local)
    return RopeContext(
        pairs=dims // 2,
        table=table,
        halves=form == "halves",
        frequencies=() if table else _lines(inverse_frequencies(rope, dims, local=local)),
        factor="" if factor == 1.0 else decimal(factor),
        given=given,
        sections=max(1, len(sections)),
        ends=tuple(sum(sections[: i + 1]) for i in range(len(sections) - 1)),
        limit=0 if table else 2**24,
        head=head,
    )
