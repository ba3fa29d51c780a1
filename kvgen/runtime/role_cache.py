"""K or V of one layer as the host sees it: shapes, rows and tensor maps, under the names of Modular MAX's KVCacheT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from kvgen.errors import ArgumentError
from kvgen.runtime.layer_cache import LayerCache
from kvgen.runtime.strides import KVParams, Role, RoleStrides

if TYPE_CHECKING:
    from kvgen.tensor_map import PageView, Promotion, RowView, Swizzle, TensorMapPlan


_SHARED: Final = {2: "two dims share a byte", 4: "four dims share a byte", 8: "eight dims share three bytes"}


class TileMap(NamedTuple):
    """A tensor map: its plan, and the 128 bytes that a kernel takes."""

    plan: TensorMapPlan
    data: bytes


@dataclass(frozen=True, repr=False)
class RoleCache:
    """K or V of one layer: what `get_key_cache(layer)` and `get_value_cache(layer)` return.

    Tensor maps are encoded on first use and kept; they hold addresses, so they live as long as the cache's memory. `tensors`
    names the tensor behind each page pointer. Tiles of packed codes are asked for in dims; copies and coordinates count bytes.
    """

    layer: LayerCache
    role: Role
    kv_params: KVParams
    page_size: int
    tensors: Mapping[str, str] = field(default_factory=dict)
    _maps: dict[tuple[object, ...], TileMap] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return f"{self.role.name.upper()} of {self.layer!r}"

    @property
    def dtype(self) -> str:
        """The element type as stored."""
        return self.role.values.dtype

    @property
    def scale_dtype(self) -> str | None:
        """The type of the scales; None without."""
        return self.role.scale_dtype

    @property
    def quantization_enabled(self) -> bool:
        """Whether values have scales."""
        return self.role.scale_dtype is not None

    @property
    def quantization_granularity(self) -> int:
        """Dims that share a scale; 1 without."""
        return self.role.granularity

    @property
    def get_type_name(self) -> str:
        """As on the device."""
        return "PagedKVCache" if self.page_size else "ContinuousBatchingKVCache"

    @property
    def blocks_shape(self) -> tuple[int, int, int, int]:
        """What the spec knows of `shape`; -1 where only the pool does."""
        return -1, self.page_size or -1, self.role.values.heads, self.role.dim

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[pages, page tokens, heads, dims]: the 4-D view of this layer."""
        dims = self.layer.dims
        return dims["pages"], dims["tokens"], self.role.values.heads, self.role.dim

    @property
    def strides(self) -> tuple[int, int | None, int | None, int | None]:
        """Those of `shape`, in elements of the values (bytes for packed ones); None where the layout splits the axis."""
        return self._strides(self.role.values)

    @property
    def scales_shape(self) -> tuple[int, int, int, int] | None:
        """[pages, page tokens, blocks of heads, places]: the view of the scales; None unless every token has some in pages."""
        found = self.role.scales
        if found is None or not found.row:
            return None
        return self._pages_of(found), self.layer.dims["tokens"], found.heads, found.dim

    @property
    def scales_strides(self) -> tuple[int, int | None, int | None, int | None] | None:
        """Those of `scales_shape`, in scales."""
        found = self.role.scales
        return self._strides(found) if found is not None and found.row else None

    @property
    def page_stride(self) -> int:
        """From one page to the next, in elements of the values (bytes for packed ones)."""
        return self._page_stride(self.role.values)

    @property
    def max_tile_size(self) -> int:
        """Tokens that lie in one page at most; -1 without pages."""
        return self.page_size or -1

    @property
    def num_kv_rows(self) -> int:
        """Rows of the cache as a matrix, a row a token: (pages - 1) * rows from page to page + page tokens."""
        return self._rows(self.role.values)

    @property
    def num_scale_rows(self) -> int:
        """The same of the scales."""
        return self._rows(self._scales())

    def create_tma_tile(
        self, rows: int, depth: int, *, swizzle: Swizzle = 128, fold: bool = False, row_major: bool = False
    ) -> TileMap:
        """The tensor map of tiles of `rows` tokens (MAX's BN, formerly tile_m) x `depth` dims (BK, tile_n) of one head.

        `fold` brings all chunks of a tile by one copy (rank 4, or 5 with `row_major`). Where a token's heads are no row,
        or rows are too many for a coordinate, the map has a dimension for pages.
        """
        from kvgen.tensor_map import folded_tile, split_tile

        view, depth = self.view(), self._columns(depth, swizzle)
        if fold and row_major:
            self._check_groups()
        if fold:
            return self._map(
                ("fold", rows, depth, swizzle, row_major),
                lambda: folded_tile(view, rows, depth, row_major=row_major, swizzle=swizzle, page_size=self._pages()),
            )
        return self._map(
            ("split", rows, depth, swizzle),
            lambda: split_tile(view, rows, depth, swizzle=swizzle, page_size=self._pages()),
        )

    def create_gather4_tma_tile(
        self,
        tile_width: int,
        *,
        tile_height: int = 4,
        tile_stride: int | None = None,
        swizzle: Swizzle = 0,
        tma_dtype: str | None = None,
        l2_promotion: Promotion = 0,
    ) -> TileMap:
        """The tensor map for gathering rows four by four (sm_100): `tile_width` elements of `tma_dtype` a row (default: as
        stored, packed codes bytes)."""
        from kvgen.tensor_map import gather4

        return self._map(
            ("gather4", tile_width, tile_height, tile_stride, swizzle, tma_dtype, l2_promotion),
            lambda: gather4(
                self.view(),
                tile_height,
                tile_width,
                tile_stride=tile_stride,
                tma_dtype=tma_dtype,
                swizzle=swizzle,
                l2_promotion=l2_promotion,
            ),
        )

    def create_ragged_tma_tile(self, rows: int, depth: int, *, group: int = 1, swizzle: Swizzle = 128) -> TileMap:
        """The tensor map for storing tiles of which only the first rows, so many as known at run time, exist."""
        from kvgen.tensor_map import ragged_tile

        depth = self._columns(depth, swizzle)
        return self._map(
            ("ragged", rows, depth, group, swizzle),
            lambda: ragged_tile(self.row_view(), rows, depth, group=group, swizzle=swizzle),
        )

    def create_rope_tma_tile(self, rows: int, *, swizzle: Swizzle = 128) -> TileMap:
        """The tensor map of tiles of the RoPE part of latent rows."""
        from kvgen.tensor_map import split_tile
        from kvgen.tensor_map.plan import chunk_elements, padded_depth

        rope = self._rope()
        depth = padded_depth(rope.dim, chunk_elements(rope.dtype, swizzle))
        return self._map(
            ("rope", rows, swizzle),
            lambda: split_tile(self.view(rope), rows, depth, swizzle=swizzle, page_size=self._pages()),
        )

    def create_rope_gather4_tma_tile(
        self, *, tile_height: int = 4, swizzle: Swizzle = 0, l2_promotion: Promotion = 0
    ) -> TileMap:
        """The tensor map for gathering the RoPE part of latent rows four by four (sm_100)."""
        from kvgen.tensor_map import gather4

        rope = self._rope()
        if not self._numbered_alike(rope):
            raise ArgumentError(
                f"{rope.base}: got pages whose rows are numbered in steps other than the latent part's; gathering takes the "
                "rows of row_idx; lay both tensors out alike, or use create_rope_tma_tile"
            )
        return self._map(
            ("rope gather4", tile_height, swizzle, l2_promotion),
            lambda: gather4(self.view(rope), tile_height, rope.dim, swizzle=swizzle, l2_promotion=l2_promotion),
        )

    def create_index_scale_tma_tile(self, tile: int) -> TileMap:
        """The tensor map of the scales of `tile` tokens, where a token has one scale."""
        from kvgen.tensor_map import index_scale_tile

        scales = self._scales()
        return self._map(
            ("index scale", tile),
            lambda: index_scale_tile(
                self.row_view(scales),
                tile,
                page_size=self.layer.dims["tokens"],
                page_stride=self._page_stride(scales),
            ),
        )

    def create_scale_tma_tile(self, tile: int) -> TileMap:
        """The tensor map of `tile` neighbouring scales of the layer's pool, numbered through from its first."""
        from kvgen.tensor_map import scale_tile

        scales = self._scales()
        row = self._row_of(scales)
        total = self._rows(scales) * row
        return self._map(("scale", tile), lambda: scale_tile(scales.dtype, self._address(scales), total, tile))

    def view(self, strides: RoleStrides | None = None) -> RowView | PageView:
        """The memory of the values (or of others) as rows; with a dimension for pages where that is not possible."""
        from kvgen.tensor_map.plan import REACH

        found = strides or self.role.values
        pages = self.page_view(found)
        if not found.row or self._page_stride(found) % found.row:
            return pages
        if found is self.role.rope and not self._numbered_alike(found):
            return pages
        rows = pages.as_rows()
        return rows if rows.rows <= REACH else pages

    def row_view(self, strides: RoleStrides | None = None) -> RowView:
        """The memory as rows, a token's heads a row; raises ArgumentError where they are none."""
        found = strides or self.role.values
        self._row_of(found)
        return self.page_view(found).as_rows()

    def page_view(self, strides: RoleStrides | None = None) -> PageView:
        """The memory as pages of tokens of heads; raises ArgumentError where the layout splits one of these axes."""
        from kvgen.tensor_map import PageView

        found = strides or self.role.values
        if found.token_stride is None or found.head_stride is None or found.dim_stride is None:
            raise ArgumentError(
                f"layout: {self.role.name.upper()} of {self.layer.module.name} splits token, head or dim; a tensor map has one "
                "stride a dimension; copy with cp.async, or choose another layout"
            )
        self._check_ascending(found)
        dims = self.layer.dims
        return PageView(
            found.dtype,
            self._address(found),
            self._pages_of(found),
            self._page_stride(found),
            dims["tokens"],
            found.token_stride,
            found.heads,
            found.head_stride,
            found.dim,
            found.dim_stride,
        )

    def _columns(self, depth: int, swizzle: Swizzle) -> int:
        """`depth` dims in elements of the array: of packed codes the bytes that hold them."""
        from kvgen.tensor_map import chunk_elements, padded_depth

        values = self.role.values
        if values.strided and depth != values.dim * values.codes:
            raise ArgumentError(
                f"depth: got {depth}; dims that share a byte are {values.dim} apart, and a tile has them all; "
                f"{values.dim * values.codes} is"
            )
        chunk = values.codes * chunk_elements(values.dtype, swizzle)
        if values.codes > 1 and depth % chunk:
            raise ArgumentError(
                f"depth: got {depth}; {_SHARED[values.codes]}, and a tile is whole chunks of {chunk} dims; "
                f"{padded_depth(max(depth, 1), chunk)} is"
            )
        return depth * values.units // values.codes

    def _check_groups(self) -> None:
        """Raise ArgumentError where a page does not begin at a multiple of 8 rows, as row-major folding counts them."""
        values = self.role.values
        pitch = self._page_stride(values) // self._row_of(values)
        if self._pages_of(values) > 1 and pitch % 8:
            raise ArgumentError(
                f"row_major: got pages {pitch} rows apart; a row-major tile begins at a multiple of 8 rows; pad pages to "
                "multiples of 8 rows, or leave row_major out"
            )

    def _map(self, key: tuple[object, ...], plan: Callable[[], TensorMapPlan]) -> TileMap:
        from kvgen.runtime.tensor_map import encode

        if key not in self._maps:
            made = plan()
            self._maps[key] = TileMap(made, encode(made, self.layer.device))
        return self._maps[key]

    def _pages(self) -> int | None:
        return self.page_size or None

    def _pages_of(self, strides: RoleStrides) -> int:
        return self.layer.dims[
            "scale_pages" if strides is self.role.scales and strides.base.endswith("scales") else "pages"
        ]

    def _address(self, strides: RoleStrides) -> int:
        return self.layer.addresses[strides.base] + strides.offset

    def _strides(self, strides: RoleStrides) -> tuple[int, int | None, int | None, int | None]:
        return self._page_stride(strides), strides.token_stride, strides.head_stride, strides.dim_stride

    def _page_stride(self, strides: RoleStrides) -> int:
        size = self.layer.sizes[strides.base]
        stride = self.layer.dims[f"{strides.base}_page_stride"] * size
        unit = _bytes(strides.dtype)
        if stride % unit:
            raise ArgumentError(
                f"{self._tensor(strides)}: got pages {stride} bytes apart; {strides.dtype} elements have {unit}; pad pages to "
                "whole elements"
            )
        return stride // unit

    def _check_ascending(self, strides: RoleStrides) -> None:
        """Raise ArgumentError where pages descend: neither rows nor a tensor map can."""
        stride = self._page_stride(strides)
        if stride < 0:
            raise ArgumentError(
                f"{self._tensor(strides)}: got stride {stride} along page (in elements); rows and tensor maps number pages "
                "upwards; pass a tensor whose pages ascend"
            )

    def _tensor(self, strides: RoleStrides) -> str:
        return self.tensors.get(strides.base, strides.base)

    def _row_of(self, strides: RoleStrides) -> int:
        if not strides.row:
            raise ArgumentError(
                f"layout: a token's heads are no row in {self.role.name.upper()} of {self.layer.module.name}; use page_view(), "
                "and kv_tma_coords(b, token) on the device"
            )
        return strides.row

    def _numbered_alike(self, rope: RoleStrides) -> bool:
        """Whether a token has the same row in the RoPE part as in the values, whose rows the device numbers."""
        values = self.role.values
        if not rope.row or not values.row:
            return False
        return self._page_stride(rope) * values.row == self._page_stride(values) * rope.row

    def _rows(self, strides: RoleStrides) -> int:
        row, pages = self._row_of(strides), self._pages_of(strides)
        stride = self._page_stride(strides)
        self._check_ascending(strides)
        if stride % row:
            raise ArgumentError(
                f"{self._tensor(strides)}: got pages {stride} elements apart; numbering rows takes whole rows of {row}; pad "
                "pages by whole rows, or use page_view()"
            )
        return (pages - 1) * (stride // row) + self.layer.dims["tokens"] if pages else 0

    def _rope(self) -> RoleStrides:
        if self.role.rope is None:
            raise ArgumentError(
                f"rope: {self.role.name.upper()} of {self.layer.module.name} has rows of one type; create_tma_tile() reads "
                "all of them"
            )
        return self.role.rope

    def _scales(self) -> RoleStrides:
        if self.role.scales is None:
            raise ArgumentError(
                f"scales: {self.role.name.upper()} of {self.layer.module.name} has no scales in pages; there is nothing to map"
            )
        return self.role.scales


def _bytes(dtype: str) -> int:
    from kvgen.layout.dtypes import DTYPES

    return DTYPES[dtype].bytes
