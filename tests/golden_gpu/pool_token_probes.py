"""Tokens pooled into entries (kernels/pool_tokens.cu): what each token of a step does, where rows wait, softmax sums, norms."""

from __future__ import annotations

from typing import Final

import numpy as np
from ml_dtypes import bfloat16

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import floats
from tests.golden_gpu.probe import Arrays, Probe, pattern

UNIT: Final = "pool_tokens"
DIM, RATE, RING, DRAFTS, PAGE = 32, 4, 16, 3, 3
NEAR: Final = Rule("f32", relative=2.0**-18, absolute=2.0**-20)
# Steps [begin, end), and a token of each: one token, a few, and some that go round the ring of 16 rows.
STEPS: Final = [
    *((7, 8, 7), (8, 9, 8), (3, 4, 3), (0, 1, 0), (0, 30, 3), (0, 30, 7), (0, 30, 29), (6, 10, 7), (6, 10, 9)),
    *(
        (5, 27, 7),
        (5, 27, 11),
        (5, 27, 15),
        (5, 27, 20),
        (5, 27, 21),
        (5, 27, 26),
        (4, 21, 7),
        (4, 21, 11),
        (4, 20, 11),
    ),
    *(
        (11, 40, 11),
        (11, 40, 15),
        (11, 40, 36),
        (13, 29, 28),
        (13, 29, 27),
        (2, 3, 2),
        (20, 23, 21),
        (1023, 1024, 1023),
    ),
]


def _close(x: Array) -> Wanted:
    flat = np.asarray(x, np.float64).reshape(-1)
    return Wanted(pattern(flat.astype(np.float32)), NEAR, flat[:, None])


def _task_inputs() -> dict[str, Array]:
    zeros = {name: np.zeros((len(STEPS), 16), np.uint32) for name in ("ring", "paged")}
    return {"steps": np.array(STEPS, np.uint32)} | zeros


def _task(begin: int, end: int, position: int, *, ring: bool) -> list[int]:
    """The numbers that a token's task has: of a ring whose entries overlap, or of pages whose do not."""

    def first_token(entry: int) -> int:
        return max(entry - ring, 0) * RATE

    rows, entry = RING if ring else PAGE, position // RATE
    kept = first_token(max(end - DRAFTS * ring, 0) // RATE)
    emits, keeps = position % RATE == RATE - 1, position >= kept
    start = first_token(entry) if emits else position
    old = range(first_token(begin // RATE), begin) if end // RATE > begin // RATE else range(0)
    laps = ring and end // RATE > begin // RATE and end - first_token(begin // RATE) > rows
    defers = laps and any(p % rows == position % rows for p in old)
    page = {i: i if not ring else 0 for i in range(4)}
    reads = [
        emits
        and any(t // rows - start // rows == page[i] for t in range(start, min(begin, position + 1)))
        and (not ring or i == 0)
        if not ring
        else emits and i == 0 and start < begin
        for i in range(4)
    ]
    own = [keeps and (i == 0 if ring else start // rows + i == position // rows) for i in range(4)]
    entries = int(emits)
    if laps and emits and entry == begin // RATE:
        entries = min(2, end // RATE - entry)
    elif laps and emits and entry == begin // RATE + 1:
        entries = 0
    stride = 128 if ring else 64
    masks = [
        sum(1 << i for i, on in enumerate(m) if on)
        for m in (reads, own, [a or b for a, b in zip(reads, own, strict=True)])
    ]
    place = 99 if position % 5 == 4 else position % 5 * 8 * 100 + 4 + position % 5 * 16
    return [
        *(entry, start, int(keeps), int(laps), int(defers), *masks, entries),
        *(0 if ring else position // rows - start // rows, position % rows * stride),
        *(entry * RATE, 10 + entry * RATE + RATE - 1 - begin, first_token(entry), kept, place),
    ]


def _tasks(arrays: Arrays) -> dict[str, Wanted]:
    steps = arrays["steps"].tolist()
    found = {name: [_task(*step, ring=name == "ring") for step in steps] for name in ("ring", "paged")}
    return {name: exact(np.array(rows, np.int64).astype(np.uint32)) for name, rows in found.items()}


def _state_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(131)
    x, ape = rng.integers(-99, 100, (24, 4 * DIM)), rng.integers(-99, 100, (RATE, 2 * DIM))
    found = {"x": pattern(x.astype(np.float32)), "ape": pattern(ape.astype(np.float32))}
    return found | {"state": pattern(np.full(RING * 4 * DIM, -7, np.float32)), "row": np.zeros(8 * DIM, np.uint32)}


def _state(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["x"].view(np.float32).reshape(24, 4 * DIM).copy()
    ape = arrays["ape"].view(np.float32).reshape(RATE, 2 * DIM)
    state = np.full((RING, 4 * DIM), -7, np.float32)

    def with_ape(row: int, token: int) -> Array:
        return np.concatenate([x[row, : 2 * DIM], x[row, 2 * DIM :] + ape[token % RATE]])

    old = range(5)  # rows that are read: tokens 0 to 4
    for token in range(20, 27):  # from the group before 24's on
        if token in (25, 26) or any(token % RING == p % RING for p in old):
            state[token % RING] = with_ape(token - 5 + 2, token)
    return {"state": floats(state.reshape(-1)), "row": floats(np.tile(with_ape(7, 10), 2))}


def _sum_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(132)
    x = rng.standard_normal((3, 4 * DIM)).astype(bfloat16)
    state, ape = rng.standard_normal((RING, 4 * DIM)), rng.standard_normal((RATE, 2 * DIM))
    state[7, 2 * DIM :] = -np.inf
    found: dict[str, Array] = {"x": x.view(np.uint16), "ape": pattern(ape.astype(np.float32))}
    found["state"] = pattern(state.astype(np.float32))
    sizes = {"mean": DIM, "one": 2 * DIM, "first": 3 * DIM, "old": 3 * DIM, "weights": 4}
    return found | {name: np.zeros(size, np.uint32) for name, size in sizes.items()}


def _sums(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["x"].view(bfloat16).astype(np.float32).reshape(3, 4 * DIM)
    ape, state = (
        arrays["ape"].view(np.float32).reshape(RATE, 2 * DIM),
        arrays["state"].view(np.float32).reshape(RING, 4 * DIM),
    )
    kv, score = [], []
    for token in range(4, 12):
        row = (
            state[token]
            if token < 10
            else np.concatenate([x[token - 9, : 2 * DIM], x[token - 9, 2 * DIM :] + ape[token % RATE]])
        )
        columns = slice(0, DIM) if token < 8 else slice(DIM, 2 * DIM)
        kv.append(row[: 2 * DIM][columns].astype(np.float64))
        score.append(row[2 * DIM :][columns].astype(np.float64))

    def pooled(tokens: slice) -> Array:
        values, scores = np.stack(kv[tokens]), np.stack(score[tokens])
        weights = np.exp(scores - scores.max(axis=0))
        found: Array = (weights * values).sum(axis=0) / weights.sum(axis=0)
        return found

    firsts = np.concatenate([kv[5], score[6], np.maximum(score[5], score[6])]).astype(np.float32)
    return {
        "mean": _close(pooled(slice(0, 8))),
        "one": _close(np.concatenate([pooled(slice(0, 4)), pooled(slice(4, 8))])),
        "first": floats(firsts),
        "old": floats(np.concatenate([state[15, :DIM], state[15, 2 * DIM : 3 * DIM], state[0, :DIM]])),
        "weights": _close(np.array([1, np.exp(-1), 1, 0])),
    }


def _norm_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(133)
    x, weight = rng.integers(-300, 300, 128) / 7, rng.integers(1, 13, 128) / 4
    found = {"x": pattern(x.astype(np.float32)), "weight": pattern(weight.astype(np.float32))}
    return found | {name: np.zeros(128, np.uint32) for name in ("normed", "scaled", "rounded", "head", "unknown")}


def _norms(arrays: Arrays) -> dict[str, Wanted]:
    x, weight = (arrays[name].view(np.float32).astype(np.float64) for name in ("x", "weight"))
    scaled = x / np.sqrt((x**2).mean() + 0.0625)
    rounded = x.astype(np.float32).astype(bfloat16).astype(np.float32)
    normed = scaled.astype(np.float32).astype(bfloat16).astype(np.float64) * (weight + 1)
    return {
        "normed": Wanted(pattern(normed.astype(np.float32)), Rule("f32", relative=2.0**-7), normed[:, None]),
        "scaled": _close(scaled),
        "rounded": floats(rounded),
        "head": floats(rounded),
        "unknown": floats(np.where(np.arange(128) // 4 % 2 == 0, rounded, np.float32(np.nan))),
    }


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe("library_pool_tasks", UNIT, "pool_tasks", _task_inputs, _tasks, len(STEPS)),
        Probe("library_pool_state", UNIT, "pool_state", _state_inputs, _state, 32),
        Probe("library_pool_sums", UNIT, "pool_sums", _sum_inputs, _sums, 16),
        Probe("library_pool_norms", UNIT, "pool_norms", _norm_inputs, _norms, 32),
    ]
