"""Where the K or V cache of one layer lies."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvgen.tensor_map.plan import ELEMENT_BYTES, Element, element, refuse


def kv_tma_coords(row: int, pitch: int) -> tuple[int, int]:
    """(row in its block, block) of a row of a view whose blocks are `pitch` rows apart."""
    return row % pitch, row // pitch


def _check_head(rows: int, heads: int, dim: int, dim_stride: int) -> None:
    for name, extent in (("rows", rows), ("heads", heads), ("dim", dim)):
        if extent < 1:
            raise refuse(name, extent, "it is at least 1")
    if dim > 1 and dim_stride != 1:
        raise refuse(
            "dim_stride", dim_stride,
            "the elements of a token's head must lie next to each other (a layout with dim/x ... dim%x has runs of x); a "
            "tensor copy moves runs; use another layout or plain copies",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowView:
    """The K or V cache of one layer as rows of tokens, all heads of a token a row: `num_kv_rows` of them.

    Strides are in elements. A row of another layer, or of V, may lie between two of these.
    """

    dtype: str
    address: int
    rows: int
    heads: int
    dim: int
    row_stride: int
    head_stride: int
    dim_stride: int = 1

    def __post_init__(self) -> None:
        _check_head(self.rows, self.heads, self.dim, self.dim_stride)

    @property
    def element(self) -> Element:
        return element(self.dtype)

    def blocked(self, pitch: int, tokens: int) -> PageView:
        """The same rows with a dimension for blocks of `tokens` rows, `pitch` rows apart: for `kv_tma_coords`."""
        if not 1 <= tokens <= pitch or (self.rows - tokens) % pitch:
            raise refuse(
                "pitch", f"{pitch} with blocks of {tokens} rows, {self.rows} rows in all",
                "the rows are (blocks - 1) * pitch + tokens, and pitch is not below tokens",
            )  # fmt: skip
        pages = (self.rows - tokens) // pitch + 1
        return PageView(
            self.dtype, self.address, pages, pitch * self.row_stride, tokens, self.row_stride, self.heads,
            self.head_stride, self.dim,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PageView:
    """The K or V cache of one layer as pages: also where a token's heads are no row, or pages are padded by part of one.

    Strides are in elements and in any order.
    """

    dtype: str
    address: int
    pages: int
    page_stride: int
    tokens: int
    token_stride: int
    heads: int
    head_stride: int
    dim: int
    dim_stride: int = 1

    def __post_init__(self) -> None:
        _check_head(self.tokens, self.heads, self.dim, self.dim_stride)
        if self.pages < 1:
            raise refuse("pages", self.pages, "it is at least 1")

    @property
    def element(self) -> Element:
        return element(self.dtype)

    def as_rows(self) -> RowView:
        """One dimension for pages and tokens, where a token's heads are a row and pages lie whole rows apart."""
        width = (self.heads - 1) * self.head_stride + self.dim
        if self.tokens > 1 and width > self.token_stride:
            raise refuse(
                "token_stride", f"{self.token_stride}, below the {width} elements of a token's heads",
                "a token's heads are no row in this layout; use the page's own dimension",
            )  # fmt: skip
        if self.token_stride < 1:
            raise refuse("token_stride", self.token_stride, "rows are numbered by it; it is at least 1")
        pitch, rest = divmod(self.page_stride, self.token_stride)
        if self.pages > 1 and rest:
            raise refuse(
                "page_stride", f"{self.page_stride}, no multiple of a row of {self.token_stride} elements",
                "rows are numbered through all pages; pad pages by whole rows or use the page's own dimension",
            )  # fmt: skip
        rows = (self.pages - 1) * pitch + self.tokens
        return RowView(
            self.dtype, self.address, rows, self.heads, self.dim, self.token_stride, self.head_stride
        )  # fmt: skip


def rope_view(view: RowView, *, offset: int, rope_dim: int) -> RowView:
    """The bf16 part of a mixed row: `offset` (padded_depth) bytes after the start of each head's bytes of `view`."""
    if ELEMENT_BYTES[view.element] != 1:
        raise refuse(
            "dtype", repr(view.dtype), "a mixed row is given in bytes, with its pitch as row_stride; pass 'u8'"
        )
    if offset + 2 * rope_dim > view.dim:
        raise refuse("rope_dim", f"{rope_dim} after {offset} bytes", f"the row has {view.dim} bytes")
    for name, stride in (("row_stride", view.row_stride), ("head_stride", view.head_stride)):
        if stride % 2:
            raise refuse(name, f"{stride} bytes", "bf16 elements lie at even bytes")
    return replace(
        view, dtype="bf16", address=view.address + offset, dim=rope_dim, row_stride=view.row_stride // 2,
        head_stride=view.head_stride // 2,
    )  # fmt: skip
