"""decode on tensor cores: which caches can, the shapes of tiles and rings, and the kernel's context."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import product
from typing import Final

from kvgen.expr.score_c import float_literal
from kvgen.layout.axes import Axis
from kvgen.layout.regions import Region
from kvgen.layout.storage import Segment
from kvgen.lowering.attention.split_kv import Attended
from kvgen.lowering.lowered import lower
from kvgen.lowering.segments import SegmentContext
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet

# Scores may pass a column's maximum by 2^8 before it rises: f16 weights stay below 2^16 by far, sums in f32.
SLACK: Final = 8
# Registers of the sums of a lane, and of Q's fragments, beside which the rest of a kernel fits 255.
OUT_REGISTERS: Final = 128
QUERY_REGISTERS: Final = 64
# Groups of dims times tiles of 8 columns whose products have sums of their own, of K, or weights of their own, of V.
MOST_SUMS: Final = {"key": 4, "value": 2}
MOST_STAGES: Final = 6
MOST_WARPS: Final = 4
# Tokens of a tile and warps of a block, the best first: what a tile costs besides its tokens counts less the longer it is,
# and a warp alone in its block has nobody to share the end of a chunk with. Where instructions are many, four warps first: of
# fewer all may lie on one sub-core.
_TILES: Final = ((32, 4), (32, 2), (16, 4), (16, 2), (32, 1), (16, 1))
_FOUR_WARPS: Final = ((32, 4), (16, 4), (32, 2), (16, 2), (32, 1), (16, 1))
# The part of a sub-core's issue slots up to which two warps a block are enough; bytes a cycle for a multiprocessor of an H200.
FEW_SLOTS: Final = 0.4
REACHABLE: Final = 17.6
# Neighbouring kv heads that a block has where it has several: results of each are to be merged where requests are cut.
MOST_HEADS: Final = 2
# Registers of sums up to which 32 tokens have room.
LONG_REGISTERS: Final = 64
_ROLES: Final = {"k": "key", "v": "value"}


@dataclass(frozen=True)
class Stages:
    """Tiles of a ring where a multiprocessor has 227 KB of shared memory (sm_90, sm_100), 164 KB (sm_80), 100 KB; 0: no
    architecture of the set has that."""

    large: int
    middle: int
    small: int

    @property
    def choices(self) -> tuple[tuple[int, int], ...]:
        """KB of shared memory and tiles, the largest memory first; the first one alone where tiles are the same everywhere."""
        found = [(kb, n) for kb, n in ((227, self.large), (164, self.middle), (100, self.small)) if n]
        return tuple(found[:1] if len({n for _, n in found}) == 1 else found)

    @property
    def most(self) -> int:
        """Tiles with the largest memory that an architecture of the set has."""
        return self.choices[0][1]

    @property
    def least(self) -> int:
        """Tiles with the smallest."""
        return self.choices[-1][1]

    @property
    def memory(self) -> int:
        """That memory, in KB."""
        return self.choices[0][0]


# Shared memory that a multiprocessor gives to blocks, less what each block is charged besides.
_MEMORY: Final = {"large": 226 * 1024, "middle": 162 * 1024, "small": 98 * 1024}
SIZES: Final = {"sm_80": "middle", "sm_89": "small", "sm_90a": "large", "sm_100f": "large", "sm_120f": "small"}


@dataclass(frozen=True)
class TensorContext:
    """Everything ops/decode.cu.j2 reads. Bytes are of a row, pitches from row to row in shared memory."""

    d: Attended
    k: SegmentContext
    v: SegmentContext
    columns: int
    cols: int
    n_tiles: int
    team_warps: int
    heads: int
    teams: int
    tokens: int
    stages: Stages
    blocks_per_sm: int
    in_flight: int
    slack: int
    k_bytes: int
    v_bytes: int
    k_pitch: int
    v_pitch: int
    k_access: int
    v_access: int
    k_step: int
    v_step: int
    run: int
    scales: bool
    expands: bool
    scales_anywhere: bool
    tables: bool
    k_direct: bool
    v_direct: bool
    k_tables: bool
    v_tables: bool
    k_use: str
    v_use: str
    k_moved: bool
    v_moved: bool
    k_bf16: bool
    k_powers: bool
    v_powers: bool
    v_weighted: bool
    k_groups: int
    v_groups: int
    k_sums: bool
    k_zero: bool
    k_scale_run: int
    v_scale_run: int
    k_given: bool
    v_given: bool
    k_global: bool
    v_global: bool
    padded: bool
    apart: bool
    hides: bool
    query_held: bool
    ranged: bool
    qk_scale: str
    usual_scale: bool


def hindrance(kernels: KernelSet, rows: int, asks: bool = False, lists: bool = False) -> str:
    """Why the set's decode cannot go through tensor cores; empty where it can. `lists`: each kv head has pages of its own."""
    cache = kernels.kv
    if cache.dtype == "f32":
        return "f32 values would lose bits as operands of tensor cores"
    for role, parts in cache.storage.roles.items():
        if len(parts) > 1:
            return f"{role.upper()} has parts of its own"
        why = segment_hindrance(parts[0], _ROLES[role], rows * kernels.group)
        why = why or waiting_hindrance(cache, role) or query_hindrance(cache, role, rows * kernels.group)
        if why:
            return f"{role.upper()}: {why}"
    if 4 * -(-cache.v_dim // 16) > _room(cache.storage.roles["v"][0], rows, asks):
        return f"sums of {cache.v_dim} dims do not fit a lane's registers"
    found = shape(kernels, rows, asks, lists)
    if found is None:
        return f"rows of {cache.head_dim} dims do not fit shared memory"
    return _list_hindrance(cache, found.tokens) if lists else ""


def _list_hindrance(cache: Cache, tokens: int) -> str:
    """Why tiles of `tokens` tokens cannot come from lists of pages; empty where they can."""
    if cache.page_tokens is None or cache.page_tokens % tokens:
        return f"listed pages of {cache.page_tokens} tokens are no whole tiles of {tokens}"
    parts = zip(("key", "value"), (parts[0] for parts in cache.storage.roles.values()), strict=True)
    if not all(_scales_aligned(part, role, 1) for role, part in parts):
        return "scales of listed pages that no copy can begin at"
    return ""


def waiting_hindrance(cache: Cache, role: str) -> str:
    """Why tokens of K or V that wait to be quantized have no form of tensor cores; empty where they have, or there are none."""
    quant = cache.storage.roles[role][0].quant
    if quant is None or not quant.residual or (role == "k" and cache.dtype == "f16" and not lower(cache).table.window):
        return ""
    return "tokens that wait to be quantized; those of K alone, f16 and in no ring, have a form of tensor cores"


def query_hindrance(cache: Cache, role: str, columns: int = 0) -> str:
    """Why q, or weights of V, cannot be operands beside what K or V is widened to; empty where they can."""
    if cache.dtype == "bf16" or not in_bf16(cache.storage.roles[role][0], _ROLES[role], columns):
        return ""
    return f"e8m0 scales of groups of dims fit bf16 operands alone, and q and weights of {cache.dtype} have more bits"


def segment_hindrance(segment: Segment, role: str = "key", columns: int = 0) -> str:
    region = segment.region
    names = [a.name for a in region.axes]
    if region.swizzle is not None:
        return "swizzled elements"
    if "dim" not in names or region.axes[-1] != Axis("dim"):
        return "a token's dims do not lie side by side"
    if any(a != Axis(a.name) for a in region.axes if a.name in ("token", "head")) or region.stride_of("token") is None:
        return "tokens are no fixed step apart"
    if region.dtype.bits < 4:
        return f"codes of {region.dtype.bits} bits"
    if region.strided:
        return "codes of a byte that are no neighbours"
    if segment.quant is not None and segment.quant.residual:
        why = _waiting_hindrance(segment)
        if why:
            return f"tokens that wait to be quantized, {why}"
    elif segment.quant is not None and segment.quant.codebook is not None:
        return "codes of a codebook"
    elif segment.quant is not None and segment.quant.recipe == "min":
        return "least values that are added to every element"
    elif segment.scales is not None and not scale_use(segment, role, columns):
        return "scales of groups of dims that f16 cannot hold, or of fewer dims than a register has"
    if segment.vector * region.dtype.bits < 32 or row_bytes(segment) % 4:
        return "rows are not aligned to 4 bytes"
    return ""


def _waiting_hindrance(segment: Segment) -> str:
    """What device/attention/tile_channels.cuh does not do of K whose newest tokens wait, V's apart; empty where it does all."""
    scales, quant = segment.scales, segment.quant
    assert scales is not None and quant is not None and quant.residual is not None
    if scales.dtype.name != "f16" or quant.codes.name not in ("i4", "u4", "i8", "u8"):
        return "whose scales or codes are no f16 and integers"
    if quant.residual % 16 or segment.scale_vector * 2 < 4:
        return f"{quant.residual} of them a group: no whole tiles"
    return "with a last group of dims that is short" if segment.size % 32 else ""


def scale_use(segment: Segment, role: str, columns: int = 0) -> str:
    """ScaleUse of device/attention/tile_scales.cuh, or "given": how a kernel of that many columns applies scales; empty where it
    cannot. 0 columns: one whose sums of products have nothing but a scale a token."""
    scales, quant = segment.scales, segment.quant
    if scales is None or quant is None:
        return "none"
    if quant.recipe == "min" or quant.codebook is not None:
        return ""
    if quant.residual:
        return "key_channels" if role == "key" and not _waiting_hindrance(segment) else ""
    if scales.array:
        return "" if scales.zero else "given"
    if not segment.global_scale and quant.recipe != "max" and _of_sums(segment, role, columns):
        return "token"
    # A register has the codes of one group. e4m3 scales times e2m1 codes are exact in f16, f16 scales round once; but e2m1 is
    # widened to fractions of 2^14, which f16 scales would make subnormal. Powers of two are exact in bf16.
    if scales.block[2] * segment.region.dtype.bits % 32:
        return ""
    if scales.dtype.name not in ("f16", "e4m3", "e8m0") or (scales.dtype.name == "f16" and quant.codes.name == "e2m1"):
        return ""
    return f"{role}_groups"


def has_powers(segment: Segment, role: str, columns: int = 0) -> bool:
    """Whether scales are powers of two of groups of dims (device/attention/tile_powers.cuh)."""
    scales = segment.scales
    some = scales is not None and scales.dtype.name == "e8m0"
    return some and (scale_use(segment, role, columns).endswith("_groups") or sum_groups(segment, role, columns) > 1)


def in_bf16(segment: Segment, role: str, columns: int = 0) -> bool:
    """Whether codes are widened to bf16 (device/attention/bf16_codes.cuh), whose exponents have room for such scales."""
    return has_powers(segment, role, columns) and scale_use(segment, role, columns) != "token"


def _of_sums(segment: Segment, role: str, columns: int) -> bool:
    """Whether computed scales, and zero points, multiply sums of products in place of elements: where that takes fewer
    instructions, and sums of all groups have room in registers."""
    scales, bits = segment.scales, segment.region.dtype.bits
    assert scales is not None
    if scales.groups == 1 and not (scales.zero and columns == 0):
        return integer_codes(segment) or not scales.zero
    if columns == 0:
        return False
    # Elements of V of other codes may be NaN or infinity, which some columns do not see.
    tiles = -(-columns // 8)
    if (role == "value" and not integer_codes(segment)) or not _together(segment):
        return False
    if scales.groups * tiles > MOST_SUMS[role]:
        return False
    # Instructions of a lane and 32 tokens, of which it has 4, and of each tile of 8 columns two.
    numbers = scales.groups * (1 + scales.zero)
    if role == "key":
        sums = 8 * numbers * tiles + 4 * numbers  # a multiplication and an addition a score; conversions to f32
    else:
        # Exponent, exponential, scale, largest, half a packing, and with zero points the way back and an addition; conversions.
        sums = 8 * (scales.groups - 1) * 5 * tiles + 8 * scales.groups * 2 * scales.zero * tiles + 4 * numbers
    elements = segment.size // 2  # multiplications, of two elements each
    # What codes are converted by that could stay integers.
    widened = 0 if not integer_codes(segment) else elements if bits == 8 else elements * 3 // 4
    return sums <= elements + widened + 2 * 4 * numbers  # expanded, and read again


def _together(segment: Segment) -> bool:
    """Whether products take the dims of each group of scales together: those of 16 bytes, up to whole 32 bytes of a row."""
    scales, bits = segment.scales, segment.region.dtype.bits
    assert scales is not None
    dims = -(-row_bytes(segment) // 32) * 256 // bits
    return scales.block[2] * bits % 128 == 0 and dims <= scales.groups * scales.block[2]


def carried_by_weights(v: Segment, n_tiles: int) -> bool:
    """Whether weights carry V's scales, powers of two, where all columns see all tokens: where that is fewer multiplications,
    for so many tiles of 8 columns, than one an element."""
    scales = v.scales
    if scales is None or not has_powers(v, "value") or not _together(v):
        return False
    return 4 * scales.groups * n_tiles <= v.size // 2 and scales.groups * n_tiles <= 2 * MOST_SUMS["key"]


def integer_codes(segment: Segment) -> bool:
    """Whether a segment has integer codes."""
    return segment.quant is not None and segment.quant.codes.name in ("i8", "u8", "i4", "u4")


def from_zero(segment: Segment, role: str, columns: int) -> bool:
    """Whether products take integer codes moved up to begin at zero (FromZero of device/attention/fragments.cuh)."""
    return integer_codes(segment) and scale_use(segment, role, columns) in ("token", "given")


def sum_groups(segment: Segment, role: str, columns: int) -> int:
    """Groups of dims whose products have sums of their own."""
    scales = segment.scales
    return scales.groups if scales is not None and scale_use(segment, role, columns) == "token" else 1


def _query_sums(k: Segment, columns: int) -> int:
    """Sums of a column of q that bring K's codes back: one a group; none where codes are unsigned and have no zero points."""
    if k.quant is None or not from_zero(k, "key", columns):
        return 0
    zero = k.scales is not None and k.scales.zero
    return sum_groups(k, "key", columns) if zero or k.quant.codes.name.startswith("i") else 0


def has_tables(segment: Segment, role: str) -> bool:
    """Whether a group's scale becomes a table of what codes are below it (device/attention/fp4_tables.cuh)."""
    quant = segment.quant
    return quant is not None and quant.recipe == "max" and scale_use(segment, role).endswith("_groups")


def direct_scales(segment: Segment, role: str, heads: int) -> bool:
    """Whether scales of groups are converted as products take them: e4m3, two groups in 16 bytes of codes, four in a copied word
    (GroupBytes of device/attention/tile_scales.cuh)."""
    scales = segment.scales
    if scales is None or not scale_use(segment, role).endswith("_groups") or has_tables(segment, role) or scales.zero:
        return False
    whole = scales.dtype.name == "e4m3" and scales.groups % 4 == 0 and segment.size == scales.groups * scales.block[2]
    return (
        whole
        and scales.block[2] * segment.region.dtype.bits == 64
        and scale_run(segment, role, heads) % 4 == 0
        and scale_run(segment, role, heads) > 0
    )


def _room(v: Segment, rows: int, asks: bool) -> int:
    """Registers that sums may take: fewer where columns may have to be multiplied one by one, or weights carry scales."""
    if rows == 1 and not asks:
        return OUT_REGISTERS
    return OUT_REGISTERS // 2 if scale_use(v, "value", 8) == "token" else OUT_REGISTERS * 3 // 4


def row_bytes(segment: Segment) -> int:
    return segment.size * segment.region.dtype.bits // 8


def row_pitch(nbytes: int) -> int:
    """From row to row in shared memory: an odd number of 16 bytes, so that 8 rows lie in different banks."""
    return (-(-nbytes // 16) | 1) * 16


def heads_together(cache: Cache) -> int:
    """Neighbouring kv heads of a block: MOST_HEADS where their scales share sectors, which the block of each would ask for.

    Without scales there is nothing to share: rows have whole sectors, and N heads a block are N times as many results to merge
    where requests are cut, and a barrier a tile.
    """
    segments = [parts[0] for parts in cache.storage.roles.values()]
    scales = [s.scales for s in segments if s.scales is not None and s.scales.region is not None]
    beside = all(row_bytes(s) % 16 == 0 and s.region.stride_of("head") == s.size for s in segments) and all(
        s.block[1] == 1 and s.region is not None and s.region.stride_of("head") == s.groups * (1 + s.zero)
        for s in scales
    )
    runs = run_of(cache, 16) > 0 and not any(s.quant is not None and s.quant.residual for s in segments)
    return MOST_HEADS if scales and beside and runs and cache.kv_heads % MOST_HEADS == 0 else 1


def issue_slots(cache: Cache, n_tiles: int) -> float:
    """The part of one sub-core's issue slots that tokens take which come at the bandwidth of its multiprocessor, estimated: what
    they would take if all warps lay on that sub-core. By warp instructions of a token and kv head."""
    segments = [parts[0] for parts in cache.storage.roles.values()]
    uses = [scale_use(s, role, 8 * n_tiles) for s, role in zip(segments, ("key", "value"), strict=True)]
    nbytes, dims = sum(map(row_bytes, segments)), sum(s.size for s in segments)
    tile = 80 / 32  # waiting, page ids, addresses: of 32 tokens
    access = 2 * nbytes / 512  # a copy and an ldmatrix of 512 bytes
    places = 0 if run_of(cache, 16) else 5 * nbytes / 512  # an address a row, by shuffles
    products = n_tiles * dims / 256  # of 16 tokens and 16 dims
    # Ten for each of a lane's scores, of which a token and 8 columns have a quarter; six for its scale.
    softmax = n_tiles * (2.5 + 1.5 * uses.count("token"))
    # Registers of two elements are 64 of a token's to a warp: of codes each is widened, of groups of dims scaled too.
    widened = sum(
        (s.quant is not None) + use.endswith(("_groups", "_channels")) for s, use in zip(segments, uses, strict=True)
    )
    return (tile + access + places + products + softmax + widened * dims / 128) / (nbytes / REACHABLE)


@dataclass(frozen=True)
class Shape:
    """How a block divides heads, columns and tokens among its warps: a team's warps have different columns, of one kv head or of
    `heads` neighbouring ones, a warp each."""

    n_tiles: int
    team_warps: int
    heads: int
    teams: int
    tiles: int
    tokens: int
    stages: Stages
    blocks_per_sm: int
    stage_bytes: int
    merged_bytes: int
    held_bytes: int
    k_pitch: int
    v_pitch: int
    plain: bool

    @property
    def align(self) -> int:
        """Elements of the widest access to rows of q and out."""
        return 4

    @property
    def tile(self) -> int:
        """Tokens that the planner counts in."""
        return self.teams * self.tokens

    @property
    def factored(self) -> bool:
        """Whether the sums are still to be multiplied with Values::kFactor."""
        return not self.plain

    @property
    def cols(self) -> int:
        """Columns of a block."""
        return 8 * self.n_tiles * self.team_warps

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.teams * self.team_warps

    def stages_on(self, arch: str) -> int:
        """Tiles of a ring on this architecture."""
        return int(asdict(self.stages)[SIZES[arch]])

    def shared(self, arch: str) -> int:
        """Bytes of shared memory on this architecture: struct Shared of the kernel."""
        rings = self.stages_on(arch) * self.stage_bytes
        return -(-(max(rings, self.merged_bytes) + self.held_bytes) // 16) * 16


def shape(kernels: KernelSet, rows: int, asks: bool = False, lists: bool = False) -> Shape | None:
    """The block of a set's decode: the longest tiles that leave two blocks to a multiprocessor, rings of three tiles each.

    None where rows are so long that no ring of two has room. A block has one kv head where each `lists` its pages.
    """
    k, v = (parts[0] for parts in kernels.kv.storage.roles.values())
    dims = max(-(-v.size // 16), 1)
    total = -(-rows * kernels.group // 8)
    most = max(1, min(4, _room(v, rows, asks) // (4 * dims)))
    team_warps = min(4, -(-total // most))
    team_warps += team_warps == 3  # all three may lie on one sub-core; of four that are alike none do
    tiles = -(-total // (most * team_warps))
    n_tiles = -(-total // (team_warps * tiles))
    steps = -(-row_bytes(k) // 32) * (16 // k.region.dtype.bits)
    plain = k.quant is None and v.quant is None
    together = heads_together(kernels.kv) if team_warps * tiles == 1 and not lists else 1
    columns = rows * kernels.group

    def of(tokens: int, heads: int, teams: int) -> tuple[int, int, int]:
        cols = 8 * n_tiles * team_warps * heads
        query = steps * cols // 8 * 256 + 4 * cols * ((not plain) + _query_sums(k, columns))
        copied = sum(copied_scale_bytes(x, role, tokens, heads) for x, role in ((k, "key"), (v, "value")))
        # Results of the teams, or what the merge of chunks needs.
        merged = 4 * cols * max(teams * (v.size + 4 + 2), 32 + 2)
        # A tile of each team has its scales as products read them.
        expanded = heads * sum(
            expanded_scale_bytes(x, role, tokens, columns)
            for x, role in ((k, "key"), (v, "value"))
            if not direct_scales(x, role, heads)
        )
        k_pitch, v_pitch = row_pitch(heads * row_bytes(k)), row_pitch(heads * row_bytes(v))
        # Scales begin where the last row ends.
        gap = (v_pitch - heads * row_bytes(v)) // 16 * 16 if copied else 0
        return teams * (tokens * (k_pitch + v_pitch) - gap + copied), merged, query + teams * expanded

    sizes = {SIZES[a] for a in kernels.arch} | {"large"}
    for blocks, (tokens, warps) in product(
        (2, 1), _FOUR_WARPS if issue_slots(kernels.kv, n_tiles) > FEW_SLOTS else _TILES
    ):
        if tokens > 16 and 4 * dims * n_tiles > LONG_REGISTERS:
            continue
        if k.quant is not None and k.quant.residual and k.quant.residual % tokens:
            continue  # a tile's tokens share K's scales
        heads = min(together, warps)
        teams = warps // heads
        stage, merged, held = of(tokens, heads, teams)
        # Smaller memories hold as many blocks where rings of two tiles leave room for them.
        rooms = {size: memory // blocks - held for size, memory in _MEMORY.items()}
        rooms |= {n: _MEMORY[n] - held for n, room in rooms.items() if n != "large" and room < max(2 * stage, merged)}
        least = {size: max((3 if size == "large" else 2) * stage, merged) for size in sizes}
        if (teams == 1 or teams * team_warps <= MOST_WARPS) and all(least[size] <= rooms[size] for size in sizes):
            break
    else:
        return None
    had = {SIZES[a] for a in kernels.arch}
    counts = {size: max(2, min(MOST_STAGES, room // stage)) if size in had else 0 for size, room in rooms.items()}
    return Shape(
        n_tiles,
        team_warps * heads,
        heads,
        teams,
        tiles,
        tokens,
        Stages(**counts),
        blocks,
        stage,
        merged,
        held,
        row_pitch(heads * row_bytes(k)),
        row_pitch(heads * row_bytes(v)),
        plain,
    )


def scale_run(segment: Segment, role: str, heads: int = 1) -> int:
    """Neighbouring scales and zero points of a token, of `heads` kv heads, that one copy brings (ScaleTile of
    device/attention/tile_scales.cuh).

    As many as are surely aligned together where they are 4 bytes or more, else as lie side by side, which a page's place may
    leave unaligned. 0 where the 4-byte word that holds one may reach past its page's scales.
    """
    scales = segment.scales
    if scales is None or scales.region is None or scale_use(segment, role) in ("none", "given", "key_channels"):
        return 1
    region, size = scales.region, scales.dtype.bytes
    own = scales.groups * (1 + scales.zero)
    aligned, beside = math.gcd(own, segment.scale_vector), _beside(region, own, 1)
    if beside * size < 4:  # no more than a word: a wider copy would ask more of where pools begin than one head's does
        beside = math.gcd(_beside(region, heads * own, heads), 4 // size)
    if aligned * size >= 4 or beside * size >= 4:
        return aligned if aligned * size >= 4 else beside
    # Where the number of tokens is known only at run time their rows lie one after another.
    whole = region.span if region.span is not None else region.stride_of("token")
    return beside if whole is not None and whole * size % 4 == 0 else 0


def _beside(region: Region, run: int, heads: int) -> int:
    """Of `run` elements side by side, which are those of `heads` heads, how many the widest access has that straddles no run."""
    strides = zip(region.axes, region.fixed_strides, strict=True)
    steps = [n * heads if a.name == "head" else n for a, n in strides if n is not None and a.name != "dim"]
    return math.gcd(run, 16 // region.dtype.bytes, region.byte_offset // region.dtype.bytes, *steps)


def _scales_aligned(segment: Segment, role: str, heads: int) -> bool:
    """Whether copies can begin at the scales of every pool: TileScales::kAligned."""
    scales = segment.scales
    if scales is None or scale_use(segment, role) in ("none", "given"):
        return True
    run, size = scale_run(segment, role, heads), scales.dtype.bytes
    return run > 0 and segment.scale_vector * size % max(4, run * size) == 0


def copied_scale_bytes(segment: Segment, role: str, tokens: int, heads: int = 1) -> int:
    """Bytes of a tile's scales in its stage: TileScales::kStageBytes."""
    use, scales = scale_use(segment, role), segment.scales
    if scales is None or use in ("none", "given"):
        return 0
    if use == "key_channels":
        return segment.size * (1 + scales.zero) * scales.dtype.bytes
    run = max(scale_run(segment, role, heads), 1)
    return tokens * heads * scales.groups * (1 + scales.zero) // run * max(4, run * scales.dtype.bytes)


def expanded_scale_bytes(segment: Segment, role: str, tokens: int, columns: int = 0) -> int:
    """The same as products read them, where they are of groups of dims: TileScales::kExpandedBytes, or kBytes of
    device/attention/tile_powers.cuh."""
    use, scales = scale_use(segment, role, columns), segment.scales
    powers = has_powers(segment, role, columns)
    if scales is None or not (use.endswith("_groups") or powers):
        return 0
    if has_tables(segment, role):
        return scales.groups * (8 * tokens + 64)
    return tokens * scales.groups * (1 + scales.zero) * (2 if use == "value_groups" else 4)


def tensor_context(kernels: KernelSet, d: Attended, scale: float, s: Shape) -> TensorContext:
    """The kernel's context; `d` is what both kernels of decode have."""
    cache = kernels.kv
    k, v = lower(cache).segments
    storage_k, storage_v = (parts[0] for parts in cache.storage.roles.values())
    held = 2 * -(-k.size // 16) * s.n_tiles <= QUERY_REGISTERS and 4 * -(-v.size // 16) * s.n_tiles <= 96
    columns = d.rows * d.group
    k_use, v_use = scale_use(storage_k, "key", columns), scale_use(storage_v, "value", columns)
    apart = d.rows > 1 or d.attend.hides
    weighted = not apart and carried_by_weights(storage_v, s.n_tiles)
    k_direct, v_direct = (direct_scales(x, role, s.heads) for x, role in ((storage_k, "key"), (storage_v, "value")))
    return TensorContext(
        d=d,
        k=k,
        v=v,
        columns=columns,
        cols=s.cols,
        n_tiles=s.n_tiles,
        team_warps=s.team_warps,
        heads=s.heads,
        teams=s.teams,
        tokens=s.tokens,
        stages=s.stages,
        blocks_per_sm=s.blocks_per_sm,
        in_flight=s.blocks_per_sm
        * (s.stages.most - 1)
        * s.tile
        * s.heads
        * (row_bytes(storage_k) + row_bytes(storage_v))
        // 1024,
        slack=SLACK,
        k_bytes=row_bytes(storage_k),
        v_bytes=row_bytes(storage_v),
        k_pitch=s.k_pitch,
        v_pitch=s.v_pitch,
        k_access=access_bytes(storage_k),
        v_access=access_bytes(storage_v),
        k_step=step_bytes(storage_k),
        v_step=step_bytes(storage_v),
        run=run_of(cache, s.tokens),
        scales=bool({k_use, v_use} - {"none", "given"}),
        expands=any(
            use.endswith("_groups") and not own and not has_powers(x, role, columns)
            for use, own, x, role in ((k_use, k_direct, storage_k, "key"), (v_use, v_direct, storage_v, "value"))
        ),
        scales_anywhere=not all(
            _scales_aligned(x, role, s.heads) for x, role in ((storage_k, "key"), (storage_v, "value"))
        ),
        tables=has_tables(storage_k, "key") or has_tables(storage_v, "value"),
        k_direct=k_direct,
        v_direct=v_direct,
        k_tables=has_tables(storage_k, "key"),
        v_tables=has_tables(storage_v, "value"),
        k_use="none" if k_use == "given" else k_use,
        v_use="none" if v_use == "given" else v_use,
        k_moved=from_zero(storage_k, "key", columns),
        v_moved=from_zero(storage_v, "value", columns),
        k_bf16=in_bf16(storage_k, "key", columns),
        k_powers=has_powers(storage_k, "key", columns),
        v_powers=has_powers(storage_v, "value", columns),
        v_weighted=weighted,
        k_groups=sum_groups(storage_k, "key", columns),
        v_groups=storage_v.scales.groups
        if weighted and storage_v.scales is not None
        else sum_groups(storage_v, "value", columns),
        k_sums=bool(_query_sums(storage_k, columns)),
        k_zero=storage_k.scales is not None and storage_k.scales.zero,
        k_scale_run=scale_run(storage_k, "key", s.heads),
        v_scale_run=scale_run(storage_v, "value", s.heads),
        k_given=k_use == "given",
        v_given=v_use == "given",
        k_global=bool(storage_k.global_scale),
        v_global=bool(storage_v.global_scale),
        padded=bool(row_bytes(storage_k) % 16 or row_bytes(storage_v) % 16),
        apart=apart,
        hides=d.attend.hides,
        query_held=held,
        ranged=not s.plain,
        qk_scale=float_literal(scale),
        usual_scale=scale == 1 / math.sqrt(cache.head_dim),
    )


def run_of(cache: Cache, tokens: int) -> int:
    """Tokens of a tile that surely lie in one page, each run copied from one address; 0 where that is too few."""
    page = cache.page_tokens
    run = tokens if page is None or lower(cache).kind.one_page else math.gcd(page, tokens)
    return run if run >= 8 else 0


def access_bytes(segment: Segment) -> int:
    """Bytes of a copy of part of a row."""
    return math.gcd(16, row_bytes(segment), segment.vector * segment.region.dtype.bits // 8)


def step_bytes(segment: Segment) -> int:
    """Bytes from a token's row to the next in a page."""
    step = segment.region.stride_of("token")
    assert step is not None
    return step * segment.region.dtype.bits // 8
