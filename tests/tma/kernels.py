"""The kernels of these tests: one text, and the launches of what is in it."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvgen.compile.flatten import flatten
from kvgen.emulator import Buffer, Library
from kvgen.paths import templates_root
from kvgen.runtime.tensor_map import encode
from kvgen.tensor_map import TensorMapPlan
from kvgen.tensor_map.plan import Swizzle
from tests.emulator.programs import aligned

HERE = Path(__file__).parent
SHARED = 65536
SWIZZLES: tuple[Swizzle, ...] = (0, 32, 64, 128)
C = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t"}
# What an element of each size may be called; the copies only see its size and, where they fill with NaN, its format.
DTYPES = {1: ("u8", "e4m3", "e5m2", "i8"), 2: ("bf16", "f16", "u16"), 4: ("f32", "u32", "i32"), 8: ("u64", "i64")}


@dataclass(frozen=True)
class Kernel:
    """A tile of `rows` x `depth` elements of `size` bytes; `issue` rows lie together, `gran` columns are a chunk. Of a
    ragged store `issue` is the group."""

    form: str
    size: int
    swizzle: Swizzle
    rows: int
    issue: int
    chunks: int
    wide: int = 0  # gran, where it is not the span of the swizzle

    @property
    def gran(self) -> int:
        return self.wide or (self.swizzle or 16) // self.size

    @property
    def depth(self) -> int:
        return self.chunks * self.gran

    @property
    def name(self) -> str:
        shape = f"{self.rows}_{self.issue}_{self.chunks}x{self.gran}"
        return f"{self.form}_{8 * self.size}b_swizzle{self.swizzle}_{shape}"

    @property
    def text(self) -> str:
        t = C[self.size]
        shape = f"{t}, {self.swizzle}, {self.rows}, {self.issue}, {self.depth}, {self.gran}"
        place = "int32_t row, int32_t page, int32_t head, int32_t depth, uint32_t valid"
        head = f'extern "C" __global__ void {self.name}(const __grid_constant__ TensorMap map, '
        if self.form in ("ragged", "blocks"):
            call = f"store_ragged<{'true' if self.form == 'blocks' else 'false'}, {shape}>(&map, in, heads, "
            return f"{head}const {t}* in, int32_t heads, {place}) {{\n  {call}{{row, page, head, depth, valid}});\n}}\n"
        call = f"load_tile<Form::{self.form}, {shape}>(&map, out, rows, {{row, page, head, depth, valid}});"
        return f"{head}{t}* out, const uint32_t* rows, {place}) {{\n  {call}\n}}\n"


def _each(form: str, shapes: Sequence[tuple[int, int, int]], offset: int) -> Iterator[Kernel]:
    """Every size with every swizzle over a few shapes (rows, issue rows, chunks); `offset` pairs them differently."""
    pairs = itertools.product((1, 2, 4, 8), SWIZZLES)
    for i, (size, swizzle) in enumerate(pairs):
        yield Kernel(form, size, swizzle, *shapes[(i + i // 4 + offset) % len(shapes)])


def _some(form: str, shapes: Sequence[tuple[int, int, int]], offset: int) -> Iterator[Kernel]:
    """Each size and each swizzle at least once."""
    for i, size in enumerate((1, 2, 4, 8)):
        yield Kernel(form, size, SWIZZLES[(i + offset) % 4], *shapes[i % len(shapes)])


LOADS: tuple[Kernel, ...] = (
    *_each("split", [(8, 8, 1), (16, 16, 2), (64, 64, 3), (13, 13, 1), (24, 24, 4)], 0),
    Kernel("split", 2, 0, 32, 32, 1, wide=128),
    Kernel("split", 4, 0, 8, 8, 2, wide=64),
    Kernel("rope", 2, 128, 16, 16, 1),
    Kernel("rope", 2, 0, 8, 8, 8),
    *_some("page", [(8, 8, 2), (16, 16, 1), (24, 24, 3)], 1),
    *_some("paged", [(32, 8, 2), (64, 16, 1), (16, 4, 2)], 3),
    *_some("paged_fill", [(32, 16, 1), (48, 8, 2)], 0),
    *_some("pages", [(32, 8, 1), (16, 16, 2)], 2),
    *_some("pages_fill", [(24, 8, 3), (64, 32, 1)], 1),
    *_each("folded", [(8, 8, 2), (32, 32, 3), (12, 12, 4)], 1),
    *_some("folded_page", [(16, 16, 2), (8, 8, 4)], 3),
    *_each("row_major", [(8, 8, 2), (24, 24, 3), (64, 64, 2)], 2),
    *_some("paged_row_major", [(32, 8, 2), (32, 16, 4)], 0),
    *(Kernel("scale", size, 0, rows, 1, 1, wide=1) for size, rows in ((4, 64), (4, 200), (2, 128))),
    *(Kernel("index_scale", size, 0, rows, 1, 1, wide=1) for size, rows in ((4, 32), (2, 64), (1, 16))),
)
GATHERS: tuple[Kernel, ...] = (
    *(k for k in _each("gather4", [(4, 4, 1), (16, 4, 2), (8, 4, 3)], 0) if k.swizzle),
    *(Kernel("gather4", size, 0, 8, 4, 1, wide=wide) for size, wide in ((1, 256), (2, 48), (4, 8))),
    Kernel("gather4", 8, 0, 8, 4, 1, wide=80),
)
STORES: tuple[Kernel, ...] = (
    *_each("ragged", [(8, 1, 1), (32, 1, 2), (16, 2, 1), (8, 4, 2)], 0),
    *(Kernel("blocks", size, 0, rows, group, chunks) for size, rows, group, chunks in
      ((1, 16, 1, 2), (2, 8, 4, 4), (4, 32, 1, 3), (8, 8, 2, 2))),
)  # fmt: skip


def text(kernels: Sequence[Kernel]) -> str:
    whole = (HERE / "tiles.cu").read_text() + "".join(k.text for k in kernels)
    return flatten("tiles.cu", lambda path: whole if path == "tiles.cu" else (templates_root() / path).read_text())


def place_bytes(row: int = 0, page: int = 0, head: int = 0, depth: int = 0, valid: int = 0) -> list[bytes]:
    return [struct.pack("<i", v) for v in (row, page, head, depth, valid)]


def run_load(
    library: Library, kernel: Kernel, plan: TensorMapPlan, memory: np.ndarray, *, rows: Sequence[int] = (),
    schedule: str | int = "ascending", **place: int,
) -> np.ndarray:  # fmt: skip
    """The tile as [rows][depth] unsigned numbers; 0xEE.. where the kernel wrote nothing."""
    out = aligned(kernel.rows * kernel.depth * kernel.size)
    out[:] = 0xEE
    numbers = np.array([*rows, 0], np.uint32)
    buffers = [
        Buffer("memory", memory.ctypes.data, memory.nbytes, False),
        Buffer("out", out.ctypes.data, out.nbytes, True),
        Buffer("rows", numbers.ctypes.data, numbers.nbytes, False),
    ]
    pointers = [struct.pack("<Q", a.ctypes.data) for a in (out, numbers)]
    library.kernels[kernel.name].launch(
        (1, 1, 1), (32, 1, 1), [encode(plan, "cpu"), *pointers, *place_bytes(**place)], buffers=buffers,
        dynamic_shared=SHARED, schedule=schedule,
    )  # fmt: skip
    return out.view(f"u{kernel.size}").reshape(kernel.rows, kernel.depth)


def run_store(
    library: Library, kernel: Kernel, plan: TensorMapPlan, memory: np.ndarray, tile: np.ndarray, heads: int,
    **place: int,
) -> None:  # fmt: skip
    buffers = [
        Buffer("memory", memory.ctypes.data, memory.nbytes, True),
        Buffer("tile", tile.ctypes.data, tile.nbytes, False),
    ]
    arguments = [encode(plan, "cpu"), struct.pack("<Q", tile.ctypes.data), struct.pack("<i", heads)]
    library.kernels[kernel.name].launch(
        (1, 1, 1), (32, 1, 1), [*arguments, *place_bytes(**place)], buffers=buffers, dynamic_shared=SHARED
    )
