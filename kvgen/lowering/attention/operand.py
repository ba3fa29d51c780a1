"""K and V as products take them: how codes become operands of tensor cores, where scales apply, how rows are copied."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from kvgen.layout.axes import Axis
from kvgen.layout.regions import Region
from kvgen.layout.storage import Segment
from kvgen.lowering.lowered import lower
from kvgen.schema.cache import Cache

Role = Literal["key", "value"]
# Groups of dims times tiles of 8 columns whose products have sums of their own, of K, or weights of their own, of V.
MOST_SUMS: Final = {"key": 4, "value": 2}


def row_pitch(nbytes: int) -> int:
    """Bytes from row to row in shared memory: an odd number of 16 bytes, so that 8 rows lie in different banks."""
    return (-(-nbytes // 16) | 1) * 16


def token_bytes(segment: Segment) -> float:
    """Bytes of a token of one kv head, with the share of its scales in the pool."""
    found, scales = segment.size * segment.region.dtype.bits / 8, segment.scales
    if scales is None or scales.region is None:
        return found
    tokens, heads, _ = scales.block
    return found + scales.groups * (1 + scales.zero) * scales.dtype.bits / 8 / tokens / heads


@dataclass(frozen=True)
class Operand:
    """K or V of an attention call, as a kernel takes it for `columns` columns, `heads` neighbouring kv heads a block.

    `columns` of 0 stands for a kernel whose sums of products take nothing but a scale a token. A row has the elements of one
    token and kv head.
    """

    segment: Segment
    role: Role
    columns: int = 0
    heads: int = 1

    # Rows ------------------------------------------------------------------------------------------------------------

    @cached_property
    def bits(self) -> int:
        """Bits of an element."""
        return self.segment.region.dtype.bits

    @cached_property
    def bytes(self) -> int:
        """Bytes of a row."""
        return self.segment.size * self.bits // 8

    @cached_property
    def pitch(self) -> int:
        """Bytes from token to token in shared memory, with the rows of all heads of a block."""
        return row_pitch(self.heads * self.bytes)

    @cached_property
    def access(self) -> int:
        """Bytes of a copy of part of a row."""
        return math.gcd(16, self.bytes, self.segment.vector * self.bits // 8)

    @cached_property
    def step(self) -> int:
        """Bytes from a token's row to the next one's in a page."""
        step = self.segment.region.stride_of("token")
        assert step is not None
        return step * self.bits // 8

    @cached_property
    def steps(self) -> int:
        """Products of 16 dims that a row takes, whole 32 bytes at a time."""
        return -(-self.bytes // 32) * (16 // self.bits)

    # Scales ----------------------------------------------------------------------------------------------------------

    @cached_property
    def path(self) -> str:
        """How scales apply: ScaleUse of device/attention/common/tile_scales.cuh, or "given"; "" where no kernel applies them."""
        segment, role = self.segment, self.role
        scales, quant = segment.scales, segment.quant
        if scales is None or quant is None:
            return "none"
        if quant.recipe == "min" or quant.codebook is not None:
            return ""
        if quant.residual:
            return "key_channels" if role == "key" and not self._waiting else ""
        if scales.array:
            return "" if scales.zero else "given"
        if not segment.global_scale and quant.recipe != "max" and self._of_sums:
            return "token"
        # A register has the codes of one group. e4m3 scales times e2m1 codes are exact in f16, f16 scales round once; but e2m1
        # is widened to fractions of 2^14, which f16 scales would make subnormal. Powers of two are exact in bf16.
        if scales.block[2] * self.bits % 32:
            return ""
        if scales.dtype.name not in ("f16", "e4m3", "e8m0") or (
            scales.dtype.name == "f16" and quant.codes.name == "e2m1"
        ):
            return ""
        return f"{role}_groups"

    @property
    def use(self) -> str:
        """ScaleUse of a tile: "none" where the scale is the caller's."""
        return "none" if self.given else self.path

    @property
    def given(self) -> bool:
        """The caller brings the scale."""
        return self.path == "given"

    @property
    def grouped(self) -> bool:
        """Scales are of groups of dims, and multiply elements."""
        return self.path.endswith("_groups")

    @property
    def zero(self) -> bool:
        """Codes have zero points."""
        return self.segment.scales is not None and self.segment.scales.zero

    @property
    def global_scale(self) -> bool:
        """Scales lie under a scale of the whole tensor."""
        return bool(self.segment.global_scale)

    @cached_property
    def groups(self) -> int:
        """Groups of dims whose products have sums of their own."""
        scales = self.segment.scales
        return scales.groups if scales is not None and self.path == "token" else 1

    @cached_property
    def powers(self) -> bool:
        """Scales are powers of two of groups of dims (device/attention/common/tile_powers.cuh)."""
        scales = self.segment.scales
        return scales is not None and scales.dtype.name == "e8m0" and (self.grouped or self.groups > 1)

    @property
    def bf16(self) -> bool:
        """Codes are widened to bf16 (device/attention/common/bf16_codes.cuh), whose exponents have room for such scales."""
        return self.powers and self.path != "token"

    @cached_property
    def tables(self) -> bool:
        """A group's scale becomes a table of products with codes (device/attention/common/fp4_tables.cuh)."""
        quant = self.segment.quant
        return quant is not None and quant.recipe == "max" and self.grouped

    @cached_property
    def direct(self) -> bool:
        """Scales of groups are converted as products take them: e4m3, two groups in 16 bytes of codes, four in a copied
        word (GroupBytes of device/attention/common/tile_scales.cuh)."""
        segment, scales = self.segment, self.segment.scales
        if scales is None or not self.grouped or self.tables or scales.zero:
            return False
        whole = (
            scales.dtype.name == "e4m3" and scales.groups % 4 == 0 and segment.size == scales.groups * scales.block[2]
        )
        return whole and scales.block[2] * self.bits == 64 and self.scale_run % 4 == 0 and self.scale_run > 0

    @cached_property
    def integer(self) -> bool:
        """Codes are integers."""
        quant = self.segment.quant
        return quant is not None and quant.codes.name in ("i8", "u8", "i4", "u4")

    @cached_property
    def biased(self) -> bool:
        """Products take integer codes moved up to begin at zero (FromZero of device/attention/common/fragments.cuh)."""
        return self.integer and self.path in ("token", "given")

    @cached_property
    def query_sums(self) -> int:
        """Sums of a column of q that bring K's codes back, one a group; none where codes are unsigned without zero points."""
        quant = self.segment.quant
        if quant is None or not self.biased:
            return 0
        return self.groups if self.zero or quant.codes.name.startswith("i") else 0

    @property
    def sums(self) -> bool:
        """Sums of q bring K's codes back."""
        return self.query_sums > 0

    @cached_property
    def whole_groups(self) -> bool:
        """Products take the dims of each group of scales together: those of 16 bytes, up to whole 32 bytes of a row."""
        scales = self.segment.scales
        assert scales is not None
        dims = -(-self.bytes // 32) * 256 // self.bits
        return scales.block[2] * self.bits % 128 == 0 and dims <= scales.groups * scales.block[2]

    @cached_property
    def _of_sums(self) -> bool:
        """Computed scales, and zero points, multiply sums of products in place of elements: where that takes fewer
        instructions, and sums of all groups have room in registers."""
        scales = self.segment.scales
        assert scales is not None
        if scales.groups == 1 and not (scales.zero and self.columns == 0):
            return self.integer or not scales.zero
        if self.columns == 0:
            return False
        # Elements of V of other codes may be NaN or infinity, which some columns do not see.
        tiles = -(-self.columns // 8)
        if (self.role == "value" and not self.integer) or not self.whole_groups:
            return False
        if scales.groups * tiles > MOST_SUMS[self.role]:
            return False
        # Instructions of a lane and 32 tokens, of which it has 4, and of each tile of 8 columns two.
        numbers = scales.groups * (1 + scales.zero)
        if self.role == "key":
            sums = 8 * numbers * tiles + 4 * numbers  # a multiplication and an addition a score; conversions to f32
        else:
            # Exponent, exponential, scale, largest, half a packing, and with zero points the way back and an addition;
            # conversions.
            sums = 8 * (scales.groups - 1) * 5 * tiles + 8 * scales.groups * 2 * scales.zero * tiles + 4 * numbers
        elements = self.segment.size // 2  # multiplications, of two elements each
        # Conversions of codes that could stay integers.
        widened = 0 if not self.integer else elements if self.bits == 8 else elements * 3 // 4
        return sums <= elements + widened + 2 * 4 * numbers  # expanded, and read again

    # Scales in shared memory ------------------------------------------------------------------------------------------

    @cached_property
    def scale_run(self) -> int:
        """Neighbouring scales and zero points of a token, of `heads` kv heads, that one copy brings (ScaleTile of
        device/attention/common/tile_scales.cuh).

        As many as are surely aligned together where they are 4 bytes or more, else as lie side by side, which a page's place
        may leave unaligned. 0 where the 4-byte word that holds one may reach past its page's scales.
        """
        segment, scales, heads = self.segment, self.segment.scales, self.heads
        if scales is None or scales.region is None or self.path in ("none", "given", "key_channels"):
            return 1
        region, size = scales.region, scales.dtype.bytes
        own = scales.groups * (1 + scales.zero)
        together, adjacent = math.gcd(own, segment.scale_vector), _adjacent(region, own, 1)
        if (
            adjacent * size < 4
        ):  # no more than a word: a wider copy would ask more of where pools begin than one head's does
            adjacent = math.gcd(_adjacent(region, heads * own, heads), 4 // size)
        if together * size >= 4 or adjacent * size >= 4:
            return together if together * size >= 4 else adjacent
        # Where the number of tokens is known only at run time their rows lie one after another.
        whole = region.span if region.span is not None else region.stride_of("token")
        return adjacent if whole is not None and whole * size % 4 == 0 else 0

    @cached_property
    def scales_aligned(self) -> bool:
        """Copies can begin at the scales of every pool: TileScales::kAligned."""
        scales = self.segment.scales
        if scales is None or self.path in ("none", "given"):
            return True
        run, size = self.scale_run, scales.dtype.bytes
        return run > 0 and self.segment.scale_vector * size % max(4, run * size) == 0

    def stage_bytes(self, tokens: int) -> int:
        """Bytes of a tile's scales in its stage: TileScales::kStageBytes."""
        scales = self.segment.scales
        if scales is None or self.path in ("none", "given"):
            return 0
        if self.path == "key_channels":
            return self.segment.size * (1 + scales.zero) * scales.dtype.bytes
        run = max(self.scale_run, 1)
        return tokens * self.heads * scales.groups * (1 + scales.zero) // run * max(4, run * scales.dtype.bytes)

    def expanded_bytes(self, tokens: int) -> int:
        """Bytes of a tile's scales as products read them, where they are of groups of dims: TileScales::kExpandedBytes, or
        kBytes of device/attention/common/tile_powers.cuh."""
        scales = self.segment.scales
        if scales is None or not (self.grouped or self.powers):
            return 0
        if self.tables:
            return scales.groups * (8 * tokens + 64)
        return tokens * scales.groups * (1 + scales.zero) * (2 if self.path == "value_groups" else 4)

    # Whether tensor cores can take it ---------------------------------------------------------------------------------

    @cached_property
    def why_not(self) -> str:
        """Why rows cannot become operands of tensor cores; "" where they can."""
        segment, region = self.segment, self.segment.region
        if region.swizzle is not None:
            return "swizzled elements"
        if "dim" not in [a.name for a in region.axes] or region.axes[-1] != Axis("dim"):
            return "a token's dims do not lie side by side"
        if any(a != Axis(a.name) for a in region.axes if a.name in ("token", "head")):
            return "tokens are no fixed step apart"
        if region.stride_of("token") is None:
            return "tokens are no fixed step apart"
        if region.dtype.bits < 4:
            return f"codes of {region.dtype.bits} bits"
        if region.strided:
            return "codes of a byte that are no neighbours"
        if segment.quant is not None and segment.quant.residual:
            if self._waiting:
                return f"tokens that wait to be quantized, {self._waiting}"
        elif segment.quant is not None and segment.quant.codebook is not None:
            return "codes of a codebook"
        elif segment.quant is not None and segment.quant.recipe == "min":
            return "least values that are added to every element"
        elif segment.scales is not None and not self.path:
            return "scales of groups of dims that f16 cannot hold, or of fewer dims than a register has"
        if segment.vector * region.dtype.bits < 32 or self.bytes % 4:
            return "rows are not aligned to 4 bytes"
        return ""

    @cached_property
    def _waiting(self) -> str:
        """Why device/attention/common/tile_channels.cuh cannot take K whose newest tokens wait to be quantized, channel by
        channel; "" where it can."""
        scales, quant = self.segment.scales, self.segment.quant
        assert scales is not None and quant is not None and quant.residual is not None
        if scales.dtype.name != "f16" or quant.codes.name not in ("i4", "u4", "i8", "u8"):
            return "whose scales or codes are no f16 and integers"
        if quant.residual % 16 or self.segment.scale_vector * 2 < 4:
            return f"{quant.residual} of them a group: no whole tiles"
        return "with a last group of dims that is short" if self.segment.size % 32 else ""

    def why_not_of(self, cache: Cache) -> str:
        """Why rows of this cache cannot be multiplied with q, or with weights; "" where they can."""
        return self.why_not or self._waiting_of(cache) or self._query_of(cache)

    def _waiting_of(self, cache: Cache) -> str:
        """Why tokens that wait to be quantized have no form of tensor cores."""
        quant = self.segment.quant
        if quant is None or not quant.residual:
            return ""
        if self.role == "key" and cache.dtype == "f16" and not lower(cache).table.window:
            return ""
        return "tokens that wait to be quantized; those of K alone, f16 and in no ring, have a form of tensor cores"

    def _query_of(self, cache: Cache) -> str:
        """Why q, or weights of V, cannot be operands beside the widened codes."""
        if cache.dtype == "bf16" or not self.bf16:
            return ""
        return (
            f"e8m0 scales of groups of dims fit bf16 operands alone, and q and weights of {cache.dtype} have more bits"
        )


def _adjacent(region: Region, run: int, heads: int) -> int:
    """Elements of the widest access that straddles no run, of `run` elements side by side, those of `heads` heads."""
    strides = zip(region.axes, region.fixed_strides, strict=True)
    steps = [n * heads if a.name == "head" else n for a, n in strides if n is not None and a.name != "dim"]
    return math.gcd(run, 16 // region.dtype.bytes, region.byte_offset // region.dtype.bytes, *steps)


def operands(cache: Cache, columns: int = 0, heads: int = 1) -> tuple[Operand, Operand]:
    """K and V of a cache for so many columns; of a role with several parts its first one."""
    k, v = (parts[0] for parts in cache.storage.roles.values())
    return Operand(k, "key", columns, heads), Operand(v, "value", columns, heads)


def run_of(cache: Cache, tokens: int) -> int:
    """Tokens of a tile that surely lie in one page, each run copied from one address; 0 where that is too few."""
    page = cache.page_tokens
    run = tokens if page is None or lower(cache).allocation.one_page else math.gcd(page, tokens)
    return run if run >= 8 else 0


def why_no_operands(cache: Cache, columns: int = 0) -> str:
    """Why K and V cannot be operands for so many columns; "" where they can."""
    if cache.dtype == "f32":
        return "f32 values would lose bits as operands of tensor cores"
    for role, parts in cache.storage.roles.items():
        if len(parts) > 1:
            return f"{role.upper()} has parts of its own"
    for operand in operands(cache, columns):
        if why := operand.why_not_of(cache):
            return f"{operand.role[0].upper()}: {why}"
    return ""
