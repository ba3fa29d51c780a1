"""extend with bad device data: the victim's rows are NaN, everybody else's keep their bits, the error word says who and where."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import float8_e8m0fnu

from kvgen import Continuous, KernelSet
from kvgen.layout.dtypes import dtype
from kvgen.reference import Place, cache_rows
from kvgen.reference.decode import products, weighted
from kvgen.runtime import describe
from kvgen.runtime.cpu import machine
from tests.ops import test_extend_sm90
from tests.ops.test_hostile import VICTIM, spoils_of
from tests.support import extend_sets
from tests.support.batches import OPEN_TOKENS, PLAIN
from tests.support.extend_steps import Step, step
from tests.support.harness import package
from tests.support.memory import Raw

CAMPAIGN: Final = "KVGEN_FAMILY" in os.environ
# On mma.sync, on CUDA cores, and by warpgroups.
SETS: Final[dict[str, KernelSet]] = {
    "paged": extend_sets.SETS["paged"],
    "f32": extend_sets.SETS["f32"],
    "wgmma_llama": test_extend_sm90.SETS["llama"],
}
if CAMPAIGN:
    SETS |= extend_sets.SETS | extend_sets.MORE
    SETS |= {f"wgmma_{name}": kernels for name, kernels in test_extend_sm90.DRAWN.items()}


# Tokens of the longest request, and rows of each: the second one's are more than a tile of 128 columns of 4 heads.
MOST: Final = (160, (7, 130, 3)) if CAMPAIGN else (90, (7, 60, 3))


def three(kernels: KernelSet, *, seed: int, padding: int = 0, errors: bool = True) -> Step:
    """Three requests, the victim in the middle: a few rows, more than a tile of them behind a prefix, a short prompt."""
    most, rows = MOST if kernels.ops[0].mask.tree != "packed" else (60, (7, 32, 3))  # type: ignore[attr-defined]
    if kernels.cache.ragged or isinstance(kernels.cache, Continuous):
        most = min(most, getattr(kernels.cache, "max_tokens", 0) or OPEN_TOKENS)
    most = min(most, getattr(kernels.cache.page_table, "window", most))
    counts = tuple(min(n, most * 3 // 4) for n in rows)
    schedule: Any = ("ascending", "descending", 3)[seed % 3]
    batch = replace(
        PLAIN,
        totals=(min(50, most), most, counts[2]),
        new=(0, 0, 0),
        seed=9,
        padding=padding,
        schedule=schedule,
        errors=errors,
    )
    return step(kernels, batch, counts, dominant=False)


def held(found: Step, right: tuple[Raw, Raw], victims: list[int]) -> None:
    """The step as the oracle has it; rows of all others have the bits of `right`."""
    out, lse = found.check(multiprocessors=2)
    begins = np.cumsum([0, *found.counts])
    for b in range(len(found.counts)):
        rows = slice(begins[b], begins[b + 1])
        if b in victims:
            continue
        assert out[rows].tobytes() == right[0][rows].tobytes(), b
        assert lse[rows].tobytes() == right[1][rows].tobytes(), b


@pytest.mark.parametrize("name", SETS)
def test_tables(name: str) -> None:
    """One wrong entry of a table, before the plan and after it."""
    kernels = SETS[name]
    clean = three(kernels, seed=0)
    right = clean.check(multiprocessors=2)
    for n, (label, spoil) in enumerate(spoils_of(kernels).items()):
        found = three(kernels, seed=n, errors=n % 4 != 3)
        victims = [2] if "indptr" in label or "offsets" in label else [VICTIM]
        planned = found.planned(multiprocessors=2)
        spoil(found.scene)
        out, lse, word = found.run(workspace=planned)
        begins = np.cumsum([0, *found.counts])
        for b in range(3):
            rows = slice(begins[b], begins[b + 1])
            same = out[rows].tobytes() == right[0][rows].tobytes() and lse[rows].tobytes() == right[1][rows].tobytes()
            assert same or b in victims, (label, b)
            if b in victims and not same:
                lost = np.isnan(out[rows].astype(np.float32)).all(axis=(1, 2))
                assert lost.any() and np.isnan(lse[rows][lost]).all(), label
                assert word or not found.scene.batch.errors, label
        held(found, right, victims)


INDEX: Final = st.sampled_from(
    (-1, 0, 1, 7, MOST[1][1] - 1, MOST[1][1], sum(MOST[1]), sum(MOST[1]) + 1, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1)
)


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=60 if CAMPAIGN else 2)
@given(data=st.data())
def test_any_offsets_and_tables(name: str, data: Any) -> None:
    """Words of the offsets, lengths and tables overwritten, all at once: the oracle says what comes of it."""
    found = three(SETS[name], seed=data.draw(st.integers(0, 2)), padding=data.draw(st.integers(0, 2)))
    for tensor in (t for tensors in found.scene.tensors.values() for t in tensors):
        array = tensor.view(tensor.memory)  # requests of other lengths see what no token was written to
        if array.dtype == float8_e8m0fnu:  # nor what no sum holds
            exponents = array.view(np.uint8)
            exponents[...] = np.clip(exponents, 120, 134)
            continue
        special = array.view(np.uint8) & 0x7C == 0x7C if array.itemsize == 1 else ~np.isfinite(array.astype(np.float32))
        array[special] = 0
    assert found.row_offsets is not None
    tables = [found.row_offsets, *found.scene.tables.values()]
    for _ in range(data.draw(st.integers(1, 4))):
        array = tables[data.draw(st.integers(0, len(tables) - 1))]
        if array.size:
            value = np.array(data.draw(INDEX)).astype(array.dtype)
            array[np.unravel_index(data.draw(st.integers(0, array.size - 1)), array.shape)] = value
    found.check(multiprocessors=data.draw(st.sampled_from((1, 16))))


STRANGE: Final[dict[str, KernelSet]] = {
    **{name: extend_sets.SETS[name] for name in ("tree", *(("paged", "window", "fp8") if CAMPAIGN else ()))},
    "wgmma_llama": test_extend_sm90.SETS["llama"],
}


@pytest.mark.parametrize("name", STRANGE)
def test_numbers_that_are_none(name: str) -> None:
    """NaN and infinities in K and V of a token are those of the rows that see it, and in q those of a row and head: all others
    keep their bits, later rows of a tile, siblings in a tree and rows behind a window too."""
    kernels = STRANGE[name]
    tree = name == "tree"
    total, rows = (60, 32) if tree else (150, 100)

    def made() -> Step:
        return step(kernels, replace(PLAIN, totals=(total, 20), new=(0, 0), seed=4), (rows, 9), dominant=False)

    right = made()
    good, good_lse = right.check()
    wanted = right.wanted()
    quantized = kernels.kv.quants["k"] is not None
    token, dim, group = total - rows // 2, 5, kernels.group
    places = ((rows // 2, np.nan), (rows - 1, np.inf), (rows + 3, -np.inf))
    changes: list[tuple[str, int, float]] = [("q", row, value) for row, value in places]
    if not quantized:
        changes += [(role, at, x) for role in "kv" for at, x in ((token, np.nan), (token - 1, np.inf))]
    for role, at, value in changes:
        found = made()
        if role == "q":
            found.q[at, 1, dim] = value
        else:
            roles = found.scene.rows()
            whole = [
                r.read(found.scene.view.places(0, at // found.scene.tokens)[i].page, at % found.scene.tokens)
                for i, r in enumerate(roles)
            ]  # type: ignore[index]
            values = [np.array(x) for x in whole]
            values["kv".index(role)][0, dim] = value
            found.scene.write(0, at, values)
        out, lse, word = found.run()
        assert word == 0
        touched = np.zeros(out.shape, np.bool_)
        for row, seen in enumerate(wanted.seen):
            assert seen is not None
            if role == "q":
                touched[row, 1] = row == at
            elif row < rows and at in seen.tokens:
                touched[row, :group, dim if role == "v" else slice(None)] = True
        assert (out.view(np.uint16) == good.view(np.uint16))[~touched].all(), (role, at, value)
        heads = touched.any(axis=2) & (role != "v")
        assert (lse.view(np.uint32) == good_lse.view(np.uint32))[~heads].all(), (role, at, value)
        assert touched.any()
        if np.isnan(value) or role == "v":
            assert not np.isfinite(out.astype(np.float32)[touched]).any(), (role, at, value)


@pytest.mark.parametrize("name", ["paged", "wgmma_llama"])
def test_past_two_to_the_31(name: str, tmp_path: Path) -> None:
    """A pool of more than 2^32 elements, and rows of q and out further apart than 2^31 (sparse files): keys in the last pages are
    found, rows are read and written."""
    kernels = SETS[name]
    kind = dtype(kernels.cache.dtype).numpy()
    (tensor,) = package(kernels).Cache.TENSORS
    of_page = math.prod(n for n in tensor.shape if isinstance(n, int))
    pages = 2**32 // of_page + 3
    shape = [{"pages": pages, "layers": 1}.get(n, n) for n in tensor.shape]
    pool: Raw = np.memmap(tmp_path / "pool", kind, "w+", shape=tuple(shape))
    assert pool.size > 2**32
    rows, total, dim = 3, 40, kernels.kv.head_dim
    table = np.array([[pages - 1, 0, pages // 2 + 1]], np.int32)
    lengths = np.array([total - rows], np.int32)
    rng = np.random.default_rng(2)
    roles = cache_rows(kernels.cache, {"pool": pool}, 0)
    for page in range(3):
        for role in roles:
            role.write_run(int(table[0, page]), 0, rng.standard_normal((16, role.heads, role.dim)).astype(kind))
    wide = [np.memmap(tmp_path / n, kind, "w+", shape=(rows, 2**31 + 64)) for n in ("q", "out")]
    q, out = (x[:, : kernels.q_heads * dim].reshape(rows, kernels.q_heads, dim) for x in wide)
    assert np.shares_memory(out, wide[1])
    q[...] = rng.standard_normal(q.shape)
    errors, generated = np.zeros(1, np.uint64), package(kernels)
    with machine(mode="check"):
        cache = generated.Cache(pool, lengths=lengths, page_table=table)
        workspace = generated.extend.workspace(max_rows=rows)
        generated.extend.plan(cache[0], workspace, rows=rows)
        generated.extend(cache[0], q, out, workspace, errors=errors)
    assert describe(errors) is None
    k, v = (
        np.concatenate([r.run_numbers(0, 16 * i, 16, Place(int(p), 0)) for i, p in enumerate(table[0])])[:total]
        for r in roles
    )
    for row in range(rows):
        seen = slice(0, total - rows + 1 + row)
        scores = products(q[row].astype(np.float64), k[seen], dim**-0.5)
        np.testing.assert_allclose(out[row].astype(np.float64), weighted(scores, v[seen])[0], atol=0.03)
