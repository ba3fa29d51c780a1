"""Halves of tiles of latent rows, widened from several records, and their pieces (kernels/latent_widen.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.golden_gpu.column_probes import UNUSED
from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.latent_warpgroup_probes import panels
from tests.golden_gpu.memory_probes import exact, random_bytes
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, pattern
from tests.golden_gpu.row_widen_probes import E2M1

UNIT: Final = "latent_widen"
BF16: Final = ml_dtypes.bfloat16
PAGES, PAGE_TOKENS, TOKENS, THREADS = 24, 4, 64, 256
ROWS: Final = PAGES * PAGE_TOKENS
E8M0: Final = np.uint8  # by their exponents
# Tokens whose row is none, in a page that there is not, or in no page that 32 bits can count.
ABSENT: Final = {3: -1, 8: ROWS, 17: 2**31 - 1, 30: -(2**31), 40: -1, 41: -1, 42: -1, 63: ROWS + 5}
# Tokens of rows with a NaN among the scales of the first half, and of the second.
NAN_TOKENS: Final = (20, 50)


@dataclass(frozen=True)
class Record:
    """Rows of `row` bytes in pages of `page`: `codes` dims of a kind, a scale each `group`, then `plain` bf16 `plain_at` bytes
    into the row. Scales begin `scales_at` bytes into a page, and lie `step` bytes apart from token to token."""

    kind: str
    codes: int
    row: int
    page: int
    scale: Any = None
    group: int = 1
    scales_at: int = 0
    step: int = 0
    plain: int = 0
    plain_at: int = 0

    @property
    def code_bytes(self) -> int:
        return self.codes // 2 if self.kind == "e2m1" else self.codes

    @property
    def scale_bytes(self) -> int:
        return self.codes // self.group * np.dtype(self.scale).itemsize if self.scale else 0


TAILS: Final = Record("e4m3", 448, 576, 4 * 584, E8M0, 64, 4 * 576, 8, 64, 448)
FINE: Final = Record("e4m3", 512, 532, 4 * 532, E8M0, 32, 512, 532)
FOURS: Final = Record("e2m1", 512, 288, 4 * 288, ml_dtypes.float8_e4m3fn, 16, 256, 288)
INTEGERS: Final = Record("i8", 512, 656, 4 * 656, np.float32, 128, 512, 656, 64, 528)
WHOLE: Final = Record("", 0, 1152, 4 * 1152, plain=576)
SHORT: Final = Record("", 0, 1024, 4 * 1024, plain=512)


@dataclass(frozen=True)
class Way:
    """A kernel, the records of its rows, and what these become."""

    name: str
    records: tuple[Record, ...]
    dims: int = 512
    to: str = "bf16"

    @property
    def powers(self) -> bool:
        """Whether bf16 is multiplied by powers of two, which are asked whether they are NaN."""
        return self.to == "bf16" and self.records[0].scale is E8M0


WAYS: Final = (
    Way("tails", (TAILS,)),
    Way("halves", (TAILS,), to="f16"),
    Way("fine", (FINE,)),
    Way("fours", (FOURS,)),
    Way("integers", (INTEGERS,), 576),
    Way("whole", (WHOLE,), 576),
    Way("mixed", (TAILS, SHORT)),
)


# Tiles ---------------------------------------------------------------------------------------------------------------


def _bytes_at(pool: Array, first: int, step: int, count: int) -> Array:
    """Of all rows of the pool, `[row, count]`: where they are so many bytes of."""
    page, token = np.divmod(np.arange(ROWS), PAGE_TOKENS)
    return page[:, None] * (pool.size // PAGES) + (first + token * step)[:, None] + np.arange(count)


def _scales(record: Record, rng: np.random.Generator) -> Array:
    """Scales of all rows as bytes. Products with f32 ones are of 20 bits: rounded once."""
    shape = (ROWS, record.codes // record.group)
    if record.scale is np.float32:
        numbers = rng.integers(2**11, 2**12, shape) * np.exp2(rng.integers(-30, 10, shape)) * rng.choice([1, -1], shape)
        return numbers.astype(np.float32).view(np.uint8)
    if record.scale is not E8M0:
        return rng.integers(0, 256, shape).astype(np.uint8)
    exponents = rng.integers(100, 155, shape)
    exponents[rng.random(shape) < 0.2] = 0
    exponents[rng.random(shape) < 0.05] = 1
    exponents[rng.random(shape) < 0.05] = 254
    return exponents.astype(np.uint8)


def _pool(record: Record, rng: np.random.Generator) -> Array:
    """Its bytes: any codes, any dims of 16 bits, and 255 wherever there is neither."""
    pool = np.full(PAGES * record.page, 0xFF, np.uint8)
    pool[_bytes_at(pool, 0, record.row, record.code_bytes)] = rng.integers(0, 256, (ROWS, record.code_bytes))
    pool[_bytes_at(pool, record.plain_at, record.row, 2 * record.plain)] = rng.integers(
        0, 256, (ROWS, 2 * record.plain)
    )
    if record.scale is not None:
        pool[_bytes_at(pool, record.scales_at, record.step, record.scale_bytes)] = _scales(record, rng)
    return pool


def _spoil(record: Record, pool: Array, row: int, half: int) -> None:
    """A NaN in place of the last scale that a half of a row has."""
    scales = _bytes_at(pool, record.scales_at, record.step, record.scale_bytes)[row]
    pool[scales[256 // record.group - 1 if half == 0 else -1]] = 0xFF


def _inputs(way: Way, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    pools = [_pool(record, rng) for record in way.records]
    entries = rng.permutation(ROWS)[:TOKENS]
    for half, token in enumerate(NAN_TOKENS):
        if way.powers:
            _spoil(way.records[0], pools[0], entries[token], half)
    for token, entry in ABSENT.items():
        entries[token] = entry
    return {
        "pool": np.concatenate(pools),
        "entries": entries.astype(np.int32),
        "out": np.full((way.dims // 64, TOKENS, 32), UNUSED, np.uint32),
        "nans": np.full((2, THREADS), UNUSED, np.uint32),
        "live": np.zeros(TOKENS // 8, np.uint8),
    }


def _numbers(kind: str, raw: Array) -> NDArray[np.float64]:
    """Codes as numbers."""
    if kind == "e2m1":
        return E2M1[np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1)]
    return raw.view(np.int8 if kind == "i8" else ml_dtypes.float8_e4m3fn).astype(np.float64)


def _power(exponents: Array, to: str = "bf16") -> NDArray[np.float64]:
    """e8m0 as factors of codes; of those that become bf16, 2^-127 counts as 0, and NaN as infinity."""
    power = np.exp2(exponents.astype(np.float64) - 127)
    least, none = (0.0, np.inf) if to == "bf16" else (2.0**-127, np.nan)
    return np.select([exponents == 0, exponents == 255], [least, none], power)


def _halves(record: Record, pool: Array, to: str) -> Array:
    """`[row, dims]` of all rows of a pool, as patterns of 16 bits."""
    plain = np.ascontiguousarray(pool[_bytes_at(pool, record.plain_at, record.row, 2 * record.plain)]).view(np.uint16)
    if record.scale is None:
        return plain
    numbers = _numbers(record.kind, pool[_bytes_at(pool, 0, record.row, record.code_bytes)])
    raw = pool[_bytes_at(pool, record.scales_at, record.step, record.scale_bytes)]
    scales = _power(raw, to) if record.scale is E8M0 else raw.view(record.scale).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        coded = (numbers * scales.repeat(record.group, axis=1)).astype(BF16 if to == "bf16" else np.float16)
    return np.concatenate([pattern(coded), plain], axis=1)


def _wanted(way: Way, arrays: Arrays) -> dict[str, Wanted]:
    """Panels of the tile; every lane of a warp is told of a NaN among its tokens' scales."""
    entries = arrays["entries"].astype(np.int64)
    live = (entries >= 0) & (entries < ROWS)
    token = np.arange(TOKENS)
    pools = np.split(arrays["pool"], np.cumsum([PAGES * r.page for r in way.records])[:-1])
    tile = np.zeros((TOKENS, way.dims), np.uint16)
    for n, (record, pool) in enumerate(zip(way.records, pools, strict=True)):
        mine = live & (token // 8 % len(way.records) == n)
        tile[mine] = _halves(record, pool, way.to)[entries[mine]]
    # Panels that no record has codes in are as memory has them.
    coded = max(record.codes for record in way.records)
    rules = [Rule(way.to, 2, any_nan=True) if at < coded else Rule("b32") for at in range(0, way.dims, 64)]
    nans = np.zeros((2, THREADS // 32, 32), np.uint32)
    if way.powers:
        nans[(0, 1), [n // 8 for n in NAN_TOKENS]] = 1
    return {
        "out": Wanted(panels(tile), tuple(rules)),
        "nans": exact(nans.reshape(2, THREADS)),
        "live": exact(np.packbits(live, bitorder="little")),
    }


# Pieces --------------------------------------------------------------------------------------------------------------

# Of each output of scales: panels, dims of a scale, bytes of one.
SCALES: Final = {
    "tails": (3, 64, 1),
    "fine": (4, 32, 1),
    "fours": (4, 16, 1),
    "integers": (4, 128, 4),
    "wide": (2, 16, 2),
}
COUNTS: Final = (1, 2, 3, 4, 7, 8, 16)
HALVES: Final = (3, 2, 1, 1)  # scales of a half
# The only scale of each warp that is NaN, which two of its lanes have.
NANS: Final = (0, 1, 2, 3, 6, 7, 8, 15)


def _scales_inputs() -> dict[str, Array]:
    words = random_bytes(16 * THREADS, 331).reshape(-1, 32, 16)
    words[words == 255] = 254
    for warp, scale in enumerate(NANS):
        words[warp, [5, 20], scale] = 255
    outs = {name: np.full((THREADS, count), UNUSED, np.uint32) for name, (count, _, _) in SCALES.items()}
    told = {name: np.full(THREADS, UNUSED, np.uint32) for name in ("nans", "told")}
    return {"in": words.reshape(THREADS, 16).view(np.uint32), **outs, **told}


def _scales_wanted(arrays: Arrays) -> dict[str, Wanted]:
    """The scale of the dims from 16 (thread % 4) on of each panel; how soon a NaN comes, to a lane and to its warp."""
    words, first = arrays["in"].view(np.uint8), np.arange(THREADS)[:, None] % 4 * 16
    found = {}
    for name, (count, dims, each) in SCALES.items():
        known = np.ascontiguousarray(words).view(f"u{each}")
        at = (np.arange(count) * 64 + first) // dims
        found[name] = exact(np.take_along_axis(known, at, axis=1).astype(np.uint32))
    nans, told = np.zeros((2, THREADS), np.uint32)
    for n, count in enumerate(COUNTS):
        nans |= (words[:, :count] == 255).any(axis=1).astype(np.uint32) << np.uint32(n)
    for n, count in enumerate(HALVES):
        told |= (np.array(NANS) < count).repeat(32).astype(np.uint32) << np.uint32(n)
    return {**found, "nans": exact(nans), "told": exact(told)}


def _powers_inputs() -> dict[str, Array]:
    return {
        "codes": np.arange(256, dtype=np.uint8).view(np.uint32),
        "out": np.full((256, 256), 0xEEEE, np.uint16),
    }


def _powers(arrays: Arrays) -> dict[str, Wanted]:
    """`[scale, code]`: one rounding, and that only where bf16 ends."""
    codes = _numbers("e4m3", arrays["codes"].view(np.uint8)[None])
    with np.errstate(invalid="ignore", over="ignore"):
        found = (codes * _power(np.arange(256))[:, None]).astype(BF16)
    return {"out": Wanted(pattern(found), Rule("bf16", any_nan=True))}


def _places_inputs() -> dict[str, Array]:
    return {
        "rows": random_bytes(TOKENS * 256, 332),
        "places": np.full((THREADS, 4), UNUSED, np.uint32),
        "copied": np.full((2, TOKENS, 32), UNUSED, np.uint32),
        "live": np.full((256, 32), 0xEE, np.uint8),
    }


def _places(arrays: Arrays) -> dict[str, Wanted]:
    token, j = np.divmod(np.arange(THREADS), 4)
    rows = arrays["rows"].view(np.uint16).reshape(TOKENS, 128).copy()
    rows[1::3] = 0
    # Of rows that are copied lanes of even tokens begin with chunks 0, 1, 4 and 5, of odd ones with 2, 3, 6 and 7.
    chunk = np.array([[0, 1, 4, 5], [2, 3, 6, 7]])[token % 2, j]
    # Bytes to chunk 2j in a panel; from a row's first dims to 16j of those from 448 and from 512 on.
    places = [token * 128 + (2 * j ^ token % 8) * 16, chunk, 448 + 32 * j, 528 + 32 * j]
    return {
        "places": exact(np.stack(places, axis=1).astype(np.uint32)),
        "copied": exact(panels(rows)),
        "live": exact(np.arange(256, dtype=np.uint8).repeat(32).reshape(256, 32)),
    }


def probes() -> list[Probe]:
    """All of this module."""
    pieces: tuple[tuple[str, Any, Any], ...] = (
        ("scales", _scales_inputs, _scales_wanted),
        ("powers", _powers_inputs, _powers),
        ("places", _places_inputs, _places),
    )
    return [
        *(
            Probe(
                f"library_latent_widen_{way.name}",
                UNIT,
                f"latent_widen_{way.name}",
                partial(_inputs, way, 340 + n),
                partial(_wanted, way),
                THREADS,
                shared=TOKENS * 2 * way.dims,
            )
            for n, way in enumerate(WAYS)
        ),
        *(
            Probe(f"library_latent_widen_{name}", UNIT, f"latent_widen_{name}", inputs, wanted, THREADS)
            for name, inputs, wanted in pieces
        ),
    ]
