"""The tensor maps of a cache, a function for each form; the names in their first lines are MAX's."""

from __future__ import annotations

from math import gcd

from kvgen.tensor_map.plan import (
    ELEMENT_BYTES,
    REACH,
    Fill,
    Promotion,
    Swizzle,
    TensorMapPlan,
    chunk_elements,
    element,
    padded_depth,
    refuse,
)
from kvgen.tensor_map.views import PageView, RowView, rope_view


def _issue_rows(rows: int, page_size: int | None) -> int:
    """The rows that lie together: of a tile, or of each page where a tile is several."""
    for name, extent in (("rows", rows), ("page_size", page_size)):
        if extent is not None and extent < 1:
            raise refuse(
                name,
                extent,
                "it is at least 1; None for a cache without pages" if name == "page_size" else "it is at least 1",
            )
    if page_size is None or rows % page_size == 0 or page_size % rows == 0:
        return rows if page_size is None else min(rows, page_size)
    if rows > page_size:
        raise refuse("rows", f"a tile of {rows}", f"it is larger than a page of {page_size} and no whole pages")
    raise refuse("rows", f"a tile of {rows}", f"it does not divide a page of {page_size}; tiles would lie in two pages")


def _reach(**extents: int) -> None:
    for name, extent in extents.items():
        if extent > REACH:
            raise refuse(
                name, extent,
                f"a coordinate is an int32, so a dimension has at most {REACH}; number blocks and rows in a block apart "
                "(RowView.blocked, kv_tma_coords), or copy fewer rows a launch",
            )  # fmt: skip


def _strides(size: int, dims: tuple[int, ...], elements: tuple[int, ...]) -> tuple[int, ...]:
    """In bytes, of dimensions 1 and up. One element has no neighbour: there any stride does that the hardware takes."""
    found = (n * size for n in elements)
    return tuple(n if d > 1 else min(n + -n % 16, 2**40 - 16) for n, d in zip(found, dims[1:], strict=True))


def _outer(view: RowView | PageView, page_size: int | None) -> tuple[list[int], list[int], list[str]]:
    """Extents, strides and names of what a row is numbered by: (row,) or (token, page)."""
    if isinstance(view, RowView):
        _reach(rows=view.rows)
        return [view.rows], [view.row_stride], ["row"]
    _reach(tokens=view.tokens, pages=view.pages)
    if page_size not in (None, view.tokens):
        raise refuse("page_size", page_size, f"the view's pages have {view.tokens} tokens")
    return [view.tokens, view.pages], [view.token_stride, view.page_stride], ["token", "page"]


def split_tile(
    view: RowView | PageView, rows: int, depth: int, *, swizzle: Swizzle = 128, page_size: int | None = None,
    gran: int | None = None, l2_promotion: Promotion = 128, oob_fill: Fill = "zero",
) -> TensorMapPlan:  # fmt: skip
    """create_tma_tile: one head's tile, a copy for each chunk of `gran` columns (and each page, where a tile is several).

    Rank 3, coordinates (depth, head, row); of a PageView rank 4, (depth, head, token, page). Without a swizzle `gran`
    may be wider than 16 bytes. Columns past dim are filled.
    """
    found = chunk_elements(view.dtype, swizzle)
    if gran is not None and gran != found and (swizzle or gran % found):
        raise refuse("gran", gran, f"it is {found}, the span of the swizzle; without one a multiple of 16 bytes")
    gran = gran or found
    if depth < 1 or depth % gran:
        raise refuse(
            "depth", depth, f"a tile is whole chunks of {gran} columns; {padded_depth(max(depth, 1), gran)} is"
        )
    issue = _issue_rows(rows, page_size)
    extents, steps, names = _outer(view, page_size)
    dims = (view.dim, view.heads, *extents)
    return TensorMapPlan(
        "split", view.element, view.address, dims, _strides(_size(view), dims, (view.head_stride, *steps)),
        (gran, 1, issue, *(1 for _ in extents[1:])), ("depth", "head", *names), swizzle, gran, issue,
        depth // gran * (rows // issue), l2_promotion, oob_fill,
    )  # fmt: skip


def _size(view: RowView | PageView) -> int:
    return ELEMENT_BYTES[view.element]


def fold_chunks(depth: int, dim: int, gran: int, *, rows: int, issue_rows: int, row_major: bool = False) -> int:
    """How many chunks of a tile one copy can bring (kv_tma_fold_chunks); 1 where a tile cannot be folded."""
    together = issue_rows % 8 == 0 if row_major else issue_rows == rows
    chunks = depth // gran
    return chunks if depth % gran == 0 and chunks >= 2 and dim % depth == 0 and together else 1


def folded_tile(
    view: RowView | PageView, rows: int, depth: int, *, row_major: bool = False, swizzle: Swizzle = 128,
    page_size: int | None = None, l2_promotion: Promotion = 128, oob_fill: Fill = "zero",
) -> TensorMapPlan:  # fmt: skip
    """All chunks of a tile by one copy; ask `fold_chunks` first.

    Rank 4, coordinates (0, row, chunk, head), the same tile in shared memory as split_tile's; of a PageView rank 5, (0,
    token, chunk, head, page). `row_major`: rank 5, (0, 0, chunk, row / 8, head), groups of 8 rows behind each other, all
    chunks of a group together; rows of all pages are numbered through, and start at multiples of 8.
    """
    gran, issue = chunk_elements(view.dtype, swizzle), _issue_rows(rows, page_size)
    fold = fold_chunks(depth, view.dim, gran, rows=rows, issue_rows=issue, row_major=row_major)
    if fold < 2:
        pages = "rows in a page a multiple of 8" if row_major else "the tile inside one page"
        raise refuse(
            "depth", f"{rows} x {depth} of dim {view.dim}, {issue} rows at a time",
            f"folding takes 2 or more whole chunks of {gran} columns, a dim of whole tiles, and {pages}; use split_tile",
        )  # fmt: skip
    dims: tuple[int, ...]
    steps: tuple[int, ...]
    box: tuple[int, ...]
    names: tuple[str, ...]
    if row_major:
        view = view.as_rows() if isinstance(view, PageView) else view
        _reach(rows=view.rows)
        if view.rows % 8:
            raise refuse("rows", f"{view.rows} rows in the view", "groups of 8 must end where it ends; use split_tile")
        dims = (gran, 8, view.dim // gran, view.rows // 8, view.heads)
        steps = (view.row_stride, gran, 8 * view.row_stride, view.head_stride)
        box = (gran, 8, fold, issue // 8, 1)
        names = ("column", "row % 8", "chunk", "row / 8", "head")
    else:
        extents, outer, numbered = _outer(view, page_size)
        dims = (gran, extents[0], view.dim // gran, view.heads, *extents[1:])
        steps = (outer[0], gran, view.head_stride, *outer[1:])
        box = (gran, rows, fold, 1, *(1 for _ in extents[1:]))
        names = ("column", numbered[0], "chunk", "head", *numbered[1:])
    return TensorMapPlan(
        "folded", view.element, view.address, dims, _strides(_size(view), dims, steps), box, names, swizzle, gran, issue,
        rows // issue, l2_promotion, oob_fill,
    )  # fmt: skip


def head_steps(tokens: int, token_stride: int, head_stride: int, dim: int, gran: int) -> tuple[int, int] | None:
    """From one head of a page to the next, in chunks and in groups of 8 rows, one of which is 0: how `group_tile` numbers
    heads. None where a page's heads are neither runs of a token's row nor of whole groups; strides in elements."""
    if head_stride % gran == 0 and dim <= head_stride and head_stride < token_stride:
        return head_stride // gran, 0
    if head_stride % (8 * token_stride) == 0 and tokens * token_stride <= head_stride:
        return 0, head_stride // (8 * token_stride)
    return None


def group_tile(
    view: PageView, rows: int, depth: int, *, swizzle: Swizzle = 128, l2_promotion: Promotion = 128
) -> TensorMapPlan:
    """Whole groups of 8 rows of a page, all chunks of a group together, by one copy for each page.

    Rank 5, coordinates (0, 0, chunk, row / 8, page); heads are numbered through with chunks or groups (`head_steps`). In
    shared memory 8 rows of a chunk are a swizzle pattern, the group's other chunks follow, then the next group: so pages lie
    behind each other whatever their size, and an operand of wgmma has one stride from group to group.
    """
    gran, issue = chunk_elements(view.dtype, swizzle), gcd(rows, view.tokens)
    steps = head_steps(view.tokens, view.token_stride, view.head_stride, view.dim, gran) if view.heads > 1 else (0, 0)
    if depth % gran or view.dim % depth or issue % 8 or steps is None:
        raise refuse(
            "depth", f"{rows} x {depth} of dim {view.dim}, pages of {view.tokens} tokens",
            f"groups take whole chunks of {gran} columns, a dim of whole tiles, pages of whole groups of 8 rows, and heads "
            "that lie in a token's row or behind a page's tokens; use split_tile",
        )  # fmt: skip
    _reach(pages=view.pages)
    last = view.heads - 1
    dims = (gran, 8, last * steps[0] + view.dim // gran, last * steps[1] + view.tokens // 8, view.pages)
    strides = (view.token_stride, gran, 8 * view.token_stride, view.page_stride)
    box = (gran, 8, depth // gran, issue // 8, 1)
    names = ("column", "row % 8", "chunk", "row / 8", "page")
    return TensorMapPlan(
        "groups", view.element, view.address, dims, _strides(_size(view), dims, strides), box, names, swizzle, gran, issue,
        rows // issue, l2_promotion,
    )  # fmt: skip


def gather4(
    view: RowView | PageView, tile_height: int, tile_width: int, *, tile_stride: int | None = None,
    tma_dtype: str | None = None, swizzle: Swizzle = 128, l2_promotion: Promotion = 128, oob_fill: Fill = "zero",
) -> TensorMapPlan:  # fmt: skip
    """create_gather4_tma_tile: four rows by one copy, each at its own coordinate (column, row, row, row, row).

    Widths and `tile_stride` (the row pitch) are in elements of `tma_dtype`, which may see the rows as something else.
    """
    view = view.as_rows() if isinstance(view, PageView) else view
    _reach(rows=view.rows)
    kind = element(tma_dtype or view.dtype)
    size, old = ELEMENT_BYTES[kind], _size(view)
    pitch, width = view.row_stride * old, ((view.heads - 1) * view.head_stride + view.dim) * old
    if tile_height < 4 or tile_height % 4:
        raise refuse("tile_height", tile_height, "one copy gathers 4 rows; it is a multiple of 4")
    for name, nbytes in (("row_stride", pitch), ("dim", width)):
        if nbytes % size:
            raise refuse("tma_dtype", repr(tma_dtype), f"{name} is {nbytes} bytes, no multiple of its {size}")
    if tile_stride not in (None, pitch // size):
        raise refuse("tile_stride", tile_stride, f"it is the row pitch, {pitch // size} x {kind}")
    if not 1 <= tile_width <= width // size:
        raise refuse("tile_width", tile_width, f"a row has {width // size} x {kind}")
    gran = swizzle // size if swizzle else tile_width
    dims = (width // size, view.rows)
    return TensorMapPlan(
        "gather4", kind, view.address, dims, _strides(1, dims, (pitch,)), (gran, 1), ("column", "row"), swizzle, gran, 4,
        tile_height // 4 * -(-tile_width // gran), l2_promotion, oob_fill,
    )  # fmt: skip


def rope_tile(
    view: RowView, rows: int, *, latent_bytes: int, rope_dim: int, swizzle: Swizzle = 128, page_size: int | None = None,
    l2_promotion: Promotion = 128,
) -> TensorMapPlan:  # fmt: skip
    """create_rope_tma_tile: split_tile of the bf16 part of a mixed row; `view` holds the rows in bytes."""
    part = rope_view(view, offset=latent_bytes, rope_dim=rope_dim)
    depth = padded_depth(rope_dim, chunk_elements("bf16", swizzle))
    return split_tile(part, rows, depth, swizzle=swizzle, page_size=page_size, l2_promotion=l2_promotion)


def rope_gather4(
    view: RowView, tile_height: int, *, latent_bytes: int, rope_dim: int, swizzle: Swizzle = 128,
    l2_promotion: Promotion = 128,
) -> TensorMapPlan:  # fmt: skip
    """create_rope_gather4_tma_tile: the row pitch is the whole row's."""
    part = rope_view(view, offset=latent_bytes, rope_dim=rope_dim)
    return gather4(part, tile_height, rope_dim, swizzle=swizzle, l2_promotion=l2_promotion)


def _flat(form: str, dtype: str, address: int, total: int, box: int, promotion: Promotion) -> TensorMapPlan:
    """Numbers in a line, as rank 2: [1, total]."""
    kind = element(dtype)
    _reach(total=total)
    dims, size = (total, 1), ELEMENT_BYTES[kind]
    strides = _strides(size, dims, (total,))
    return TensorMapPlan(form, kind, address, dims, strides, (box, 1), ("row", "zero"), 0, box, 1, 1, promotion)


def index_scale_tile(
    view: RowView, tile: int, *, page_size: int, page_stride: int, l2_promotion: Promotion = 128
) -> TensorMapPlan:
    """create_index_scale_tma_tile: the scales of `tile` tokens, one a token; rows are those of `scale_row_idx`.

    The box is 16 bytes longer than the tile: it may start up to that much before it. `page_stride` is in elements.
    """
    size = _size(view)
    if view.heads * view.dim != 1 or view.row_stride != 1:
        raise refuse(
            "heads * dim", f"{view.heads} x {view.dim} scales a token, {view.row_stride} apart",
            "an index scale tile has one scale a token, next to each other",
        )  # fmt: skip
    if tile < 1 or page_size < 1 or page_size % tile:
        raise refuse("tile", tile, f"it must divide a page of {page_size}; tiles would lie in two pages")
    if page_stride * size % 16:
        raise refuse("page_stride", f"{page_stride * size} bytes of scales", "it must be a multiple of 16 bytes")
    return _flat("index_scale", view.dtype, view.address, view.rows, tile + 16 // size, l2_promotion)


def scale_tile(dtype: str, address: int, total: int, tile: int, *, l2_promotion: Promotion = 128) -> TensorMapPlan:
    """create_scale_tma_tile: `tile` of `total` scales in a line."""
    if total % 4:
        raise refuse("total", total, "it must be a multiple of 4; pad the scales")
    return _flat("scale", dtype, address, total, tile, l2_promotion)


def ragged_tile(
    view: RowView, tile_rows: int, depth: int, *, group: int = 1, blocks: bool = False, swizzle: Swizzle = 128,
    l2_promotion: Promotion = 0,
) -> TensorMapPlan:  # fmt: skip
    """create_ragged_tma_tile: a tile of which only the first `n` rows exist, n known at run time; rows past n are clipped.

    The base lies `tile_rows` rows early. Coordinates: (depth, tile_rows - n, (row + n) * heads + head); with `group` query
    heads a head, stored as `group` lines a row, (depth, 0, tile_rows - n, (row + n) * heads + head). `blocks` adds a
    dimension of chunks before the last, so that one copy moves them all.
    """
    size, gran = _size(view), chunk_elements(view.dtype, swizzle)
    if group < 1 or view.heads % group:
        raise refuse("group", group, f"it must divide the {view.heads} heads of a row")
    if view.row_stride != view.heads * view.dim or (view.heads > 1 and view.head_stride != view.dim):
        raise refuse(
            "row_stride", view.row_stride, f"rows lie close: {view.heads} heads of {view.dim} one after the other"
        )
    if depth < 1 or depth % gran:
        raise refuse(
            "depth", depth, f"a tile is whole chunks of {gran} columns; {padded_depth(max(depth, 1), gran)} is"
        )
    if blocks and (swizzle or view.dim % gran):
        raise refuse(
            "blocks", f"swizzle {swizzle}, dim {view.dim}", f"chunks as a dimension: swizzle 0, dim % {gran} == 0"
        )
    merged = view.heads // group * (view.rows + 1)
    _reach(**{"heads * (rows + 1)": merged})
    inner = [(view.dim, 1, gran, "depth")] if not blocks else [(gran, 1, gran, "column")]
    lines = [(group, view.dim, group, "query head")] if group > 1 else []
    lines += [(tile_rows, view.row_stride, tile_rows, "row")]
    chunks = [(view.dim // gran, gran, depth // gran, "chunk")] if blocks else []
    parts = [*inner, *lines, *chunks, (merged, group * view.dim, 1, "(row + n) * heads + head")]
    dims = tuple(p[0] for p in parts)
    return TensorMapPlan(
        "ragged", view.element, view.address - tile_rows * view.row_stride * size, dims,
        _strides(size, dims, tuple(p[1] for p in parts[1:])), tuple(p[2] for p in parts), tuple(p[3] for p in parts),
        swizzle, gran, tile_rows, 1 if blocks else depth // gran, l2_promotion,
    )  # fmt: skip
