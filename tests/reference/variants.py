"""Caches of every variant, small, and memory for them: 0xEE wherever nobody wrote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from kvgen import CSR, Block, Continuous, Dense, Latent, Layout, Paged, PerKV, Quant
from kvgen.layout.dtypes import dtype
from kvgen.reference import TableView, append, cache_rows, gather
from kvgen.runtime.faults import NO_FAULT
from kvgen.schema.cache import Cache

PAGES, LAYERS, CANARY = 3, 2, 0xEE
F32 = np.float32
FP8 = Quant(dtype="e4m3", scale_dtype="f32")


def blank(shape: Sequence[int], kind: Any = np.uint8, gap: int = 0) -> np.ndarray:
    """An array of canaries; with `gap`, so many elements of canaries between its outermost entries."""
    kind = np.dtype(kind)
    inner = [int(n) for n in np.cumprod((kind.itemsize, *shape[:1:-1]))[::-1]] if len(shape) > 1 else []
    outer = (math.prod(shape[1:]) + gap) * kind.itemsize
    memory = np.full(shape[0] * outer, CANARY, np.uint8)
    return np.ndarray(tuple(shape), kind, memory, 0, (outer, *inner))


def bits(array: np.ndarray) -> np.ndarray:
    """An array's bytes."""
    return np.ascontiguousarray(array).view(np.uint8)


def paged(**more: Any) -> Paged:
    """Two heads of four dims in f32, pages of two tokens."""
    return Paged(**({"dtype": "f32", "kv_heads": 2, "head_dim": 4, "page_size": 2} | more))


def latent(**more: Any) -> Latent:
    """Rows of 8 latent dims and 2 of RoPE in bf16, pages of two tokens."""
    return Latent(**({"dtype": "bf16", "latent_dim": 8, "rope_dim": 2, "page_size": 2} | more))


APART = Layout(k="page layer token head dim", v="page layer head token dim")
VARIANTS: dict[str, Cache] = {
    "plain": paged(),
    "cast": paged(quant=Quant(dtype="e4m3")),
    "cast_both_fp8": paged(k_quant=Quant(dtype="e4m3"), v_quant=Quant(dtype="e5m2")),
    "fp8": paged(quant=FP8),
    "fp8_pow2": paged(quant=Quant(dtype="e5m2", scale_dtype="f32", recipe="pow2")),
    "fp8_all_heads": paged(quant=Quant(dtype="e4m3", scale_dtype="f16", block=Block(head=None))),
    "fp8_head_pairs": paged(kv_heads=4, quant=Quant(dtype="e4m3", scale_dtype="bf16", block=Block(head=2))),
    "i8": paged(dtype="bf16", quant=Quant(dtype="i8", scale_dtype="bf16")),
    "i8_zero": paged(dtype="f16", head_dim=5, quant=Quant(dtype="i8", scale_dtype="f16", zero=True)),
    "i8_groups": paged(head_dim=5, quant=Quant(dtype="i8", scale_dtype="f32", block=Block(dim=2))),
    "i4": paged(head_dim=6, quant=Quant(dtype="i4", scale_dtype="f32", block=Block(dim=4))),
    "i4_zero": paged(head_dim=6, quant=Quant(dtype="i4", scale_dtype="bf16", zero=True, block=Block(dim=4))),
    "e2m1": paged(quant=Quant(dtype="e2m1", scale_dtype="f16")),
    "nvfp4": paged(head_dim=32, quant=Quant(dtype="e2m1", scale_dtype="e4m3", recipe="max")),
    "nvfp4_global": paged(head_dim=32, quant=Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global")),
    "nvfp4_tiles": paged(
        head_dim=128, page_size=256, quant=Quant(dtype="e2m1", scale_dtype="e4m3", recipe="max", order="swizzled")
    ),
    "given": paged(quant=Quant(dtype="i8", scale_dtype="f32", scale="given", block=Block(token=None, head=1, dim=2))),
    "own_table": paged(quant=Quant(dtype="e4m3", scale_dtype="f32", own_table=True)),
    "own_table_k": paged(
        k_quant=Quant(dtype="e4m3", scale_dtype="f32", own_table=True), v_quant=Quant(dtype="e4m3"), table=Dense()
    ),
    "k_only_quantized": paged(layout=APART, k_quant=FP8),
    "differently": paged(
        layout=APART,
        k_quant=Quant(dtype="i8", scale_dtype="f16", zero=True),
        v_quant=Quant(dtype="i4", scale_dtype="bf16", block=Block(dim=2)),
    ),
    "scales_apart": paged(
        quant=FP8,
        layout=Layout(
            kv="page kv layer token head dim", scales="page layer head token dim", v_scales="layer page token head dim"
        ),
    ),
    "split": paged(
        head_dim=8,
        page_size=4,
        quant=Quant(dtype="i8", scale_dtype="f32", block=Block(dim=4)),
        layout=Layout(k="page head dim/4 token dim%4", v="page token/2 head dim token%2", layers="pointers"),
    ),
    "swizzled": paged(
        head_dim=8, page_size=4, quant=FP8, layout=Layout(kv="page kv layer token head dim", swizzle=(1, 2, 2))
    ),
    "swizzled_i4": paged(
        head_dim=8,
        page_size=4,
        quant=Quant(dtype="i4", scale_dtype="f32"),
        layout=Layout(kv="page kv layer head token dim", swizzle=(2, 1, 2)),
    ),
    "per_kv": paged(quant=FP8, layout="page layer token head dim", table=PerKV()),
    "continuous": Continuous(dtype="bf16", kv_heads=2, head_dim=4, quant=FP8),
    "byte_page": paged(quant=Quant(dtype="e4m3", scale_dtype="f32", place="page")),
    "byte_page_hnd": paged(
        head_dim=6,
        kv_heads=3,
        page_size=3,
        table=CSR(),
        layout=Layout(kv="page kv head token dim", layers="pointers"),
        quant=Quant(dtype="i4", scale_dtype="f16", place="page", zero=True, block=Block(dim=4)),
    ),
    "byte_page_k": paged(
        k_quant=Quant(dtype="i8", scale_dtype="f32", place="page"), v_quant=Quant(dtype="e4m3"), stores="kv"
    ),
    "index_k": paged(stores="k", kv_heads=1, head_dim=8, quant=Quant(dtype="e4m3", scale_dtype="f32", place="page")),
    "latent_plain": latent(),
    "latent_two_tensors": latent(layout=Layout(kv="page layer token dim", rope="page layer token dim")),
    "latent_two_tensors_fp8": latent(layout=Layout(k="page layer token dim", rope="layer page dim token"), quant=FP8),
    "latent_cast": latent(quant=Quant(dtype="e4m3")),
    "latent_row": latent(quant=Quant(dtype="e4m3", scale_dtype="f32", block=Block(dim=4), place="row", recipe="pow2")),
    "latent_pool": latent(quant=Quant(dtype="e4m3", scale_dtype="f32", block=Block(dim=4))),
    "latent_i4": latent(quant=Quant(dtype="i4", scale_dtype="bf16", block=Block(dim=4), place="row", zero=True)),
    "latent_rope_too": latent(quant_rope=True, quant=FP8),
    "residual": paged(
        page_size=4,
        layout=APART,
        k_quant=Quant(dtype="i4", scale_dtype="f32", zero=True, block=Block(token=2, dim=1), residual=2),
        v_quant=Quant(dtype="i4", scale_dtype="f32", zero=True, block=Block(dim=2)),
    ),
    "residual_split": paged(
        page_size=8,
        head_dim=8,
        layout=Layout(k="page layer token/2 head dim token%2", v="page layer token head dim"),
        k_quant=Quant(dtype="i8", scale_dtype="f16", block=Block(token=4, dim=1), residual=4),
    ),
}


def arrays_of(cache: Cache, *, pages: int = PAGES, scale_pages: int = PAGES + 2, requests: int = 2) -> dict[str, Any]:
    """Every tensor and array that `Cache(...)` takes for the pool, full of canaries; given scales are powers of two."""
    sizes = {"pages": pages, "scale_pages": scale_pages, "layers": LAYERS, "tokens": 3, "B": requests}
    own = any(q is not None and q.own_table for q in cache.quants.values())
    if not own:
        sizes["scale_pages"] = pages
    found: dict[str, Any] = {}
    pointers = cache.layout.layers == "pointers"
    for tensor in cache.storage.tensors:
        kind = dtype(tensor.dtypes[-1]).numpy()
        shape = [sizes[s] if isinstance(s, str) else s for s in tensor.shape]
        layers = [blank(shape, kind, gap=16) for _ in range(LAYERS if pointers else 1)]
        found[tensor.name] = layers if pointers else layers[0]
    for name in found.keys() & {"k_scale", "v_scale", "k_global_scale", "v_global_scale"}:
        for array in found[name] if pointers else [found[name]]:
            powers = np.arange(array.size).reshape(array.shape) % 5 - 3.0
            array[...] = np.exp2(powers).astype(array.dtype)
    if cache.storage.residual:
        found["k_sealed"] = np.zeros(requests, np.int32)
    return found


def memory_of(arrays: dict[str, Any]) -> dict[str, list[np.ndarray]]:
    """The bytes behind every array, gaps included; the arrays' own, not a copy."""
    found = {}
    for name, array in arrays.items():
        found[name] = [a if a.base is None else a.base for a in (array if isinstance(array, list) else [array])]
    return found


# --- one step, by hand --------------------------------------------------------------------------------------------------


def hexes(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), np.uint8)


def rows(*tokens: Any, kind: Any = F32) -> np.ndarray:
    """`[T, heads, dim]`; a token of numbers has one head."""
    found = np.array(tokens, np.float64)
    return (found if found.ndim == 3 else found[:, None]).astype(kind)


def step(cache: Cache, arrays: dict[str, Any], new: list[np.ndarray], layer: int = 0) -> TableView:
    """Append to request 0, whose page is 2, from its second token on."""
    tables = {"lengths": np.array([1]), "page_table": np.array([[2]]), "scales_page_table": np.array([[1]])}
    if isinstance(cache.page_table, PerKV):
        tables["page_table"] = np.array([[[2], [0]]])
    view = TableView(cache, tables, 3, cache.page_tokens or 0)
    assert append(view, cache_rows(cache, arrays, layer), new, row_offsets=np.array([0, len(new[0])])) == NO_FAULT
    return view


def read(cache: Cache, arrays: dict[str, Any], view: TableView, layer: int = 0) -> list[np.ndarray]:
    """Token 1 of request 0, gathered."""
    pools = cache_rows(cache, arrays, layer)
    before = [np.zeros((1, p.heads, p.dim), ml_dtypes.bfloat16 if cache.dtype == "bf16" else F32) for p in pools]
    found = gather(view, pools, before, row_offsets=np.array([0, 1]), starts=np.array([1]))
    assert found.errors == NO_FAULT
    return [out[0] for out in found.outputs]


def one_head(quant: Quant, head_dim: int = 4, **more: Any) -> Paged:
    return paged(kv_heads=1, head_dim=head_dim, quant=quant, **more)


def check(array: np.ndarray, *written: tuple[Any, np.ndarray]) -> None:
    """The array holds what was written where, and canaries everywhere else."""
    wanted = np.full(bits(array).shape, CANARY, np.uint8).view(array.dtype)
    for where, what in written:
        wanted[where] = what
    np.testing.assert_array_equal(bits(array), bits(wanted))
