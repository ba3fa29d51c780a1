"""Where quantized tokens lie: split and swizzled axes, padded pages, pages and rows of bytes; by hand, byte for byte."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvgen import Block, Latent, Layout, PerKV, Quant
from tests.reference.variants import CANARY, F32, bits, blank, check, hexes, latent, one_head, paged, read, rows, step


def test_split_axes() -> None:
    """vLLM's packed keys as int8: dims by four outside the tokens; scales lose the split."""
    layout = Layout(k="page head dim/4 token dim%4", v="page token head dim", layers="pointers")
    cache = one_head(Quant(dtype="i8", scale_dtype="f32"), 8, layout=layout)
    shapes = {"k_pool": (3, 1, 2, 2, 4), "v_pool": (3, 2, 1, 8), "k_scales": (3, 1, 2, 1), "v_scales": (3, 2, 1, 1)}
    arrays = {n: [blank(s, F32 if "scales" in n else np.uint8) for _ in range(2)] for n, s in shapes.items()}
    new = rows([127, 1, 2, 3, 4, 5, 6, 7])
    step(cache, arrays, [new, new], 1)
    check(arrays["k_pool"][1], (np.s_[2, 0, :, 1], np.array([[127, 1, 2, 3], [4, 5, 6, 7]], np.uint8)))
    check(arrays["k_scales"][1], (np.s_[2, 0, 1, 0], F32(1)))
    check(arrays["v_scales"][1], (np.s_[2, 1, 0, 0], F32(1)))
    check(arrays["k_pool"][0])
    check(arrays["v_scales"][0])


def test_swizzled_nibbles() -> None:
    """bits=1, base=1, shift=1: of every 8 elements, the last two pairs swap; a pair is a byte."""
    layout = Layout(kv="page kv layer token head dim", swizzle=(1, 1, 1))
    cache = one_head(Quant(dtype="i4", scale_dtype="f32"), layout=layout)
    arrays = {"pool": blank((3, 2, 1, 2, 1, 2)), "scales": blank((3, 2, 1, 2, 1, 1), F32)}
    view = step(cache, arrays, [rows([7, 1, 2, 3])] * 2)  # token 1: elements 4..7 of the page
    check(arrays["pool"], (np.s_[2, :, 0, 1, 0], hexes("32 17")))
    np.testing.assert_array_equal(read(cache, arrays, view)[0][0], [7, 1, 2, 3])


def test_padded_pages() -> None:
    """Strides are the array's: pages of scales lie apart, and the gaps stay as they are."""
    cache = one_head(Quant(dtype="i8", scale_dtype="f32"), layout="page kv layer token head dim")
    memory = np.full(300, CANARY, np.uint8).view(F32)
    scales = as_strided(memory, (3, 2, 1, 2, 1, 1), (80, 16, 4, 4, 4, 4))
    step(cache, {"pool": blank((3, 2, 1, 2, 1, 4), gap=12), "scales": scales}, [rows([254, 0, 0, 0])] * 2)
    check(memory, (np.array([2 * 20 + 1, 2 * 20 + 4 + 1]), F32(2)))


def test_per_kv_pages() -> None:
    """K's page is 2, V's 0; scales are in the pages of the same numbers."""
    cache = one_head(Quant(dtype="i8", scale_dtype="f32"), layout="page layer token head dim", table=PerKV())
    arrays = {"pool": blank((3, 1, 2, 1, 4)), "scales": blank((3, 1, 2, 1, 1), F32)}
    step(cache, arrays, [rows([127, 0, 0, 1]), rows([254, 0, 0, 2])])
    check(arrays["scales"], (np.s_[2, 0, 1, 0, 0], F32(1)), (np.s_[0, 0, 1, 0, 0], F32(2)))
    check(arrays["pool"], (np.s_[[2, 0], 0, 1, 0], hexes("7F 00 00 01")))


def test_k_and_v_differ() -> None:
    """K in int8 per token, V as it is."""
    layout = Layout(k="page layer token head dim", v="page layer token head dim")
    cache = paged(kv_heads=1, layout=layout, k_quant=Quant(dtype="i8", scale_dtype="f32"))
    arrays = {
        "k_pool": blank((3, 1, 2, 1, 4)),
        "v_pool": blank((3, 1, 2, 1, 4), F32),
        "k_scales": blank((3, 1, 2, 1, 1), F32),
    }
    v = rows([0.1, np.nan, -0.0, 3])
    step(cache, arrays, [rows([127, 0, 0, 0]), v])
    check(arrays["k_scales"], (np.s_[2, 0, 1, 0, 0], F32(1)))
    check(arrays["v_pool"], (np.s_[2, 0, 1], v[0]))


# --- pages and rows of bytes ----------------------------------------------------------------------------------------------


def test_byte_page() -> None:
    """K's 8 bytes, V's from 16 on, K's two scales from 32 on, V's from 48 on: 64 bytes a page and layer."""
    cache = one_head(Quant(dtype="e4m3", scale_dtype="f32", place="page"))
    pool = blank((3, 2, 64))
    view = step(cache, {"pool": pool}, [rows([448, 224, 1, 0]), rows([896, 0, 2, 4])], 1)
    page = pool[2, 1]
    assert (
        page[4:8].tobytes() == hexes("7E 76 38 00").tobytes()
        and page[20:24].tobytes() == hexes("7E 00 38 40").tobytes()
    )
    assert page[36:40].view(F32)[0] == 1 and page[52:56].view(F32)[0] == 2
    keep = np.ones(64, bool)
    for begin in (4, 20, 36, 52):
        keep[begin : begin + 4] = False
    assert (page[keep] == CANARY).all() and (pool[:2] == CANARY).all() and (pool[2, 0] == CANARY).all()
    np.testing.assert_array_equal(read(cache, {"pool": pool}, view, 1)[1][0], [896, 0, 2, 4])


def test_byte_page_of_packed_heads_first() -> None:
    """Two heads of 6 nibbles, three tokens, heads outside: K 18 bytes, V from 32, scales [head, token, group] f16 from 64."""
    layout = Layout(kv="page kv head token dim", layers="pointers")
    quant = Quant(dtype="i4", scale_dtype="f16", place="page", block=Block(dim=4))
    cache = paged(head_dim=6, page_size=3, layout=layout, quant=quant)
    pool = blank((3, 128))
    new = rows([[7, 1, 0, 0, 1, 7], [14, 2, 0, 0, 0, 0]])
    step(cache, {"pool": [pool, pool]}, [new, new])
    page = pool[2]
    for begin in (0, 32):  # head 0's token 1 from byte 3, head 1's from 9 + 3
        assert page[begin + 3 : begin + 6].tobytes() == hexes("17 00 71").tobytes()
        assert page[begin + 12 : begin + 15].tobytes() == hexes("17 00 00").tobytes()
    for begin in (64, 96):
        found = page[begin : begin + 24].view(np.float16).reshape(2, 3, 2)
        np.testing.assert_array_equal(found[:, 1], [[1, 1], [2, 0]])
        assert (bits(found[:, [0, 2]]) == CANARY).all()
    assert (pool != CANARY).sum() == 2 * (6 + 8)


def test_deepseek_row() -> None:
    """FlashMLA's 656 bytes: 512 codes, four f32 scales of 128 dims, 64 bf16; the RoPE part bit for bit."""
    quant = Quant(dtype="e4m3", scale_dtype="f32", recipe="pow2", place="row", block=Block(dim=128))
    cache = Latent(dtype="bf16", page_size=2, quant=quant)
    pool = blank((3, 1, 1, 2, 1, 656))
    row = np.zeros((1, 1, 576), ml_dtypes.bfloat16)
    row[0, 0, [0, 128, 511]] = 448, 224, 3
    row.view(np.uint16)[0, 0, 512:] = 0x7F81 + np.arange(64)  # NaN of 64 kinds
    view = step(cache, {"pool": pool}, [row])
    found = pool[2, 0, 0, 1, 0]
    np.testing.assert_array_equal(found[512:528].view(F32), [1, 0.5, 2.0**-126, 2.0**-7])
    assert found[[0, 128, 511]].tolist() == [0x7E, 0x7E, 0x7C] and np.count_nonzero(found[:512]) == 3
    np.testing.assert_array_equal(found[528:].view(np.uint16), 0x7F81 + np.arange(64))
    assert (pool[:2] == CANARY).all() and (pool[2, 0, 0, 0] == CANARY).all()
    back = read(cache, {"pool": pool}, view)[0]
    np.testing.assert_array_equal(back.view(np.uint16), row[0].view(np.uint16))


def test_latent_rows_without_scales_in_them() -> None:
    """8 codes, then 2 bf16; scales in a tensor of their own, two a row."""
    cache = latent(quant=Quant(dtype="i8", scale_dtype="f16", block=Block(dim=4)))
    arrays = {"pool": blank((3, 1, 1, 2, 1, 12)), "scales": blank((3, 1, 1, 2, 1, 2), np.float16)}
    row = rows([127, 1, 0, 0, -254, 0, 0, 2, 1, -2], kind=ml_dtypes.bfloat16)
    step(cache, arrays, [row])
    check(arrays["pool"], (np.s_[2, 0, 0, 1, 0], hexes("7F 01 00 00 81 00 00 01 80 3F 00 C0")))
    check(arrays["scales"], (np.s_[2, 0, 0, 1, 0], np.array([1, 2], np.float16)))


def test_latent_packed_row_with_zero_points() -> None:
    """4 bytes of nibbles, two scales and zeros of bf16, 2 bf16: 16 bytes."""
    cache = latent(quant=Quant(dtype="i4", scale_dtype="bf16", block=Block(dim=4), place="row", zero=True))
    pool = blank((3, 1, 1, 2, 1, 16))
    step(cache, {"pool": pool}, [rows([-1, 14, 0, 1, 5, 5, 5, 5, 1, 2], kind=ml_dtypes.bfloat16)])
    # Scale 1 and zero 1; constant 5: scale 5, zero -1, codes 0.
    written = hexes("F0 21 00 00 803F 803F A040 80BF 803F 0040")
    check(pool, (np.s_[2, 0, 0, 1, 0], written))


def test_latent_in_two_tensors() -> None:
    """FlashInfer's: the latent part quantized, the RoPE part in its own tensor."""
    layout = Layout(kv="page layer token dim", rope="page layer token dim")
    cache = latent(layout=layout, quant=Quant(dtype="e4m3"))
    arrays = {"pool": blank((3, 1, 2, 8)), "rope_pool": blank((3, 1, 2, 2), ml_dtypes.bfloat16)}
    step(cache, arrays, [rows([1, 0, 0, 0, 0, 0, 0, 2, 9, -9], kind=ml_dtypes.bfloat16)])
    check(arrays["pool"], (np.s_[2, 0, 1], hexes("38 000000 000000 40")))
    check(arrays["rope_pool"].view(np.uint16), (np.s_[2, 0, 1], np.array([0x4110, 0xC110], np.uint16)))
