"""Tensor copies against index arithmetic in NumPy, the rules of tensor maps, and their misuse."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvgen.emulator import Buffer, KernelFault, Library, TensorMap
from tests.emulator.conftest import Build
from tests.emulator.programs import aligned, nvrtc_ptx
from tests.support.each_case import each_case

HEADER = (Path(__file__).parent / "cuda" / "async.cuh").read_text()
DTYPES: dict[str, Any] = {
    "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32, "int32": np.int32, "uint64": np.uint64,
    "int64": np.int64, "float16": np.float16, "float32": np.float32, "float64": np.float64,
    "bfloat16": ml_dtypes.bfloat16,
}  # fmt: skip
AT = {n: ", ".join(f"%{i}" for i in range(3, 3 + n)) for n in range(1, 6)}
SHARED = 40960
LOAD = """
extern "C" __global__ void {name}(const __grid_constant__ TensorMap map, int4* out, int bytes, int expected, int offset,
    int x0, int x1, int x2, int x3, int x4) {{
  extern __shared__ __align__(1024) unsigned char tile[]; __shared__ u64 bar; int t = threadIdx.x;
  asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
  if (t == 0) {{ init(&bar, 1); fence_init(); expect(&bar, expected);
    asm volatile("cp.async.bulk.prefetch.tensor.{rank}d.L2.global{mode} [%0, {{{at}}}];"
      :: "l"(&map), "r"(0), "r"(0), {values} : "memory");
    asm volatile("cp.async.bulk.tensor.{form} [%0], [%1, {{{at}}}], [%2]{tail};"
      :: "r"(shared(tile) + offset), "l"(&map), "r"(shared(&bar)), {values}{more} : "memory"); }}
  __syncthreads(); wait(&bar, 0);
  for (int i = t; i < bytes / 16; i += 32) out[i] = ((int4*)(tile + offset))[i];
}}
"""
STORE = """
extern "C" __global__ void {name}(const __grid_constant__ TensorMap map, const int4* in, int bytes, int offset,
    int x0, int x1, int x2, int x3, int x4) {{
  extern __shared__ __align__(1024) unsigned char tile[]; int t = threadIdx.x;
  for (int i = t; i < bytes / 16; i += 32) ((int4*)(tile + offset))[i] = in[i];
  fence_shared(); __syncthreads();
  if (t == 0) {{
    asm volatile("cp.{form} [%0, {{{at}}}], [%1]{tail};"
      :: "l"(&map), "r"(shared(tile) + offset), "l"(0ull), {values} : "memory");
    commit(); wait_group<0>(); }}
}}
"""
BY_MBARRIER = "shared::cluster.global{mode}.mbarrier::complete_tx::bytes"


def loader(name: str, rank: int, coordinates: int, mode: str, extra: str = "", tail: str = "", more: str = "") -> str:
    return LOAD.format(
        name=name, rank=rank, mode=mode, form=f"{rank}d.{BY_MBARRIER.format(mode=mode)}{extra}",
        at=AT[coordinates], values=", ".join(f'"r"(x{i})' for i in range(coordinates)), tail=tail, more=more,
    )  # fmt: skip


def storer(name: str, rank: int, coordinates: int, form: str, tail: str = "") -> str:
    values = ", ".join(f'"r"(x{i})' for i in range(coordinates))
    return STORE.format(name=name, form=form.format(rank=f"{rank}d"), at=AT[coordinates], values=values, tail=tail)


REDUCE_FORM = "reduce.async.bulk.tensor.{rank}.global.shared::cta.OP.tile.bulk_group.L2::cache_hint"
STORE_FORM = "async.bulk.tensor.{rank}.global.shared::cta.bulk_group"
REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    parts = [loader(f"load{n}", n, n, ".tile" if n % 2 else "") for n in range(1, 6)]
    parts += [storer(f"store{n}", n, n, STORE_FORM) for n in range(1, 6)]
    parts += [storer(f"reduce_{op}", 2, 2, REDUCE_FORM.replace("OP", op), ", %2") for op in REDUCTIONS]
    parts.append(loader("multicast", 2, 2, "", ".multicast::cluster", ", %5", ', "h"((short)blocks)').replace(
        "int x2", "int blocks", 1))  # fmt: skip
    newer = [
        loader("gather", 2, 5, ".tile::gather4"),
        storer("scatter", 2, 5, "async.bulk.tensor.{rank}.global.shared::cta.tile::scatter4.bulk_group"),
    ]
    return [
        nvrtc_ptx(HEADER + "".join(parts), arch="compute_90a", name="tma.cu"),
        nvrtc_ptx(HEADER + "".join(newer), arch="compute_100a", name="tma.cu"),
    ]


@pytest.fixture(scope="module")
def library(build: Build, texts: list[str]) -> Library:
    return build(texts)


# ---------------------------------------------------------------- the reference
@dataclasses.dataclass
class Tensor:
    """Random bytes in memory and a map of them."""

    memory: np.ndarray
    map: TensorMap

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(DTYPES[self.map.element])


def tensor(rng: np.random.Generator, element: str, dims: tuple[int, ...], box: tuple[int, ...], **more: Any) -> Tensor:
    size = np.dtype(DTYPES[element]).itemsize
    strides, extent = [], dims[0] * size
    for d in dims[1:]:  # rows with some slack between them
        strides.append(-(-extent // 16) * 16 + 16 * int(rng.integers(0, 3)))
        extent = strides[-1] * d
    memory = aligned(extent)
    values = rng.integers(-60, 60, -(-extent // size)).astype(DTYPES[element])
    memory[:] = values.view(np.uint8)[:extent]
    return Tensor(memory, TensorMap(element, memory.ctypes.data, dims, tuple(strides), box, **more))


def places(map: TensorMap, at: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """For each element of the tile, outermost dimension first: its byte in memory, and whether the tensor has it."""
    size = np.dtype(DTYPES[map.element]).itemsize
    counts = (map.box[0], *(-(-n // s) for n, s in zip(map.box[1:], map.element_strides[1:], strict=True)))
    index = np.indices(counts[::-1])[::-1]
    steps = (1, *map.element_strides[1:])
    where = [a + k * s for a, k, s in zip(at, index, steps, strict=True)]
    inside = np.logical_and.reduce([(c >= 0) & (c < d) for c, d in zip(where, map.dims, strict=True)])
    return sum(c * s for c, s in zip(where, (size, *map.strides), strict=True)), inside


def rows_of(map: TensorMap, at: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Places of a box for gather4 and scatter4: four rows, each at a coordinate of its own."""
    found = [places(map, (at[0], row)) for row in at[1:]]
    return np.concatenate([f[0] for f in found]), np.concatenate([f[1] for f in found])


def expected_tile(t: Tensor, where: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    byte, inside = where
    size = t.dtype.itemsize
    flat = t.memory[np.where(inside, byte, 0)[..., None] + np.arange(size)]
    out = np.where(inside[..., None], flat, 0).astype(np.uint8)
    if t.map.oob_fill == "nan":
        out[~inside] = np.array([np.nan], t.dtype).view(np.uint8)
    return out.reshape(-1)


def swizzled(tile: np.ndarray, span: int, offset: int) -> np.ndarray:
    """Where 16-byte chunks go: in the n-th line of 128 bytes, chunk c lies at c ^ (n % 8), n % 4 or n % 2."""
    if not span:
        return tile
    out = np.full(-(-len(tile) // 128) * 128, 0xFF, np.uint8)
    for i in range(0, len(tile), 16):
        line, chunk = divmod((offset + i) // 16, 8)
        out[(line * 8 + (chunk ^ line % (span // 16))) * 16 - offset :][:16] = tile[i : i + 16]
    return out


def launch_load(
    library: Library, name: str, t: Tensor, at: tuple[int, ...], expected: int, offset: int = 0, **more: Any
) -> tuple[np.ndarray, Any]:
    nbytes = t.map.nbytes * (4 if name == "gather" else 1)
    out = aligned(nbytes)
    arguments = (t.map.encode(), out, nbytes, expected, offset, *(*at, 0, 0, 0, 0)[:5])
    counters = run_with(library, name, t.memory, False, *arguments, **more)
    return out, counters


def run_with(library: Library, name: str, memory: np.ndarray, writable: bool, *arguments: Any, **more: Any) -> Any:
    """Arrays become pointers and the buffer 'argument', ints 4 bytes; the tensor is one more buffer."""
    buffers = [Buffer("tensor", memory.ctypes.data, memory.nbytes, writable)]
    raw = []
    for a in arguments:
        if isinstance(a, np.ndarray):
            buffers.append(Buffer("argument", a.ctypes.data, a.nbytes, True))
            raw.append(struct.pack("<Q", a.ctypes.data))
        else:
            raw.append(a if isinstance(a, bytes) else struct.pack("<i", a))
    kernel = library.kernels[name]
    return kernel.launch((1, 1, 1), (32, 1, 1), raw, buffers=buffers, dynamic_shared=SHARED, **more)


def equal_or_nan(actual: np.ndarray, expected: np.ndarray, dtype: np.dtype[Any]) -> None:
    a, b = actual.view(dtype), expected.view(dtype)
    if dtype.kind in "iu":
        np.testing.assert_array_equal(a, b)
    else:
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((1000,), (256,)), ((40, 9), (16, 4)), ((24, 7, 5), (8, 3, 4)), ((20, 5, 4, 3), (16, 2, 3, 2)),
    ((18, 4, 3, 5, 3), (16, 3, 2, 2, 2)),
]  # fmt: skip


# ---------------------------------------------------------------- loads and stores
@pytest.mark.parametrize("element", DTYPES)
def test_load(element: str, library: Library) -> None:
    rng = np.random.default_rng(list(DTYPES).index(element))
    size = np.dtype(DTYPES[element]).itemsize
    for dims, box in SHAPES:
        rank = len(dims)
        inner = max(box[0], 16 // size)
        fill = "nan" if "float" in element and rank % 2 else "zero"
        t = tensor(rng, element, dims, (inner, *box[1:]), oob_fill=fill)
        corners = [(0,) * rank, (-1,) * rank, tuple(d - 2 for d in dims), tuple(d + 9 for d in dims)]
        corners += [tuple(int(rng.integers(-n, d + 1)) for d, n in zip(dims, t.map.box, strict=True)) for _ in range(3)]
        for at in corners:
            out, counters = launch_load(library, f"load{rank}", t, at, t.map.nbytes, schedule=int(rng.integers(9)))
            where = places(t.map, at)
            equal_or_nan(out, expected_tile(t, where), t.dtype)
            counts = counters.per_buffer["tensor"]
            assert counts.load_bytes == where[1].sum() * size
            assert counts.load_requests == where[1].any()


@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_swizzle(span: int, library: Library) -> None:
    rng = np.random.default_rng(span)
    for element, offset, rows in itertools.product(("uint8", "bfloat16", "float64"), (0, 128, 640, 1024), (8, 13, 32)):
        size = np.dtype(DTYPES[element]).itemsize
        t = tensor(rng, element, (300 // size, 50), ((span or 64) // size, rows), swizzle=span)
        at = (int(rng.integers(-3, 9)), int(rng.integers(-3, 30)))
        nbytes = t.map.nbytes // 128 * 128  # what of the last line is written depends on the swizzle
        out = aligned(nbytes)
        run_with(library, "load2", t.memory, False, t.map.encode(), out, nbytes, t.map.nbytes, offset, *at, 0, 0, 0)
        expected = swizzled(expected_tile(t, places(t.map, at)), span, offset)
        np.testing.assert_array_equal(out, expected[:nbytes])


def test_element_strides(library: Library) -> None:
    rng = np.random.default_rng(1)
    for steps in ((1, 2, 1), (1, 3, 2), (8, 1, 8), (1, 8, 5)):
        t = tensor(rng, "int32", (40, 30, 20), (8, 9, 7), element_strides=steps)
        for at in ((0, 0, 0), (3, -4, 9), (36, 25, 16)):
            out, _ = launch_load(library, "load3", t, at, t.map.nbytes)
            np.testing.assert_array_equal(out, expected_tile(t, places(t.map, at)))


@pytest.mark.parametrize("element", DTYPES)
def test_store(element: str, library: Library) -> None:
    rng = np.random.default_rng(20 + list(DTYPES).index(element))
    size = np.dtype(DTYPES[element]).itemsize
    for (dims, box), span in zip(SHAPES, (0, 64, 0, 32, 128), strict=True):
        inner = max(min(box[0], (span or 4096) // size), 16 // size)
        t = tensor(rng, element, dims, (inner, *box[1:]), swizzle=span)
        for at in (tuple(0 for _ in dims), tuple(d - 2 for d in dims), tuple(-1 for _ in dims)):
            tile = rng.integers(0, 256, t.map.nbytes).astype(np.uint8)
            before, (byte, inside) = t.memory.copy(), places(t.map, at)
            before[byte[inside][:, None] + np.arange(size)] = tile.reshape(*inside.shape, size)[inside]
            source = aligned(-(-len(tile) // 128) * 128)
            source[: len(swizzled(tile, span, 128))] = swizzled(tile, span, 128)
            arguments = (t.map.encode(), source, len(source), 128, *(*at, 0, 0, 0, 0)[:5])
            counters = run_with(library, f"store{len(dims)}", t.memory, True, *arguments)
            np.testing.assert_array_equal(t.memory, before)
            counts = counters.per_buffer["tensor"]
            assert (counts.store_requests, counts.store_bytes) == (1, inside.sum() * size)


def combined(op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    table = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
             "xor": np.bitwise_xor}  # fmt: skip
    if op == "inc":
        return np.where(a >= b, 0, a + 1)
    if op == "dec":
        return np.where((a == 0) | (a > b), b, a - 1)
    return table[op](a, b)


REDUCED = {
    "add": ("uint32", "int32", "uint64", "float16", "bfloat16", "float32", "float64"),
    "min": ("uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
    "max": ("uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
    **dict.fromkeys(("inc", "dec"), ("uint32",)),
    **dict.fromkeys(("and", "or", "xor"), ("uint32", "int32", "uint64", "int64")),
}


@pytest.mark.parametrize("op", REDUCTIONS)
def test_reduce(op: str, library: Library) -> None:
    rng = np.random.default_rng(40)
    for element in DTYPES:
        t = tensor(rng, element, (40, 9), (16, 4))
        tile = rng.integers(-60, 60, 64).astype(DTYPES[element])
        before = t.memory.copy()
        source = aligned(tile.nbytes)
        source[:] = tile.view(np.uint8)
        arguments = (t.map.encode(), source, len(source), 0, 30, 7, 0, 0, 0)
        if element not in REDUCED[op]:
            with pytest.raises(KernelFault, match=r"bad_tensor_map.*does not exist for the tensor map's element type"):
                run_with(library, f"reduce_{op}", t.memory, True, *arguments)
            continue
        byte, inside = places(t.map, (30, 7))
        spots = byte[inside][:, None] + np.arange(t.dtype.itemsize)
        old = before[spots].view(t.dtype)[:, 0]
        before[spots] = combined(op, old, tile[inside.reshape(-1)]).astype(t.dtype)[:, None].view(np.uint8)
        counters = run_with(library, f"reduce_{op}", t.memory, True, *arguments)
        np.testing.assert_array_equal(t.memory, before)
        assert counters.per_buffer["tensor"].atomic_bytes == inside.sum() * t.dtype.itemsize


def test_gather_and_scatter(library: Library) -> None:
    rng = np.random.default_rng(50)
    for element, span in (("bfloat16", 128), ("uint8", 0), ("float32", 64)):
        size = np.dtype(DTYPES[element]).itemsize
        t = tensor(rng, element, (100, 40), ((span or 64) // size, 1), swizzle=span)
        for at in ((0, 5, 17, 2, 39), (3, 11, 11, 40, -1), (90, 1, 2, 3, 4)):
            where = rows_of(t.map, at)
            out, counters = launch_load(library, "gather", t, at, 4 * t.map.nbytes)
            np.testing.assert_array_equal(out, swizzled(expected_tile(t, where), span, 0)[: len(out)])
            assert counters.per_buffer["tensor"].load_requests == 1
        at = (3, 30, 2, 41, 7)
        tile = rng.integers(0, 256, 4 * t.map.nbytes).astype(np.uint8)
        before, (byte, inside) = t.memory.copy(), rows_of(t.map, at)
        before[byte[inside][:, None] + np.arange(size)] = tile.reshape(*inside.shape, size)[inside]
        source = aligned(len(tile))
        source[:] = swizzled(tile, span, 0)[: len(tile)]
        run_with(library, "scatter", t.memory, True, t.map.encode(), source, len(source), 0, *at)
        np.testing.assert_array_equal(t.memory, before)


def test_sectors_of_a_tile(library: Library) -> None:
    t = tensor(np.random.default_rng(0), "bfloat16", (256, 64), (64, 16))
    _, counters = launch_load(library, "load2", t, (64, 8), t.map.nbytes)
    counts = counters.per_buffer["tensor"]
    start = t.memory.ctypes.data + 8 * t.map.strides[0] + 128
    touched = sum(len({(start + r * t.map.strides[0] + b) // 32 for b in range(128)}) for r in range(16))
    assert (counts.load_requests, counts.load_bytes, counts.load_sectors) == (1, 2048, touched)


def test_multicast_in_a_cluster(library: Library) -> None:
    t = tensor(np.random.default_rng(2), "int32", (40, 9), (16, 4))
    out, _ = launch_load(library, "multicast", t, (5, 3, 1), t.map.nbytes)
    np.testing.assert_array_equal(out, expected_tile(t, places(t.map, (5, 3))))
    with pytest.raises(KernelFault, match=r"bad_copy.*multicast to blocks 0x2, the cluster has 1"):
        launch_load(library, "multicast", t, (5, 3, 2), t.map.nbytes)


# ---------------------------------------------------------------- misuse
@each_case("schedule", ["ascending", "descending", 3])
def test_misuse(schedule: str | int, library: Library) -> None:
    rng = np.random.default_rng(3)
    t = tensor(rng, "int32", (40, 9), (16, 4))

    def kind(name: str, t: Tensor, at: tuple[int, ...], *, expected: int | None = None, offset: int = 0) -> str:
        with pytest.raises(KernelFault) as caught:
            launch_load(library, name, t, at, t.map.nbytes if expected is None else expected, offset, schedule=schedule)
        return caught.value.kind

    assert kind("load1", t, (0,)) == "bad_tensor_map"  # of another rank
    assert kind("gather", t, (0, 0, 1, 2, 3), expected=4 * 256) == "bad_tensor_map"  # a box of more than one row
    assert kind("load2", t, (0, 0), offset=64) == "misaligned"
    assert kind("load2", t, (0, 0), offset=16) == "misaligned"
    assert kind("load2", t, (36, 7), expected=4 * 4 * 2) == "deadlock"  # clipped bytes count too
    assert kind("load2", t, (0, 0), offset=SHARED - 128) == "shared_out_of_bounds"
    longer = Tensor(t.memory, dataclasses.replace(t.map, dims=(40, 10)))
    assert kind("load2", longer, (0, 7)) == "global_out_of_bounds"


def test_stores_are_checked(library: Library) -> None:
    t = tensor(np.random.default_rng(4), "int32", (40, 9), (16, 4))
    source = aligned(256)
    with pytest.raises(KernelFault, match=r"read_only.*'tensor'"):
        run_with(library, "store2", t.memory, False, t.map.encode(), source, 256, 0, 0, 0, 0, 0, 0)
    with pytest.raises(KernelFault, match="uninitialised"):
        run_with(library, "store2", t.memory, True, t.map.encode(), source, 128, 0, 0, 0, 0, 0, 0)
    run_with(library, "store2", t.memory, True, t.map.encode(), source, 128, 0, 0, 7, 0, 0, 0)  # the rest is clipped


def test_what_is_no_tensor_map(library: Library) -> None:
    t = tensor(np.random.default_rng(5), "int32", (40, 9), (16, 4))
    out, good = aligned(256), t.map.encode()
    for bad in (bytes(128), good[:8] + bytes(120), bytes(8) + good[8:]):
        with pytest.raises(KernelFault, match="bad_tensor_map"):
            run_with(library, "load2", t.memory, False, bad, out, 256, 256, 0, 0, 0, 0, 0, 0)
