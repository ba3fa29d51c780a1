"""Sets and calls of the operations that copy rows as they are stored: gather and scatter with raw, gather_rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvgen import ops
from kvgen.layout.dtypes import dtype
from kvgen.lowering.lowered import lower
from kvgen.lowering.row_runs import stored_runs
from kvgen.reference import gather_raw, scatter, scatter_raw
from kvgen.schema.cache import Cache
from tests.support.cache_matrix import CHOSEN, FEW_BITS, chosen
from tests.support.harness import Run, hold_memory, launcher, surroundings
from tests.support.memory import CANARY, Raw, rows_array
from tests.support.scenes import Scene

# Scatter makes codes as append does; raw rows do not ask how scales were chosen.
SCATTER = (
    "kv_inside",
    "per_kv",
    "mapped",
    "ring",
    "latent_row",
    "mixed",
    "int8_own_table",
    "nvfp4_swizzled",
    *FEW_BITS,
)
RAW = (
    "kv_inside",
    "per_kv",
    "ring",
    "xpacked",
    "latent_row",
    "int8_own_table",
    "int4_in_page",
    "nvfp4_swizzled",
    *FEW_BITS,
)


def _operations(cache: Cache) -> list[Any]:
    found: list[Any] = []
    if any(cache is CHOSEN[name] for name in SCATTER):
        found.append(ops.Scatter())
    if any(cache is CHOSEN[name] for name in RAW):
        found += [ops.Gather(name="gather_raw", raw=True), ops.Scatter(name="scatter_raw", raw=True)]
    return found


STORED = chosen("stored", _operations, dict.fromkeys((*SCATTER, *RAW)))


def stored_arrays(scene: Scene, rows: int, suffix: str = "") -> tuple[dict[str, Raw], list[Any]]:
    """Arrays for raw rows by name, and the memory around each: canaries."""
    found, memory = {}, []
    for run in stored_runs(lower(scene.cache)):
        array, around = rows_array(rows, run.shape, run.array.name, strided=scene.batch.strided)
        found[run.name + suffix] = array
        memory.append(around)
    return found, memory


def check_gather_raw(scene: Scene, rows: int, *, row_offsets: Raw, starts: Raw | None) -> dict[str, Raw]:
    """Gather what is stored and compare every byte with the oracle's, those around the rows too."""
    outs, memory = stored_arrays(scene, rows, "_out")
    before = {name.removesuffix("_out"): array.copy() for name, array in outs.items()}
    wanted, failed, word = gather_raw(scene.view, scene.rows(), before, row_offsets=row_offsets, starts=starts)
    pool = scene.snapshot()
    run = Run(scene, "gather_raw", launcher(scene, "gather_raw"), **outs, row_offsets=row_offsets, starts=starts)
    for (name, out), around in zip(outs.items(), memory, strict=True):
        right = wanted[name.removesuffix("_out")]
        assert _bits(out[~failed]) == _bits(right[~failed]), name
        assert (np.isnan(out[failed].astype(np.float32)) | (out[failed] == right[failed])).all(), name
        assert (surroundings(out, around) == CANARY).all(), "written beside the rows"
    hold_memory(scene, pool)
    run.expect_word(word)
    return {name.removesuffix("_out"): out for name, out in outs.items()}


def _bits(array: Raw) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def check_scatter(scene: Scene, new: dict[str, Raw], *, row_offsets: Raw, starts: Raw | None, raw: bool) -> int:
    """Scatter and compare all memory, byte for byte, with the oracle's; the error word."""
    expected = scene.snapshot()
    places = {"row_offsets": row_offsets, "starts": starts}
    if raw:
        word = scatter_raw(scene.view, scene.rows(expected), new, **places)  # type: ignore[arg-type]
    else:
        word = scatter(scene.view, scene.rows(expected), list(new.values()), **places)  # type: ignore[arg-type]
    op = "scatter_raw" if raw else "scatter"
    run = Run(scene, op, launcher(scene, op), **new, **places)
    hold_memory(scene, expected)
    run.expect_word(word)
    return word


def random_stored(scene: Scene, rows: int) -> dict[str, Raw]:
    """Random bits for raw rows."""
    arrays, _ = stored_arrays(scene, rows)
    for array in arrays.values():
        bits = scene.rng.integers(0, 256, (*array.shape, array.itemsize), np.uint8)
        array[...] = bits.view(array.dtype)[..., 0]
    return arrays


def starts_of(scene: Scene, index: str, values: list[int]) -> Raw:
    """First tokens as the operation takes them."""
    return np.array(values, np.int64).astype(dtype(index).numpy())
