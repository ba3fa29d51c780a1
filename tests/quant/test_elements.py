"""pack and unpack on every input that a code can have, in each way of converting, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgen.reference import quant
from tests.quant.inputs import around, every_half, patterns
from tests.quant.kernels import PLAIN, SCALES, TARGETS, TYPES, WIDTH, launch, memory

targets = pytest.mark.parametrize("arch", TARGETS)


def packed(codes: np.ndarray, dtype: str) -> np.ndarray:
    return quant.pack_nibbles(codes) if TYPES[dtype][1] == 2 else codes


def bits_of(x: np.ndarray) -> np.ndarray:
    """Comparable bits of f32: all NaN are one."""
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), x.view(np.uint32))


@targets
@pytest.mark.parametrize("dtype", TYPES)
def test_pack(dtype: str, arch: str) -> None:
    codes = quant.values(np.arange(16 if TYPES[dtype][1] == 2 else 256), dtype)
    codes = np.sort(codes[np.isfinite(codes)])
    x = np.concatenate([every_half(), patterns(), around(codes), around((codes[1:] + codes[:-1]) / 2)])
    source = memory(len(x), np.float32, x)
    out = memory(len(x) // TYPES[dtype][1], np.uint8)
    launch(arch, f"pack_{dtype}", [out], [source], len(x) // WIDTH)
    np.testing.assert_array_equal(out, packed(quant.cast(x, dtype), dtype))


@targets
@pytest.mark.parametrize("dtype", TYPES)
def test_unpack(dtype: str, arch: str) -> None:
    """Every byte at every place of a vector."""
    each = TYPES[dtype][1]
    count = WIDTH // each
    raw = np.stack([np.roll(np.arange(256, dtype=np.uint8), i * 37) for i in range(count)], axis=1).reshape(-1)
    source, out = memory(len(raw), np.uint8, raw), memory(len(raw) * each, np.float32)
    launch(arch, f"unpack_{dtype}", [out], [source], len(raw) // count)
    codes = quant.unpack_nibbles(raw) if each == 2 else raw
    np.testing.assert_array_equal(bits_of(out), bits_of(quant.values(codes, dtype).astype(np.float32)))


@targets
@pytest.mark.parametrize("dtype", TYPES)
def test_vectors_below_a_word(dtype: str, arch: str) -> None:
    each, threads = TYPES[dtype][1], 128
    x = np.resize(patterns()[-4096:], 2 * each * threads).astype(np.float32)
    one, two = memory(threads, np.uint8), memory(2 * threads, np.uint8)
    launch(arch, f"pack_few_{dtype}", [one, two], [memory(len(x), np.float32, x)], threads)
    wanted = packed(quant.cast(x, dtype), dtype)
    np.testing.assert_array_equal(one, wanted[:threads])
    np.testing.assert_array_equal(two, wanted)
    back, back2 = memory(each * threads, np.float32), memory(2 * each * threads, np.float32)
    launch(arch, f"unpack_few_{dtype}", [back, back2], [one, two], threads)
    codes = quant.unpack_nibbles(two) if each == 2 else two
    values = bits_of(quant.values(codes, dtype).astype(np.float32))
    np.testing.assert_array_equal(bits_of(back), values[: each * threads])
    np.testing.assert_array_equal(bits_of(back2), values)


@targets
@pytest.mark.parametrize("dtype", PLAIN)
def test_plain_elements(dtype: str, arch: str) -> None:
    """They round as a cast does, without saturation, and widen exactly."""
    kind: Any = SCALES[dtype]
    x = np.concatenate([every_half(), patterns()])
    raw, few, few2 = (memory(n, kind) for n in (len(x), 128, 256))
    launch(arch, f"pack_{dtype}", [raw], [memory(len(x), np.float32, x)], len(x) // WIDTH)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = x.astype(kind).astype(np.float32)
    np.testing.assert_array_equal(bits_of(raw.astype(np.float32)), bits_of(wanted))
    launch(arch, f"pack_few_{dtype}", [few, few2], [memory(256, np.float32, x[-256:])], 128)
    np.testing.assert_array_equal(few.astype(np.float32), wanted[-256:-128])
    np.testing.assert_array_equal(few2.astype(np.float32), wanted[-256:])
    out = memory(len(x), np.float32)
    launch(arch, f"unpack_{dtype}", [out], [raw], len(x) // WIDTH)
    np.testing.assert_array_equal(bits_of(out), bits_of(wanted))
