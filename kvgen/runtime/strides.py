"""Where K, V and their scales lie, as generated modules say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class KVParams(NamedTuple):
    """KVCacheStaticParams: `num_heads` heads of `head_size`; K only if `is_mla`."""

    num_heads: int
    head_size: int
    is_mla: bool


@dataclass(frozen=True, slots=True)
class RoleStrides:
    """Where elements of one kind lie in a page: `base` names the page pointer, `offset` is in bytes from it.

    Strides are in elements and constant; a None says that the layout splits the axis, so that no one stride exists. `row`
    is the step from a token's row to the next, 0 where a token's heads are no row. `units` elements hold `codes` numbers: packed
    ones are bytes, of which `dim` counts them, of two, of four, or eight in three; `strided`: of numbers that are no neighbours.
    """

    base: str
    dtype: str
    heads: int
    dim: int
    offset: int
    token_stride: int | None
    head_stride: int | None
    dim_stride: int | None
    row: int
    codes: int = 1
    units: int = 1
    strided: bool = False


@dataclass(frozen=True, slots=True)
class Role:
    """K or V of a generated cache: values, the RoPE part of latent rows, scales. `dim` is a whole row's."""

    name: str
    dim: int
    values: RoleStrides
    rope: RoleStrides | None = None
    scales: RoleStrides | None = None
    granularity: int = 1
    scale_dtype: str | None = None

    @property
    def scales_a_head(self) -> int:
        """Scales that a head's quantized dims have; the dims themselves without."""
        return -(-self.values.dim * self.values.codes // self.values.units // self.granularity)


class TensorLayout(NamedTuple):
    """A tensor of the pool as the spec fixes it: its axes, slowest first; -1 stands for what only the tensor knows."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
