"""From how many query rows on a request goes through extend instead of decode, where a set has both: what a token costs each.

Both read a token's K and V once a request: blocks with other columns of it find them in L2. What their multiprocessors do with
them grows with the columns that blocks have room for, filled or not. Of equal costs decode's counts as the lower one: it cuts
keys finer, and its blocks have less to begin with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgen.architectures import Arch, architecture
from kvgen.lowering.attention import decode_mma
from kvgen.lowering.attention.operand import operands
from kvgen.lowering.attention.problem import Fit
from kvgen.schema.kernel_set import KernelSet

# Of a decode, at most.
MOST_ROWS: Final = 128
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


def arch_of(kernels: KernelSet) -> Arch:
    """The architecture that the rule is worked out for: the set's first one with warpgroups, else its last one."""
    return next((name for name in kernels.arch if architecture(name).wgmma), kernels.arch[-1])


def _memory(kernels: KernelSet) -> float:
    return sum(operand.bytes for operand in operands(kernels.kv)) / decode_mma.REACHABLE


def _dims(kernels: KernelSet) -> int:
    return kernels.kv.head_dim + kernels.kv.v_dim


def decode_cost(kernels: KernelSet, rows: int, arch: Arch, *, elementwise: bool = False) -> TokenCost | None:
    """The cost of a decode made for so many rows; None where it has no tensor cores for them."""
    cache, columns, target = kernels.kv, rows * kernels.group, architecture(arch)
    if decode_mma.why_not(cache, rows, columns, elementwise=elementwise):
        return None
    shape = decode_mma.shape(cache, rows, columns, target, elementwise=elementwise)
    if shape is None:
        return None
    memory, cols = _memory(kernels), shape.cols // shape.heads
    issued = decode_mma.issue_slots(cache, shape.n_tiles) * memory * (shape.team_warps // shape.heads) / _ISSUED
    dims = _dims(kernels)
    reached = next((part for most, part in _DECODE_REACHES if dims <= most), _DECODE_REACHES[-1][1])
    products = cols * dims / (reached * target.warp_products)
    return TokenCost(shape.tiles, cols, memory, shape.tiles * max(products, issued))


def extend_cost(kernels: KernelSet, rows: int, arch: Arch, fit: Fit) -> TokenCost:
    """The cost of an extend by `fit`: whole tiles of columns, and one of the rest, which takes half the time where it is
    narrow."""
    target, cols = architecture(arch), fit.division.columns
    rate = target.warpgroup_products if fit.persistent else _EXTEND_REACHES * target.warp_products
    tile = max(cols * _dims(kernels) / rate, cols / _WEIGHTS)
    whole, rest = divmod(rows * kernels.group, cols)
    part = 0.0 if rest == 0 else 0.5 if rest <= fit.narrow_columns else 1.0
    return TokenCost(whole + (rest > 0), cols, _memory(kernels), (whole + part) * tile)


def decode_rows(kernels: KernelSet, most: int, arch: Arch, fit: Fit, *, elementwise: bool) -> int:
    """Rows of a request up to which decode, made for `most` rows or more, costs no more than the extend by `fit`."""
    for rows in range(1, most + 1):
        by_decode = decode_cost(kernels, rows, arch, elementwise=elementwise)
        if by_decode is None or by_decode.cycles > extend_cost(kernels, rows, arch, fit).cycles:
            return rows - 1
    return most
