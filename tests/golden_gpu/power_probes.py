"""e8m0 scales onto codes, sums of K and weights of V, and codes as bf16 (kernels/tile_powers.cu)."""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import numbers_of
from tests.golden_gpu.probe import Arrays, Probe, pattern, u32

UNIT: Final = "tile_powers"
BF16: Final = ml_dtypes.bfloat16
TILE, HEADS, HEAD, DIMS, LINES = 16, 2, 1, 40, 4


def _powers(exponents: Array) -> Array:
    """The numbers of e8m0, as f32."""
    found: Array = exponents.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return found


# Onto codes and sums ------------------------------------------------------------------------------------------------

# Dims of a scale and use: the blocks of tile_powers_held.
HELD: Final = ((10, "key"), (10, "value"), (20, "value"), (16, "key"), (10, "sums"), (16, "sums"))


def _held_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(400)
    scales = rng.integers(100, 150, TILE * HEADS * LINES).astype(np.uint8)
    scales[5::7] = rng.choice([0, 1, 2, 253, 254, 255], len(scales[5::7]))
    codes = rng.choice([0.0, -0.0, 0.5, -6, 448, -(2.0**-9), 3], (LINES, TILE, 2)).astype(BF16)
    return {
        "scales": scales,
        "codes": codes.view(np.uint32).reshape(LINES, TILE),
        "out": np.zeros((len(HELD), LINES * TILE * 2), np.uint32),
    }


def _held(arrays: Arrays) -> dict[str, Wanted]:
    codes = arrays["codes"].view(BF16).reshape(LINES, TILE, 2).astype(np.float64)
    out = np.zeros((len(HELD), LINES * TILE * 2), np.uint32)
    for i, (dims, use) in enumerate(HELD):
        groups = -(-DIMS // dims)
        mine = _powers(arrays["scales"][: TILE * HEADS * groups]).reshape(TILE, HEADS, groups)[:, HEAD].T
        to = out[i, : groups * TILE * 2].reshape(groups, TILE, 2)
        if use == "sums":
            to[..., 0] = pattern(np.ascontiguousarray(mine))
            continue
        for token in range(0, TILE, 1 if use == "key" else 2):
            pair = mine[:, [token, token if use == "key" else token + 1]]
            to[:, token, 0] = np.ascontiguousarray(pair.astype(BF16)).view(np.uint32)[:, 0]
            with np.errstate(invalid="ignore", over="ignore"):
                product = (codes[:groups, token] * pair.astype(np.float64)).astype(BF16)
            to[:, token, 1] = np.ascontiguousarray(product).view(np.uint32)[:, 0]
    rules = tuple(Rule("f32", any_nan=True) if use == "sums" else Rule("bf16", 2, any_nan=True) for _, use in HELD)
    return {"out": Wanted(out, rules)}


# Onto weights -------------------------------------------------------------------------------------------------------

# The largest exponent of each tile, which the unit follows upward.
TILES: Final = (20, 19, 60, 3, 90, 254)


def _weights_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(401)
    tops = np.array(TILES)[:, None, None, None]
    scales = np.maximum(tops - rng.integers(0, 12, (len(TILES), TILE, HEADS, 2)), 0)
    scales[:, 3, HEAD, 1] = TILES
    scales[1, 7, HEAD, 0] = 255  # no number, and no unit
    return {
        "scales": scales.astype(np.uint8).reshape(-1),
        "scores": pattern((-rng.integers(0, 9, (TILE, 8))).astype(np.float32)),
        "out": np.zeros((2, len(TILES), 4, 32), np.uint32),
        **{name: np.zeros((2, len(TILES)), np.uint32) for name in ("kept", "units", "inverses")},
    }


def _weights(arrays: Arrays) -> dict[str, Wanted]:
    scales = arrays["scales"].reshape(len(TILES), TILE, HEADS, 2)[:, :, HEAD].astype(np.int64)
    weights = np.exp2(arrays["scores"].view(np.float32).astype(np.float64)).reshape(TILE, 8)
    number = scales < 255
    units = np.maximum.accumulate(np.maximum(np.where(number, scales, 0).max(axis=(1, 2)), 1))
    lane, i = np.ogrid[:32, :4]
    tokens = (2 * (lane % 4) + 8 * (i % 2))[..., None] + np.arange(2)
    plain = weights[tokens, (lane // 4)[..., None]]
    out = []
    for up in (118, 0):  # of e2m1 and e4m3
        fractions = np.where(number, np.exp2(scales - units[:, None, None] + float(up)), np.nan)
        carried = plain * fractions[:, tokens, (i // 2)[..., None]]
        out.append(np.ascontiguousarray(carried.astype(BF16)).view(np.uint32)[..., 0].transpose(0, 2, 1))
    kept, inverses = np.exp2(1.0 - units).astype(np.float32), np.exp2(127.0 - units).astype(BF16)
    pairs = np.ascontiguousarray(np.stack([inverses, inverses], axis=1)).view(np.uint32)[:, 0]
    return {
        "out": Wanted(np.stack(out), Rule("bf16", 2, any_nan=True)),
        "kept": exact(np.tile(pattern(kept), (2, 1))),
        "units": exact(np.tile(pattern(np.exp2(units - 127.0).astype(np.float32)), (2, 1))),
        "inverses": exact(np.tile(pairs, (2, 1))),
    }


# Words --------------------------------------------------------------------------------------------------------------


def _words_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(402)
    codes = np.concatenate([np.roll(np.arange(256, dtype=np.uint8), i).view(np.uint32) for i in range(4)])
    exponents = np.arange(2 * len(codes)).reshape(-1, 2) % 256
    return {
        "codes": codes,
        "bytes": (exponents[:, 0] | exponents[:, 1] << 16).astype(np.uint32),
        "factors": np.ascontiguousarray(
            rng.choice([-6.0, 0.0, -0.0, 1.5, 448, np.inf, np.nan], (len(codes), 2)).astype(BF16)
        ).view(np.uint32)[:, 0],
        "out": np.zeros((18, len(codes)), np.uint32),
    }


def _words(arrays: Arrays) -> dict[str, Wanted]:
    raw, n = arrays["codes"].view(np.uint8), len(arrays["codes"])
    rows: list[Array] = []

    def add(values: Array) -> None:
        rows.append(np.ascontiguousarray(values.astype(BF16)).view(np.uint32)[:, 0])

    pairs = numbers_of(raw, "e2m1").reshape(n, 8).astype(np.float64)
    for i in range(4):
        add(pairs[:, 2 * i : 2 * i + 2])
    for factor in (1.0, 2.0**-126):
        for i in range(4):
            add(pairs[:, [i, i + 4]] * factor)
    singles = numbers_of(raw, "e4m3").reshape(n, 4)
    for i in range(2):
        add(singles[:, [i, i + 2]])
    exponents = np.stack([arrays["bytes"] & 255, arrays["bytes"] >> 16], axis=1)
    powers = _powers(exponents).astype(np.float64)
    add(powers)
    with np.errstate(invalid="ignore", over="ignore"):
        add(arrays["factors"].view(BF16).reshape(n, 2).astype(np.float64) * powers)
    add(np.ones((n, 2)))
    unit = np.maximum(np.where(exponents[:, 0] == 255, 1, exponents[:, 0]).astype(np.float64), 1)
    rows.append(pattern(np.exp2(1 - unit).astype(np.float32)))
    return {"out": Wanted(np.stack(rows), (*[Rule("bf16", 2, any_nan=True)] * 17, Rule("f32")))}


def probes() -> list[Probe]:
    """All of this module."""
    blocks = len(_words_inputs()["codes"]) // 64
    return [
        Probe("library_powers_of_tiles", UNIT, "tile_powers_held", _held_inputs, _held, 32, (len(HELD), 1, 1)),
        Probe(
            "library_powers_of_weights",
            UNIT,
            "tile_powers_weights",
            _weights_inputs,
            _weights,
            32,
            tail=[u32(len(TILES))],
        ),
        Probe("library_powers_words", UNIT, "tile_powers_words", _words_inputs, _words, 64, (blocks, 1, 1)),
    ]
