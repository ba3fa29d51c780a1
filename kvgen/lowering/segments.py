"""Segments as templates see them: how each run of dims is stored, and how a kernel that copies rows walks it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from struct import pack, unpack
from typing import Final

from kvgen.expr.score_c import float_literal
from kvgen.layout.dtypes import DType, dtype
from kvgen.layout.storage import Quantization, Scales, Segment
from kvgen.lowering.offsets import OffsetContext, offset_context
from kvgen.schema.cache import Cache

# Accesses a lane keeps of a block in registers; of larger blocks so many are in flight.
HELD_CHUNKS: Final = 8
UNROLLED: Final = 4
STRUCTS: Final = {"k": "Key", "v": "Value"}
_RECIPES: Final = {
    "amax": "amax",
    "pow2": "pow2",
    "min": "least",
    "norm": "norm",
    "unit": "unit",
    "signs": "signs",
    "max": "nvfp4_max",
    "global": "nvfp4_global",
}


@dataclass(frozen=True)
class ScaleContext:
    """The scales of a segment: from `start` elements of `pointer` on, a page pointer (`cast`: to other elements than scales)
    or, if they are `given`, a field of the cache. `vector` neighbours are read by one access.

    `lanes`, `width` and `chunks` say how a warp quantizes a block: in registers if it is `held`, `units` at a time; `whole`
    blocks give every lane as much, up to the last dim; `byte_codes` codes of a byte are one lane's. `floors` are the least
    amax and scale, in C, or none; `pad` places behind a token's scales are zero.
    """

    type: str
    recipe: str
    zero: bool
    floors: tuple[str, ...]
    given: bool
    pointer: str
    cast: bool
    start: int
    offset: OffsetContext
    vector: int
    heads: int
    dims: int
    groups: int
    blocks: int
    pad: int
    global_scale: str
    residual: int
    lanes: int
    width: int
    chunks: int
    whole: bool
    byte_codes: int = 1

    @property
    def held(self) -> bool:
        """True: the lanes of a block keep its values in registers between the range and the codes."""
        return self.chunks <= HELD_CHUNKS

    @property
    def each(self) -> int:
        """Numbers of a block: its scale, and its zero point."""
        return 2 if self.zero else 1

    @property
    def unroll(self) -> int:
        """Accesses of a lane that are written out."""
        return self.chunks if self.held else UNROLLED

    @property
    def units(self) -> int:
        """Blocks a lane has in flight."""
        return 2 if self.chunks <= 2 and self.heads * self.dims > 1 else 1

    @property
    def mask(self) -> int:
        """The lanes of a block, the first at 0, as bits."""
        return (1 << self.lanes) - 1


@dataclass(frozen=True)
class BookContext:
    """A codebook in cache.cuh, of the segment `struct`: its values, what lies halfway between them, the largest magnitude. Where
    readers correct norms, 2^23 units of squares and the root of a unit, as `norm`. `signs`: codes have a sign's bit above.
    """

    struct: str
    title: str
    values: tuple[str, ...]
    middles: tuple[str, ...]
    largest: str
    norm: tuple[str, ...] = ()
    signs: bool = False


@dataclass(frozen=True)
class SegmentContext:
    """A segment: its struct in cache.cuh, and the vectors in which rows of `value` are copied to and from it.

    It begins `start` elements of the page pointer `pointer` on, which is to other elements if there is a `cast`.
    """

    struct: str
    role: str
    title: str
    begin: int
    size: int
    row: int
    heads: int
    value: str
    element: str
    axes: str
    pointer: str
    cast: bool
    start: int
    offset: OffsetContext
    vector: int
    width: int
    scales: tuple[ScaleContext, ...]

    @property
    def computed(self) -> bool:
        """True: a write chooses scales."""
        return bool(self.scales) and self.scales[0].recipe != "given"

    @property
    def corrected(self) -> bool:
        """True: readers need all codes of a block to read one."""
        return bool(self.scales) and self.scales[0].recipe == "norm_corrected"

    @property
    def global_scale(self) -> bool:
        """True: one scale lies above those of the blocks."""
        return bool(self.scales) and bool(self.scales[0].global_scale)

    @property
    def by_vectors(self) -> bool:
        """True: new rows are stored vector by vector: a write computes no scales, and no residual waits for them."""
        return not self.computed and not self.residual

    @property
    def residual(self) -> int:
        """Tokens that are quantized together once there are so many; 0: every token on its own."""
        return self.scales[0].residual if self.scales else 0

    @property
    def vectors(self) -> int:
        """Vectors of `width` a token has."""
        return self.heads * self.size // self.width


def check_whole_bytes(op: str, segment: Segment) -> None:
    """Raise ValueError where the codes of a byte have several scales that an operation computes."""
    kind, scales = segment.region.dtype, segment.scales
    if scales is not None and scales.block[2] % kind.together:
        raise ValueError(
            f"quant: got block.dim={scales.block[2]} with {kind.name} codes, {kind.packing}, whose scales {op} computes; codes "
            f"that share bytes are written together, so make block.dim a multiple of {kind.together}"
        )


def books(cache: Cache) -> tuple[BookContext, ...]:
    """The codebooks of a cache."""
    found = []
    for context in segments(cache):
        quant = cache.quants[context.role]
        if quant is not None and quant.codebook is not None and not context.begin:
            values = [_single(v) for v in quant.codebook]
            middles = [_single(_single(a + b) / 2) for a, b in pairwise(values)]
            largest = max(map(abs, values))
            codes, between = (tuple(map(float_literal, v)) for v in (values, middles))
            norm = tuple(map(float_literal, _square_units(largest))) if quant.norm_correction else ()
            signs = quant.recipe == "signs"
            found.append(
                BookContext(context.struct, context.title, codes, between, float_literal(largest), norm, signs)
            )
    return tuple(found)


def _square_units(largest: float) -> tuple[float, float]:
    """2^23 units of squares, and the root of a unit: squares of values have 22 bits, so that those of 1023 add up in 32."""
    _, exponent = math.frexp(largest)  # largest < 2^exponent
    return 2.0 ** (2 * exponent + 1), 2.0 ** (exponent - 11)


def _single(x: float) -> float:
    """The f32 nearest to x."""
    found: float = unpack("f", pack("f", x))[0]
    return found


def _element(element: DType, quant: Quantization | None, name: str) -> str:
    """The C type of a segment's elements."""
    if quant is None:
        return element.c
    codes = f"Strided<{element.c}>" if quant.strided else element.c
    return f"Coded<{codes}, {name}Book>" if quant.codebook is not None else codes


def _start(cache: Cache, base: str, element: str, start: int) -> tuple[bool, int]:
    """(the page pointer `base` is to other elements, `start` bytes in elements of its own)."""
    own = cache.storage.base(base).element
    if own.c != element:
        return True, start
    return False, start // own.bytes if start else 0


def _floors(quant: Quantization) -> tuple[str, ...]:
    """The least amax and scale, as f32 in C; empty where there is none."""
    floors = (quant.amax_min, quant.scale_min)
    return tuple(float_literal(n or 0.0) for n in floors) if any(floors) else ()


def _recipe(quant: Quantization) -> str:
    """The recipe's name in device/cache/segment.cuh."""
    return _RECIPES[quant.recipe] + ("_raised" if _floors(quant) else "_corrected" if quant.norm_correction else "")


def lane_accesses(block: int, width: int, byte_codes: int) -> tuple[int, int]:
    """(lanes, accesses of a lane) that go through a block in accesses of `width`. Where the `byte_codes`
    codes of a byte lie apart, a lane has all of them.
    """
    if byte_codes > 1:
        most = block // (width * byte_codes)
        lanes = min(32, most & -most)
    else:
        lanes = min(32, 1 << (-(-block // width) - 1).bit_length())
    return lanes, -(-block // (width * lanes))


def _scales(cache: Cache, role: str, segment: Segment, scales: Scales, width: int) -> ScaleContext:
    quant = segment.quant
    assert quant is not None
    floors = _floors(quant)
    index = segment.region.index_vars()
    offset = scales.offset(index["token"], index["head"], index["dim"])
    cast, start = False, 0
    if not scales.array:
        assert scales.region is not None
        cast, start = _start(cache, scales.base, scales.dtype.c, scales.region.byte_offset)
    block = scales.block[1] * scales.block[2]
    while scales.block[2] % width:
        width //= 2
    byte_codes = segment.region.dtype.together if segment.region.strided else 1
    lanes, chunks = lane_accesses(block, width, byte_codes)
    return ScaleContext(
        type=scales.dtype.c,
        recipe="given" if scales.array else _recipe(quant),
        zero=scales.zero,
        floors=floors,
        given=bool(scales.array),
        pointer=scales.array or scales.base,
        cast=cast,
        start=start,
        offset=offset_context(offset),
        vector=segment.scale_vector,
        heads=scales.block[1],
        dims=scales.block[2],
        groups=scales.groups,
        blocks=scales.heads * scales.groups,
        pad=scales.pad,
        global_scale=segment.global_scale,
        residual=quant.residual or 0,
        lanes=lanes,
        width=width,
        chunks=chunks,
        whole=block % (width * lanes) == 0 and segment.size % scales.block[2] == 0,
        byte_codes=byte_codes,
    )


@lru_cache(maxsize=64)
def segments(cache: Cache) -> tuple[SegmentContext, ...]:
    """Every segment of a cache, K's first."""
    found = []
    value = dtype(cache.dtype)
    for role, parts in cache.storage.roles.items():
        row = sum(s.size for s in parts)
        for segment in parts:
            region = segment.region
            element, offset = region.dtype, region.offset()
            part = "Rope" if segment.begin else ""
            kind = _element(element, segment.quant, STRUCTS[role] + part)
            cast, start = _start(cache, segment.base, kind, region.byte_offset)
            width = min(segment.vector, max(16 // value.bytes, 1 if region.strided else element.together))
            # A row of the caller's has its parts side by side: each begins with a whole access.
            while len(parts) > 1 and (segment.begin % width or row % width):
                width //= 2
            found.append(
                SegmentContext(
                    struct=STRUCTS[role] + part,
                    role=role,
                    title=role.upper() + (", RoPE part" if part else ""),
                    begin=segment.begin,
                    size=segment.size,
                    row=row,
                    heads=cache.kv_heads,
                    value=value.c,
                    element=kind,
                    axes=region.text,
                    pointer=segment.base,
                    cast=cast,
                    start=start,
                    offset=offset_context(offset),
                    vector=segment.vector,
                    width=width,
                    scales=(_scales(cache, role, segment, segment.scales, width),) if segment.scales else (),
                )
            )
    return tuple(found)
