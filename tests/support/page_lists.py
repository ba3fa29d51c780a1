"""Page tables in another form: to_dense and to_csr, run and compared with their oracles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvgen import CSR, Dense, Indirect, KernelSet, Mapped, ops
from kvgen.layout.dtypes import dtype
from kvgen.reference import to_csr, to_dense
from kvgen.runtime import describe
from kvgen.schema.cache import Cache, Continuous
from kvgen.schema.kernel_set import Op
from tests.support.batches import PLAIN
from tests.support.cache_matrix import CHOSEN, chosen
from tests.support.harness import surroundings
from tests.support.memory import CANARY, Raw, rows_array
from tests.support.scenes import Scene
from tests.support.step_lengths import go, hold, vector


def operations(cache: Cache) -> Sequence[Op] | None:
    found: list[Op] = []
    both = any(cache is CHOSEN[name] for name in BOTH)
    if isinstance(cache.page_table, CSR | Indirect | Mapped):
        found += [ops.ToDense(), ops.ToDense(name="signed", table_dtype="i64", fill=-1)][: 1 + both]
    if isinstance(cache.page_table, Dense | Indirect | Mapped) and not isinstance(cache, Continuous):
        found += [ops.ToCsr(), ops.ToCsr(name="wide", table_dtype="i64", fill=-1)][: 1 + both]
    return found or None


# Whose tables come in another type with another null entry too.
BOTH = ("kv_inside", "indirect", "dense")


# CSR of both kinds, with and without a multiplier; slots; rows by name; dense tables of both kinds, one beside one of scales.
SETS = chosen("lists", operations, ("kv_inside", "flashinfer", "indirect", "mapped", "dense", "hnd", "int8_own_table"))


TO_DENSE = [name for name, kernels in SETS.items() if any(isinstance(o, ops.ToDense) for o in kernels.ops)]


TO_CSR = [name for name, kernels in SETS.items() if any(isinstance(o, ops.ToCsr) for o in kernels.ops)]


FILLS = {"to_dense": None, "signed": -1, "to_csr": None, "wide": -1}


KINDS = {"to_dense": "i32", "signed": "i64", "to_csr": "i32", "wide": "i64"}


def step_arrays(kernels: KernelSet, offsets: Raw | None) -> dict[str, Raw | None]:
    """The argument that says how many new tokens there are, where the operation takes one."""
    return {} if isinstance(kernels.cache.page_table, CSR) else {"row_offsets": offsets}


def check_to_dense(scene: Scene, op: str, columns: int, offsets: Raw | None) -> int:
    """A table of so many columns against the oracle; the error word."""
    requests = len(scene.batch.totals)
    out, around = rows_array(requests, (columns,), KINDS[op], strided=scene.batch.strided)
    given, extra = step_arrays(scene.kernels, offsets), {}
    wanted, wanted_lengths = out.copy(), None
    if "last_page_len" in scene.tables:
        extra["lengths"] = vector(requests, scene.cache.lengths_dtype)
        wanted_lengths = extra["lengths"][0].copy()
    word = to_dense(scene.view, wanted, fill=FILLS[op], lengths=wanted_lengths, **given)
    found = go(scene, op, page_table=out, **given, **{name: array for name, (array, _) in extra.items()})
    np.testing.assert_array_equal(out, wanted)
    assert (surroundings(out, around) == CANARY).all(), "written beside the table"
    for array in extra.values():
        hold(array, wanted_lengths)
    assert not scene.batch.errors or found == word, f"{describe(found)}, not {describe(word)}"
    return word


def check_to_csr(scene: Scene, op: str, room: int, offsets: Raw | None, *, last: bool = True) -> tuple[int, list[Raw]]:
    """Lists with room for so many ids against the oracle; the error word and the lists."""
    requests = len(scene.batch.totals)
    arrays = {"page_indices": vector(room, KINDS[op]), "page_indptr": vector(requests + 1, KINDS[op])}
    if last:
        arrays["last_page_len"] = vector(requests, KINDS[op])
    wanted = [array.copy() for array, _ in arrays.values()]
    word = to_csr(scene.view, *wanted, fill=FILLS[op], row_offsets=offsets)
    found = go(scene, op, **{name: array for name, (array, _) in arrays.items()}, row_offsets=offsets)
    for pair, right in zip(arrays.values(), wanted, strict=True):
        hold(pair, right)
    assert not scene.batch.errors or found == word, f"{describe(found)}, not {describe(word)}"
    return word, wanted


def having(kernels: KernelSet, *names: str) -> list[str]:
    """Those of the operations that the set has."""
    return [op.name for op in kernels.ops if op.name in names]


def long(name: str, requests: int, pages: int, counts: Sequence[int] | None = None) -> tuple[Scene, Raw]:
    """A scene of many requests with up to so many pages each, and how many each has."""
    rng = np.random.default_rng(requests)
    scene = Scene(SETS[name], PLAIN, ())
    counts = rng.integers(0, pages + 1, requests) if counts is None else np.array(counts)
    scene.batch = replace(PLAIN, totals=tuple(int(n) * scene.tokens for n in counts), new=(0,) * requests)
    table = scene.cache.page_table.dtype
    if isinstance(scene.cache.page_table, CSR):
        indptr = np.cumsum([0, *counts])
        scene.tables["page_indptr"] = indptr.astype(dtype(table).numpy())
        scene.tables["page_indices"] = rng.integers(0, 2, indptr[-1]).astype(dtype(table).numpy())
        scene.tables["last_page_len"] = np.full(requests, scene.tokens, dtype(table).numpy())
    else:
        scene.tables["lengths"] = (counts * scene.tokens).astype(dtype(scene.cache.lengths_dtype).numpy())
        scene.tables["page_table"] = rng.integers(0, 2, (requests, pages)).astype(dtype(table).numpy())
    return scene, counts


BATCH = replace(PLAIN, totals=(7, 20, 5), new=(2, 3, 1))


def spoil(scene: Scene, name: str, at: Any, value: int) -> None:
    array = scene.tables[name] = scene.tables[name].copy()
    array[at] = np.array(value, np.int64).astype(array.dtype)
