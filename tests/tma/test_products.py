"""Tiles of paged caches as operands of wgmma: for each way into shared memory the products are NumPy's."""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import pytest

from kvgen import emulator
from kvgen.compile.flatten import flatten
from kvgen.emulator import Buffer, Library
from kvgen.errors import ArgumentError
from kvgen.paths import templates_root
from kvgen.runtime.tensor_map import encode
from kvgen.tensor_map import PageView, TensorMapPlan, group_tile, head_steps, split_tile
from tests.emulator.programs import aligned, nvrtc_ptx

HEADS = 3
Layout = Literal["NHD", "HND", "interleaved"]


@dataclass(frozen=True)
class Case:
    """A tile of `tokens`, K of `k` and V of `v` dims, from pages of `page` tokens."""

    plan: Literal["groups", "chunks", "rows"]
    layout: Layout
    page: int
    tokens: int
    k: int
    v: int
    dtype: str

    @property
    def issue(self) -> int:
        return gcd(self.page, self.tokens)

    @property
    def name(self) -> str:
        return f"{self.plan}_{self.layout}_p{self.page}_n{self.tokens}_k{self.k}_v{self.v}_{self.dtype}"

    @property
    def text(self) -> str:
        numbers = ("pitch", "k_chunk", "v_chunk", "group", "head")
        declared = ", ".join(f"{'int64_t' if n == 'pitch' else 'uint32_t'} {n}" for n in numbers)
        t = self.dtype
        return (
            f'extern "C" __global__ void __launch_bounds__(128) {self.name}(const __grid_constant__ TensorMap k_map, '
            f"const __grid_constant__ TensorMap v_map, const {t}* q, const {t}* p, float* s, float* o, const uint32_t* pages, "
            f"const uint32_t* tokens, const {t}* k_rows, const {t}* v_rows, {declared}) {{\n"
            f"  multiply<Plan::{self.plan}, {self.tokens}, {self.k}, {self.v}, {self.issue}>(&k_map, &v_map, q, p, s, o, pages, "
            f"tokens, k_rows, v_rows, {', '.join(numbers)});\n}}\n"
        )


DIMS = ((64, 64), (128, 128), (192, 128))
LAYOUTS: tuple[Layout, ...] = ("NHD", "HND", "interleaved")
CASES = [
    *(
        Case("groups", layout, page, 128, k, v, "bf16")
        for (k, v), (layout, page) in itertools.product(DIMS, zip(LAYOUTS, (16, 64, 256), strict=True))
    ),
    *(Case("groups", layout, page, 80, 256, 256, "f16") for layout, page in zip(LAYOUTS, (16, 64, 256), strict=True)),
    *(Case("groups", "NHD", 8, n, 64, 128, "f16") for n in (32, 96, 112, 176)),
    *(Case("chunks", layout, page, 128, k, v, "bf16") for k, v in DIMS for layout, page in (("NHD", 16), ("HND", 64))),
    Case("chunks", "NHD", 256, 64, 256, 256, "f16"),
    *(Case("rows", "NHD", 1, 128, k, v, "bf16") for k, v in DIMS),
    Case("rows", "NHD", 1, 80, 256, 256, "f16"),
]  # fmt: skip


@pytest.fixture(scope="module")
def library() -> Library:
    whole = (Path(__file__).parent / "products.cu").read_text() + "".join(c.text for c in CASES)
    text = flatten(
        "products.cu", lambda path: whole if path == "products.cu" else (templates_root() / path).read_text()
    )
    return emulator.build([nvrtc_ptx(text, arch="compute_90a", name="products.cu")], mode="check")


def pool_of(case: Case, dim: int, pages: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, PageView]:
    """Memory that ends with its last element, the same as [page, token, head, dim], and the view of it."""
    kind = np.dtype(ml_dtypes.bfloat16 if case.dtype == "bf16" else np.float16)
    heads_first = case.layout == "HND"
    kv = 2 if case.layout == "interleaved" else 1  # K and V of a token side by side
    shape = (pages, HEADS, case.page, dim) if heads_first else (pages, case.page, kv, HEADS, dim)
    memory = aligned(int(np.prod(shape)) * 2)
    whole = memory.view(kind).reshape(shape)
    whole[:] = rng.integers(-4, 5, shape)
    logical = whole.transpose(0, 2, 1, 3) if heads_first else whole[:, :, 0]
    page, token, head, _ = (s // 2 for s in logical.strides)
    view = PageView(case.dtype, memory.ctypes.data, pages, page, case.page, token, HEADS, head, dim)
    return memory, logical, view


def map_of(case: Case, view: PageView, dim: int) -> bytes:
    if case.plan == "rows":
        return bytes(128)
    plan: TensorMapPlan
    if case.plan == "groups":
        plan = group_tile(view, case.tokens, dim)
    else:
        plan = split_tile(view, case.tokens, dim, page_size=case.page)
    assert plan.tile_bytes == case.tokens * dim * 2 and plan.issue_rows == case.issue
    return encode(plan, "cpu")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_products(case: Case, library: Library) -> None:
    rng = np.random.default_rng(3)
    pages = 300 if case.page == 1 else 6 + case.tokens // case.page
    k_memory, k, k_view = pool_of(case, case.k, pages, rng)
    v_memory, v, v_view = pool_of(case, case.v, pages, rng)
    first = 8 if case.page > case.tokens else 0  # the tile begins inside of a page
    at = first + np.arange(0, case.tokens, case.issue)
    table = rng.permutation(pages)[: 1 + at.max() // case.page]
    bad = rng.integers(len(at)) if case.plan != "rows" else -1
    ids, tokens = table[at // case.page].astype(np.uint32), (at % case.page).astype(np.uint32)
    if bad >= 0:
        ids[bad] = rng.choice([pages, 2**31, 2**32 - 1])  # no page of the pool: zeros
    q = rng.integers(-2, 3, (64, case.k)).astype(k.dtype)
    p = rng.integers(0, 3, (64, case.tokens)).astype(k.dtype)
    s, o = np.zeros((64, case.tokens), np.float32), np.zeros((64, case.v), np.float32)
    arrays = {"q": q, "p": p, "s": s, "o": o, "ids": ids, "tokens": tokens, "k": k_memory, "v": v_memory}
    buffers = [Buffer(n, a.ctypes.data, a.nbytes, n in "so") for n, a in arrays.items()]
    head = int(rng.integers(HEADS))
    steps = [head_steps(case.page, x.token_stride, x.head_stride, x.dim, 64) or (0, 0) for x in (k_view, v_view)]
    numbers = (steps[0][0] * head, steps[1][0] * head, steps[0][1], head)
    args = [map_of(case, k_view, case.k), map_of(case, v_view, case.v)]
    args += [struct.pack("<Q", a.ctypes.data) for a in arrays.values()]
    args += [struct.pack("<q", HEADS), *(struct.pack("<I", n) for n in numbers)]
    shared = 2 * (case.tokens * (case.k + case.v) + 64 * case.k)
    for schedule in ("ascending", 1):
        library.kernels[case.name].launch(
            (1, 1, 1), (128, 1, 1), args, buffers=buffers, dynamic_shared=shared, schedule=schedule
        )
        place = np.arange(case.tokens) // case.issue
        live = (ids[place] < pages)[:, None]
        inside = tokens[place] + np.arange(case.tokens) % case.issue
        page = np.minimum(ids[place], pages - 1)
        keys, values = (np.where(live, x[page, inside, head].astype(np.float32), 0) for x in (k, v))
        np.testing.assert_array_equal(s, q.astype(np.float32) @ keys.T)
        np.testing.assert_array_equal(o, p.astype(np.float32) @ values)


def test_what_groups_cannot_be_made_of() -> None:
    def view(tokens: int = 16, token_stride: int = 256, head_stride: int = 128, heads: int = 2) -> PageView:
        return PageView("bf16", 4096, 4, 8192, tokens, token_stride, heads, head_stride, 128)

    assert group_tile(view(), 128, 128).coordinates == ("column", "row % 8", "chunk", "row / 8", "page")
    assert group_tile(view(heads=1, head_stride=40), 128, 128).dims == (64, 8, 2, 2, 4)
    assert group_tile(view(token_stride=128, head_stride=2048), 128, 128).dims == (64, 8, 2, 4, 4)
    for wrong in (view(tokens=12), view(head_stride=96), view(token_stride=128, head_stride=2112)):
        with pytest.raises(ArgumentError, match="use split_tile"):
            group_tile(wrong, 128, 128)
    with pytest.raises(ArgumentError, match="use split_tile"):
        group_tile(view(), 128, 96)
