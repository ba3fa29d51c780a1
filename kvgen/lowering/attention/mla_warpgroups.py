"""mla_decode of few columns over lists of rows of e4m3 with e8m0 scales, on sm_90a: warpgroups that have tokens of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kvgen.lowering.attention.mla_lists import ListContext
from kvgen.lowering.attention.mla_pairs import COLS, DIMS, pair_row, rows_hindrance
from kvgen.lowering.attention.split_kv import Attended
from kvgen.lowering.attention.wgmma import ARCH, MEMORY, THREADS, others, wgmma_file
from kvgen.plan.kernel import KernelPlan
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.keys import Keys

TEMPLATE: Final = "ops/mla_decode_warpgroups.cu.j2"
# Tokens of a tile: rows of a product. Dims of a product: what shares a scale.
TOKENS: Final = 64
GROUP: Final = 64
STAGES: Final = 2
WARPGROUPS: Final = THREADS // 128
_ALIGN: Final = 1024


@dataclass(frozen=True)
class WarpgroupsShape:
    """A block's work: `cols` columns, two warpgroups that have `stages` tiles of `tokens` rows each.

    A row has `latent` codes; `row_bytes` are copied of it, and `scale_bytes` of its scales. In shared memory, of which a block
    has `shared` bytes, rows begin `pitch` bytes apart.
    """

    cols: int
    tokens: int
    stages: int
    latent: int
    row_bytes: int
    scale_bytes: int
    pitch: int
    shared: int


@dataclass(frozen=True)
class MlaWarpgroupsContext:
    """Everything ops/mla_decode_warpgroups.cu.j2 reads.

    `qk_scale` turns products into scores in base 2. `other_file` is the kernel of the set's other architectures ("": there are
    none).
    """

    d: Attended
    lists: tuple[ListContext, ...]
    shape: WarpgroupsShape
    threads: int
    slack: int
    head_dim: int
    qk_scale: str
    other_file: str


def warpgroups_hindrance(kernels: KernelSet, sources: tuple[Keys, ...]) -> str:
    """Why a set's lists do not go through this kernel on sm_90a; empty where they do."""
    if ARCH not in kernels.arch:
        return f"wgmma is {ARCH}'s alone"
    if hindered := rows_hindrance(kernels, sources):
        return hindered
    if pair_row(kernels.kv).group_dims != GROUP:
        return f"a product has {GROUP} dims, which share no scale"
    if warpgroups_shape(kernels).shared > MEMORY:
        return f"{STAGES} tiles of every warpgroup do not fit shared memory"
    return ""


def warpgroups_shape(kernels: KernelSet) -> WarpgroupsShape:
    """How a block divides its work, where rows do not hinder it."""
    row, cols = pair_row(kernels.kv), 8 if kernels.q_heads <= 8 else COLS
    pitch = (row.row_bytes // 16 | 1) * 16
    panels = (1 + WARPGROUPS) * 2 * cols * DIMS
    tiles = panels + WARPGROUPS * STAGES * TOKENS * (pitch + row.scale_bytes)
    merged = WARPGROUPS * 4 * cols * (DIMS + 6)
    told = WARPGROUPS * 4 * (4 * cols + 4) + 4 * cols
    shared = _aligned(_aligned(max(tiles, merged)) + told)
    return WarpgroupsShape(cols, TOKENS, STAGES, row.latent, row.row_bytes, row.scale_bytes, pitch, shared)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def with_warpgroups_of_lists(kernels: KernelSet, plan: KernelPlan, context: MlaWarpgroupsContext) -> KernelPlan:
    """The plan of another kernel over the same lists with this one in its place, which takes the same arguments; beside other
    architectures as a file of its own."""
    shared = context.shape.shared
    if not others(kernels):
        return replace(plan, template=TEMPLATE, context=context, threads=THREADS, shared=shared, shared_by_arch=())
    assert plan.threads == THREADS
    beside = replace(context, other_file=plan.name)
    here = replace(
        plan, name=wgmma_file(plan.name), template=TEMPLATE, context=beside, shared=shared, shared_by_arch=()
    )
    by_arch = ((arch, shared if arch == ARCH else plan.shared_on(arch)) for arch in kernels.arch)
    return replace(plan, shared_by_arch=tuple(by_arch), elsewhere=((ARCH, here),))
