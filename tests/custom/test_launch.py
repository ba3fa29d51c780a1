"""Kernels of the user's on the CPU machine in check mode: over several caches, and with every kind of argument."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from kvgen import KernelSet, Paged
from kvgen.cli.project import generated
from kvgen.errors import ArgumentError
from kvgen.ops import Array, Custom, Scalar, Size, TensorMap
from kvgen.runtime import describe
from kvgen.runtime.tensor_map import encode
from kvgen.tensor_map import TensorMapPlan
from tests.custom.building import CHECK, build

EVERY = """#include "cache.cuh"
#include "../device/memory/mbarrier.cuh"
#include "../device/tma/tma.cuh"
extern "C" __global__ void every(const __grid_constant__ Cache cache, const bf16* rows, uint32_t* out, int32_t i,
                                 const __grid_constant__ TensorMap map, uint64_t u, int64_t l, float f, uint32_t w,
                                 int64_t stride, int64_t none, uint32_t n, uint32_t layers, const uint32_t* maybe,
                                 uint64_t* errors) {
  pdl_wait();
  extern __shared__ uint32_t shared[];
  shared[threadIdx.x] = (uint32_t)map.opaque[threadIdx.x / 2];
  __syncthreads();
  if (threadIdx.x != 0 || blockIdx.x != 0 || blockIdx.y != 0) return;
  out[0] = (uint32_t)i;
  out[1] = (uint32_t)(u >> 32);
  out[2] = (uint32_t)(l >> 32);
  out[3] = __float_as_uint(f);
  out[4] = w;
  out[5] = (uint32_t)stride;
  out[6] = (uint32_t)none;
  out[7] = n;
  out[8] = layers;
  out[9] = maybe == nullptr ? 7 : maybe[0];
  out[10] = shared[30];
  out[11] = rows[(n - 1) * stride].bits;
  out[12] = gridDim.x << 16 | gridDim.y << 8 | gridDim.z;
  if (w == 5) report(errors, Fault::slot, 1, 2);
}
"""
ARGUMENTS = (
    Array("rows", "bf16", ("N", "head_dim"), strided=True, align=4),
    Array("out", "u32", (16,), "inout", in_place=("maybe",)),
    Scalar("i", "i32"),
    TensorMap("map"),
    Scalar("u", "u64"),
    Scalar("l", "i64"),
    Scalar("f", "f32"),
    Scalar("w", "u32"),
    Size("stride", "rows.stride"),
    Size("none", "maybe.stride"),
    Size("n", "N"),
    Size("layers", "layers"),
    Array("maybe", "u32", ("Q",), optional=True, strided=True),
)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("every")
    op = Custom(
        name="every",
        text=EVERY,
        params=ARGUMENTS,
        grid=("max(N - 2, 1) * 2", "B"),
        threads=32,
        shared=128,
        errors=True,
        doc='Every kind of argument; """quotes""" and \\ too.\n\nMore.',
    )
    cache = Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16)
    build(folder, KernelSet(name="all", q_heads=4, cache=cache, ops=(op,)))
    with generated(folder, "all") as package:
        yield package


class Call:
    """A right call of `every`."""

    def __init__(self, package: ModuleType) -> None:
        tables = {"lengths": np.zeros(3, np.int32), "page_table": np.zeros((3, 1), np.int32)}
        self.package = package
        self.cache = package.Cache(np.zeros((2, 2, 5, 16, 2, 64), bfloat16), **tables)
        self.out = np.zeros(16, np.uint32)
        self.map = bytes(range(128))
        wide = np.arange(4 * 80).reshape(4, 80).astype(bfloat16)
        self.arguments: dict[str, Any] = {
            "rows": wide[:, :64], "out": self.out, "i": -3, "map": self.map, "u": 2**40, "l": -(2**40), "f": 0.5, "w": 9,
        }  # fmt: skip

    def __call__(self, **changes: Any) -> None:
        CHECK(self.package.every, self.cache[1], **(self.arguments | changes))


def test_in_place(every: ModuleType) -> None:
    """An array that is written may be the one that the spec names, as it lies, and no other array."""
    call = Call(every)
    call(maybe=call.out)
    assert int(call.out[9]) == int(np.int32(-3).view(np.uint32))
    lies_in = r"^out: got memory that {} lies in too; .*; pass an array of its own"
    for other in (call.out[1:], call.out[:5], call.out[::2], call.out[::-1]):
        with pytest.raises(
            ArgumentError, match=lies_in.format("maybe") + ", or maybe itself: its address and its strides"
        ):
            call(maybe=other)
    rows = np.zeros((4, 64), bfloat16)
    with pytest.raises(ArgumentError, match=lies_in.format("rows") + "$"):
        call(rows=rows, out=rows.view(np.uint32)[0, :16])
    with pytest.raises(ArgumentError, match=lies_in.format("lengths")):
        tables = {"lengths": np.zeros(16, np.int32), "page_table": np.zeros((16, 1), np.int32)}
        call.cache = call.package.Cache(np.zeros((2, 2, 5, 16, 2, 64), bfloat16), **tables)
        call(out=tables["lengths"].view(np.uint32))


def test_every_argument_arrives(every: ModuleType) -> None:
    call = Call(every)
    call()
    word = int.from_bytes(call.map[120:124], "little")
    last = call.arguments["rows"][3, 0]
    wanted = [
        2**32 - 3,
        2**8,
        2**32 - 2**8,
        0x3F000000,
        9,
        80,
        0,
        4,
        5,
        7,
        word,
        last.view(np.uint16),
        4 << 16 | 3 << 8 | 1,
    ]
    assert call.out[:13].tolist() == wanted


def test_optional_ones_and_the_error_word(every: ModuleType) -> None:
    call, errors = Call(every), np.zeros(1, np.uint64)
    spread = np.array([4, 0, 5, 0], np.uint32)[::2]
    call(maybe=spread, errors=errors, w=5)
    assert call.out[9] == 4 and call.out[6] == 2
    assert str(describe(errors)).startswith("SLOT")


def test_bound_and_positional(every: ModuleType) -> None:
    call = Call(every)
    step = every.every.bind(call.cache[0], *call.arguments.values())
    step()
    assert call.out[4] == 9
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'w'"):
        every.every.bind(call.cache[0], *list(call.arguments.values())[:-1])


def test_the_docstring(every: ModuleType) -> None:
    doc = every.EveryLauncher.__doc__
    for line in ("Every kind of argument; '''quotes''' and \\ too.", "More.", "f: f32.", "map: tensor map, 128 bytes.",
                 "rows: bf16[N, 64], rows may be strided."):  # fmt: skip
        assert line in doc


class Map:
    """What an encoder might return."""

    data = bytes(range(128))


def test_a_tensor_map_may_be_an_object(every: ModuleType) -> None:
    call = Call(every)
    call(map=Map())
    assert call.out[10] == int.from_bytes(Map.data[120:124], "little")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"i": 2**31}, "i: got 2147483648; the kernel takes i32; pass a number from -2147483648 to 2147483647"),
    ({"i": -(2**31) - 1}, "i: got -2147483649"),
    ({"w": -1}, "w: got -1; the kernel takes u32; pass a number from 0 to 4294967295"),
    ({"w": 2**32}, "w: got 4294967296"),
    ({"u": 2**64}, "u: got 18446744073709551616"),
    ({"l": 2**63}, "l: got 9223372036854775808"),
    ({"i": 1.0}, "i: got 1.0; the kernel takes i32; pass an int"),
    ({"i": True}, "i: got True"),
    ({"i": "3"}, "i: got '3'"),
    ({"i": None}, "i: got None"),
    ({"i": np.zeros(1, np.int32)}, "the kernel takes i32; pass an int"),
    ({"f": 3.5e38}, "f: got 3.5e+38; the kernel takes f32"),
    ({"f": 10**400}, "the kernel takes f32; pass at most"),
    ({"f": "x"}, "f: got 'x'; the kernel takes f32; pass a float"),
    ({"map": bytes(127)}, "map: got 127 bytes; it must be a tensor map of 128 bytes"),
    ({"map": np.zeros(128, np.uint8)}, "map: got ndarray; it must be a tensor map"),
    ({"rows": np.zeros((4, 63), bfloat16)}, "rows: got shape (4, 63); dimension 1 must be 64, head_dim of the spec"),
    ({"rows": np.zeros((4, 64), np.float16)}, "rows: got dtype f16; it must be bf16; pass a bf16 array"),
    ({"rows": np.zeros((4, 65), bfloat16)[:, :64]}, "it must be a multiple of 2 elements"),
    ({"out": np.zeros((16, 2), np.uint32)[:, 0]}, "out: got stride 2 in dimension 0"),
    ({"rows": None}, "rows: got None; the operation needs it"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_a_wrong_argument(every: ModuleType, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        Call(every)(**changes)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "value", [np.float32(0.25), np.int64(3), 2, float("inf"), float("-inf"), float("nan"), 3.4028235e38]
)
def test_numbers_of_other_types(every: ModuleType, value: Any) -> None:
    call = Call(every)
    call(f=value, i=np.int16(-4), w=np.uint8(200))
    assert call.out[3:4].view(np.float32).tobytes() == np.float32(value).tobytes()
    assert call.out[0] == 2**32 - 4 and call.out[4] == 200


GRIDS: list[tuple[Any, int, str]] = [
    ("N - 3", 1, "every: got a grid of (-2, 1, 1)"),
    ((1, "N * 20000"), 4, "every: got a grid of (1, 80000, 1)"),
    ("4 // (N - 1)", 1, "every: its grid divides by a size that is 0 in this call"),
    ("N * 536870912", 4, "got a grid of 2147483648 blocks"),
]


@pytest.mark.parametrize(("grid", "rows", "said"), GRIDS)
def test_a_grid_that_cannot_be(tmp_path: Path, grid: Any, rows: int, said: str) -> None:
    op = Custom(name="every", text=EVERY, params=ARGUMENTS, grid=grid, errors=True)
    cache = Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16)
    build(tmp_path, KernelSet(name="own", q_heads=4, cache=cache, ops=(op,)))
    with generated(tmp_path, "own") as package, pytest.raises(ArgumentError) as raised:
        Call(package)(rows=np.zeros((rows, 64), bfloat16))
    assert said in str(raised.value)


def test_an_empty_grid_launches_nothing_and_sizes_may_be_called_d(tmp_path: Path) -> None:
    text = '#include "cache.cuh"\nextern "C" __global__ void own(const __grid_constant__ Cache cache, float* x) { x[0] = 1; }\n'
    op = Custom(name="own", text=text, params=[Array("x", "f32", ("d", "T"), "out")], grid=("T", "d"))
    cache = Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16)
    build(tmp_path, KernelSet(name="sets", q_heads=4, cache=cache, ops=(op,)))
    with generated(tmp_path, "sets") as package:
        tables = {"lengths": np.zeros(3, np.int32), "page_table": np.zeros((3, 1), np.int32)}
        layer = package.Cache(np.zeros((2, 2, 5, 16, 2, 64), bfloat16), **tables)[0]
        package.own(layer, np.zeros((3, 0), np.float32))
        with pytest.raises(Exception, match=r"before griddepcontrol\.wait"):
            CHECK(package.own, layer, np.zeros((2, 1), np.float32))


OVERLAP = """#include "cache.cuh"
extern "C" __global__ void {name}(const __grid_constant__ Cache cache, const uint32_t* from, uint32_t* to) {{
  pdl_wait();
  {body}
  to[threadIdx.x] = x;
}}
"""
LATE = "const uint32_t x = from[threadIdx.x];\n  __syncthreads();\n  pdl_trigger();"
EARLY = "pdl_trigger();\n  const uint32_t x = from[threadIdx.x];"


def test_a_kernel_behind_may_overwrite_what_is_read_after_the_trigger(tmp_path: Path) -> None:
    own = tuple(
        Custom(
            name=name,
            text=OVERLAP.format(name=name, body=body),
            params=[Array("source", "u32", (64,)), Array("to", "u32", (64,), "out")],
            grid=1,
            threads=64,
        )
        for name, body in {"late": LATE, "early": EARLY}.items()
    )
    cache = Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16)
    build(tmp_path, KernelSet(name="overlaps", q_heads=4, cache=cache, ops=own, arch=("sm_90a",)))
    source, to = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    with generated(tmp_path, "overlaps") as package:
        tables = {"lengths": np.zeros(1, np.int32), "page_table": np.zeros((1, 1), np.int32)}
        layer = package.Cache(np.zeros((1, 2, 1, 16, 2, 64), bfloat16), **tables)[0]
        CHECK(package.late, layer, source, to)
        assert (to == source).all()
        with pytest.raises(Exception, match=r"read of 'source' .* behind the griddepcontrol\.launch_dependents"):
            CHECK(package.early, layer, source, to)


# A tensor copy of the user's -------------------------------------------------------------------------------------------

BOX = """#include "cache.cuh"
#include "../device/memory/mbarrier.cuh"
#include "../device/tma/tma.cuh"
extern "C" __global__ void box(const __grid_constant__ Cache cache, const __grid_constant__ TensorMap map, int32_t row,
                               const float* from, float* to) {
  __shared__ alignas(128) float tile[4][8];
  __shared__ uint64_t bar;
  pdl_wait();
  if (threadIdx.x == 0) {
    mbarrier_init(&bar, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&bar, sizeof(tile));
    tma_load(tile, &map, &bar, CacheHint::normal, 4, row);
  }
  __syncthreads();
  mbarrier_wait(&bar, 0);
  to[threadIdx.x] = (&tile[0][0])[threadIdx.x];
}
"""


def test_a_tensor_copy(tmp_path: Path) -> None:
    """`encode` makes what the call brings; rows past the array are zeros."""
    params = [
        TensorMap("map"),
        Scalar("row", "i32"),
        Array("source", "f32", (6, 16)),
        Array("to", "f32", (4, 8), "out"),
    ]
    op = Custom(name="box", text=BOX, params=params, grid=1, threads=32)
    cache = Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16)
    build(tmp_path, KernelSet(name="copies", q_heads=4, cache=cache, ops=(op,), arch=("sm_90a",)))
    raw = np.zeros(6 * 16 + 4, np.float32)
    first = -raw.ctypes.data % 16 // 4
    source = raw[first : first + 96].reshape(6, 16)
    source[...] = np.arange(96).reshape(6, 16)
    plan = TensorMapPlan("own", "f32", source.ctypes.data, (16, 6), (64,), (8, 4), ("column", "row"), 0, 8, 4, 1)
    to = np.zeros((4, 8), np.float32)
    with generated(tmp_path, "copies") as package:
        tables = {"lengths": np.zeros(1, np.int32), "page_table": np.zeros((1, 1), np.int32)}
        layer = package.Cache(np.zeros((1, 2, 1, 16, 2, 64), bfloat16), **tables)[0]
        CHECK(package.box, layer, encode(plan, "cpu"), 4, source, to)
    assert (to[:2] == source[4:, 4:12]).all() and not to[2:].any()
