"""Steps of a head between the caller's rows and the cache: bias, norm, RoPE, a factor of q; and how lanes share it."""

from __future__ import annotations

import functools
import math
import struct
import textwrap
from dataclasses import dataclass
from typing import Final

from kvgen.layout.dtypes import dtype
from kvgen.lowering.frequencies import cos_sin_factor, inverse_frequencies
from kvgen.schema.model import Rope
from kvgen.schema.norm import LayerNorm, Norm
from kvgen.schema.position_scale import PositionScale

POSITIONS: Final = 2**24  # f32 has every position below it exactly
_LINE: Final = 166  # characters of a line of numbers


@dataclass(frozen=True)
class NormContext:
    """A norm, and the struct `name` that a kernel spells out of it: over `count` elements, which are rounded to the C type
    `cast` (float: not at all) before they are multiplied by weights of C type `type`; `eps` and `offset` are decimal texts. RMS
    norm, with weights or none (`plain`), over a head or the `whole_row`, whose mean square may be `given`; or LayerNorm
    (`layer`), with a `bias` or none, weights of all heads or `per_head`."""

    name: str
    roles: str
    type: str
    cast: str
    count: int
    eps: str
    offset: str
    whole_row: bool
    plain: bool = False
    layer: bool = False
    bias: bool = False
    per_head: bool = False
    given: bool = False

    @property
    def word(self) -> str:
        """The norm's name in comments of kernels."""
        return "LayerNorm" if self.layer else "norm"


@dataclass(frozen=True)
class RopeContext:
    """The angles of a row: `pairs` of them, from a `table` (in `halves`, or as pairs of cosine and sine) or from `frequencies`,
    lines of decimal texts, times `factor` (a text, empty for 1).

    `given` says that the caller brings positions, `sections` that each has several, of which section s + 1 begins at pair
    `ends[s]`; or pair i belongs to section i % 3 where it is below `rounds[i % 3]`, else to the first. A position has an angle
    below `limit`; with a table, below its number of rows. Angles are stored as heads of the struct `head` read them, of which
    only the `first` pairs may rotate. In a table's halves the sine of pair i is number `sines` + i. An entry of `rate` tokens
    rotates by its first one's position.
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
    rounds: tuple[int, ...] = ()
    first: bool = False
    sines: int = 0
    rate: int = 1


@dataclass(frozen=True)
class PositionsContext:
    """Which positions a row may have: `given` in `sections` arrays, or its place in its request; below the rows of a `table` of
    angles, or `limit`."""

    given: bool
    sections: int
    table: bool
    limit: int


@dataclass(frozen=True)
class PositionScaleContext:
    """q's factor by position, and the struct `name` that a kernel spells out of it; `scale` is a decimal text. `given`: the
    caller brings positions. `limit`: q has a factor at positions below it; 0: they are checked as RoPE's, or not brought."""

    name: str
    period: int
    offset: int
    scale: str
    given: bool
    limit: int


@dataclass(frozen=True)
class HeadContext:
    """How lanes share a head: the struct `name` that a kernel spells out for Head; `roles` says whose heads. `hadamard`: the
    factor of its transform, a decimal text; empty: it has none."""

    name: str
    roles: str
    dim: int
    rotary_dim: int
    rotary_begin: int
    neox: bool
    width: int
    lanes: int
    rotary_pairs: int = 0  # the first pairs, which rotate; 0: all of them
    hadamard: str = ""
    bits: bool = False  # bits of the dim are bits of lane, vector and element


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
    norm_after: bool = False
    scaled: bool = False

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
class PadContext:
    """Zeros behind a row of q_out: `count` elements from element `begin` on, `width` an access."""

    begin: int
    count: int
    width: int


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


@functools.lru_cache(maxsize=256)  # one rope has the same ones in every operation and set
def _lines(numbers: tuple[float, ...]) -> tuple[str, ...]:
    """Decimal texts, as many a line as fit."""
    found = textwrap.wrap(", ".join(map(decimal, numbers)), _LINE)
    return tuple(line.removesuffix(",") for line in found)


def norm_context(norm: Norm, element: str, dim: int, heads: int) -> NormContext:
    """A norm over heads of `dim` elements, of which a row has `heads`; its name comes later."""
    weights = dtype("f32" if norm.weight_dtype == "f32" else element).c
    if isinstance(norm, LayerNorm):
        return NormContext(
            name="",
            roles="",
            type=weights,
            cast="float",
            count=dim,
            eps=decimal(norm.eps),
            offset="0.0",
            whole_row=False,
            layer=True,
            bias=norm.bias,
            per_head=norm.per_head,
        )
    return NormContext(
        name="",
        roles="",
        type=weights,
        cast=dtype(element if norm.multiply == "after" else "f32").c,
        count=heads * dim if norm.whole_row else norm.dim or dim,
        eps=decimal(norm.eps),
        offset=decimal(norm.weight_offset),
        whole_row=norm.whole_row,
        plain=not norm.weight,
        given=norm.given,
    )


def position_scale_context(scale: PositionScale, *, given: bool, checked: bool) -> PositionScaleContext:
    """q's factor; `checked` says that positions are RoPE's too, which checks them."""
    limit = 0 if checked or not given else POSITIONS
    return PositionScaleContext("QScale", scale.period, scale.offset, decimal(scale.scale), given, limit)


def rope_context(
    rope: Rope,
    dims: int,
    *,
    head_dim: int,
    local: bool,
    table: bool,
    form: str,
    given: bool,
    sections: tuple[int, ...],
    order: str,
    head: HeadContext,
    rate: int,
) -> RopeContext:
    """The angles of `dims` rotated elements of heads of `head_dim`; `form` says how a `table` of them is stored, `order` how
    sections share them, `rate` how many tokens an entry stands for."""
    factor = 1.0 if table else cos_sin_factor(rope, local=local)
    whole = head_dim if rope.proportional else dims
    runs = order == "runs"
    return RopeContext(
        pairs=dims // 2,
        table=table,
        halves=form == "halves",
        frequencies=() if table else _lines(inverse_frequencies(rope, whole, local=local)),
        factor="" if factor == 1.0 else decimal(factor),
        given=given,
        sections=max(1, len(sections)),
        ends=tuple(sum(sections[: i + 1]) for i in range(len(sections) - 1)) if runs else (),
        limit=0 if table else POSITIONS,
        head=head.name,
        rounds=() if runs else tuple(3 * n for n in sections),
        first=head.rotary_pairs > 0,
        sines=whole // 2,
        rate=rate,
    )
