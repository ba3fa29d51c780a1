"""Caches in memory, and tiles of them by NumPy indexing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvgen.tensor_map import PageView, RowView
from tests.emulator.programs import aligned
from tests.tma.kernels import DTYPES, Kernel

Rng = np.random.Generator


def padded(n: int, size: int, slack: int) -> int:
    """The next stride of at least `n` elements that the hardware takes, and `slack` 16-byte pieces more."""
    piece = 16 // size
    return (-(-n // piece) + slack) * piece


@dataclass
class Scene:
    """Random memory that ends with the view's last element, and the place of each element of the view."""

    memory: np.ndarray
    size: int
    view: RowView | PageView

    def element(self, place: np.ndarray, inside: np.ndarray) -> np.ndarray:
        """The elements at these places (bytes from the view's address); 0 where not `inside`."""
        start = self.view.address - self.memory.ctypes.data
        byte = np.where(inside, start + place, 0)
        values = self.memory[byte[..., None] + np.arange(self.size)].view(f"u{self.size}")[..., 0]
        return np.where(inside, values, 0).astype(f"u{self.size}")

    def columns(self, depth: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        at = depth + np.arange(n)
        return at * self.size, (at >= 0) & (at < self.view.dim)

    def row_tile(self, rows: np.ndarray, head: int, depth: int, n: int) -> np.ndarray:
        """[len(rows)][n] of a RowView."""
        view = self.view
        assert isinstance(view, RowView)
        column, inside = self.columns(depth, n)
        there = (rows >= 0) & (rows < view.rows) & (0 <= head < view.heads)
        place = rows[:, None] * view.row_stride * self.size + head * view.head_stride * self.size + column
        return self.element(place, there[:, None] & inside)

    def page_tile(self, pages: np.ndarray, tokens: np.ndarray, head: int, depth: int, n: int) -> np.ndarray:
        """[len(tokens)][n] of a PageView; a page for each token."""
        view = self.view
        assert isinstance(view, PageView)
        column, inside = self.columns(depth, n)
        there = (pages >= 0) & (pages < view.pages) & (tokens >= 0) & (tokens < view.tokens) & (0 <= head < view.heads)
        line = pages * view.page_stride + tokens * view.token_stride + head * view.head_stride
        return self.element(line[:, None] * self.size + column, there[:, None] & inside)


_BEHIND: Final = (
    1 << 16
)  # bytes that are nobody's, so that what is read past a memory lies in no other array of the launch


def _memory(rng: Rng, extent: int, size: int) -> tuple[np.ndarray, int]:
    """Random bytes of which the last `extent` elements are the view's, and its address."""
    before = 16 * int(rng.integers(0, 5))
    memory = aligned(before + extent * size + _BEHIND)[: before + extent * size]
    memory[:] = rng.integers(0, 256, memory.nbytes)
    return memory, memory.ctypes.data + before


def dtype_of(rng: Rng, size: int) -> str:
    return str(rng.choice(DTYPES[size]))


def row_scene(rng: Rng, kernel: Kernel, *, dim: int | None = None, rows: int | None = None) -> Scene:
    """Rows of 1 to 4 heads, close or padded, and as many as some tiles."""
    size = kernel.size
    dim = dim or int(rng.integers(1, 2 * kernel.depth + 1))
    heads = int(rng.integers(1, 5))
    head_stride = padded(dim, size, int(rng.integers(0, 2)))
    row_stride = heads * head_stride + padded(0, size, int(rng.integers(0, 3)))
    rows = rows or int(rng.integers(1, 3 * kernel.rows))
    memory, address = _memory(rng, (rows - 1) * row_stride + (heads - 1) * head_stride + dim, size)
    return Scene(memory, size, RowView(dtype_of(rng, size), address, rows, heads, dim, row_stride, head_stride))


def page_scene(rng: Rng, kernel: Kernel, tokens: int, *, dim: int | None = None) -> Scene:
    """Pages of `tokens` in either order of token and head, padded by parts of rows."""
    size = kernel.size
    dim = dim or int(rng.integers(1, 2 * kernel.depth + 1))
    heads, pages = (int(n) for n in rng.integers(1, 5, 2))
    inner = padded(dim, size, int(rng.integers(0, 2)))
    if rng.integers(2):
        head_stride, token_stride = inner, heads * inner
    else:
        token_stride, head_stride = inner, tokens * inner
    page_stride = tokens * heads * inner + padded(0, size, int(rng.integers(0, 3)))
    extent = (pages - 1) * page_stride + (tokens - 1) * token_stride + (heads - 1) * head_stride + dim
    memory, address = _memory(rng, extent, size)
    view = PageView(
        dtype_of(rng, size), address, pages, page_stride, tokens, token_stride, heads, head_stride, dim
    )  # fmt: skip
    return Scene(memory, size, view)
