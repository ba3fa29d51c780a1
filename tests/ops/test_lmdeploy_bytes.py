"""lmdeploy's pages of int4 and of quant_policy 42, byte for byte as fill_kv_cache.py makes them: stated here in NumPy, in its own
f32 steps, without kvgen's oracle. Codes may differ where a number lies at a tie, or a scale is rounded before it divides.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

from kvgen import KernelSet, ops, presets
from kvgen.runtime.cpu import machine
from tests.support.harness import package

Raw = np.ndarray[Any, np.dtype[Any]]
SIZES: Final[dict[str, Any]] = {"dtype": "f16", "kv_heads": 2, "head_dim": 32, "page_size": 16}
TOKENS, HEADS, DIM, PAGE = 48, 2, 32, 16
CACHES: Final = {
    "int4": presets.lmdeploy_int4(**SIZES),
    "turboquant": presets.lmdeploy_turboquant(**SIZES),
}
SETS: Final = {
    name: KernelSet(
        name=f"lmdeploy_bytes_{name}", q_heads=8, cache=c, ops=(ops.Append(), ops.Gather()), arch=("sm_90a",)
    )
    for name, c in CACHES.items()
}
# turbo_quant.py, get_lloyd_max_codebook: centroids and boundaries at sigma = 1, each times sigma in f32.
OF_3_BITS: Final = [-2.1519456, -1.3439093, -0.7560052, -0.2450942, 0.2450942, 0.7560052, 1.3439093, 2.1519456]
BETWEEN_3: Final = [-1.7479274, -1.0499573, -0.5005497, 0.0, 0.5005497, 1.0499573, 1.7479274]
OF_2_BITS: Final = [-1.5104176, -0.4527808, 0.4527808, 1.5104176]
BETWEEN_2: Final = [-0.9815992, 0.0, 0.9815992]
TINY: Final = np.float32(1e-8)


class Stored(NamedTuple):
    """What the pools hold of tokens in order: bytes of K and V `[T, H, ...]`, numbers beside them; and what gather makes of
    it."""

    codes: tuple[Raw, Raw]
    numbers: tuple[Raw, Raw]
    out: tuple[Raw, Raw]


def scaled(numbers: list[float], dim: int) -> Raw:
    return np.array(numbers, np.float32) * np.float32(1 / math.sqrt(dim))


def rows(seed: int) -> tuple[Raw, Raw]:
    """K and V in f16; some rows are NaN in a place. None is so small that 1e-8 shows beside its squares."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, TOKENS, HEADS, DIM)) * 4.0 ** rng.integers(-1, 5, (2, TOKENS, HEADS, 1))
    x[:, 5, :, 7] = np.nan
    return tuple(x.astype(np.float16))


def store(name: str, k: Raw, v: Raw) -> Stored:
    """Appended to pages in an order of their own, and read back."""
    generated = package(SETS[name])
    per_byte = {"int4": (2, 2), "turboquant": (2, 4)}[name]
    numbers = {"int4": (2, 2), "turboquant": (2, 1)}[name]
    pools = [np.full((3, PAGE, HEADS, DIM // n), 0xEE, np.uint8) for n in per_byte]
    scales = [np.full((3, PAGE, HEADS, n), 7, np.float16) for n in numbers]
    table = {"lengths": np.array([TOKENS], np.int32), "page_table": np.array([[2, 0, 1]], np.int32)}
    offsets, out = np.array([0, TOKENS], np.int32), (np.empty_like(k), np.empty_like(v))
    with machine(mode="check"):
        cache = generated.Cache([pools[0]], [pools[1]], k_scales=[scales[0]], v_scales=[scales[1]], **table)[0]
        generated.append(cache, k=k, v=v, row_offsets=offsets)
        generated.gather(cache, k_out=out[0], v_out=out[1], row_offsets=offsets)
    order = [t[[2, 0, 1]].reshape(TOKENS, HEADS, -1) for t in (*pools, *scales)]
    return Stored((order[0], order[1]), (order[2], order[3]), out)


def quarters(codes: Raw, bits: int) -> Raw:
    """Bytes of codes `[..., D]`, the first 8 / bits-th of them in the lowest bits."""
    parts = np.split(codes.astype(np.uint8), 8 // bits, axis=-1)
    return np.bitwise_or.reduce([part << bits * i for i, part in enumerate(parts)]).astype(np.uint8)


def unpacked(stored: Raw, bits: int) -> Raw:
    return np.concatenate([stored >> bits * i & (1 << bits) - 1 for i in range(8 // bits)], axis=-1).astype(np.int64)


def indices(u: Raw, boundaries: Raw) -> Raw:
    """How many boundaries lie below each number; of NaN none."""
    return (u[..., None] > boundaries).sum(-1)


def off(found: Raw, wanted: Raw) -> Raw:
    """Where f16 numbers are not the same; they are neighbours, or NaN both."""
    np.testing.assert_array_max_ulp(np.nan_to_num(found), np.nan_to_num(wanted), 1)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    return (found != wanted) & ~np.isnan(found)


def test_turboquant() -> None:
    k, v = rows(1)
    stored = store("turboquant", k, v)
    with np.errstate(invalid="ignore"):
        x, book = k.astype(np.float32), scaled(OF_3_BITS, DIM)
        norm = np.sqrt((x * x).sum(-1, keepdims=True) + TINY)
        u = x / norm
        index = indices(u, scaled(BETWEEN_3, DIM))
        left = u - book[index]
        rms = np.sqrt((left * left).sum(-1, keepdims=True) + TINY) / np.float32(math.sqrt(DIM))
        nibbles = index | (left >= 0).astype(np.int64) << 3
        assert off(stored.numbers[0], np.concatenate([norm, rms], -1).astype(np.float16)).mean() < 0.02
        tie = (np.abs(u[..., None] - scaled(BETWEEN_3, DIM)).min(-1) < 1e-6) | (np.abs(left) < 1e-6)
        whole = ~tie.any(-1)
        assert whole.mean() > 0.9
        np.testing.assert_array_equal(stored.codes[0][whole], quarters(nibbles, 4)[whole])

        x, book = v.astype(np.float32), scaled(OF_2_BITS, DIM)
        norm = np.sqrt((x * x).sum(-1, keepdims=True) + TINY)
        index = indices(x / norm, scaled(BETWEEN_2, DIM))
        assert off(stored.numbers[1], norm.astype(np.float16)).mean() < 0.02
        near = (
            np.abs((x / norm)[..., None] - scaled(BETWEEN_2, DIM)).min(-1) < 2**-11
        )  # norms divide after they are rounded
        whole = ~near.any(-1)
        assert whole.mean() > 0.8
        np.testing.assert_array_equal(stored.codes[1][whole], quarters(index, 2)[whole])


def test_readers_of_turboquant() -> None:
    """_flatten_kv_cache_quant's steps on every byte and number that may lie there: to the bit."""
    rng, generated = np.random.default_rng(2), package(SETS["turboquant"])
    k_pool, v_pool = (np.resize(rng.permutation(np.arange(256)), (1, PAGE, HEADS, n)).astype(np.uint8) for n in (16, 8))
    k_scales, v_scales = (
        np.resize(np.array([0.5, 3, 0, np.nan, 40000, 2**-20, np.inf, 1.7]), (1, PAGE, HEADS, n)) for n in (2, 1)
    )
    k_scales, v_scales = rng.permuted(k_scales.astype(np.float16), axis=1), v_scales.astype(np.float16)
    k, v = np.empty((2, PAGE, HEADS, DIM), np.float16)
    with machine(mode="check"):
        table = {"lengths": np.array([PAGE], np.int32), "page_table": np.array([[0]], np.int32)}
        cache = generated.Cache([k_pool], [v_pool], k_scales=[k_scales], v_scales=[v_scales], **table)[0]
        generated.gather(cache, k_out=k, v_out=v, row_offsets=np.array([0, PAGE], np.int32))
    nibbles, quads = unpacked(k_pool[0], 4), unpacked(v_pool[0], 2)
    assert len(np.unique(k_pool)) == 256 and len(np.unique(v_pool)) == 256
    norm, left = (k_scales[0, ..., i, None].astype(np.float32) for i in (0, 1))
    sign = (nibbles >> 3).astype(np.float32) * np.float32(2) - np.float32(1)
    with np.errstate(all="ignore"):
        keys = norm * (scaled(OF_3_BITS, DIM)[nibbles & 7] + left * sign)
        values = scaled(OF_2_BITS, DIM)[quads] * v_scales[0].astype(np.float32)
        np.testing.assert_array_equal(k, keys.astype(np.float16))
        np.testing.assert_array_equal(v, values.astype(np.float16))


def test_rows_of_zeros() -> None:
    """lmdeploy has a norm of 1e-4 there, and the lower of two centroids at 0; what is read back is 0 here."""
    k, v = (np.zeros_like(x) for x in rows(3))
    stored = store("turboquant", k, v)
    assert (stored.codes[0] == 0x44).all() and (stored.codes[1] == 0xAA).all()
    assert (stored.numbers[0][..., 0] == 0).all() and (stored.numbers[1] == 0).all()
    np.testing.assert_array_equal(stored.numbers[0][..., 1], np.float16(scaled(OF_3_BITS, DIM)[4]))
    assert not stored.out[0].any() and not stored.out[1].any()


def test_int4() -> None:
    k, v = rows(4)
    stored = store("int4", k, v)
    for x, codes, numbers, out in zip((k, v), *stored, strict=True):
        known = ~np.isnan(x).any(-1)
        wide = x[known].astype(np.float32)
        low, high = wide.min(-1, keepdims=True), wide.max(-1, keepdims=True)
        scale = (high - low) / np.float32(15)
        wanted = np.concatenate([scale, -low / scale], -1).astype(np.float16)
        np.testing.assert_array_equal(numbers[known][..., 0], wanted[..., 0])
        np.testing.assert_allclose(numbers[known][..., 1].astype(float), wanted[..., 1].astype(float), rtol=2**-9)
        halves = np.clip(wide / scale + -low / scale + np.float32(0.5), 0, 15).astype(np.int64)
        found = unpacked(codes[known], 4)
        assert (found != halves).mean() < 0.02 and np.abs(found - halves).max() <= 1
        read = (found - numbers[known][..., 1:].astype(np.float32)) * numbers[known][..., :1].astype(np.float32)
        np.testing.assert_array_equal(out[known], read.astype(np.float16))
        assert np.isnan(out[~known]).all()


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_codebooks_are_lmdeploys(dim: int) -> None:
    """To the bit."""
    cache = presets.lmdeploy_turboquant(dtype="bf16", kv_heads=1, head_dim=dim)
    for quant, numbers in ((cache.k_quant, OF_3_BITS), (cache.v_quant, OF_2_BITS)):
        assert quant is not None and quant.codebook is not None
        np.testing.assert_array_equal(np.array(quant.codebook, np.float32), scaled(numbers, dim))
