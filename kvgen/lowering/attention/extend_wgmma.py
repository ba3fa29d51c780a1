"""extend with products of warpgroups (sm_90a): which kernels have them, and what their template reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from kvgen.expr.nodes import const, var
from kvgen.expr.score_c import float_literal
from kvgen.layout.dtypes import dtype
from kvgen.lowering.attention.extend import ExtendContext
from kvgen.lowering.attention.mma import SLACK
from kvgen.lowering.attention.split_kv import Attended
from kvgen.lowering.lowered import lower
from kvgen.lowering.segments import SegmentContext
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import PoolMap
from kvgen.spec.kernel_set import KernelSet
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


@dataclass(frozen=True)
class ExtendWgmmaContext:
    """Everything ops/extend_wgmma.cu.j2 reads.

    `issue` tokens come by one copy. In the tensor maps a kv head begins so many chunks of 64 dims (`k_head_chunks`) or
    groups of 8 tokens (`k_head_groups`) after the one before it. Plans count `planned_blocks` a multiprocessor.
    `turns`: warpgroups begin their products in turns. `other_file` is the kernel of the set's other architectures ("": there
    are none).
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


def wgmma_file(name: str) -> str:
    """The kernel of operation `name` that stands beside that of other architectures."""
    return f"{name}_{ARCH}"


def tile_tokens(kernels: KernelSet) -> int:
    """Tokens of a tile: what sums, scores and weights leave registers and shared memory for."""
    return 128 if max(kernels.kv.head_dim, kernels.kv.v_dim) <= 192 else 64


def narrow_cols(chunk_tokens: int) -> int:
    """Columns of an entry for whose tiles products take half the time; none with fixed cuts, of `chunk_tokens`."""
    return 0 if chunk_tokens else NARROW_COLS


def applies(kernels: KernelSet, cols: int, chunk_tokens: int) -> str:
    """Why a set's kernel on sm_90a does not use it; empty where it does. `cols` are the columns of the other kernel's block,
    cuts are fixed at multiples of `chunk_tokens` (0: they are not)."""
    cache = kernels.kv
    if ARCH not in kernels.arch:
        return f"wgmma is {ARCH}'s alone"
    if chunk_tokens % tile_tokens(kernels):
        return f"sums begin anew every {chunk_tokens} tokens, which are no whole tiles of {tile_tokens(kernels)}"
    if cache.quants["k"] is not None or cache.quants["v"] is not None or cache.dtype not in ("bf16", "f16"):
        return "K and V are not of 16-bit elements"
    if cache.head_dim % 64 or cache.v_dim % 64 or max(cache.head_dim, cache.v_dim) > 256:
        return f"dims are not multiples of 64 up to 256: {cache.head_dim}, {cache.v_dim}"
    if cols != COLS:
        return f"a block has {cols} columns, two warpgroups have {COLS}, and one plan serves all"
    page = cache.page_tokens
    if page is None or page % 8 or lower(cache).kind.one_page:
        return "tensor copies bring groups of 8 tokens of a page"
    for role, parts in cache.storage.roles.items():
        region = parts[0].region
        token, head = _strides(kernels, role)
        if len(parts) > 1 or not token or not head or region.stride_of("dim") != 1:
            return f"{role.upper()} has no one stride from token to token and from head to head"
        if token % 8 or region.byte_offset % 16 or _steps(kernels, role) is None:
            return f"{role.upper()}: heads of a page are neither side by side in a token nor one behind the other"
    return "" if _stages(kernels) > 1 else "two tiles do not fit shared memory"


def _strides(kernels: KernelSet, role: str) -> tuple[int, int]:
    """Elements from token to token and from kv head to kv head; 0 where there is no one step."""
    segment = kernels.kv.storage.roles[role][0]
    region = segment.region
    alone = not any(axis.name == "head" for axis in region.axes)  # a single head
    return region.stride_of("token") or 0, segment.size if alone else region.stride_of("head") or 0


def _steps(kernels: KernelSet, role: str) -> tuple[int, int] | None:
    """Chunks and groups of 8 tokens from a kv head to the next."""
    cache = kernels.kv
    assert cache.page_tokens is not None
    if cache.kv_heads == 1:
        return 0, 0
    return head_steps(cache.page_tokens, *_strides(kernels, role), cache.storage.roles[role][0].size, 64)


def _stages(kernels: KernelSet) -> int:
    dims = kernels.kv.head_dim + kernels.kv.v_dim
    return min(_MOST_STAGES, (_MEMORY - 2 * COLS * kernels.kv.head_dim) // (2 * tile_tokens(kernels) * dims))


def shared_bytes(kernels: KernelSet) -> int:
    """Shared of the template."""
    dims = kernels.kv.head_dim + kernels.kv.v_dim
    stages = _stages(kernels)
    flags = -(-(8 * (4 * stages + 6) + 4 * (stages + 5)) // 16) * 16
    return (
        2 * COLS * kernels.kv.head_dim
        + stages * 2 * tile_tokens(kernels) * dims
        + flags
        + 8 * NARROW_COLS
        + 48 * _WARPS
    )


def maps(kernels: KernelSet) -> tuple[PoolMap, PoolMap]:
    """The tensor maps that the kernel takes behind all else."""
    cache, rows, found = kernels.kv, tile_tokens(kernels), []
    for role in ("k", "v"):
        segment = cache.storage.roles[role][0]
        token, head = _strides(kernels, role)
        found.append(
            PoolMap(
                f"{role}_map",
                doc=f"pages of {role.upper()} in groups of 8 tokens: `group_tile` of kvgen.tensor_map for tiles of {rows} tokens",
                base=segment.base,
                element=cache.dtype,
                heads=cache.kv_heads,
                dim=segment.size,
                token_stride=token,
                head_stride=head,
                rows=rows,
                offset=segment.region.byte_offset,
            )
        )
    return found[0], found[1]


def with_warpgroups(kernels: KernelSet, plan: KernelPlan, attended: Attended, scale: float) -> KernelPlan:
    """The plan of extend's kernel with this one in its place, which takes the same arguments; beside other architectures as a
    file of its own. `plan` has the tensor maps among its parameters."""
    cache = kernels.kv
    k, v = lower(cache).segments
    steps = {role: _steps(kernels, role) or (0, 0) for role in ("k", "v")}
    others = tuple(arch for arch in kernels.arch if arch != ARCH)
    tokens, shared = tile_tokens(kernels), shared_bytes(kernels)
    assert cache.page_tokens is not None and isinstance(plan.context, ExtendContext)
    context = ExtendWgmmaContext(
        d=attended,
        operand=dtype(cache.dtype).c,
        k=k,
        v=v,
        cols=COLS,
        narrow_cols=narrow_cols(plan.context.chunk_tokens),
        chunk_tokens=plan.context.chunk_tokens,
        tokens=tokens,
        stages=_stages(kernels),
        issue=math.gcd(cache.page_tokens, tokens),
        k_head_chunks=steps["k"][0],
        k_head_groups=steps["k"][1],
        v_head_chunks=steps["v"][0],
        v_head_groups=steps["v"][1],
        producer_registers=_PRODUCER,
        consumer_registers=_CONSUMER,
        slack=SLACK,
        shared_bytes=shared,
        planned_blocks=plan.context.blocks_per_sm,
        turns=max(kernels.kv.head_dim, kernels.kv.v_dim) > 64 or _stages(kernels) % 2 == 1,
        qk_scale=float_literal(scale),
        other_file=plan.name if others else "",
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
