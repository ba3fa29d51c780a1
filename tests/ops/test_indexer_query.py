"""indexer_query against the oracle: codes and scales of every head, weights, rows without a position, nothing beside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import Block, KernelSet, Layout, Paged, Quant, Rope, presets
from kvgen.layout.dtypes import dtype
from kvgen.ops import IndexerQuery
from kvgen.reference import indexer_query
from kvgen.reference.indexer_query import block_scales, e2m1_half_step, head_scales, words_of
from kvgen.reference.indexer_scores import e8m0_scales, unpacked
from kvgen.reference.quant import cast, pack_nibbles, values
from kvgen.reference.rope import Table
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN
from tests.support.harness import package, surroundings
from tests.support.memory import CANARY, Raw, rows_array
from tests.support.scenes import Scene

MOST = 40  # rows of a table of angles
OPTIONS: dict[str, dict[str, Any]] = {
    # DeepSeek V4's, which transforms; V3.2's, whose first dims turn; nothing but codes.
    "last": {"rope": Rope(style="interleaved", theta=1e4, dim=64, part="last"), "hadamard": True},
    "first": {"rope": Rope(style="neox", theta=1e4, dim=64), "angles": "halves", "weights_dtype": "same", "recipe": "amax"},
    "plain": {"factor": 0.5, "amax_min": 0.25},
}  # fmt: skip
KERNELS = KernelSet(
    name="indexer_queries",
    q_heads=8,
    cache=presets.vllm_indexer(page_size=16),
    ops=[IndexerQuery(name=name, **given) for name, given in OPTIONS.items()],
    arch=["sm_80"],
)


PACKED = KernelSet(
    name="indexer_packed_queries",
    q_heads=6,
    cache=Paged(
        dtype="bf16",
        kv_heads=1,
        head_dim=128,
        page_size=16,
        stores="k",
        layout=Layout(k="page token head dim", layers="pointers"),
        quant=Quant(dtype="e2m1", scale_dtype="e8m0", block=Block(dim=32), recipe="pow2", place="pool"),
    ),
    ops=[IndexerQuery(name="turned", rope=OPTIONS["last"]["rope"]), IndexerQuery(name="codes", factor=2.0)],
    arch=["sm_90a"],
)


def call_of(name: str, rows: int, seed: int, kernels: KernelSet = KERNELS) -> tuple[dict[str, Raw], dict[str, Raw]]:
    """Arguments of a call, and the memory around each array."""
    rng, arrays, around = np.random.default_rng(seed), dict[str, Raw](), dict[str, Raw]()
    sizes = {"T": rows, "P": MOST}
    for spec in getattr(package(kernels), name).KERNEL.arguments:
        if spec.name == "errors":
            continue
        shape = [n if isinstance(n, int) else sizes[n] for n in spec.shape]
        if not spec.strided:
            arrays[spec.name] = rng.integers(0, MOST, shape).astype(dtype(spec.dtype).numpy())
            continue
        arrays[spec.name], around[spec.name] = rows_array(
            shape[0], tuple(shape[1:]), spec.dtype, strided=bool(seed % 2)
        )
        if spec.access == "in":
            sizes_of_rows = 2.0 ** rng.integers(-20, 9, (shape[0],) + (1,) * (len(shape) - 1))
            arrays[spec.name][...] = rng.standard_normal(shape) * sizes_of_rows
    return arrays, around


def check(name: str, arrays: dict[str, Raw], around: dict[str, Raw]) -> int:
    """Launch it; hold codes, scales, weights, the word and the memory beside the outputs to the oracle."""
    op = next(op for op in KERNELS.ops if op.name == name)
    assert isinstance(op, IndexerQuery)
    rope = op.rope
    assert rope is None or isinstance(rope, Rope)
    table = Table(arrays["cos_sin"], op.angles) if op.angles != "computed" else None
    wanted = indexer_query(arrays["q"], rope=rope, positions=arrays.get("positions"), table=table, hadamard=op.hadamard)
    word = np.zeros(1, np.uint64)
    generated = package(KERNELS)
    layer = generated.Cache(**Scene(KERNELS, PLAIN, ()).arguments())[0]
    with machine(mode="check"):
        getattr(generated, name)(layer, **arrays, errors=word)
    assert int(word[0]) == wanted.word, (describe(int(word[0])), describe(wanted.word))
    for out in ("q_out", "weights_out"):
        assert (surroundings(arrays[out], around[out]) == CANARY).all(), f"written beside {out}"
    codes = np.ascontiguousarray(arrays["q_out"]).view(np.uint8)
    assert (codes[~wanted.known] == 0x7F).all() and np.isnan(arrays["weights_out"][~wanted.known]).all()
    rows, lost = wanted.change.rows[wanted.known], wanted.change.lost[wanted.known]
    low, high = (head_scales(np.maximum(np.abs(rows) + by, 0), op.recipe, op.least(KERNELS)) for by in (-lost, lost))
    given = arrays["weights"].astype(np.float64)[wanted.known] * op.weight_factor(KERNELS)
    got = arrays["weights_out"][wanted.known].astype(np.float64)
    bounds = np.sort(np.stack([given * low, given * high]), axis=0)
    room = (
        5 * 2.0**-24 * np.abs(bounds).max(axis=0)
    )  # amax / 448, two products and the factor, each rounded; low and high too
    assert ((bounds[0] - room <= got) & (got <= bounds[1] + room)).all(), "weights are off"
    if not lost.any():
        with np.errstate(all="ignore"):
            exact = cast(rows.astype(np.float32) / low.astype(np.float32)[..., None], "e4m3")
        np.testing.assert_array_equal(codes[wanted.known], exact)
        return int(word[0])
    scale = (got / given)[..., None]
    half = np.maximum(np.abs(rows) * 2.0**-4, scale * 2.0**-10)  # of e4m3: half a unit of its 3 bits, and of its least
    off = np.abs(values(codes[wanted.known], "e4m3") * scale - rows)
    assert (off <= half * 1.001 + lost).all(), "codes are off"
    return int(word[0])


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=4)
@given(rows=st.integers(1, 7), seed=st.integers(0, 100))
def test_drawn(name: str, rows: int, seed: int) -> None:
    assert check(name, *call_of(name, rows, seed)) == 0


@pytest.mark.parametrize(("name", "value"), [("last", -1), ("last", 2**24), ("first", MOST), ("first", 2**40)])
def test_a_bad_position(name: str, value: int) -> None:
    """Its row is NaN, codes and weights, and the word names it; all others are what they are."""
    arrays, around = call_of(name, 6, 3)
    arrays["positions"][4] = value
    report = describe(check(name, arrays, around))
    assert report is not None and (report.code, report.request, report.position) == (Fault.POSITION, 4, 4)


@pytest.mark.parametrize("name", ["turned", "codes"])
@settings(max_examples=4)
@given(rows=st.integers(1, 7), seed=st.integers(0, 100), bad=st.booleans())
def test_packed(name: str, rows: int, seed: int, bad: bool) -> None:
    """e2m1 codes with four scales a head; weights times the factor alone; NaN where a row has no position."""
    op = next(op for op in PACKED.ops if op.name == name)
    assert isinstance(op, IndexerQuery) and not isinstance(op.rope, str)
    arrays, around = call_of(name, rows, seed, PACKED)
    if bad and "positions" in arrays:
        arrays["positions"][rows - 1] = -1
    wanted = indexer_query(arrays["q"], rope=op.rope, positions=arrays.get("positions"))
    word, generated = np.zeros(1, np.uint64), package(PACKED)
    with machine(mode="check"):
        getattr(generated, name)(generated.Cache(**Scene(PACKED, PLAIN, ()).arguments())[0], **arrays, errors=word)
    assert int(word[0]) == wanted.word
    for out in ("q_out", "q_scales", "weights_out"):
        assert (surroundings(arrays[out], around[out]) == CANARY).all(), f"written beside {out}"
    known = wanted.known
    assert np.isnan(arrays["weights_out"][~known]).all() and (arrays["q_scales"][~known] == -1).all()
    weights = arrays["weights"].astype(np.float64)[known] * op.weight_factor(PACKED)
    np.testing.assert_allclose(arrays["weights_out"][known], weights, rtol=2.0**-22)
    change, words = wanted.change, arrays["q_scales"][known]
    rows_known, lost = change.rows[known], change.lost[known]
    if op.rope is None:
        scales = block_scales(rows_known, op.least(PACKED))
        np.testing.assert_array_equal(words, words_of(scales))
        parts = rows_known.reshape(*scales.shape, 32).astype(np.float32) / scales[..., None].astype(np.float32)
        np.testing.assert_array_equal(
            np.ascontiguousarray(arrays["q_out"])[known], pack_nibbles(cast(parts, "e2m1").reshape(rows_known.shape))
        )
        return
    scales = e8m0_scales(words)
    low, high = (block_scales(np.maximum(np.abs(rows_known) + by, 0), op.least(PACKED)) for by in (-lost, lost))
    assert ((low <= scales) & (scales <= high)).all()
    off = np.abs(unpacked(np.ascontiguousarray(arrays["q_out"])[known], words) - rows_known)
    assert (off <= e2m1_half_step(rows_known, np.repeat(scales, 32, axis=-1)) * 1.001 + lost).all(), "codes are off"


def test_zeros_and_weights_in_place() -> None:
    """A head of zeros has the scale of the least magnitude; weights_out may be weights' memory."""
    arrays, around = call_of("plain", 3, 2)
    arrays["q"][1] = 0
    was = arrays["weights"].copy()
    check("plain", arrays, around)
    assert (arrays["weights_out"][1] == was[1] * np.float32(0.5 * 2.0**-10)).all()  # 0.25 / 448, rounded up
    wanted = arrays["weights_out"].copy()
    arrays["weights_out"] = arrays["weights"]
    with machine(mode="check"):
        generated = package(KERNELS)
        generated.plain(generated.Cache(**Scene(KERNELS, PLAIN, ()).arguments())[0], **arrays)
    np.testing.assert_array_equal(arrays["weights"], wanted)
