"""extend with products of warpgroups (sm_90a): which kernels have them, and what their template reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvgen.expr.nodes import const, var
from kvgen.expr.score_c import float_literal
from kvgen.layout.dtypes import dtype
from kvgen.layout.storage import Segment
from kvgen.lowering.attention import mma
from kvgen.lowering.attention.extend import ExtendContext
from kvgen.lowering.attention.split_kv import Attended
from kvgen.lowering.lowered import lower
from kvgen.lowering.segments import SegmentContext
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import PoolMap
from kvgen.schema.kernel_set import KernelSet
from kvgen.tensor_map import head_steps

TEMPLATE: Final = "ops/extend_wgmma.cu.j2"
# The one architecture that has these products.
ARCH: Final = "sm_90a"
THREADS: Final = 384
# Columns of a block: 64 of each of two warpgroups.
COLS: Final = 128
# An entry with no more columns than one warpgroup's is narrow: both warpgroups have them, and every other tile of keys each. The
# tensor cores take half the time of others for its tiles.
NARROW_COLS: Final = COLS // 2
# Warps that have columns.
_WARPS: Final = 8
# Shared memory of a block, less barriers, flags and what warps keep of entries.
_MEMORY: Final = (227 << 10) - 2048
_MOST_STAGES: Final = 4
# Registers of a thread that copies and of one that multiplies: of 168 at the start the copying warpgroup leaves 128.
_PRODUCER: Final = 40
_CONSUMER: Final = 232
# The same where the copying warpgroup widens codes.
_WIDENER: Final = 72
_WIDENED: Final = 216
_ROLES: Final = {"k": "key", "v": "value"}
# Columns of q that one of its warps loads at once, beside codes of 4 bits and of 8.
_AT_ONCE: Final = {4: 2, 8: 4}


@dataclass(frozen=True)
class Widening:
    """How codes of K and V become f16, or bf16 where their scales are e8m0 of groups of dims.

    ScaleUse of each (device/attention/tile_scales.cuh); whether scales are the caller's, or lie under one of all; bytes of a
    tile's codes; columns of q that a warp loads at once. `base_two`: products become scores in base 2 at once. `q_scaled`: q
    may have a scale.
    """

    k_use: str
    v_use: str
    k_given: bool
    v_given: bool
    k_global: bool
    v_global: bool
    code_bytes: int
    at_once: int
    base_two: bool
    q_scaled: bool


@dataclass(frozen=True)
class ExtendWgmmaContext:
    """Everything ops/extend_wgmma.cu.j2 reads.

    `rows`: K and V come 16 bytes at a time, else `issue` tokens by one tensor copy. In the tensor maps a kv head begins so
    many chunks of 64 dims (`k_head_chunks`) or groups of 8 tokens (`k_head_groups`) after the one before it. Plans count
    `planned_blocks` a multiprocessor. `turns`: warpgroups begin their products in turns. `other_file` is the kernel of the
    set's other architectures ("": there are none). `w`: K and V are of codes.
    """

    d: Attended
    operand: str
    k: SegmentContext
    v: SegmentContext
    cols: int
    narrow_cols: int
    chunk_tokens: int
    tokens: int
    stages: int
    rows: bool
    issue: int
    k_head_chunks: int
    k_head_groups: int
    v_head_chunks: int
    v_head_groups: int
    producer_registers: int
    consumer_registers: int
    slack: int
    shared_bytes: int
    planned_blocks: int
    turns: bool
    qk_scale: str
    other_file: str
    w: Widening | None


def wgmma_file(name: str) -> str:
    """The kernel of operation `name` that stands beside that of other architectures."""
    return f"{name}_{ARCH}"


def tile_tokens(kernels: KernelSet) -> int:
    """Tokens of a tile: what sums, scores and weights leave registers and shared memory for."""
    return 128 if max(kernels.kv.head_dim, kernels.kv.v_dim) <= 192 else 64


def narrow_cols(chunk_tokens: int) -> int:
    """Columns of an entry for whose tiles products take half the time; none with fixed cuts, of `chunk_tokens`."""
    return 0 if chunk_tokens else NARROW_COLS


def applies(kernels: KernelSet, cols: int, chunk_tokens: int, scores: bool, masks: bool) -> str:
    """Why a set's kernel on sm_90a does not use it; empty where it does. `cols` are the columns of the other kernel's block,
    cuts are fixed at multiples of `chunk_tokens` (0: they are not). `scores`: something is done to scores before the softmax;
    `masks`: rows do not see all tokens up to their own, or all."""
    cache = kernels.kv
    if ARCH not in kernels.arch:
        return f"wgmma is {ARCH}'s alone"
    if chunk_tokens % tile_tokens(kernels):
        return f"sums begin anew every {chunk_tokens} tokens, which are no whole tiles of {tile_tokens(kernels)}"
    if cache.dtype not in ("bf16", "f16"):
        return "K and V are not of 16-bit elements"
    if (cache.quants["k"] is None) != (cache.quants["v"] is None):
        return "one of K and V is of codes, and not the other"
    if cache.head_dim % 64 or cache.v_dim % 64 or max(cache.head_dim, cache.v_dim) > 256:
        return f"dims are not multiples of 64 up to 256: {cache.head_dim}, {cache.v_dim}"
    if cols != COLS:
        return f"a block has {cols} columns, two warpgroups have {COLS}, and one plan serves all"
    for role, parts in cache.storage.roles.items():
        why = mma.segment_hindrance(parts[0]) or (
            "rows are not aligned to 16 bytes" if mma.access_bytes(parts[0]) < 16 else ""
        )
        if len(parts) > 1 or why:
            return f"{role.upper()}: {why or 'has parts of its own'}"
    if widens(kernels):
        why = by_rows(kernels) or _hinders_widening(kernels, chunk_tokens, scores, masks)
        if why:
            return why
    return "" if _stages(kernels) else "two tiles do not fit shared memory"


def by_rows(kernels: KernelSet) -> str:
    """Why K and V come 16 bytes at a time; empty where tensor copies bring them."""
    cache = kernels.kv
    if cache.page_tokens is None or cache.page_tokens % 8 or lower(cache).kind.one_page:
        return "tensor copies bring groups of 8 tokens of a page"
    for role, parts in cache.storage.roles.items():
        region = parts[0].region
        token, head = _strides(kernels, role)
        if not token or not head:
            return f"{role.upper()} has no one stride from token to token and from head to head"
        if token * region.dtype.bits % 128 or region.byte_offset % 16 or _steps(kernels, role) is None:
            return f"{role.upper()}: heads of a page are neither side by side in a token nor one behind the other"
    return ""


def _hinders_widening(kernels: KernelSet, chunk_tokens: int, scores: bool, masks: bool) -> str:
    """Why codes of K and V cannot be widened."""
    for role, quant in kernels.kv.quants.items():
        if quant is not None and quant.residual:
            return f"{role.upper()}: tokens that wait to be quantized are no codes"
    scaled = mma.scale_use(kernels.kv.storage.roles["v"][0], "value") == "token"
    if chunk_tokens and scaled:
        return "weights are relative to the scales of a tile of V, whichever tokens of it a row sees"
    if scores or (masks and scaled and kernels.kv.v_dim > 64):
        what = "what is done to scores" if scores else "masks and scales of tokens"
        return f"{what} and sums of {kernels.kv.v_dim} dims do not fit {_WIDENED} registers, which widening leaves"
    if kernels.kv.v_dim > 192:
        return f"sums of {kernels.kv.v_dim} dims do not fit {_WIDENED} registers, which widening leaves"
    if len({mma.has_powers(parts[0], _ROLES[role]) for role, parts in kernels.kv.storage.roles.items()}) > 1:
        return "one of K and V becomes bf16, beside e8m0 scales of dims, and the other f16"
    for role, parts in kernels.kv.storage.roles.items():
        segment = parts[0]
        halves = 128 // tile_tokens(kernels)  # threads of a row
        scales = segment.scales
        own = scales is not None and scales.groups > 1 and mma.scale_use(segment, _ROLES[role]).endswith("_groups")
        if own and scales is not None and segment.size // halves % scales.block[2]:
            return f"{role.upper()}: two threads share a row, and scales of dims lie across both halves"
    return ""


def _strides(kernels: KernelSet, role: str) -> tuple[int, int]:
    """Elements from token to token and from kv head to kv head; 0 where there is no one step."""
    segment = kernels.kv.storage.roles[role][0]
    region = segment.region
    alone = not any(axis.name == "head" for axis in region.axes)  # a single head
    return region.stride_of("token") or 0, segment.size if alone else region.stride_of("head") or 0


def _steps(kernels: KernelSet, role: str) -> tuple[int, int] | None:
    """Chunks and groups of 8 tokens from a kv head to the next."""
    cache = kernels.kv
    if cache.page_tokens is None or cache.kv_heads == 1:
        return 0, 0
    segment = cache.storage.roles[role][0]
    if segment.quant is None:
        return head_steps(cache.page_tokens, *_strides(kernels, role), segment.size, 64)
    token, head = (n * segment.region.dtype.bits // 8 for n in _strides(kernels, role))
    return head_steps(cache.page_tokens, token, head, mma.row_bytes(segment), _span(segment))


def _span(segment: Segment) -> Literal[32, 64, 128]:
    """Bytes of the swizzle by which codes come: CodeRows::kSpan of device/attention/row_widen.cuh."""
    nbytes = mma.row_bytes(segment)
    return 128 if nbytes % 128 == 0 else 64 if nbytes % 64 == 0 else 32


def widens(kernels: KernelSet) -> bool:
    """Whether K and V are of codes."""
    return kernels.kv.quants["k"] is not None


def _copied_rows(kernels: KernelSet) -> int:
    """Rows that one warp has copied: a tile's, or a quarter of them."""
    return tile_tokens(kernels) // (4 if widens(kernels) else 1)


def _code_bytes(kernels: KernelSet, stages: int) -> int:
    """What Shared has besides where codes are widened: those of a tile, scales of tokens and of columns of q, mbarriers."""
    if not widens(kernels):
        return 0
    k, v = (parts[0] for parts in kernels.kv.storage.roles.values())
    a_tile = 4 * tile_tokens(kernels)
    found = 4 * COLS + 8 * 8 + tile_tokens(kernels) * (mma.row_bytes(k) + mma.row_bytes(v))
    found += 2 * stages * a_tile * (mma.scale_use(k, "key") == "token")
    return found + 2 * stages * (a_tile + 32) * (mma.scale_use(v, "value") == "token")


def _stages(kernels: KernelSet) -> int:
    for stages in range(_MOST_STAGES, 1, -1):
        if _tiles_bytes(kernels, stages) <= _MEMORY:
            return stages
    return 0


def _tiles_bytes(kernels: KernelSet, stages: int) -> int:
    """Q, rings of K and of V, codes and scales."""
    k_dims, v_dims = kernels.kv.head_dim, kernels.kv.v_dim
    return 2 * COLS * k_dims + stages * 2 * tile_tokens(kernels) * (k_dims + v_dims) + _code_bytes(kernels, stages)


def shared_bytes(kernels: KernelSet) -> int:
    """Shared of the template."""
    stages = _stages(kernels)
    flags = -(-(8 * ((6 if by_rows(kernels) else 4) * stages + 6) + 4 * (stages + 5)) // 16) * 16
    return _tiles_bytes(kernels, stages) + flags + 8 * NARROW_COLS + 48 * _WARPS


def maps(kernels: KernelSet) -> tuple[PoolMap, ...]:
    """The tensor maps that the kernel takes behind all else."""
    cache, rows, found = kernels.kv, _copied_rows(kernels), list[PoolMap]()
    if by_rows(kernels):
        return ()
    for role in ("k", "v"):
        segment = cache.storage.roles[role][0]
        codes, bits = segment.quant is not None, segment.region.dtype.bits
        token, head = (n * bits // 8 if codes else n for n in _strides(kernels, role))
        found.append(
            PoolMap(
                f"{role}_map",
                doc=f"pages of {role.upper()} in groups of 8 tokens: `group_tile` of kvgen.tensor_map for tiles of {rows} tokens",
                base=segment.base,
                element="u8" if codes else cache.dtype,
                heads=cache.kv_heads,
                dim=mma.row_bytes(segment) if codes else segment.size,
                token_stride=token,
                head_stride=head,
                rows=rows,
                offset=segment.region.byte_offset,
                swizzle=_span(segment) if codes else 128,
            )
        )
    return tuple(found)


def _widening(kernels: KernelSet, d: Attended) -> Widening | None:
    """How the set's codes are widened; None where there are none."""
    k, v = (parts[0] for parts in kernels.kv.storage.roles.values())
    if k.quant is None:
        return None
    k_use, v_use = mma.scale_use(k, "key"), mma.scale_use(v, "value")
    return Widening(
        k_use="none" if k_use == "given" else k_use,
        v_use="none" if v_use == "given" else v_use,
        k_given=k_use == "given",
        v_given=v_use == "given",
        k_global=bool(k.global_scale),
        v_global=bool(v.global_scale),
        code_bytes=tile_tokens(kernels) * (mma.row_bytes(k) + mma.row_bytes(v)),
        at_once=_AT_ONCE[k.region.dtype.bits],
        base_two=d.attend.plain,
        q_scaled=d.q_scaled,
    )


def with_warpgroups(kernels: KernelSet, plan: KernelPlan, attended: Attended, scale: float) -> KernelPlan:
    """The plan of extend's kernel with this one in its place, which takes the same arguments; beside other architectures as a
    file of its own. `plan` has the tensor maps among its parameters."""
    cache = kernels.kv
    k, v = lower(cache).segments
    steps = {role: _steps(kernels, role) or (0, 0) for role in ("k", "v")}
    others = tuple(arch for arch in kernels.arch if arch != ARCH)
    tokens, shared = tile_tokens(kernels), shared_bytes(kernels)
    assert isinstance(plan.context, ExtendContext)
    w = _widening(kernels, attended)
    powers = mma.has_powers(cache.storage.roles["k"][0], "key")
    context = ExtendWgmmaContext(
        d=attended,
        operand=dtype(cache.dtype).c if w is None else "bf16" if powers else "f16",
        k=k,
        v=v,
        cols=COLS,
        narrow_cols=narrow_cols(plan.context.chunk_tokens),
        chunk_tokens=plan.context.chunk_tokens,
        tokens=tokens,
        stages=_stages(kernels),
        rows=bool(by_rows(kernels)),
        issue=math.gcd(cache.page_tokens or 0, _copied_rows(kernels)),
        k_head_chunks=steps["k"][0],
        k_head_groups=steps["k"][1],
        v_head_chunks=steps["v"][0],
        v_head_groups=steps["v"][1],
        producer_registers=_PRODUCER if w is None else _WIDENER,
        consumer_registers=_CONSUMER if w is None else _WIDENED,
        slack=mma.SLACK,
        shared_bytes=shared,
        planned_blocks=plan.context.blocks_per_sm,
        turns=max(kernels.kv.head_dim, kernels.kv.v_dim) > 64 or _stages(kernels) % 2 == 1,
        qk_scale=float_literal(scale),
        other_file=plan.name if others else "",
        w=w,
    )
    if not others:
        return replace(
            plan,
            template=TEMPLATE,
            context=context,
            grid=(var("num_sm_parts"), const(1), const(1)),
            threads=THREADS,
            shared=shared,
            shared_by_arch=(),
        )
    here = replace(
        plan,
        name=wgmma_file(plan.name),
        template=TEMPLATE,
        context=context,
        threads=THREADS,
        shared=shared,
        shared_by_arch=(),
    )
    by_arch = tuple((arch, shared if arch == ARCH else plan.shared_on(arch)) for arch in kernels.arch)
    context_there = replace(plan.context, wgmma_file=here.name)
    return replace(
        plan,
        context=context_there,
        shared_by_arch=by_arch,
        threads_by_arch=((ARCH, THREADS),),
        blocks_by_arch=((ARCH, 1),),
        elsewhere=((ARCH, here),),
    )
