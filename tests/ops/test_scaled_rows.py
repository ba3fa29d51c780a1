"""Rows that have their scales: K's and V's bytes of a token's head, in one row or one each, through the operations that read and
write them."""

from __future__ import annotations

import os
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import Block, KernelSet, Layout, Paged, Quant, ops, presets
from kvgen.codegen.emit import render_all, units_of
from kvgen.compile import compile_many, default_cache
from kvgen.lowering.attention.decode_simt import DecodeSimt
from kvgen.reference import cache_rows
from kvgen.reference.quant import unpack_codes
from kvgen.runtime.cpu import machine
from kvgen.schema.codebooks import lloyd_max
from kvgen.schema.loader import LoadedSet
from tests.ops.test_decode import decode_scene
from tests.support.batches import batches
from tests.support.extend_steps import steps
from tests.support.harness import check_append, check_decode, check_gather, index_name, offsets_of, package
from tests.support.scenes import Scene


def paged(**fields: Any) -> Paged:
    return Paged(dtype="bf16", kv_heads=2, head_dim=32, page_size=16, **fields)


def rows(name: str, cache: Paged, *more: Any) -> KernelSet:
    found = (ops.Append(), ops.Gather(), *more)
    return KernelSet(name=f"scaled_{name}", q_heads=8, cache=cache, ops=found, arch=("sm_90a",))


def per_token_head(kv_cache_dtype: Any) -> Paged:
    """vLLM's packed cache with 32 codes of K, an f32, 32 codes of V, an f32 a row."""
    sizes: dict[str, Any] = {"dtype": "bf16", "kv_heads": 2, "head_dim": 32, "page_size": 16}
    return presets.vllm_packed(**sizes, order="LBHNC", kv_cache_dtype=kv_cache_dtype)


def norms(recipe: Any, **more: Any) -> Quant:
    """Codes of a codebook of 16 values under a norm, as rotated keys have them: 16 + 2 bytes."""
    book = lloyd_max(4, 32)
    return Quant(dtype="i4", scale_dtype="f16", codebook=book, recipe=recipe, place="row", **more)


CAMPAIGN: Final = "KVGEN_FAMILY" in os.environ


def decoded(name: str, cache: Paged) -> KernelSet:
    return rows(name, cache, ops.Decode(split="none"))


# vLLM's turboquant_k8v4, K cast to fp8, V in 4 bits with scale and least value: 32 + 16 + 4 bytes, padded to 56.
UNLIKE: Final = paged(
    layout=Layout(kv="page layer token head kv dim", row_align=8),
    k_quant=Quant(dtype="e4m3"),
    v_quant=Quant(dtype="i4", scale_dtype="f16", zero=True, recipe="min", place="row"),
)
# vLLM's turboquant_3bit_nc: rows of 12 + 2 + 12 + 4 bytes, norms that readers correct.
TURNED: Final = presets.vllm_turboquant(
    dtype="bf16", kv_heads=2, head_dim=32, page_size=16, kv_cache_dtype="turboquant_3bit_nc"
)
# lmdeploy's quant_policy 42: codes of a byte that are 16 and 8 dims apart, signs above those of K.
STRIDED: Final = presets.lmdeploy_turboquant(dtype="f16", kv_heads=2, head_dim=32, page_size=16)
SETS: Final = {
    "narrow": decoded("narrow", TURNED).model_copy(
        update={"ops": (*decoded("narrow", TURNED).ops, ops.Append(name="append_turned", hadamard="qk"))}
    ),
    "book": decoded(
        "book", paged(layout=Layout(kv="page layer token head kv dim"), k_quant=norms("unit"), v_quant=norms("norm"))
    ),
    # Norms of V that readers correct, by fewer lanes than a warp has.
    "corrected": decoded(
        "corrected",
        paged(
            layout=Layout(kv="page layer token head kv dim"),
            k_quant=norms("unit"),
            v_quant=norms("norm", norm_correction=True),
        ),
    ),
    "strided": decoded("strided", STRIDED),
    "int8": decoded("int8", per_token_head("int8_per_token_head")),
    "unlike": (decoded if CAMPAIGN else rows)("unlike", UNLIKE),
}
APART: Final = Layout(k="page layer head token dim", v="page layer token head dim")
if CAMPAIGN:
    SETS["fp8"] = rows("fp8", per_token_head("fp8_per_token_head"), ops.Extend())
    # nvfp4 on two levels: 16 bytes of codes, 2 of scales, a tensor each.
    nvfp4 = Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global", place="row")
    SETS["apart"] = decoded("apart", paged(layout=APART, quant=nvfp4))
    nf4 = Quant(dtype="i4", scale_dtype="f32", block=Block(dim=16), codebook=lloyd_max(4, 8))
    SETS["nf4"] = decoded("nf4", paged(layout=APART, quant=nf4))
    # Codes of 3 and 2 bits in pools, of vectors wider than an access to f32 rows; norms of groups of dims; prompts of
    # vLLM's rows.
    SETS["few_f32"] = decoded(
        "few_f32",
        Paged(
            dtype="f32",
            kv_heads=2,
            head_dim=48,
            page_size=4,
            layout=APART,
            k_quant=Quant(dtype="i3", scale_dtype="f32", zero=True, block=Block(dim=16)),
            v_quant=Quant(dtype="i2", scale_dtype="f16", zero=True),
        ),
    )
    corrected, signs = {"recipe": "norm", "norm_correction": True}, {"recipe": "signs"}
    SETS["few_groups"] = decoded(
        "few_groups",
        paged(
            layout=APART,
            k_quant=Quant(dtype="i2", scale_dtype="f32", codebook=lloyd_max(2, 16), block=Block(dim=16), **corrected),
            v_quant=Quant(
                dtype="i3", scale_dtype="bf16", codebook=lloyd_max(3, 64), block=Block(head=None), **corrected
            ),
        ),
    )
    # Signs above few codes, of groups of dims and of all heads.
    SETS["signs"] = decoded(
        "signs",
        paged(
            layout=APART,
            k_quant=Quant(
                dtype="i3", scale_dtype="f32", zero=True, block=Block(dim=16), codebook=lloyd_max(2, 16), **signs
            ),
            v_quant=Quant(
                dtype="i2", scale_dtype="bf16", zero=True, block=Block(head=None), codebook=lloyd_max(1, 64), **signs
            ),
        ),
    )
    # lmdeploy's int4 in rows, of f32.
    SETS["strided_rows"] = decoded(
        "strided_rows",
        Paged(
            dtype="f32",
            kv_heads=2,
            head_dim=40,
            page_size=4,
            layout=Layout(kv="page layer token head kv dim"),
            quant=Quant(dtype="i4", scale_dtype="f16", zero=True, packing="strided", place="row"),
        ),
    )
    SETS["turned"] = rows("turned", TURNED, ops.Extend())
    groups = Quant(dtype="e4m3", scale_dtype="f16", block=Block(dim=16), place="row")
    SETS["kv_axis"] = decoded("kv_axis", paged(layout=Layout(kv="page kv layer token head dim"), quant=groups))


def having(kind: str) -> list[str]:
    return [name for name, kernels in SETS.items() if any(op.kind == kind for op in kernels.ops)]


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=3)
@given(data=st.data())
def test_append_and_gather(name: str, data: Any) -> None:
    """Every byte of the pool is the oracle's, padding and other rows untouched; and is read back."""
    kernels = SETS[name]
    batch = data.draw(batches(kernels))
    before = [n - new for n, new in zip(batch.totals, batch.new, strict=True)]
    scene = Scene(kernels, batch, batch.totals if kernels.cache.lengths == "after" else before)
    scene.fill(before)
    index = index_name(kernels, "append")
    check_append(
        scene, batch.leading + sum(batch.new) + batch.padding, row_offsets=offsets_of(batch.new, index, batch.leading)
    )
    scene = Scene(kernels, batch, batch.totals)
    scene.fill(batch.totals)
    check_gather(
        scene,
        batch.leading + sum(batch.totals) + batch.padding,
        row_offsets=offsets_of(batch.totals, index, batch.leading),
        starts=None,
    )


@pytest.mark.parametrize("name", having("decode"))
@settings(max_examples=3)
@given(data=st.data())
def test_decode(name: str, data: Any) -> None:
    batch = data.draw(batches(SETS[name], least=0 if SETS[name].cache.lengths == "after" else 1))
    scene, q = decode_scene(SETS[name], batch, len(batch.totals) + batch.padding)
    check_decode(scene, q, lse=data.draw(st.booleans()))


def test_decode_by_parts_of_three_bytes() -> None:
    """A lane that has five query heads reads four f32 of a row at a time, half of the codes that three bytes hold; the kernel
    compiles. A campaign runs such kernels (tests/forms, seed 1 14100)."""
    turned = Quant(
        dtype="i3", scale_dtype="f16", codebook=lloyd_max(3, 32), recipe="norm", norm_correction=True, place="row"
    )
    cache = Paged(dtype="f32", kv_heads=1, head_dim=32, page_size=16, quant=turned)
    op = ops.Decode(split="none")
    kernels = KernelSet(name="scaled_parts", q_heads=5, cache=cache, ops=(op,), arch=("sm_90a",))
    context = op.plan(kernels)[0].context
    assert isinstance(context, DecodeSimt) and context.shape.width == 4
    loaded = LoadedSet(kernels, "tests/ops/test_scaled_rows.py", "")
    jobs: list[Any] = [(unit, "sm_90a", "ptx") for unit in units_of(loaded, render_all([loaded]), "generated")]
    assert len(compile_many(jobs, cache=default_cache())) == 1


if CAMPAIGN:

    @pytest.mark.parametrize("name", ["fp8", "turned"])
    @settings(max_examples=3)
    @given(data=st.data())
    def test_extend(name: str, data: Any) -> None:
        data.draw(steps(SETS[name])).check()


def vllm_rows(x: np.ndarray, codes: str) -> tuple[np.ndarray, np.ndarray]:
    """vLLM 0.32's _reshape_cache_per_token_head in its own f32 steps: codes as bytes and scales of values `[T, heads, dim]`."""
    wide = x.astype(np.float32)
    largest = np.float32(127 if codes == "int8" else 448)
    scale = np.maximum(np.abs(wide).max(-1, keepdims=True) / largest, np.float32(1e-6))
    q = wide * (1 / scale)
    if codes == "int8":
        away = np.trunc(np.where(q >= 0, q + np.float32(0.5), q - np.float32(0.5)))
        return np.clip(away, -128, 127).astype(np.int8).view(np.uint8), scale
    return np.clip(q, -largest, largest).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scale


@pytest.mark.parametrize("codes", [name for name in ("int8", "fp8") if name in SETS])
def test_rows_are_those_of_vllms_writer(codes: str) -> None:
    """[K | f32 | V | f32] a head and slot: scales to the bit, codes too but for quotients that lie at a tie."""
    generated, rng = package(SETS[codes]), np.random.default_rng(3)
    tokens, heads, dim = 48, 2, 32
    k, v = (rng.standard_normal((2, tokens, heads, dim)) * 4.0 ** rng.integers(-9, 9, (2, tokens, heads, 1))).astype(
        ml_dtypes.bfloat16
    )
    k[5], v[7, 1] = 0, 0
    k[6] *= 0
    k[6, :, 3] = 1e-7  # below the floor
    pool = np.full((3, heads, 16, 2 * (dim + 4)), 0xEE, np.uint8)
    cache = generated.Cache([pool], lengths=np.array([tokens], np.int32), page_table=np.array([[2, 0, 1]], np.int32))
    with machine(mode="check"):
        generated.append(cache[0], k=k, v=v, row_offsets=np.array([0, tokens], np.int32))
    stored = pool[[2, 0, 1]].transpose(0, 2, 1, 3).reshape(tokens, heads, 2, dim + 4)
    for i, x in enumerate((k, v)):
        wanted, scale = vllm_rows(x, codes)
        np.testing.assert_array_equal(stored[:, :, i, dim:], scale.view(np.uint8))
        found = stored[:, :, i, :dim]
        differ = found != wanted
        assert differ.mean() < 0.01
        kind = np.int8 if codes == "int8" else ml_dtypes.float8_e4m3fn
        one, other = (np.ascontiguousarray(b).view(kind).astype(np.float64) for b in (found, wanted))
        middle, exact = (one + other) / 2, x.astype(np.float64) / scale
        np.testing.assert_allclose(exact[differ], middle[differ], rtol=2**-22)


def test_values_of_four_bits_are_those_of_vllms_writer() -> None:
    """turboquant_k8v4: e4m3 of K, nibbles of V, scale and least value in f16. vLLM divides by the scale before it is rounded."""
    generated, rng = package(SETS["unlike"]), np.random.default_rng(4)
    tokens, heads, dim = 32, 2, 32
    k, v = (rng.standard_normal((2, tokens, heads, dim)) * 4.0 ** rng.integers(-5, 5, (2, tokens, heads, 1))).astype(
        ml_dtypes.bfloat16
    )
    v[3], v[4, 1] = 0, 2.5
    pool = np.full((2, 1, 16, heads, 56), 0xEE, np.uint8)
    cache = generated.Cache(pool, lengths=np.array([0], np.int32), page_table=np.array([[1, 0]], np.int32))
    with machine(mode="check"):
        generated.append(cache[0], k=k, v=v, row_offsets=np.array([0, tokens], np.int32))
    stored = pool[[1, 0], 0].reshape(tokens, heads, 56)
    cast = np.clip(k.astype(np.float32), -448, 448)  # as the hardware's conversion saturates
    np.testing.assert_array_equal(stored[..., :dim], cast.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    wide = v.astype(np.float32)
    low, high = wide.min(-1, keepdims=True), wide.max(-1, keepdims=True)
    scale = (high - low) / np.float32(15)
    numbers = np.concatenate([scale, low], -1).astype(np.float16)
    np.testing.assert_array_equal(stored[..., dim + 16 : dim + 20], numbers.view(np.uint8))
    assert (stored[..., dim + 20 :] == 0xEE).all()
    wanted = np.clip((wide - low) / np.maximum(scale, np.float32(1e-8)) + np.float32(0.5), 0, 15).astype(np.int64)
    nibbles = stored[..., dim : dim + 16]
    found = np.stack([nibbles & 15, nibbles >> 4], -1).reshape(tokens, heads, dim).astype(np.int64)
    assert (found != wanted).mean() < 0.02
    assert np.abs(found - wanted).max() <= 1


def test_codes_of_a_codebook_are_those_of_vllms_writer() -> None:
    """turboquant's keys, here as V: nibbles of the centroids nearest to x / norm, and the norm in f16. Beside them, as K, the
    same under norm / norm of the centroids: one product gives what vLLM's readers of "4bit_nc" make of its own rows."""
    generated, rng = package(SETS["book"]), np.random.default_rng(5)
    tokens, heads, dim = 32, 2, 32
    x = (rng.standard_normal((tokens, heads, dim)) * 4.0 ** rng.integers(-5, 5, (tokens, heads, 1))).astype(
        ml_dtypes.bfloat16
    )
    x[3], x[4, 1, 1:] = 0, 0
    pool = np.full((2, 1, 16, heads, 36), 0xEE, np.uint8)
    table = {"lengths": np.array([0], np.int32), "page_table": np.array([[1, 0]], np.int32)}
    offsets = np.array([0, tokens], np.int32)
    k, v = np.empty_like(x), np.empty_like(x)
    with machine(mode="check"):
        generated.append(generated.Cache(pool, **table)[0], k=x, v=x, row_offsets=offsets)
        table["lengths"][:] = tokens
        generated.gather(generated.Cache(pool, **table)[0], k_out=k, v_out=v, row_offsets=offsets)
    stored = pool[[1, 0], 0].reshape(tokens, heads, 36)[..., 18:]
    wide, centroids = x.astype(np.float32), np.array(lloyd_max(4, dim), np.float32)
    norm = np.linalg.norm(wide.astype(np.float64), axis=-1, keepdims=True).astype(np.float32)
    wanted = np.searchsorted((centroids[:-1] + centroids[1:]) / 2, wide / (norm + np.float32(1e-8)), "right")
    np.testing.assert_array_equal(stored[..., 16:], norm.astype(np.float16).view(np.uint8))
    found = np.stack([stored[..., :16] & 15, stored[..., :16] >> 4], -1).reshape(tokens, heads, dim)
    assert (found != wanted).mean() < 0.005  # norms are rounded to f16 before they divide
    assert np.abs(found.astype(np.int64) - wanted).max() <= 1
    values = centroids[wanted].astype(np.float64)
    corrected = norm * values / np.linalg.norm(values, axis=-1, keepdims=True)
    np.testing.assert_allclose(k.astype(np.float64), corrected, rtol=2**-7, atol=0)


def centroids(bits: int, dim: int) -> np.ndarray:
    """vLLM 0.33's solve_lloyd_max: at most 200 rounds of means by trapezoids of a 200th, edges at 10.5 sigma."""
    sigma, count = dim**-0.5, 2**bits
    found = np.linspace(-3.5, 3.5, 2 * count + 1)[1::2] * sigma
    for _ in range(200):
        edges = np.concatenate([[-10.5 * sigma], (found[:-1] + found[1:]) / 2, [10.5 * sigma]])
        x = np.linspace(edges[:-1], edges[1:], 201, axis=1)
        weight = np.exp(-(x**2) * dim / 2)
        weight[:, [0, -1]] /= 2
        before, found = found, (x * weight).sum(axis=1) / weight.sum(axis=1)
        if np.abs(found - before).max() < 1e-10:
            return before.astype(np.float32)
    return found.astype(np.float32)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_codebooks_are_vllms(dim: int) -> None:
    """To the bit; `lloyd_max` is the exact solution, from which they are off by up to two thousandths of sigma."""
    for name, bits in (("turboquant_4bit_nc", 4), ("turboquant_3bit_nc", 3)):
        cache = presets.vllm_turboquant(dtype="bf16", kv_heads=1, head_dim=dim, kv_cache_dtype=name)  # type: ignore[arg-type]
        assert cache.k_quant is not None and cache.k_quant.codebook is not None
        book = np.array(cache.k_quant.codebook, np.float32)
        np.testing.assert_array_equal(book, centroids(bits, dim))
        assert 0 < np.abs(book - np.array(lloyd_max(bits, dim), np.float32)).max() * dim**0.5 < 0.002


def three_bits(codes: np.ndarray) -> np.ndarray:
    """Eight codes in three bytes, the first in the lowest bits, as vLLM packs them: sums of shifted codes, cut into bytes."""
    packed = (codes.astype(np.int64).reshape(*codes.shape[:-1], -1, 8) << (3 * np.arange(8))).sum(axis=-1)
    found = np.stack([packed & 255, packed >> 8 & 255, packed >> 16 & 255], axis=-1)
    return found.reshape(*codes.shape[:-1], -1).astype(np.uint8)


def test_rows_of_three_bits_are_those_of_vllms_writer() -> None:
    """turboquant_3bit_nc: every byte of K and V but codes whose numbers lie at a tie; what its reader makes of them; and keys
    that append turns itself."""
    generated, rng = package(SETS["narrow"]), np.random.default_rng(6)
    tokens, heads, dim = 48, 2, 32
    k, v = (rng.standard_normal((2, tokens, heads, dim)) * 4.0 ** rng.integers(-5, 5, (2, tokens, heads, 1))).astype(
        ml_dtypes.bfloat16
    )
    k[3], v[3], v[4, 1] = 0, 0, 2.5
    k[5, :, 7], v[5, :, 7] = np.nan, np.nan
    pools = np.full((2, 3, 16, heads, 30), 0xEE, np.uint8)
    table = {"lengths": np.array([tokens], np.int32), "page_table": np.array([[2, 0, 1]], np.int32)}
    offsets, turn = np.array([0, tokens], np.int32), np.array([[dim**-0.5]])
    while len(turn) < dim:
        turn = np.block([[turn, turn], [turn, -turn]])
    k_out, v_out = np.empty_like(k), np.empty_like(v)
    with machine(mode="check"):
        caches = [generated.Cache([pool], **table)[0] for pool in pools]
        generated.append(caches[0], k=k, v=v, row_offsets=offsets)
        generated.gather(caches[0], k_out=k_out, v_out=v_out, row_offsets=offsets)
        q = np.zeros((tokens, 8, dim), k.dtype)
        generated.append_turned(caches[1], k=k, v=v, q=q, q_out=np.empty_like(q), row_offsets=offsets)
    stored, turned = (pool[[2, 0, 1]].reshape(tokens, heads, 30) for pool in pools)

    wide, book = k.astype(np.float32), centroids(3, dim)
    middles = (book[:-1] + book[1:]) / np.float32(2)
    with np.errstate(invalid="ignore"):
        norm = np.linalg.norm(wide, axis=-1, keepdims=True)
        y = wide / (norm + np.float32(1e-8))
        wanted = np.where(np.isnan(y), 0, np.searchsorted(middles, y, "right"))  # no comparison holds for NaN
        also = np.searchsorted(middles, (y.astype(np.float64) @ turn).astype(np.float32), "right")
    known = ~np.isnan(norm[..., 0])
    np.testing.assert_array_equal(stored[known, 12:14], norm[known].astype(np.float16).view(np.uint8))
    assert np.isnan(stored[~known, 12:14].copy().view(np.float16)).all()
    found = unpack_codes(stored[..., :12], 3)
    tie = np.abs(y[..., None] - middles).min(axis=-1) < 1e-6
    assert ((found == wanted) | tie).all() and tie.mean() < 0.1  # rows of zeros are ties
    np.testing.assert_array_equal(stored[..., :12][~tie.any(axis=-1)], three_bits(wanted)[~tie.any(axis=-1)])
    again = unpack_codes(turned[..., :12], 3)
    assert (again == also)[known].mean() > 0.998 and np.abs(again.astype(int) - also)[known].max() <= 1

    wide = v.astype(np.float32)
    low, high = wide.min(-1, keepdims=True), wide.max(-1, keepdims=True)
    scale = (high - low) / np.float32(7)
    with np.errstate(invalid="ignore"):
        numbers = np.concatenate([scale, low], -1).astype(np.float16)
    np.testing.assert_array_equal(stored[known, 26:30], numbers[known].view(np.uint8))
    assert np.isnan(stored[~known, 26:30].copy().view(np.float16)).all()
    exact = np.clip((wide - low) / np.maximum(scale, np.float32(1e-8)) + np.float32(0.5), 0, 7)[known]
    found = unpack_codes(stored[..., 14:26], 3)[known]
    assert (found != exact.astype(int)).mean() < 0.01 and np.abs(found - exact.astype(int)).max() <= 1

    values = book[unpack_codes(stored[..., :12], 3)]  # the reader's steps
    inverse = np.float32(1) / np.sqrt((values * values).sum(-1, keepdims=True) + np.float32(1e-16))
    norms = stored[..., 12:14].copy().view(np.float16).astype(np.float32)
    np.testing.assert_allclose(
        k_out.astype(np.float64)[known], (norms * (values * inverse)).astype(np.float64)[known], rtol=2**-7, atol=0
    )
    assert np.isnan(k_out.astype(np.float32)[~known]).all() and np.isnan(v_out.astype(np.float32)[~known]).all()


def test_rows_of_k_alone() -> None:
    """A layout with kv before dim whose cache has no V: its axis is one long, and the oracle reads K there."""
    quant = Quant(dtype="e4m3", scale_dtype="f32", place="row")
    cache = paged(stores="k", quant=quant, layout=Layout(kv="page token head kv dim", layers="pointers"))
    pool = np.zeros((2, 16, 2, 1, 32 + 4), np.uint8)
    pool[1, 3, 1, 0, :32] = np.full(32, 1.5, ml_dtypes.float8_e4m3fn).view(np.uint8)
    pool[1, 3, 1, 0, 32:] = np.array([4], np.float32).view(np.uint8)
    (keys,) = cache_rows(cache, {"pool": [pool]}, 0)
    np.testing.assert_array_equal(keys.numbers(1, 3), [[0.0] * 32, [6.0] * 32])
