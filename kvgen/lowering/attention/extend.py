"""extend on tensor cores: the shapes of blocks and rings, and the contexts of the kernel and its planner."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Final

from kvgen.expr.nodes import const
from kvgen.expr.score_c import float_literal
from kvgen.lowering.attention import extend_simt, mma
from kvgen.lowering.attention.masks_scores import AttentionContext
from kvgen.lowering.attention.mma import SIZES, SLACK, Stages
from kvgen.lowering.attention.split_kv import (
    OVERHEAD,
    PLAN_THREADS,
    WORKSPACE,
    Attended,
    new_in_length,
    row_offsets,
)
from kvgen.lowering.attention.split_kv import SIZES as WORKSPACE_SIZES
from kvgen.lowering.cache_struct import entry_name
from kvgen.lowering.lowered import lower
from kvgen.lowering.segments import SegmentContext
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Size
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.mask import TREE_ROWS

# Warps of a block, tiles of 16 columns of each, and tokens of a tile, the best first: what a warp reads of K and V serves 32
# columns, or the tensor cores wait for shared memory.
_BLOCKS: Final = ((4, 2, 64), (4, 2, 32), (8, 1, 64), (8, 1, 32), (4, 1, 32), (4, 1, 16))
# Registers beside sums, scores and weights of a tile: addresses, page ids, operands, what columns see; more where sums are
# added up at fixed cuts. Then what a kernel may seem to need, and what it may need with Q in registers: the compiler takes
# some more to overlap trips.
_OTHER_REGISTERS: Final = 54
_CUT_REGISTERS: Final = 26
_MOST_REGISTERS: Final = 240
_HELD_REGISTERS: Final = 224
_MOST_STAGES: Final = 4
# Columns of q that a warp loads at once.
_AT_ONCE: Final = 4
# Tokens that an entry has at least where a tile's keys are cut.
LEAST_TOKENS: Final = 512
# Slots of an SM part: pieces of tiles that are cut; where cuts are fixed there are more of them, and one is its own.
SLOTS: Final = 2
FIXED_SLOTS: Final = 9
# Bytes of K and V that stay in L2 beside all else.
_TOGETHER: Final = 16 << 20
# Shared memory that a multiprocessor gives to blocks, less what each block is charged besides.
_MEMORY: Final = {"large": 226 * 1024, "middle": 162 * 1024, "small": 98 * 1024}


@dataclass(frozen=True)
class Shape:
    """How a block divides columns among its warps; `query_held`: operands of Q stay in registers."""

    warps: int
    m_tiles: int
    tokens: int
    stages: Stages
    blocks_per_sm: int
    stage_bytes: int
    merged_bytes: int
    query_bytes: int
    held_bytes: int
    query_held: bool

    @property
    def cols(self) -> int:
        """Columns of a block."""
        return 16 * self.m_tiles * self.warps

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    def shared(self, arch: str) -> int:
        """Bytes of shared memory on this architecture: struct Shared of the kernel."""
        ring = int(asdict(self.stages)[SIZES[arch]]) * self.stage_bytes
        read = max(ring, self.query_bytes) if self.query_held else ring + self.query_bytes
        return -(-(max(read, self.merged_bytes) + 48 + self.held_bytes) // 16) * 16


@dataclass(frozen=True)
class ExtendContext:
    """Everything ops/extend.cu.j2 reads. Bytes are of a row, pitches from row to row in shared memory; `wgmma_file` is the kernel
    of sm_90a ("": this one)."""

    d: Attended
    k: SegmentContext
    v: SegmentContext
    cols: int
    warps: int
    m_tiles: int
    tokens: int
    stages: Stages
    blocks_per_sm: int
    in_flight: int
    slack: int
    at_once: int
    chunk_tokens: int
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
    tables: bool
    k_tables: bool
    v_tables: bool
    k_use: str
    v_use: str
    k_powers: bool
    v_powers: bool
    k_scale_run: int
    v_scale_run: int
    k_given: bool
    v_given: bool
    k_global: bool
    v_global: bool
    padded: bool
    query_held: bool
    ranged: bool
    qk_scale: str
    usual_scale: bool
    wgmma_file: str


@dataclass(frozen=True)
class ExtendPlanContext:
    """Everything ops/extend_plan.cu.j2 reads: `cols` columns a tile of rows, `tile` tokens a tile of keys, which are cut at
    multiples of `chunk_tokens` (0: where balance asks). Where another kernel runs that has products of warpgroups its tiles have
    `warpgroup_tile` tokens (0: none does), and an entry of up to `narrow_cols` columns takes half their time."""

    entry: str
    attends: str
    params: tuple[str, ...]
    attend: AttentionContext
    threads: int
    cols: int
    group: int
    kv_heads: int
    most_rows: int
    tile: int
    warpgroup_tile: int
    narrow_cols: int
    blocks_per_sm: int
    chunk_tokens: int
    overhead: int
    least_tokens: int
    token_bytes: int
    together_bytes: int
    new_in_length: bool
    digest: int


def hindrance(kernels: KernelSet, *, fixed: bool = False) -> str:
    """Why the set's extend, with fixed cuts or without, cannot go through tensor cores; empty where it can."""
    cache = kernels.kv
    if cache.dtype == "f32":
        return "f32 values would lose bits as operands of tensor cores"
    for role, parts in cache.storage.roles.items():
        if len(parts) > 1:
            return f"{role.upper()} has parts of its own"
        why = mma.segment_hindrance(parts[0]) or mma.waiting_hindrance(cache, role) or mma.query_hindrance(cache, role)
        if why:
            return f"{role.upper()}: {why}"
    found = shape(kernels, fixed=fixed)
    return "" if found else f"rows of {cache.head_dim} and {cache.v_dim} dims do not fit registers and shared memory"


def shape(kernels: KernelSet, *, fixed: bool = False) -> Shape | None:
    """The block of a set's extend: the first one whose registers and rings of two tiles fit everywhere."""
    k, v = (parts[0] for parts in kernels.kv.storage.roles.values())
    k_pitch, v_pitch = (mma.row_pitch(mma.row_bytes(x)) for x in (k, v))
    steps = -(-mma.row_bytes(k) // 32) * (16 // k.region.dtype.bits)
    dims = -(-v.size // 16) * 16
    plain = k.quant is None and v.quant is None
    sizes = {SIZES[a] for a in kernels.arch}
    for warps, m_tiles, tokens in _BLOCKS:
        cols = 16 * m_tiles * warps
        working = m_tiles * (dims // 2 + 3 * tokens // 4) + _OTHER_REGISTERS + fixed * _CUT_REGISTERS
        held = working + 4 * m_tiles * steps <= _HELD_REGISTERS
        query = steps * cols // 8 * 256
        scales = sum(mma.copied_scale_bytes(x, role, tokens) for x, role in ((k, "key"), (v, "value")))
        expanded = sum(mma.expanded_scale_bytes(x, role, tokens) for x, role in ((k, "key"), (v, "value")))
        stage = tokens * (k_pitch + v_pitch) + scales
        merged = 4 * cols * (v.size + 4 + 2)
        beside = expanded + 4 * cols * (not plain)
        least = max(2 * stage, merged, query) + beside if held else max(2 * stage + query, merged) + beside
        if k.quant is not None and k.quant.residual and k.quant.residual % tokens:
            continue  # a tile's tokens share K's scales
        if tokens > 32 and not mma.run_of(kernels.kv, tokens):  # a lane looks up one token's page
            continue
        if working > _MOST_REGISTERS or any(least > _MEMORY[size] for size in sizes):
            continue
        # Blocks that a multiprocessor holds: where its memory is small there may be one.
        blocks = 2 if warps == 4 and all(2 * least <= _MEMORY[size] for size in sizes if size != "small") else 1
        counts = {
            size: max(
                2,
                min(
                    _MOST_STAGES, (memory // (1 if size == "small" else blocks) - beside - query * (not held)) // stage
                ),
            )
            if size in sizes
            else 0
            for size, memory in _MEMORY.items()
        }
        return Shape(warps, m_tiles, tokens, Stages(**counts), blocks, stage, merged, query, beside, held)
    return None


def tiles_a_row(kernels: KernelSet, cols: int) -> int:
    """Blocks' columns that a row's query heads of a kv head take at most."""
    return -(-kernels.group // cols)


def partial_bytes(kernels: KernelSet, found: Shape | extend_simt.Shape) -> int:
    """Bytes of a partial result of a block: RowPartial of device/attention/extend_tiles.cuh."""
    if isinstance(found, extend_simt.Shape):
        return found.partial_bytes
    v = kernels.kv.storage.roles["v"][0]
    tiles = 2 * -(-mma.row_bytes(v) // 32) * (16 // v.region.dtype.bits)
    return 4 * found.m_tiles * found.threads * (4 * tiles + 4)


def extend_context(kernels: KernelSet, d: Attended, scale: float, s: Shape, chunk_tokens: int) -> ExtendContext:
    """The kernel's context."""
    cache = kernels.kv
    k, v = lower(cache).segments
    storage_k, storage_v = (parts[0] for parts in cache.storage.roles.values())
    k_use, v_use = mma.scale_use(storage_k, "key"), mma.scale_use(storage_v, "value")
    k_bytes, v_bytes = mma.row_bytes(storage_k), mma.row_bytes(storage_v)
    plain = storage_k.quant is None and storage_v.quant is None
    return ExtendContext(
        d=d,
        k=k,
        v=v,
        cols=s.cols,
        warps=s.warps,
        m_tiles=s.m_tiles,
        tokens=s.tokens,
        stages=s.stages,
        blocks_per_sm=s.blocks_per_sm,
        in_flight=(s.stages.most - 1) * s.tokens * (k_bytes + v_bytes) // 1024,
        slack=SLACK,
        at_once=_AT_ONCE,
        chunk_tokens=chunk_tokens,
        k_bytes=k_bytes,
        v_bytes=v_bytes,
        k_pitch=mma.row_pitch(k_bytes),
        v_pitch=mma.row_pitch(v_bytes),
        k_access=mma.access_bytes(storage_k),
        v_access=mma.access_bytes(storage_v),
        k_step=mma.step_bytes(storage_k),
        v_step=mma.step_bytes(storage_v),
        run=mma.run_of(cache, s.tokens),
        scales=bool({k_use, v_use} - {"none", "given"}),
        expands=any(
            use.endswith("_groups") and not mma.has_powers(x, role)
            for use, x, role in ((k_use, storage_k, "key"), (v_use, storage_v, "value"))
        ),
        tables=mma.has_tables(storage_k, "key") or mma.has_tables(storage_v, "value"),
        k_tables=mma.has_tables(storage_k, "key"),
        v_tables=mma.has_tables(storage_v, "value"),
        k_use="none" if k_use == "given" else k_use,
        v_use="none" if v_use == "given" else v_use,
        k_powers=mma.has_powers(storage_k, "key"),
        v_powers=mma.has_powers(storage_v, "value"),
        k_scale_run=mma.scale_run(storage_k, "key"),
        v_scale_run=mma.scale_run(storage_v, "value"),
        k_given=k_use == "given",
        v_given=v_use == "given",
        k_global=bool(storage_k.global_scale),
        v_global=bool(storage_v.global_scale),
        padded=bool(k_bytes % 16 or v_bytes % 16 or k_bytes % 32 or v_bytes % 32),
        query_held=s.query_held,
        ranged=not plain,
        qk_scale=float_literal(scale),
        usual_scale=scale == 1 / math.sqrt(cache.head_dim),
        wgmma_file="",
    )


def planner(
    kernels: KernelSet,
    name: str,
    *,
    attend: AttentionContext,
    found: Shape | extend_simt.Shape,
    warpgroup_tile: int,
    narrow_cols: int,
    chunk_tokens: int,
    index: str,
    digest: int,
    cross: bool,
) -> KernelPlan:
    """The planner of operation `name`: one block, once a step."""
    cache = kernels.kv
    padding = tuple(p for p in attend.params if p.name == "valid_tokens")
    params = (
        WORKSPACE,
        row_offsets(index),
        *padding,
        Size("num_rows", "u32", "planned_rows"),
        *WORKSPACE_SIZES,
    )
    context = ExtendPlanContext(
        entry=entry_name(kernels, f"{name}_plan"),
        attends=entry_name(kernels, name),
        params=tuple(p.declaration for p in params),
        attend=attend,
        threads=PLAN_THREADS,
        cols=found.cols,
        group=kernels.group,
        kv_heads=cache.kv_heads,
        most_rows=TREE_ROWS if attend.packed else (2**32 - 1) // kernels.group,
        tile=found.tokens,
        warpgroup_tile=math.gcd(warpgroup_tile, chunk_tokens),
        narrow_cols=narrow_cols,
        blocks_per_sm=found.blocks_per_sm,
        chunk_tokens=chunk_tokens,
        overhead=OVERHEAD,
        least_tokens=LEAST_TOKENS,
        token_bytes=sum(mma.row_bytes(parts[0]) for parts in cache.storage.roles.values()),
        together_bytes=_TOGETHER,
        new_in_length=new_in_length(kernels, cross),
        digest=digest,
    )
    one = const(1)
    return KernelPlan(
        f"{name}_plan", context.entry, "ops/extend_plan.cu.j2", context, params, (one, one, one), PLAN_THREADS
    )
