"""attention_output against the oracle: rows within rounding, codes and scales bit for bit where nothing turns, nothing beside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Latent, Paged, Rope
from kvgen.layout.dtypes import dtype
from kvgen.ops import AttentionOutput
from kvgen.reference import attention_output
from kvgen.reference.attention_output import Output, blocks_of, read_blocks, scales_of
from kvgen.reference.rope import Table
from kvgen.reference.rounding import ulp
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN
from tests.support.harness import package, surroundings
from tests.support.memory import CANARY, Raw, rows_array
from tests.support.scenes import Scene

LATENT = Latent(dtype="bf16", latent_dim=64, rope_dim=16, page_size=16)
WIDE = Latent(dtype="bf16", latent_dim=448, rope_dim=64, page_size=16)
GQA = Paged(dtype="f16", kv_heads=2, head_dim=32, page_size=16)
LAST: dict[str, Any] = {"rope": Rope(style="interleaved", theta=1e4), "dim": 64}
MOST = 40  # rows of a table of angles


def _set(name: str, cache: Any, q_heads: int, **options: Any) -> KernelSet:
    return KernelSet(name=f"output_{name}", q_heads=q_heads, cache=cache, ops=[AttentionOutput(**options)])


SETS = {
    s.name.removeprefix("output_"): s
    for s in (
        # DeepSeek V4's, with both kinds of scales, and as it is; the same of small heads.
        _set("v4", WIDE, 4, rope=LAST["rope"], dim=512, angles="halves", block=128, groups=2),
        _set("v41", WIDE, 2, rope=LAST["rope"], dim=512, block=32, scale_dtype="e8m0"),
        _set("small", LATENT, 6, **LAST, angles="pairs", angles_dtype="same", index_dtype="i32"),
        _set("both", GQA, 8, rope=Rope(style="neox", theta=1e4), hadamard=True, block=16, groups=2, scale_dtype="e8m0"),
        _set("quarter", Paged(dtype="f32", kv_heads=1, head_dim=64, page_size=16), 3, rope=Rope(style="neox", theta=1e4, dim=16),
             block=32, recipe="amax"),
        _set("hadamard", GQA, 2, hadamard=True),
        _set("blocks", GQA, 4, block=32, groups=4, amax_min=0.5),
    )
}  # fmt: skip


@dataclass
class Call:
    """One launch: its arguments, and the memory around those that it writes."""

    kernels: KernelSet
    arrays: dict[str, Raw]
    around: dict[str, Raw]

    @property
    def op(self) -> AttentionOutput:
        op = self.kernels.ops[0]
        assert isinstance(op, AttentionOutput)
        return op

    def wanted(self) -> Output:
        op = self.op
        rope = op.rope
        assert rope is None or isinstance(rope, Rope)
        table = None if op.angles == "computed" else Table(self.arrays["cos_sin"], op.angles)
        latent = self.kernels.cache.rope_part
        return attention_output(
            self.arrays["o"],
            hadamard=op.hadamard,
            rope=rope,
            positions=self.arrays.get("positions"),
            table=table,
            dims=latent or None,
            part="last" if latent else None,
        )


def call_of(name: str, rows: int, seed: int = 0, *, in_place: bool = False) -> Call:
    kernels = SETS[name]
    rng, found = np.random.default_rng(seed), Call(kernels, {}, {})
    sizes = {"T": rows, "P": MOST}
    for spec in package(kernels).attention_output.KERNEL.arguments:
        if spec.name == "errors":
            continue
        shape = [n if isinstance(n, int) else sizes[n] for n in spec.shape]
        if spec.access == "out" and spec.name == "out_scales":  # rows side by side, padded to four
            groups, blocks, _ = shape
            array, around = rows_array(groups, (blocks, -(-rows // 4) * 4), spec.dtype, strided=bool(seed % 2))
            array, found.around["out_scales"] = array[:, :, :rows], around
        elif spec.strided:
            array, around = rows_array(shape[0], tuple(shape[1:]), spec.dtype, strided=bool(seed % 2))
            found.around[spec.name] = around
        else:
            array = rng.integers(0, MOST, shape).astype(dtype(spec.dtype).numpy())
        if spec.access == "in" and spec.strided:
            array[...] = rng.standard_normal(array.shape) * 2.0 ** rng.integers(
                -9, 9, (len(array),) + (1,) * (array.ndim - 1)
            )
        found.arrays[spec.name] = array
    if in_place:
        found.arrays["out"], found.around["out"] = found.arrays["o"], found.around["o"]
    return found


def layer_of(kernels: KernelSet) -> Any:
    """A cache that the operation takes and does not look at."""
    return package(kernels).Cache(**Scene(kernels, PLAIN, ()).arguments())[0]


def launch(call: Call) -> int:
    word = np.zeros(1, np.uint64)
    with machine(mode="check"):
        package(call.kernels).attention_output(layer_of(call.kernels), **call.arrays, errors=word)
    return int(word[0])


def check(call: Call, *, in_place: bool = False) -> int:
    """Launch it; compare what is written with the oracle, and the memory beside it with what it was."""
    wanted = call.wanted()
    word = launch(call)
    out = call.arrays["out"]
    if call.op.block is None:
        _check_rows(out, wanted)
    else:
        _check_blocks(call, wanted)
        assert (surroundings_of(call, "out_scales") == CANARY).all(), "written beside the scales"
    if not in_place:
        assert (surroundings_of(call, "out") == CANARY).all(), "written beside the output"
    assert word == wanted.word, (describe(word), describe(wanted.word))
    return word


def surroundings_of(call: Call, name: str) -> Raw:
    return surroundings(call.arrays[name], call.around[name])


def _check_rows(out: Raw, wanted: Output) -> None:
    assert np.isnan(out[~wanted.known].astype(np.float64)).all()
    rows, lost = wanted.change.rows[wanted.known], wanted.change.lost[wanted.known]
    off = np.abs(out[wanted.known].astype(np.float64) - rows)
    allowed = ulp(rows, out.dtype) / 2 + lost
    assert (off <= allowed).all(), f"off by {(off / allowed).max():.2f} of what rounding allows"


def _check_blocks(call: Call, wanted: Output) -> None:
    """Scales and codes of the oracle's rows, bit for bit where nothing is lost; else within what f32 loses of them."""
    op, heads = call.op, call.kernels.q_heads
    assert op.block is not None
    codes = np.ascontiguousarray(call.arrays["out"].swapaxes(0, 1)).view(np.uint8).reshape(wanted.change.rows.shape)
    scales = scales_of(call.arrays["out_scales"], heads)
    unknown = ~wanted.known
    assert (codes[unknown] == 0x7F).all() and np.isnan(scales[unknown]).all()
    rows, lost = wanted.change.rows[wanted.known], wanted.change.lost[wanted.known]
    low, _ = blocks_of(np.maximum(np.abs(rows) - lost, 0), op.block, op.recipe, op.amax_min)
    high, exact = blocks_of(np.abs(rows) + lost, op.block, op.recipe, op.amax_min)
    got = scales[wanted.known]
    assert ((low <= got) & (got <= high)).all(), "scales are off"
    if not lost.any():
        _, exact = blocks_of(rows, op.block, op.recipe, op.amax_min)
        np.testing.assert_array_equal(codes[wanted.known], exact)
        return
    step = np.repeat(got, op.block, axis=-1)
    numbers = read_blocks(codes[wanted.known], got)
    half = np.maximum(np.abs(rows) * 2.0**-4, step * 2.0**-10)  # of e4m3: half a unit of its 3 bits, and of its least
    assert (np.abs(numbers - rows) <= half * 1.001 + lost).all(), "codes are off"


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=4)
@given(rows=st.integers(1, 19), seed=st.integers(0, 100))
def test_drawn(name: str, rows: int, seed: int) -> None:
    assert check(call_of(name, rows, seed)) == 0


@pytest.mark.parametrize("name", ["small", "hadamard"])
def test_in_place(name: str) -> None:
    check(call_of(name, 9, 1, in_place=True), in_place=True)


@pytest.mark.parametrize("name", ["v4", "v41", "small"])
@pytest.mark.parametrize("value", [-1, MOST, 2**24, 2**31 - 1])
def test_a_bad_position(name: str, value: int) -> None:
    """Its row is NaN, codes and scales, and the word names it; all others are what they are."""
    call = call_of(name, 10, 3)
    call.arrays["positions"][7] = value
    word = check(call)
    if value == MOST and call.op.angles == "computed":
        assert word == 0
        return
    report = describe(word)
    assert report is not None and (report.code, report.request, report.position) == (Fault.POSITION, 7, 7)


def test_zero_rows_tiny_and_huge_blocks() -> None:
    """The floor of a block's magnitude, a block of zeros, one of infinity and one of NaN: codes and scales as the recipe says."""
    call = call_of("blocks", 4)
    o = call.arrays["o"]
    o[0], o[1], o[2], o[3] = 0, 0.25, 1, 65504
    o[2, 1, 5], o[2, 2, 6] = np.nan, -np.inf
    launch(call)
    scales = call.arrays["out_scales"]
    codes = np.ascontiguousarray(call.arrays["out"].swapaxes(0, 1)).view(np.uint8).reshape(4, 4, 32)
    floor = 2.0**-9  # 0.5 / 448, rounded up to a power of two
    assert (scales[:, :, 0] == floor).all() and (codes[0] == 0).all()
    assert (scales[:, :, 1] == floor).all() and (codes[1] == 0x70).all()  # 0.25 / 2^-9 = 128
    assert np.isnan(scales[1, :, 2]).all() and (codes[2, 1] == 0x7F).all()
    assert np.isinf(scales[2, :, 2]).all() and codes[2, 2, 6] == 0x7F and (np.delete(codes[2, 2], 6) == 0).all()
    assert (scales[0, :, 2] == 2.0**-8).all() and (codes[2, 0] == 0x78).all()  # 1 / 448, rounded up; 256
    assert (scales[:, :, 3] == 256).all()


def test_undoes_what_append_does() -> None:
    """Rows that append turned and transformed come back, through attention over one key: within what f16 loses twice."""
    rope = Rope(style="neox", theta=1e4)
    rng = np.random.default_rng(5)
    from kvgen.reference.append import Change, changed

    x = rng.standard_normal((6, 8, 32)).astype(np.float16)
    positions = rng.integers(0, MOST, 6)
    there = changed(x, Change(rope=rope, positions=positions, hadamard=True)).rows.astype(np.float16)
    back = attention_output(there, rope=rope, positions=positions, hadamard=True).change.rows
    assert np.abs(back - x).max() < 0.01


def test_bytes_moved() -> None:
    """Every sector of o is read once and every sector of codes and scales written once, with T a multiple of 8."""
    call = call_of("v4", 16)
    with machine(mode="check") as log:
        package(call.kernels).attention_output(layer_of(call.kernels), **call.arrays)
    (launched,) = log.launches
    counted = launched.counters.per_buffer
    assert counted["o"].load_sectors == 16 * 4 * 512 * 2 // 32
    assert counted["out"].store_sectors == 16 * 4 * 512 // 32
    assert counted["out_scales"].store_sectors == 16 * 4 * 4 * 4 // 32
