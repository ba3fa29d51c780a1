"""Rows of a cache, read and written (kernels/stored.cu), over the arrays of paged_probes."""

from __future__ import annotations

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import floats
from tests.golden_gpu.paged_probes import BF16, DIMS, HEADS, PAGES, TOKENS, Paged, memory, queries
from tests.golden_gpu.probe import Arrays, Probe, pattern

COUNT, ROW, SCALES = 128, HEADS * DIMS, 12


def _load_inputs() -> dict[str, Array]:
    outs = {"k": (ROW, 4), "dims": (32, 4), "v": (ROW, 2), "k_codes": (ROW, 1), "v_codes": (ROW, 2)}
    outs |= {"k_scales": (SCALES, 2), "fourth": (1, 2)}
    zeros: dict[str, Array] = {name: np.zeros((COUNT, n), f"u{size}") for name, (n, size) in outs.items()}
    return {"queries": queries(), **memory(), **zeros}


def _load(arrays: Arrays) -> dict[str, Wanted]:
    """NaN for a token whose page cannot be had; as a byte, 0xff."""
    cache = Paged(arrays)
    k, dims, v = (np.full((COUNT, n), np.nan, np.float32) for n in (ROW, 32, ROW))
    codes, scales = np.full((COUNT, ROW), 0xFF, np.uint8), np.full((COUNT, SCALES), np.nan, np.float16)
    for i, (b, token, _, _) in enumerate(arrays["queries"].tolist()):
        page, fault = cache.page(b, token)
        if fault:
            continue
        at = token % TOKENS
        k[i] = [cache.k(page, at, h, d) for h in range(HEADS) for d in range(DIMS)]
        dims[i] = [cache.k(page, at, h, d) for h in range(HEADS) for d in range(32, 48)]
        v[i] = [cache.v(page, at, h, d) for h in range(HEADS) for d in range(DIMS)]
        codes[i] = [cache.code(page, at, h, d) for h in range(HEADS) for d in range(DIMS)]
        scales[i] = cache.scales[page, at * SCALES :][:SCALES]
    return {
        "k": floats(k),
        "dims": floats(dims),
        "v": floats(v.astype(BF16), "bf16"),
        "k_codes": exact(codes),
        "v_codes": floats(v.astype(BF16), "bf16"),
        "k_scales": floats(scales, "f16"),
        "fourth": floats(scales[:, 9:10], "f16"),
    }


def _store_inputs() -> dict[str, Array]:
    rng, arrays, count = np.random.default_rng(119), memory(), PAGES * TOKENS
    table = np.zeros((1, 8), np.uint32)
    table[0, :PAGES] = rng.permutation(PAGES)
    return {
        "table": table,
        "k_codes": rng.integers(0, 256, (count, ROW), np.uint8),
        "k_scales": pattern(rng.standard_normal((count, SCALES)).astype(np.float16)),
        "v": pattern(rng.standard_normal((count, ROW)).astype(BF16)),
        **{name: arrays[name] for name in ("codes", "scales", "values")},
    }


def _store(arrays: Arrays) -> dict[str, Wanted]:
    """Rows of 80 codes and of 12 scales from the first of each page's on; V has whole pages."""
    found = {}
    pages = arrays["table"][0, :PAGES]
    for name, rows in (("codes", "k_codes"), ("scales", "k_scales"), ("values", "v")):
        own = arrays[name].reshape(PAGES, -1).copy()
        given = arrays[rows].reshape(PAGES, -1)
        own[pages, : given.shape[1]] = given
        found[name] = exact(own.reshape(-1))
    return found


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe("library_stored_load", "stored", "stored_load", _load_inputs, _load, 64, (2, 1, 1)),
        Probe("library_stored_store", "stored", "stored_store", _store_inputs, _store, PAGES * TOKENS),
    ]
