"""Rows added to a cache (kernels/add.cu), over the runs of kernels/runs.cuh: what is there is read, added to and stored anew."""

from __future__ import annotations

import struct
from functools import partial
from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import PACKED, floats, quant
from tests.golden_gpu.probe import Arrays, Probe, pattern
from tests.golden_gpu.quantize_probes import GLOBAL
from tests.golden_gpu.segment_probes import BF16, DIMS, HEADS, KINDS, PAGES, TOKENS, Run, stored

# Where each row goes, in tokens of both pages.
PLACES: Final = [i % 2 * TOKENS + i * 5 % TOKENS for i in range(6)]
NOWHERE, STRIDE = 2, 88
RUNS: Final = {
    "add_bf16": Run("bf16", None),
    "add_given_e4m3": Run("e4m3", "f32", "given", dims=4),
    "add_i8": Run("i8", "f16"),
    "add_u8": Run("u8", "f16", zero=True),
    "add_u4": Run("u4", "bf16", zero=True),
    "add_nvfp4_max": Run("e2m1", "e4m3", "max"),
    "add_nvfp4_global": Run("e2m1", "e4m3", "global"),
}


def _inputs(run: Run) -> dict[str, Array]:
    rng = np.random.default_rng(117)
    x = rng.standard_normal((PAGES * TOKENS, HEADS, DIMS)).astype(BF16)
    rows = (rng.standard_normal((6, STRIDE)) * 3).astype(BF16)
    scales = np.zeros((PAGES * TOKENS, run.scale_row if run.kind else 0), KINDS[run.kind or "f32"])
    if run.recipe == "given":
        scales[:] = np.exp2(rng.uniform(-8, 2, scales.shape))
    memory = x.view(np.uint8) if run.plain else _bytes(run, stored(run, x.astype(np.float32), scales)[0])
    return {
        "rows": pattern(rows),
        "scales": pattern(scales.reshape(-1) if run.kind else np.zeros(1, np.float32)),
        "codes": memory.reshape(-1).copy(),
    }


def _bytes(run: Run, codes: Array) -> Array:
    packed: Array = quant.pack_nibbles(codes) if run.dtype in PACKED else codes
    return packed.reshape(-1)


def _values(run: Run, arrays: Arrays, scales: Array) -> tuple[Array, Array]:
    """The cache's codes a value, and the numbers they are."""
    shape = (PAGES * TOKENS, HEADS, DIMS)
    raw = arrays["codes"]
    codes = (quant.unpack_nibbles(raw) if run.dtype in PACKED else raw).reshape(shape).copy()
    values = np.zeros(shape, np.float32)
    for block, place in run.blocks():
        scale, zero = scales[:, place], scales[:, place + 1] if run.zero else None
        recipe = "amax" if run.recipe == "given" else run.recipe
        level = GLOBAL if run.recipe == "global" else None
        some = codes[block].reshape(shape[0], -1)
        values[block] = quant.dequantize(some, scale, zero, run.spec, recipe, "f32", level).reshape(codes[block].shape)
    return codes, values


def _wanted(run: Run, arrays: Arrays) -> dict[str, Wanted]:
    rows = arrays["rows"].view(BF16).astype(np.float32).reshape(6, STRIDE)[:, : HEADS * DIMS].reshape(6, HEADS, DIMS)
    to, live = [p for i, p in enumerate(PLACES) if i != NOWHERE], [i for i in range(6) if i != NOWHERE]
    if run.plain:
        memory = arrays["codes"].view(BF16).reshape(PAGES * TOKENS, HEADS, DIMS).copy()
        memory[to] = (memory[to].astype(np.float32) + rows[live]).astype(BF16)
        return {"codes": exact(memory.reshape(-1).view(np.uint8))}
    kind = KINDS[run.kind or "f32"]
    scales = arrays["scales"].view(kind).copy().reshape(PAGES * TOKENS, -1)
    codes, values = _values(run, arrays, scales)
    mine = scales[to]
    codes[to] = stored(run, values[to] + rows[live], mine)[0]
    found = {"codes": exact(_bytes(run, codes))}
    if run.recipe == "given":
        return found
    scales[to] = mine
    return found | {"scales": floats(scales.reshape(-1), run.kind or "f32")}


def _pieces_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(118)
    return {
        "rows": pattern((rng.standard_normal((6, STRIDE))).astype(BF16)),
        "codes": rng.integers(0, 256, 256, np.uint8),
        "scales": pattern(np.array([0.37, 91], np.float32)),
        "chunks": np.zeros((64, 2), np.uint32),
        "parts": np.zeros((64, 2, 4), np.uint16),
        "values": np.zeros(256, np.uint32),
    }


def _pieces(arrays: Arrays) -> dict[str, Wanted]:
    """A row has 12 slots, two lanes a block of 16 dims; the last block of a head has 8."""
    rows, scale = arrays["rows"].reshape(6, STRIDE), arrays["scales"].view(np.float32)
    chunks, parts = np.full((64, 2), 2**32 - 1, np.uint32), np.zeros((64, 2, 4), np.uint16)
    for slot in range(64):
        row, (block, lane) = slot // 12, divmod(slot % 12, 2)
        for c in range(2):
            head, dim = block // 3, block % 3 * 16 + c * 8 + lane * 4
            if dim < DIMS:
                chunks[slot, c] = head << 8 | dim
                parts[slot, c] = rows[row, head * DIMS + dim :][:4]
    values = (arrays["codes"].astype(np.float32) - scale[1]) * scale[0]
    return {"chunks": exact(chunks), "parts": exact(parts), "values": floats(values)}


def probes() -> list[Probe]:
    """All of this module."""
    tail = [struct.pack("<f", GLOBAL)]
    return [
        *(
            Probe(f"library_{name}", "add", name, partial(_inputs, run), partial(_wanted, run), 96, tail=tail)
            for name, run in RUNS.items()
        ),
        Probe("library_add_pieces", "add", "add_pieces", _pieces_inputs, _pieces, 64),
    ]
