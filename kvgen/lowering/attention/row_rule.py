"""From how many query rows on a request goes through extend instead of decode, where a set has both: what a token costs each.

Both read a token's K and V once a request: blocks with other columns of it find them in L2. What their multiprocessors do with
them grows with the columns that blocks have room for, filled or not. Of equal costs decode's counts as the lower one: it cuts
keys finer, and its blocks have less to begin with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgen.lowering.attention import extend, extend_wgmma, mma
from kvgen.schema.kernel_set import KernelSet

# Of a decode, at most.
MOST_ROWS: Final = 128
# Products of 16-bit numbers a cycle and multiprocessor, by warps and by warpgroups.
_PRODUCTS: Final = {"sm_80": 1024.0, "sm_90a": 1260.0}
_WARPGROUP_PRODUCTS: Final = 2048.0
# What loops reach of the former by the replay of their machine code (docs/cycles.md): extend's, and decode's with 64 columns,
# by the dims of K and V together.
_EXTEND_REACHES: Final = 0.7
_DECODE_REACHES: Final = ((128, 0.39), (256, 0.29), (512, 0.16))
# Scores that a multiprocessor makes weights of in a cycle: exponentials take half of that time.
_WEIGHTS: Final = 8.0
# Instructions that it issues in a cycle.
_ISSUED: Final = 4


@dataclass(frozen=True)
class TokenCost:
    """Cycles of a multiprocessor for a token and kv head of a request: until its bytes have come, where all read, and of
    work. `blocks` read it, with `columns` each."""

    blocks: int
    columns: int
    memory: float
    work: float

    @property
    def cycles(self) -> float:
        """The larger one."""
        return max(self.memory, self.work)


def arch_of(kernels: KernelSet) -> str:
    """The architecture that the rule is worked out for: sm_90a, or a set's last one."""
    return extend_wgmma.ARCH if extend_wgmma.ARCH in kernels.arch else kernels.arch[-1]


def _memory(kernels: KernelSet) -> float:
    return sum(mma.row_bytes(parts[0]) for parts in kernels.kv.storage.roles.values()) / mma.REACHABLE


def _dims(kernels: KernelSet) -> int:
    return kernels.kv.head_dim + kernels.kv.v_dim


def _rate(arch: str) -> float:
    return _PRODUCTS["sm_80" if arch in ("sm_80", "sm_89", "sm_120f") else "sm_90a"]


def decode_cost(kernels: KernelSet, rows: int, arch: str, *, asks: bool = False) -> TokenCost | None:
    """Of decode made for so many rows; None where it has no tensor cores for them."""
    if mma.hindrance(kernels, rows, asks):
        return None
    shape = mma.shape(kernels, rows, asks)
    if shape is None:
        return None
    memory, cols = _memory(kernels), shape.cols // shape.heads
    issued = mma.issue_slots(kernels.kv, shape.n_tiles) * memory * (shape.team_warps // shape.heads) / _ISSUED
    dims = _dims(kernels)
    reached = next((part for most, part in _DECODE_REACHES if dims <= most), _DECODE_REACHES[-1][1])
    return TokenCost(shape.tiles, cols, memory, shape.tiles * max(cols * dims / (reached * _rate(arch)), issued))


def extend_cost(kernels: KernelSet, rows: int, arch: str, *, narrow_cols: int, warpgroups: bool) -> TokenCost:
    """Of extend: whole tiles of columns, and one of the rest, which takes half the time up to `narrow_cols`."""
    shape = extend.shape(kernels)
    assert shape is not None
    warpgroups = warpgroups and arch == extend_wgmma.ARCH
    rate = _WARPGROUP_PRODUCTS if warpgroups else _EXTEND_REACHES * _rate(arch)
    tile = max(shape.cols * _dims(kernels) / rate, shape.cols / _WEIGHTS)
    whole, rest = divmod(rows * kernels.group, shape.cols)
    part = 0.0 if rest == 0 else 0.5 if warpgroups and rest <= narrow_cols else 1.0
    return TokenCost(whole + (rest > 0), shape.cols, _memory(kernels), (whole + part) * tile)


def decode_rows(kernels: KernelSet, most: int, arch: str, *, asks: bool, narrow_cols: int, warpgroups: bool) -> int:
    """Rows of a request up to which decode, made for `most` rows or more, costs no more than extend."""
    for rows in range(1, most + 1):
        by_decode = decode_cost(kernels, rows, arch, asks=asks)
        by_extend = extend_cost(kernels, rows, arch, narrow_cols=narrow_cols, warpgroups=warpgroups)
        if by_decode is None or by_decode.cycles > by_extend.cycles:
            return rows - 1
    return most
