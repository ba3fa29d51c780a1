"""Pages between ranks of different tensor-parallel sizes: by their bytes alone, bit for bit, codes and scales alike."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from kvgen import Block, KernelSet, Layout, Paged, Quant, ops, page_ranges, paired_ranges, presets
from kvgen.errors import ArgumentError
from kvgen.schema.presets.vllm import PackedOrder
from tests.support.harness import package

ROOT: Final = Path(__file__).resolve().parents[2]
HEADS: Final = 4  # of the model
PAGES: Final = 7
LAYERS: Final = 3
SHAPE: Final[dict[str, Any]] = {"dtype": "bf16", "head_dim": 8, "page_size": 16}  # of what the documentation counts
TOKEN_HEAD: Final = Quant(dtype="e4m3", scale_dtype="f32", block=Block(token=1, head=1))
CACHES: Final[dict[str, dict[str, Any]]] = {
    "bf16": {},
    "bf16_heads_outside": {"layout": Layout(kv="page head layer token kv dim"), "total_layers": LAYERS},
    "bf16_heads_first": {"layout": Layout(kv="head page token kv dim", layers="pointers"), "total_pages": PAGES},
    "e4m3": {"quant": TOKEN_HEAD},
    "e4m3_heads_outside": {
        "quant": TOKEN_HEAD,
        "layout": Layout(kv="page head layer kv token dim"),
        "total_layers": LAYERS,
    },
    "e4m3_pairs": {"quant": Quant(dtype="e4m3", scale_dtype="f32", block=Block(token=1, head=2))},
    "nvfp4": {"quant": Quant(dtype="e2m1", scale_dtype="e4m3", recipe="max", block=Block(token=1, head=1, dim=16))},
}


def shard(name: str, heads: int) -> ModuleType:
    """The package of a rank that holds `heads` KV heads."""
    cache = Paged(dtype="bf16", kv_heads=heads, head_dim=16, page_size=4, **CACHES[name])
    kernels = KernelSet(
        name=f"reshard_{name}_{heads}", q_heads=2 * heads, cache=cache, ops=[ops.SwapPages(direction="out")]
    )
    return package(kernels)


class Rank:
    """A rank's pool full of random bytes, NaNs among them."""

    def __init__(self, name: str, heads: int, seed: int) -> None:
        generated, rng = shard(name, heads), np.random.default_rng(seed)
        sizes = {"pages": PAGES, "scale_pages": PAGES, "layers": LAYERS}
        self.tensors = [t for t in generated.Pages.TENSORS if "page" in t.axes]
        self.arrays: dict[str, list[NDArray[Any]]] = {}
        for t in self.tensors:
            shape = [sizes.get(n, n) for n in t.shape]
            kind = np.dtype(ml_dtypes.bfloat16 if t.dtype == "bf16" else np.float32 if t.dtype == "f32" else np.uint8)
            count = 1 if "layer" in t.axes else LAYERS
            self.arrays[t.name] = [
                rng.integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), np.uint8).view(kind)
                for _ in range(count)
            ]
        self.heads = heads
        self.pages = generated.Pages(
            **{t.name: self.arrays[t.name] if "layer" not in t.axes else self.arrays[t.name][0] for t in self.tensors}
        )

    def bits(self, page: int, heads: range) -> list[NDArray[np.uint8]]:
        """A page's bytes of these heads, element by element, tensor by tensor and layer by layer."""
        found = []
        for t in self.tensors:
            for array in self.arrays[t.name]:
                part = np.moveaxis(array, [t.axes.index("page"), t.axes.index("head")], [0, 1])[page]
                block = self.heads // len(part)
                part = part[heads.start // block : heads.stop // block]
                found.append(np.ascontiguousarray(part).view(np.uint8))
        return found


def move(source: Rank, target: Rank, pages: dict[int, int], given: range | None, taken: range | None) -> int:
    """Move pages (source's id to the target's) of heads by their bytes; how many pieces that took."""
    pieces = 0
    outputs = page_ranges(source.pages, list(pages), heads=given)
    for here, there in zip(outputs, page_ranges(target.pages, list(pages.values()), heads=taken), strict=True):
        for pair in paired_ranges(here, there):
            ctypes.memmove(pair.target, pair.source, pair.nbytes)
            pieces += 1
    return pieces


def hold(rank: Rank, page: int, heads: range, wanted: list[NDArray[np.uint8]]) -> None:
    for found, expected in zip(rank.bits(page, heads), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)


def _packed(order: PackedOrder, heads: int) -> Paged:
    totals = {"LHBNC": {"total_pages": 2}, "BHLNC": {"total_layers": 32}}.get(order, {})
    return presets.vllm_packed(**SHAPE, kv_heads=heads, order=order, **totals)


def _pages(row: str, heads: int) -> Any:
    """A pool of two pages and 32 layers; where pages lie outside of layers, layers are views of one memory."""
    cache = TABLE[row](heads)
    name = "counted_" + "".join(c if c.isalnum() else "_" for c in row.lower()) + str(heads)
    generated = package(KernelSet(name=name, q_heads=heads, cache=cache, ops=[ops.SwapPages(direction="out")]))
    sizes = {"pages": 2, "layers": 32}
    (tensor,) = generated.Pages.TENSORS
    shape = [sizes.get(n, n) for n in tensor.shape]
    if "layer" in tensor.axes:
        return generated.Pages(np.zeros(shape, ml_dtypes.bfloat16))
    pages_first = "BL" in row
    memory = np.zeros([shape[0], 32, *shape[1:]] if pages_first else [32, *shape], ml_dtypes.bfloat16)
    return generated.Pages([memory[:, i] if pages_first else memory[i] for i in range(32)])


MOVED: Final = {6: 1, 0: 5, 3: 0}


@pytest.mark.parametrize(
    ("name", "tp"), [*((name, 2) for name in CACHES), ("bf16", 4), ("e4m3", 4), ("e4m3_heads_outside", 4)]
)
def test_one_rank_to_many_and_back(name: str, tp: int) -> None:
    """4 KV heads on one rank, 4 / tp on each of the others; then back into another pool of the first size."""
    each = HEADS // tp
    whole, back = Rank(name, HEADS, 1), Rank(name, HEADS, 2)
    untouched = [p for p in range(PAGES) if p not in MOVED.values()]
    for rank in range(tp):
        part, heads = Rank(name, each, 3 + rank), range(rank * each, (rank + 1) * each)
        before = {p: part.bits(p, range(each)) for p in untouched}
        move(whole, part, MOVED, heads, None)
        for source, target in MOVED.items():
            hold(part, target, range(each), whole.bits(source, heads))
        for page, wanted in before.items():
            hold(part, page, range(each), wanted)
        others = [range(h) for h in [heads.start] if h] + [range(h, HEADS) for h in [heads.stop] if h < HEADS]
        beside = {(p, o): back.bits(p, o) for p in MOVED for o in others}
        move(part, back, {target: source for source, target in MOVED.items()}, None, heads)
        for (page, other), wanted in beside.items():
            hold(back, page, other, wanted)
    for source in MOVED:
        hold(back, source, range(HEADS), whole.bits(source, range(HEADS)))


# The table of docs/disaggregation.md: caches of a layout, one of whose axes the rows name.
TABLE: Final[dict[str, Callable[[int], Paged]]] = {
    "kvgen's own, `max_paged`": lambda heads: Paged(**SHAPE, kv_heads=heads),
    "`kvbm_universal`": lambda heads: presets.kvbm_universal(**SHAPE, kv_heads=heads, total_layers=32),
    "`kvbm_operational`": lambda heads: presets.kvbm_operational(**SHAPE, kv_heads=heads),
    **{
        f'`vllm_packed(order="{order}")`': partial(_packed, order)
        for order in ("BHLNC", "BLHNC", "BLNHC", "LBHNC", "LBNHC", "LHBNC")
    },
    "`flashinfer_hnd`": lambda heads: presets.flashinfer_hnd(**SHAPE, kv_heads=heads),
    "`vllm_hnd`": lambda heads: presets.vllm_hnd(**SHAPE, kv_heads=heads),
    "`vllm`": lambda heads: presets.vllm(**SHAPE, kv_heads=heads),
}


@pytest.mark.parametrize("row", TABLE)
def test_the_descriptors_that_the_page_counts(row: str) -> None:
    """A page of 16 tokens, 8 KV heads and 32 layers: all of it to a pool like its own, and 4 heads to a rank of them."""
    counts = []
    for kept in (8, 4):
        whole, part = (_pages(row, heads) for heads in (8, kept))
        (source,), (target,) = page_ranges(whole, [1], heads=range(8 - kept, 8)), page_ranges(part, [0])
        counts.append(len(paired_ranges(source, target)))
    lines = (ROOT / "docs" / "disaggregation.md").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith(f"| {row} |") and line.endswith(f"| {counts[0]} | {counts[1]} |") for line in lines), (
        counts
    )


def test_more_ranks_than_heads() -> None:
    """4 ranks over 2 KV heads: two ranks hold the same head."""
    source = Rank("e4m3", 2, 1)
    for rank in range(4):
        target, head = Rank("e4m3", 1, 2 + rank), rank * 2 // 4
        move(source, target, MOVED, range(head, head + 1), None)
        for page, there in MOVED.items():
            hold(target, there, range(1), source.bits(page, range(head, head + 1)))


def test_all_heads_do_not_fit_a_shard() -> None:
    with pytest.raises(ArgumentError, match=r"^target: got 1536 bytes for 3072 of the source"):
        move(Rank("bf16", HEADS, 1), Rank("bf16", 2, 2), {0: 0}, None, None)
