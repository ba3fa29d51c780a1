"""mla_decode with products of warpgroups (sm_90a, many columns): which kernels have them, and what their template reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kvgen.lowering.attention.mla import LatentRow, latent_row, shape_of
from kvgen.lowering.attention.split_kv import Attended
from kvgen.plan.kernel import KernelPlan
from kvgen.schema.kernel_set import KernelSet

TEMPLATE: Final = "ops/mla_decode_wgmma.cu.j2"
# The one architecture that has these products.
ARCH: Final = "sm_90a"
THREADS: Final = 256
# Columns of a block: what one product has. Tokens of a tile: four of them beside Q fill a multiprocessor's shared memory.
COLS: Final = 64
TOKENS: Final = 32
STAGES: Final = 4
# Tokens of a step of both warpgroups, which chunks should be multiples of.
CHUNK_MULTIPLE: Final = 2 * TOKENS
# Both halves of the sums are 64 x 256, 128 registers a thread: the only size that device/mma/wgmma.cuh has.
LATENT: Final = 512
MEMORY: Final = 227 << 10
# Steps of 16 dims whose Q a thread keeps, 4 registers each, beside 128 of sums; a plan's chunks take the place of one.
HELD: Final = 16


@dataclass(frozen=True)
class MlaWgmmaContext:
    """Everything ops/mla_decode_wgmma.cu.j2 reads.

    `rope_at` bytes into the run of `rope_struct` the dims that are K alone begin. Q of the first `held` steps of 16 dims is in
    registers. `shared` is what all stages have together of shared memory. `qk_scale` turns products into scores in base 2; a
    maximum rises when a score passes it by 2^`slack`. `other_file` is the kernel of the set's other architectures ("": there are
    none).
    """

    d: Attended
    threads: int
    cols: int
    tokens: int
    stages: int
    held: int
    slack: int
    shared: tuple[int, ...]
    head_dim: int
    rope_struct: str
    rope_at: int
    qk_scale: str
    other_file: str


def wgmma_file(name: str) -> str:
    """The kernel of operation `name` that stands beside that of other architectures."""
    return f"{name}_{ARCH}"


def others(kernels: KernelSet) -> tuple[str, ...]:
    """The set's architectures without these products."""
    return tuple(arch for arch in kernels.arch if arch != ARCH)


def applies(kernels: KernelSet, columns: int, sparse: bool) -> str:
    """Why a set's kernel on sm_90a does not use it; empty where it does."""
    cache, rest = kernels.kv, others(kernels)
    if ARCH not in kernels.arch:
        return f"wgmma is {ARCH}'s alone"
    if columns < COLS:
        return f"a product has {COLS} columns"
    if sparse:
        return "lists name rows one by one"
    if cache.quants["k"] is not None or cache.dtype not in ("bf16", "f16"):
        return "rows are not of 16-bit elements"
    if cache.latent_part != LATENT or cache.head_dim != LATENT + cache.rope_part or cache.rope_part % 64:
        return f"rows are not {LATENT} dims and a multiple of 64"
    if shared_bytes(cache.head_dim) > MEMORY:
        return "its tiles do not fit shared memory"
    cols = shape_of(latent_row(cache), cache, columns, rest).cols if rest else COLS
    if cols != COLS:  # workspaces are divided, and plans made, by the columns of a block
        return f"{', '.join(rest)}: a block has room for {cols} columns, a product has {COLS}, and one plan serves all"
    return ""


def shared_bytes(head_dim: int) -> int:
    """Shared of the template: ring, and what its stages share."""
    return 2 * head_dim * STAGES * TOKENS + sum(_besides(head_dim))


def _besides(head_dim: int) -> tuple[int, ...]:
    """Q, weights, maxima and barriers."""
    return 2 * head_dim * COLS, 128 * COLS, 8 * COLS, 8 * (STAGES + 2)


def with_warpgroups(
    kernels: KernelSet, plan: KernelPlan, attended: Attended, *, slack: int, qk_scale: str
) -> KernelPlan:
    """The plan of mla_decode's kernel with this one in its place, which takes the same arguments; beside other architectures
    as a file of its own."""
    cache = kernels.kv
    assert attended.tiles == -(-attended.rows * attended.group // COLS), "both kernels have blocks of so many columns"
    rope_struct, rope_at = _rope(latent_row(cache))
    shared = shared_bytes(cache.head_dim)
    context = MlaWgmmaContext(
        d=attended,
        threads=THREADS,
        cols=COLS,
        tokens=TOKENS,
        stages=STAGES,
        held=HELD - attended.planned,
        slack=slack,
        shared=_besides(cache.head_dim),
        head_dim=cache.head_dim,
        rope_struct=rope_struct,
        rope_at=rope_at,
        qk_scale=qk_scale,
        other_file=plan.name if others(kernels) else "",
    )
    if not others(kernels):
        return replace(plan, template=TEMPLATE, context=context, threads=THREADS, shared=shared, shared_by_arch=())
    assert plan.threads == THREADS
    here = replace(
        plan, name=wgmma_file(plan.name), template=TEMPLATE, context=context, shared=shared, shared_by_arch=()
    )
    by_arch = ((arch, shared if arch == ARCH else plan.shared_on(arch)) for arch in kernels.arch)
    return replace(plan, shared_by_arch=tuple(by_arch), elsewhere=((ARCH, here),))


def _rope(row: LatentRow) -> tuple[str, int]:
    """Where K's own dims are: which run, and how many bytes into it."""
    if not row.rope_bytes:
        return row.runs[0].struct, 2 * LATENT
    if len(row.runs) == 1:
        return row.runs[0].struct, row.rope_at
    return row.runs[1].struct, 0
