"""Every way of quantizing, on rows whose bytes were worked out by hand; whatever is not named keeps its 0xEE.

e4m3: 1 is 38, 2 is 40, 0.5 is 30, 448 is 7E, 224 is 76, 112 is 6E; a minus sign is 80 more. e5m2: 1 is 3C, 57344 is 7B.
e2m1, in a nibble: 0.5 is 1, 1 is 2, 1.5 is 3, 2 is 4, 3 is 5, 4 is 6, 6 is 7; minus is 8 more.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvgen import Block, Layout, Quant
from kvgen.reference import TableView, cache_rows, decode, gather
from tests.reference.variants import F32, blank, check, hexes, latent, one_head, paged, read, rows, step

# --- codes and scales in tensors of their own -----------------------------------------------------------------------------


def test_scale_free() -> None:
    """A cast: what is too large becomes the largest code; NaN stays NaN, and so does the sign of zero."""
    cache, pool = one_head(Quant(dtype="e4m3")), blank((3, 2, 2, 2, 1, 4))
    view = step(cache, {"pool": pool}, [rows([1, -500, np.inf, -0.0]), rows([0.5, np.nan, 2, 0])], 1)
    check(pool, (np.s_[2, 0, 1, 1, 0], hexes("38 FE 7E 80")), (np.s_[2, 1, 1, 1, 0], hexes("30 7F 40 00")))
    k, v = read(cache, {"pool": pool}, view, 1)
    np.testing.assert_array_equal(k[0], [1, -448, 448, -0.0])
    np.testing.assert_array_equal(v[0], [0.5, np.nan, 2, 0])


def test_fp8_scales() -> None:
    """A scale a token and head, amax / 448; the codes of a block of zeros are zeros. The pool may be fp8 or bytes."""
    for kind in (np.uint8, ml_dtypes.float8_e4m3fn):
        cache = paged(quant=Quant(dtype="e4m3", scale_dtype="f32"))
        arrays = {"pool": blank((3, 2, 2, 2, 2, 4), kind), "scales": blank((3, 2, 2, 2, 2, 1), F32)}
        k = rows([[448, 224, -112, 0], [2 * 448, 448, 2, 1]])
        v = rows([[0, 0, 0, 0], [-4480, 0, 10, 20]])
        view = step(cache, arrays, [k, v], 1)
        codes = np.array([[hexes("7E 76 EE 00"), hexes("7E 76 38 30")], [hexes("00000000"), hexes("FE 00 38 40")]])
        check(arrays["pool"].view(np.uint8), (np.s_[2, :, 1, 1], codes))
        check(arrays["scales"], (np.s_[2, :, 1, 1, :, 0], np.array([[1, 2], [0, 10]], F32)))
        for found, wanted in zip(read(cache, arrays, view, 1), (k, v), strict=True):
            np.testing.assert_array_equal(found, wanted[0])


def test_pow2() -> None:
    """amax / 448 = 1.1 becomes 2; exactly 0.5 stays."""
    cache = one_head(Quant(dtype="e4m3", scale_dtype="f32", recipe="pow2"))
    arrays = {"pool": blank((3, 2, 1, 2, 1, 4)), "scales": blank((3, 2, 1, 2, 1, 1), F32)}
    step(cache, arrays, [rows([492.8, 4, 2, 0]), rows([224, -1, 0, 0])])
    check(arrays["scales"], (np.s_[2, :, 0, 1, 0, 0], np.array([2, 0.5], F32)))
    # 492.8 / 2 = 246.4: codes there step by 16, 240 is 0x77.
    check(arrays["pool"], (np.s_[2, :, 0, 1, 0], np.array([hexes("77 40 38 00"), hexes("7E C0 00 00")])))


def test_e5m2_in_f16_scales() -> None:
    """A scale that f16 rounds to 0 makes the block 0; one beyond f16 is infinite, and NaN comes back."""
    cache = one_head(Quant(dtype="e5m2", scale_dtype="f16"))
    arrays = {"pool": blank((3, 2, 1, 2, 1, 4)), "scales": blank((3, 2, 1, 2, 1, 1), np.float16)}
    view = step(cache, arrays, [rows([1e-4, 0, -1e-5, 0]), rows([57344.0 * 70000, 1, 0, 0])])
    check(arrays["scales"], (np.s_[2, :, 0, 1, 0, 0], np.array([0, np.inf], np.float16)))
    k, v = read(cache, arrays, view)
    assert not k.any() and np.isnan(v).all()


def test_i8() -> None:
    """Signed, 127 the largest, halves to even; a scale of 2^-1."""
    cache = one_head(Quant(dtype="i8", scale_dtype="bf16"), dtype="bf16")
    arrays = {"pool": blank((3, 2, 1, 2, 1, 4), np.int8), "scales": blank((3, 2, 1, 2, 1, 1), ml_dtypes.bfloat16)}
    new = [rows([127, -127, 2.5, 3.5], kind=ml_dtypes.bfloat16), rows([-63.5, 1.25, 0.5, 0], kind=ml_dtypes.bfloat16)]
    view = step(cache, arrays, new)
    check(arrays["pool"].view(np.uint8), (np.s_[2, :, 0, 1, 0], np.array([hexes("7F 81 02 04"), hexes("81 02 01 00")])))
    check(arrays["scales"].view(np.uint16), (np.s_[2, :, 0, 1, 0, 0], np.array([0x3F80, 0x3F00], np.uint16)))
    np.testing.assert_array_equal(read(cache, arrays, view)[1][0].astype(F32), [-63.5, 1, 0.5, 0])


def test_i8_zero_point() -> None:
    """Bytes 0 to 255, (255 + 0) / 255 = 1 a step; the zero stands behind its scale. A constant block is exact."""
    cache = one_head(Quant(dtype="i8", scale_dtype="f32", zero=True, block=Block(dim=2)))
    arrays = {"pool": blank((3, 2, 1, 2, 1, 4)), "scales": blank((3, 2, 1, 2, 1, 4), F32)}
    view = step(cache, arrays, [rows([-1, 254, -3, -3]), rows([0, 0, 510, 255])])
    check(arrays["pool"], (np.s_[2, :, 0, 1, 0], np.array([hexes("00 FF 00 00"), hexes("00 00 FF 00")])))
    # K: scale 1, zero 1; scale |c| = 3, zero -sign(c) = 1. V: scale 1, zero 0; scale 1, zero -255.
    check(arrays["scales"], (np.s_[2, :, 0, 1, 0], np.array([[1, 1, 3, 1], [1, 0, 1, -255]], F32)))
    k, v = read(cache, arrays, view)
    np.testing.assert_array_equal([k[0], v[0]], [[-1, 254, -3, -3], [0, 0, 510, 255]])


def test_i4_with_a_short_group() -> None:
    """Six dims in groups of four: the last has two. Element 2i is in the low half of its byte."""
    cache = one_head(Quant(dtype="i4", scale_dtype="f32", block=Block(dim=4)), 6)
    arrays = {"pool": blank((3, 2, 1, 2, 1, 3)), "scales": blank((3, 2, 1, 2, 1, 2), F32)}
    view = step(cache, arrays, [rows([7, -7, 1, -1, 14, 2]), rows([0, 0, 0, 0, -3.5, 1.5])])
    check(arrays["pool"], (np.s_[2, :, 0, 1, 0], np.array([hexes("97 F1 17"), hexes("00 00 39")])))
    check(arrays["scales"], (np.s_[2, :, 0, 1, 0], np.array([[1, 2], [0, 0.5]], F32)))
    np.testing.assert_array_equal(read(cache, arrays, view)[0][0], [7, -7, 1, -1, 14, 2])


def test_i4_zero_point() -> None:
    """Nibbles 0 to 15."""
    cache = one_head(Quant(dtype="i4", scale_dtype="f16", zero=True))
    arrays = {"pool": blank((3, 2, 1, 2, 1, 2)), "scales": blank((3, 2, 1, 2, 1, 2), np.float16)}
    step(cache, arrays, [rows([-2, 13, 0, 5]), rows([0, 30, 1, 7])])
    # K + 2 = 0, 15, 2, 7. V / 2 = 0, 15, 0.5, 3.5: halves to even, 0 and 4.
    check(arrays["pool"], (np.s_[2, :, 0, 1, 0], np.array([hexes("F0 72"), hexes("F0 40")])))
    check(arrays["scales"], (np.s_[2, :, 0, 1, 0], np.array([[1, 2], [2, 0]], np.float16)))


def test_e2m1() -> None:
    """5 is half way between 4 and 6, whose codes are 6 and 7: the even one. Zero is never negative."""
    cache = one_head(Quant(dtype="e2m1", scale_dtype="f16"))
    arrays = {"pool": blank((3, 2, 1, 2, 1, 2)), "scales": blank((3, 2, 1, 2, 1, 1), np.float16)}
    step(cache, arrays, [rows([6, -3, 5, -0.2]), rows([12, 2, -8, 3])])
    check(arrays["pool"], (np.s_[2, :, 0, 1, 0], np.array([hexes("D7 06"), hexes("27 3E")])))
    check(arrays["scales"], (np.s_[2, :, 0, 1, 0, 0], np.array([1, 2], np.float16)))


def test_nvfp4() -> None:
    """MAX's: scales amax / 6 in e4m3, at least 2^-9; what comes back is e4m3 too."""
    cache = one_head(Quant(dtype="e2m1", scale_dtype="e4m3", recipe="max"), 32)
    arrays = {"pool": blank((3, 2, 1, 2, 1, 16)), "scales": blank((3, 2, 1, 2, 1, 2))}
    k, v = np.zeros((1, 1, 32), F32), np.zeros((1, 1, 32), F32)
    k[0, 0, [0, 1, 16]] = 6, -1, 12
    v[0, 0, [0, 1]] = 6 * 1.125, 3.375
    view = step(cache, arrays, [k, v])
    codes = np.zeros((2, 16), np.uint8)
    codes[0, [0, 8]], codes[1, 0] = (0xA7, 0x07), 0x57
    check(arrays["pool"], (np.s_[2, :, 0, 1, 0], codes))
    check(arrays["scales"], (np.s_[2, :, 0, 1, 0], np.array([hexes("38 40"), hexes("39 01")])))
    # 6 * 1.125 = 6.75 lies between 6.5 and 7 in e4m3: the even one is 7 (0x4E). 3 * 1.125 = 3.375: 3.5, not 3.25.
    np.testing.assert_array_equal(read(cache, arrays, view)[1][0, :2], [7, 3.5])
    np.testing.assert_array_equal(read(cache, arrays, view)[0], k[0])


def test_nvfp4_global() -> None:
    """Two levels: scale = amax / (6 G), codes x / (scale G)."""
    cache = one_head(Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global"), 16)
    arrays = {
        "pool": blank((3, 2, 1, 2, 1, 8)),
        "scales": blank((3, 2, 1, 2, 1, 1)),
        "k_global_scale": np.array([[0.5]], F32),
        "v_global_scale": np.array([[4]], F32),
    }
    k, v = np.zeros((1, 1, 16), F32), np.zeros((1, 1, 16), F32)
    k[0, 0, :2], v[0, 0, :2] = (6, 1.5), (24, -16)
    view = step(cache, arrays, [k, v])
    check(arrays["pool"], (np.s_[2, :, 0, 1, 0], np.array([hexes("37" + "00" * 7), hexes("E7" + "00" * 7)])))
    check(arrays["scales"], (np.s_[2, :, 0, 1, 0, 0], hexes("40 38")))
    found = read(cache, arrays, view)
    np.testing.assert_array_equal(found, [k[0], v[0]])


def test_swizzled_scales() -> None:
    """Token 37 = 32 + 5, group 2 of 4: row 5 of 32, its second four, its third byte: 5 * 16 + 4 + 2."""
    quant = Quant(dtype="e2m1", scale_dtype="e4m3", recipe="max", order="swizzled")
    cache = one_head(quant, 128, page_size=256)
    arrays = {"pool": blank((3, 2, 1, 256, 1, 64)), "scales": blank((3, 2, 1, 1, 2, 2, 32, 4, 4))}
    k = np.zeros((1, 1, 128), F32)
    k[0, 0, 16 * np.arange(8)] = 6 * 2.0 ** np.arange(8)
    for pool in cache_rows(cache, arrays, 0):
        pool.write(1, 128 + 37, k[0])
    scales = arrays["scales"].reshape(3, 2, 2048)
    place = 1024 + 5 * 16 + 4  # the second 128 tokens, first four groups
    written = [(np.s_[1, :, place + 512 * (g // 4) + g % 4], np.uint8(0x38 + 8 * g)) for g in range(8)]
    check(scales, *written)


def test_heads_share_scales() -> None:
    """Two scales for four heads, then one: the head axis counts blocks."""
    for heads, wanted in ((2, [[1], [4]]), (None, [[4]])):
        cache = paged(kv_heads=4, quant=Quant(dtype="i8", scale_dtype="f32", block=Block(head=heads)))
        arrays = {"pool": blank((3, 2, 1, 2, 4, 4)), "scales": blank((3, 2, 1, 2, len(wanted), 1), F32)}
        new = rows([[127, 0, 0, 0], [4, 0, 0, 0], [0, -508, 0, 0], [4, 0, 0, 0]])
        step(cache, arrays, [new, new])
        check(arrays["scales"], (np.s_[2, :, 0, 1], np.array(wanted, F32)))
        first = [127, 4, 0, 1] if heads else [32, 1, 0, 1]
        np.testing.assert_array_equal(arrays["pool"][2, 1, 0, 1, :, 0], first)


def test_given_scales() -> None:
    """One a head and pair of dims, read only, a layer's own; a scale of 0 stores NaN."""
    quant = Quant(dtype="e4m3", scale_dtype="f32", scale="given", block=Block(token=None, head=1, dim=2))
    cache, pool = paged(quant=quant), blank((3, 2, 2, 2, 2, 4))
    scale = np.array([np.full((2, 2), np.nan), [[1, 0.5], [0, 2]]], F32)
    arrays = {"pool": pool, "k_scale": scale, "v_scale": scale * F32(2)}
    view = step(cache, arrays, [rows([[1, 2, 1, 1], [5, 5, 1000, 4]])] * 2, 1)
    k, v = (
        np.array([hexes("38 40 40 40"), hexes("7F 7F 7E 40")]),
        np.array([hexes("30 38 38 38"), hexes("7F 7F 78 38")]),
    )
    check(pool, (np.s_[2, 0, 1, 1], k), (np.s_[2, 1, 1, 1], v))  # 1000 / 4 = 250: 256 is 0x78
    np.testing.assert_array_equal(read(cache, arrays, view, 1)[0], [[1, 2, 1, 1], [np.nan, np.nan, 896, 4]])


def test_blocks_that_are_not_finite() -> None:
    """NaN or infinity spoil their own block, and no other."""
    cache = one_head(Quant(dtype="i8", scale_dtype="f32", block=Block(dim=2)))
    arrays = {"pool": blank((3, 2, 1, 2, 1, 4)), "scales": blank((3, 2, 1, 2, 1, 2), F32)}
    view = step(cache, arrays, [rows([np.nan, 1, 127, 0]), rows([127, 1, -np.inf, 1])])
    k, v = read(cache, arrays, view)
    np.testing.assert_array_equal([k[0], v[0]], [[np.nan, np.nan, 127, 0], [127, 1, np.nan, np.nan]])


# --- reading --------------------------------------------------------------------------------------------------------------


def test_gather_rounds_once_and_decode_does_not() -> None:
    """100 * f32(1 / 127) is 0.7874; bf16 has 0.7891 beside it. Attention to one token gives V itself."""
    cache = one_head(Quant(dtype="i8", scale_dtype="f32"), dtype="bf16")
    arrays = {"pool": blank((3, 2, 1, 2, 1, 4)), "scales": blank((3, 2, 1, 2, 1, 1), F32)}
    for pool in cache_rows(cache, arrays, 0):
        pool.write(2, 0, np.array([[1, 0.787, 0, 0]]))
    tables = {"lengths": np.array([0]), "page_table": np.array([[2]])}
    view = TableView(cache, tables, 3, 2)
    pools = cache_rows(cache, arrays, 0)
    exact = F32(100) * (F32(1) / F32(127))
    out = decode(view, pools, np.ones((1, 1, 4), F32)).out
    assert out[0, 0, 1] == float(exact)
    before = [np.zeros((1, 1, 4), ml_dtypes.bfloat16)] * 2
    found = gather(view, pools, before, row_offsets=np.array([0, 1])).outputs[1]
    assert found[0, 0, 1] == ml_dtypes.bfloat16(exact) and float(found[0, 0, 1]) != float(exact)


def test_latent_decode() -> None:
    """V is the latent part of K."""
    cache = latent(quant=Quant(dtype="e4m3"), lengths="after")
    arrays = {"pool": blank((3, 1, 1, 2, 1, 12))}
    (pool,) = cache_rows(cache, arrays, 0)
    for token, value in enumerate((2, 4)):
        pool.write(2, token, np.full((1, 10), value, ml_dtypes.bfloat16))
    view = TableView(cache, {"lengths": np.array([2]), "page_table": np.array([[2]])}, 3, 2)
    found = decode(view, (pool,), np.zeros((1, 3, 10), F32))
    assert found.out.shape == (1, 3, 8) and (found.out == 3).all()


def test_a_group_of_tokens_is_written_whole() -> None:
    cache = paged(
        layout=Layout(k="page layer token head dim", v="page layer token head dim"),
        k_quant=Quant(dtype="i8", scale_dtype="f32", block=Block(token=2, dim=1), residual=2),
    )
    arrays = {
        "k_pool": blank((3, 1, 2, 2, 4)),
        "v_pool": blank((3, 1, 2, 2, 4), F32),
        "k_scales": blank((3, 1, 1, 2, 4), F32),
        "k_tail": blank((1, 1, 2, 2, 4), F32),
        "k_sealed": np.zeros(1, np.int32),
    }
    keys, _ = cache_rows(cache, arrays, 0)
    with pytest.raises(ValueError, match="2 tokens share a scale"):
        keys.write(0, 0, np.zeros((2, 4), F32))
