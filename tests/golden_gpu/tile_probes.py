"""Tiles by tensor copies: the kernels of tests/tma on fixed scenes, against NumPy indexing of the same memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from kvgen.tensor_map import (
    RowView,
    TensorMapPlan,
    folded_tile,
    index_scale_tile,
    ragged_tile,
    rope_tile,
    scale_tile,
    split_tile,
)
from tests.emulator.programs import aligned
from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, TensorMap, u32
from tests.tma.kernels import LOADS, STORES, Kernel, place_bytes, text
from tests.tma.scenes import dtype_of, padded, page_scene, row_scene

UNIT: Final = "tiles"
NOWHERE: Final = 2**32 - 1


# The element size that a swizzle is probed with, so that each has its turn.
SIZES: Final = {0: 8, 32: 1, 64: 4, 128: 2}


@cache
def kernels() -> tuple[Kernel, ...]:
    """Every form with every swizzle that tests/tma has of it, small tiles first."""

    def order(kernel: Kernel) -> tuple[bool, int]:
        return kernel.size != SIZES[kernel.swizzle], kernel.rows * kernel.depth * kernel.size

    found: dict[object, Kernel] = {}
    for kernel in sorted((*LOADS, *STORES), key=order):
        found.setdefault((kernel.form, kernel.swizzle, bool(kernel.wide)), kernel)
    return tuple(found.values())


def cuda() -> str:
    """Their text, and that of tma_more.cu."""
    return text(kernels()) + (Path(__file__).parent / "kernels" / "tma_more.cu").read_text(encoding="utf-8")


# Scenes -------------------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """A plan over `memory`, the kernel's scalars, and the tile `[rows][depth]`; None where the kernel writes nothing."""

    plan: TensorMapPlan
    memory: Array
    tile: Callable[[], Array]
    rows: Array
    place: dict[str, int]
    present: int


def _starts(rng: np.random.Generator, kernel: Kernel, starts: int, step: int) -> tuple[Array, int]:
    """Where sub-pages start, one of them nowhere, and how many there are."""
    n = kernel.rows // kernel.issue
    rows = step * rng.integers(0, starts, n)
    rows[n // 2] = (NOWHERE, 2**31, step * (starts + 9))[int(rng.integers(3))]
    return rows, n - int(rng.integers(0, 2))


def _signed(starts: Array) -> Array:
    return np.where(starts >= 2**31, -(2**40), starts).astype(np.int64)


def _sub_pages(rng: np.random.Generator, kernel: Kernel) -> Load:
    """Tiles of several pages."""
    major, fill = kernel.form == "paged_row_major", kernel.form not in ("paged", "pages")
    at, issue = np.arange(kernel.rows), kernel.issue
    if kernel.form.startswith("pages"):
        scene = page_scene(rng, kernel, issue)
        starts, valid = _starts(rng, kernel, scene.view.pages, 1)  # type: ignore[union-attr]
        head, depth = int(rng.integers(0, scene.view.heads)), int(rng.integers(-4, 9))
    else:
        dim = kernel.depth * 2 if major else None
        scene = row_scene(rng, kernel, rows=issue * 5, dim=dim)
        starts, valid = _starts(rng, kernel, 5, issue)
        head, depth = int(rng.integers(0, scene.view.heads)), kernel.depth if major else int(rng.integers(-4, 9))
    if major:
        plan = folded_tile(
            scene.view, kernel.rows, kernel.depth, row_major=True, swizzle=kernel.swizzle, page_size=issue
        )
    else:
        plan = split_tile(scene.view, kernel.rows, kernel.depth, swizzle=kernel.swizzle, page_size=issue)

    def tile() -> Array:
        pages = _signed(starts)[at // issue]
        if kernel.form.startswith("pages"):
            found = scene.page_tile(pages, at % issue, head, depth, kernel.depth)
        else:
            found = scene.row_tile(pages + at % issue, head, depth, kernel.depth)
        found[valid * issue :] = 0
        return found

    place = {"head": head, "depth": depth, "valid": valid}
    return Load(plan, scene.memory, tile, starts, place, kernel.rows if fill else valid * issue)


def _one_page(rng: np.random.Generator, kernel: Kernel) -> Load:
    """From a token of a page on, past the page's last."""
    folded = kernel.form == "folded_page"
    tokens = kernel.rows + 3
    scene = page_scene(rng, kernel, tokens, dim=2 * kernel.depth if folded else None)
    tile_of = folded_tile if folded else split_tile
    plan: TensorMapPlan = tile_of(scene.view, kernel.rows, kernel.depth, swizzle=kernel.swizzle)
    page, head, row = scene.view.pages - 1, scene.view.heads - 1, 7  # type: ignore[union-attr]
    depth = kernel.depth if folded else -1
    at = row + np.arange(kernel.rows)
    place = {"row": row, "page": page, "head": head, "depth": depth}
    return Load(
        plan,
        scene.memory,
        lambda: scene.page_tile(np.full(len(at), page), at, head, depth, kernel.depth),
        np.zeros(1),
        place,
        kernel.rows,
    )


def _rows(rng: np.random.Generator, kernel: Kernel) -> Load:
    """Rows of one head over the edges of the tensor."""
    major, folded = kernel.form == "row_major", kernel.form != "split"
    dim = kernel.depth * 3 if folded else None
    scene = row_scene(rng, kernel, dim=dim, rows=kernel.rows + 8 if major else kernel.rows + 5)
    if folded:
        plan = folded_tile(scene.view, kernel.rows, kernel.depth, row_major=major, swizzle=kernel.swizzle)
    else:
        plan = split_tile(scene.view, kernel.rows, kernel.depth, swizzle=kernel.swizzle, gran=kernel.wide or None)
    row, depth = (16 if major else 7), (2 * kernel.depth if folded else -3)
    if kernel.size == 2 and not major:
        row = -2
    head = scene.view.heads - 1
    at = row + np.arange(kernel.rows)
    place = {"row": row, "head": head, "depth": depth}
    return Load(
        plan, scene.memory, lambda: scene.row_tile(at, head, depth, kernel.depth), np.zeros(1), place, kernel.rows
    )


def _random(rng: np.random.Generator, nbytes: int) -> Array:
    memory: Array = aligned(nbytes)
    memory[:] = rng.integers(0, 256, nbytes)
    return memory


def _rope(rng: np.random.Generator, kernel: Kernel) -> Load:
    """The bf16 end of rows of 48 bytes latent."""
    rows, rope, pitch, row = kernel.rows + 3, kernel.depth - 5, 48 + 2 * kernel.depth + 16, 6
    memory = _random(rng, (rows - 1) * pitch + 48 + 2 * rope)
    view = RowView("e4m3", memory.ctypes.data, rows, 1, 48 + 2 * rope, pitch, pitch)
    plan = rope_tile(view, kernel.rows, latent_bytes=48, rope_dim=rope, swizzle=kernel.swizzle)

    def tile() -> Array:
        out = np.zeros((kernel.rows, kernel.depth), np.uint16)
        for i in range(rows - row):
            out[i, :rope] = memory[(row + i) * pitch + 48 :][: 2 * rope].view(np.uint16)
        return out

    return Load(plan, memory, tile, np.zeros(1), {"row": row}, kernel.rows)


def _scales(rng: np.random.Generator, kernel: Kernel) -> Load:
    """Scales one behind the other, past the last of them; or in pages, from any row on."""
    total = kernel.rows * 3
    memory = _random(rng, total * kernel.size)
    kind = dtype_of(rng, kernel.size)
    if kernel.form == "scale":
        plan, first = scale_tile(kind, memory.ctypes.data, total, kernel.rows), total - kernel.rows // 2 - 3
    else:
        view = RowView(kind, memory.ctypes.data, total, 1, 1, 1, 1)
        plan, first = (
            index_scale_tile(view, kernel.rows, page_size=total, page_stride=total),
            total - kernel.rows // 2 - 3,
        )

    def tile() -> Array:
        out = np.zeros((kernel.rows, 1), f"u{kernel.size}")
        found = memory.view(f"u{kernel.size}")[first : first + kernel.rows]
        out[: len(found), 0] = found
        return out

    return Load(plan, memory, tile, np.zeros(1), {"row": first}, kernel.rows)


FORMS: Final[dict[str, Callable[[np.random.Generator, Kernel], Load]]] = {
    **dict.fromkeys(("split", "folded", "row_major"), _rows),
    **dict.fromkeys(("page", "folded_page"), _one_page),
    **dict.fromkeys(("paged", "paged_fill", "pages", "pages_fill", "paged_row_major"), _sub_pages),
    **dict.fromkeys(("scale", "index_scale"), _scales),
    "rope": _rope,
}


def tensor_map(plan: TensorMapPlan, memory: Array, array: str = "memory") -> TensorMap:
    """A plan over `memory` as a probe's parameter."""
    dtype = {"i32": "s32", "i64": "s64"}.get(plan.dtype, plan.dtype)
    offset = plan.address - memory.ctypes.data
    return TensorMap(array, dtype, plan.dims, plan.strides, plan.box, plan.swizzle, plan.oob_fill == "nan", offset)


def load_probe(kernel: Kernel) -> Probe:
    """One tile written out element by element; 0xee where nothing is written."""
    load = FORMS[kernel.form](np.random.default_rng(len(kernel.name)), kernel)
    image = load.memory.copy()

    def inputs() -> dict[str, Array]:
        out = np.full(kernel.rows * kernel.depth * kernel.size, 0xEE, np.uint8).view(f"u{kernel.size}")
        return {"memory": image, "out": out, "rows": load.rows.astype(np.uint32)}

    def wanted(arrays: Arrays) -> dict[str, Wanted]:
        load.memory[:] = arrays["memory"]
        out = arrays["out"].copy().reshape(kernel.rows, kernel.depth)
        out[: load.present] = load.tile()[: load.present]
        return {"out": exact(out.reshape(-1))}

    shared = kernel.rows * kernel.depth * kernel.size + 1024
    head, tail = [tensor_map(load.plan, load.memory)], place_bytes(**load.place)
    name = f"library_tile_{kernel.name}"
    return Probe(name, UNIT, kernel.name, inputs, wanted, 32, shared=shared, head=head, tail=tail, unpassed=["memory"])


def store_probe(kernel: Kernel) -> Probe:
    """Rows [row, row + valid) of one head out of a tile; all else keeps what it had."""
    rng = np.random.default_rng(len(kernel.name))
    group, blocks, heads, rows, row = kernel.issue, kernel.form == "blocks", 3, kernel.rows + 4, 3
    valid, head, depth = kernel.rows - 2, 1, 0
    dim = kernel.depth if blocks else padded(kernel.depth - 1, kernel.size, 0)
    memory = _random(rng, 48 + rows * heads * group * dim * kernel.size + 160)
    view = RowView(
        dtype_of(rng, kernel.size), memory.ctypes.data + 48, rows, heads * group, dim, heads * group * dim, dim
    )  # fmt: skip
    plan = ragged_tile(view, kernel.rows, kernel.depth, group=group, blocks=blocks, swizzle=kernel.swizzle)
    image = memory.copy()
    tile = rng.integers(0, 256, kernel.rows * group * kernel.depth * kernel.size, np.uint8)

    def inputs() -> dict[str, Array]:
        return {"memory": image, "in": tile}

    def wanted(arrays: Arrays) -> dict[str, Wanted]:
        out = arrays["memory"].copy()
        values = arrays["in"].view(f"u{kernel.size}").reshape(kernel.rows, group, kernel.depth)
        inside = out[48:-160].view(f"u{kernel.size}").reshape(rows, heads, group, dim)
        width = min(kernel.depth, dim - depth)
        inside[row : row + valid, head, :, :width] = values[:valid, :, :width]
        return {"memory": exact(out)}

    tail = [u32(heads), *place_bytes(row=row, valid=valid, head=head, depth=depth)]
    head_ = [tensor_map(plan, memory)]
    shared = len(tile) + 1024
    return Probe(
        f"library_store_{kernel.name}",
        UNIT,
        kernel.name,
        inputs,
        wanted,
        32,
        shared=shared,
        head=head_,
        tail=tail,
        unpassed=["memory"],
    )


def probes() -> list[Probe]:
    """All of this module."""
    return [store_probe(k) if k.form in ("ragged", "blocks") else load_probe(k) for k in kernels()]
