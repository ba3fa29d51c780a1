"""Tensors outside of a cache, as LayoutTensorMHAOperand and RaggedMHAOperand read them: their tensor maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from kvgen.errors import ArgumentError
from kvgen.runtime.arrays import ArrayView, view
from kvgen.runtime.role_cache import TileMap

if TYPE_CHECKING:
    from kvgen.tensor_map import RowView, Swizzle, TensorMapPlan


@dataclass(frozen=True)
class TensorOperand:
    """A contiguous tensor `[batch, tokens, heads, depth]` or ragged rows `[rows, heads, depth]`; `scales` in the same axes.

    Either is a matrix with a row a token, which its maps number through. Maps are encoded on first use and kept; they hold
    addresses, so they live as long as the memory.
    """

    tensor: object
    scales: object | None = None
    _maps: dict[tuple[object, ...], TileMap] = field(default_factory=dict, repr=False)

    @cached_property
    def memory(self) -> ArrayView:
        """The tensor, checked; raises ArgumentError for another rank, and where rows cannot be numbered through."""
        return _rows_of(self.tensor, "tensor")

    @property
    def num_kv_rows(self) -> int:
        """Rows of the matrix: all tokens."""
        shape = self.memory.shape
        return shape[0] if len(shape) == 3 else shape[0] * shape[1]

    def row_view(self) -> RowView:
        """The memory as rows, a token's heads a row."""
        from kvgen.tensor_map import RowView

        found = self.memory
        heads, dim = found.shape[-2:]
        return RowView(found.dtype, found.pointer, self.num_kv_rows, heads, dim, found.strides[-3], found.strides[-2])

    def create_tma_tile(
        self, rows: int, depth: int, *, swizzle: Swizzle = 128, fold: bool = False, row_major: bool = False
    ) -> TileMap:
        """The tensor map of tiles of `rows` tokens x `depth` dims of one head; `fold` as of a cache."""
        from kvgen.tensor_map import folded_tile, split_tile

        if fold:
            return self._map(
                ("fold", rows, depth, swizzle, row_major),
                lambda: folded_tile(self.row_view(), rows, depth, row_major=row_major, swizzle=swizzle),
            )
        return self._map(
            ("split", rows, depth, swizzle),
            lambda: split_tile(self.row_view(), rows, depth, swizzle=swizzle),
        )

    def create_gather4_tma_tile(
        self, tile_width: int, *, tile_height: int = 4, swizzle: Swizzle = 0, tma_dtype: str | None = None
    ) -> TileMap:
        """The tensor map for gathering rows four by four (sm_100): `tile_width` elements of `tma_dtype` a row."""
        from kvgen.tensor_map import gather4

        return self._map(
            ("gather4", tile_width, tile_height, swizzle, tma_dtype),
            lambda: gather4(self.row_view(), tile_height, tile_width, tma_dtype=tma_dtype, swizzle=swizzle),
        )

    def create_ragged_tma_tile(self, rows: int, depth: int, *, group: int = 1, swizzle: Swizzle = 128) -> TileMap:
        """The tensor map for storing tiles of which only the first rows, so many as known at run time, exist."""
        from kvgen.tensor_map import ragged_tile

        return self._map(
            ("ragged", rows, depth, group, swizzle),
            lambda: ragged_tile(self.row_view(), rows, depth, group=group, swizzle=swizzle),
        )

    def create_scale_tma_tile(self, tile: int) -> TileMap:
        """The tensor map of `tile` neighbouring scales, numbered through from the first; raises ArgumentError without."""
        from kvgen.tensor_map import scale_tile

        if self.scales is None:
            raise ArgumentError("scales: got None; this operand has none to map; pass TensorOperand(tensor, scales)")
        found, rows = _rows_of(self.scales, "scales"), self.memory.shape[:-2]
        heads, dim = found.shape[-2:]
        if found.shape[:-2] != rows:
            raise ArgumentError(
                f"scales: got shape {found.shape} for a tensor {self.memory.shape}; both have the same tokens; pass "
                f"{(*rows, heads, dim)}"
            )
        if found.strides[-2:] != (dim, 1) or found.strides[-3] != heads * dim:
            raise ArgumentError(
                f"scales: got strides {found.strides} (in elements); they are numbered through; pass them contiguous"
            )
        total = self.num_kv_rows * heads * dim
        return self._map(("scale", tile), lambda: scale_tile(found.dtype, found.pointer, total, tile))

    def _map(self, key: tuple[object, ...], plan: Callable[[], TensorMapPlan]) -> TileMap:
        from kvgen.runtime.tensor_map import encode

        if key not in self._maps:
            made = plan()
            self._maps[key] = TileMap(made, encode(made, self.memory.device))
        return self._maps[key]


def _rows_of(array: object, name: str) -> ArrayView:
    found = view(array, name)
    if len(found.shape) not in (3, 4):
        raise ArgumentError(
            f"{name}: got shape {found.shape}; it is [batch, tokens, heads, depth], or [rows, heads, depth] of ragged rows"
        )
    if len(found.shape) == 4 and found.shape[0] > 1 and found.strides[0] != found.shape[1] * found.strides[1]:
        raise ArgumentError(
            f"{name}: got strides {found.strides} (in elements) for shape {found.shape}; rows are numbered through all "
            "requests; pass batch and tokens contiguous"
        )
    return found
