"""merge_states against the oracle: states that saw nothing, one or all keys, in place, whatever dtypes and bases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Paged, ops, presets
from kvgen.errors import ArgumentError
from kvgen.ops.merge_states import values_dim
from kvgen.reference import merge_states
from kvgen.runtime.cpu import machine
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import Op
from tests.support.batches import PLAIN
from tests.support.cache_matrix import chosen
from tests.support.harness import package, surroundings
from tests.support.memory import CANARY, Raw, rows_array
from tests.support.scenes import Scene
from tests.support.tolerance import HALF_ULP, TINY


def _operations(cache: Cache) -> Sequence[Op]:
    return (
        ops.MergeStates(name="two"),
        ops.MergeStates(name="many", states="many", lse_base="2", lse_empty="inf"),
        ops.MergeStates(name="rows", states="many", first="rows", dtype="f32", out_dtype="bf16"),
    )


# f32 and bf16, latent rows, V narrower than K; below f16, and dims of many vectors and of odd ones.
SETS = chosen("merge", _operations, ("kv_inside", "flashinfer", "latent", "mixed"))
SETS["merge_wide"] = KernelSet(
    name="merge_wide",
    q_heads=3,
    cache=Paged(dtype="bf16", kv_heads=1, head_dim=512, page_size=1),
    ops=(ops.MergeStates(name="many", states="many", out_dtype="f32"), ops.MergeStates(name="two", lse_empty="inf")),
)
SETS["merge_odd"] = KernelSet(
    name="merge_odd",
    q_heads=5,
    cache=Paged(dtype="f16", kv_heads=1, head_dim=71, page_size=1),
    ops=(ops.MergeStates(name="two", out_dtype="f32"),),
)
CASES = [(name, op.name) for name, kernels in SETS.items() for op in kernels.ops]


def op_of(kernels: KernelSet, name: str) -> ops.MergeStates:
    """The operation of a set that has this name."""
    found = next(op for op in kernels.ops if op.name == name)
    assert isinstance(found, ops.MergeStates)
    return found


class Case:
    """Arrays of an operation, with canaries around what it writes; `outs` and `lses` are views, states first."""

    def __init__(self, name: str, op: str, states: int, rows: int, *, strided: bool, place: int | None = None) -> None:
        """`place`: the state whose memory the output is, None: its own."""
        self.kernels, self.op = SETS[name], op_of(SETS[name], op)
        kinds = [self.op.dtype or self.kernels.cache.dtype]
        kinds.append(self.op.out_dtype or kinds[0])
        heads, (dim, _) = self.kernels.q_heads, values_dim(self.kernels.cache)
        self.memory: list[tuple[Raw, Raw]] = []
        if self.op.states == "two":
            values = [self._array(rows, (heads, dim), kinds[0], strided) for _ in "ab"]
            sums = [self._array(rows, (heads,), "f32", False) for _ in "ab"]
            self.arguments = {f"out_{n}": x for n, x in zip("ab", values, strict=True)}
            self.arguments |= {f"lse_{n}": x for n, x in zip("ab", sums, strict=True)}
            self.outs, self.lses = values, sums
        else:
            axes = (states, rows) if self.op.first == "states" else (rows, states)
            whole = self._array(axes[0], (axes[1], heads, dim), kinds[0], strided)
            sums_of = self._array(axes[0], (axes[1], heads), "f32", strided)
            self.arguments = {"outs": whole, "lses": sums_of}
            if self.op.first == "rows":
                whole, sums_of = whole.swapaxes(0, 1), sums_of.swapaxes(0, 1)
            self.outs, self.lses = list(whole), list(sums_of)
        if place is None:
            self.out, self.lse = (
                self._array(rows, (heads, dim), kinds[1], strided),
                self._array(rows, (heads,), "f32", False),
            )
        else:
            self.out, self.lse = self.outs[place], self.lses[place]

    def _array(self, rows: int, width: tuple[int, ...], kind: str, strided: bool) -> Raw:
        array, memory = rows_array(rows, width, kind, strided=strided)
        self.memory.append((array, memory))
        return array

    def fill(self, rng: np.random.Generator, *, spread: float = 4.0) -> None:
        """Random values and log-sum-exps of many sizes; a fifth of the states saw nothing and have garbage for values."""
        none = float(self.op.lse_empty)
        for out, lse in zip(self.outs, self.lses, strict=True):
            out[...] = rng.standard_normal(out.shape).astype(out.dtype)
            lse[...] = rng.standard_normal(lse.shape) * spread * rng.choice((1, 20), lse.shape)
            nobody = rng.random(lse.shape) < 0.2
            lse[nobody], out[nobody] = none, np.nan

    def oracle(self) -> tuple[Raw, Raw]:
        """The merged values and log-sum-exps."""
        shape = (0, *self.out.shape)
        outs = np.stack(self.outs) if self.outs else np.zeros(shape)
        lses = np.stack(self.lses) if self.lses else np.zeros(shape[:-1])
        return merge_states(outs, lses, base=self.op.lse_base, empty=self.op.lse_empty)

    def go(self, *, lse: bool = True, schedule: Any = 7) -> None:
        """Merge, once; what lies around the arrays stays."""
        scene = Scene(self.kernels, PLAIN, ())
        cache = package(self.kernels).Cache(**scene.arguments())[0]
        with machine(mode="check", schedule=schedule):
            getattr(package(self.kernels), self.op.name)(
                cache, **self.arguments, out=self.out, lse=self.lse if lse else None
            )
        for array, memory in self.memory:
            assert (surroundings(array, memory) == CANARY).all(), "written beside the rows"

    def check(self, *, lse: bool = True, **how: Any) -> None:
        """Merge and hold every element to the oracle."""
        wanted, sums = self.oracle()
        sizes = np.zeros(wanted.shape)
        for values in self.outs:
            sizes = np.fmax(sizes, np.abs(values.astype(np.float64)))
        self.go(lse=lse, **how)
        found, kind = self.out.astype(np.float64), self.op.out_dtype or self.op.dtype or self.kernels.cache.dtype
        numbers = np.isfinite(sums)[..., None] & np.ones(wanted.shape, bool)
        off = np.abs(found - np.nan_to_num(wanted))
        # A weight is off by the rounding of its exponent, which is at most 128, and by 2^-21; so is their sum.
        bound = HALF_ULP[kind] * np.abs(wanted) + TINY[kind] + 2.0**-15 * sizes
        assert (off <= bound)[numbers].all(), f"off by {off[numbers].max()}"
        assert (np.isnan(found) == np.isnan(wanted))[~numbers].all()
        if not lse:
            return
        same = self.lse.astype(np.float64)
        assert (np.isnan(same) == np.isnan(sums)).all()
        exact = np.isinf(sums)
        assert (same[exact] == sums[exact]).all()
        finite = np.isfinite(sums)
        assert (np.abs(same[finite] - sums[finite]) <= 2.0**-19 * (1 + np.abs(sums[finite]))).all()


@pytest.mark.parametrize(("name", "op"), CASES)
@settings(max_examples=4)
@given(data=st.data())
def test_merge(name: str, op: str, data: Any) -> None:
    """Any number of states and rows, in memory of its own or a state's."""
    two = op_of(SETS[name], op).states == "two"
    states = 2 if two else data.draw(st.sampled_from((0, 1, 3, 8, 9, 17)))
    kinds = op_of(SETS[name], op)
    same = states and (kinds.out_dtype or kinds.dtype or SETS[name].cache.dtype) == (
        kinds.dtype or SETS[name].cache.dtype
    )
    place = data.draw(st.sampled_from((None, 0, states - 1))) if same else None
    case = Case(name, op, states, data.draw(st.integers(0, 9)), strided=data.draw(st.booleans()), place=place)
    case.fill(np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))))
    case.check(
        lse=data.draw(st.sampled_from((True, True, False))) or place is not None,
        schedule=data.draw(st.sampled_from(("ascending", "descending", 7))),
    )


@pytest.mark.parametrize(
    ("name", "op"), [("merge_mixed", "two"), ("merge_mixed", "many"), ("merge_flashinfer", "rows")]
)
def test_what_is_no_number(name: str, op: str) -> None:
    """NaN in a value or a log-sum-exp, or one that overflowed, makes its head NaN and no other; where no key was seen, none."""
    case = Case(name, op, 2, 3, strided=False)
    case.fill(np.random.default_rng(1))
    case.lses[0][...], case.lses[1][...] = 1.0, -30.0
    for out in case.outs:
        out[...] = 1
    bad = [(0, 0), (1, 1), (1, 2)]
    case.lses[0][0, 0] = np.nan
    case.outs[1][1, 1] = np.nan
    case.lses[1][1, 2] = np.nan
    if case.op.lse_empty == "-inf":
        case.lses[1][2, 0] = np.inf
        bad.append((2, 0))
    none = float(case.op.lse_empty)
    case.lses[0][2, 1], case.outs[0][2, 1] = none, np.nan
    case.lses[1][2, 2], case.outs[1][2, 2] = -np.inf, np.inf
    case.go()
    for t, h in np.ndindex(*case.lse.shape):
        values = case.out[t, h].astype(np.float32)
        assert np.isnan(values).all() if (t, h) in bad else (np.abs(values - 1) < 1e-2).all(), (t, h)
        assert np.isnan(case.lse[t, h]) == ((t, h) in bad and (t, h) != (1, 1))


@pytest.mark.parametrize(
    ("name", "op"), [("merge_flashinfer", "two"), ("merge_flashinfer", "many"), ("merge_kv_inside", "two")]
)
def test_one_state_that_counts_stays_as_it_is(name: str, op: str) -> None:
    """Its bits, whatever stands beside it; and without any, 0 and the empty value."""
    case = Case(name, op, 2, 5, strided=True)
    case.fill(np.random.default_rng(2))
    none = float(case.op.lse_empty)
    case.outs[0][...] = np.random.default_rng(3).standard_normal(case.outs[0].shape).astype(case.outs[0].dtype)
    case.lses[0][...], case.lses[1][...] = 3.7, none
    case.lses[0][4] = none
    case.go()
    assert case.out[:4].tobytes() == np.ascontiguousarray(case.outs[0][:4]).tobytes()
    assert case.lse[:4].tobytes() == case.lses[0][:4].tobytes()
    assert not case.out[4].astype(np.float32).any() and (case.lse[4] == none).all()


def test_the_order_of_states_is_fixed() -> None:
    """16 runs, three schedules: the same bits; merging by twos and all at once agree within rounding."""
    case = Case("merge_kv_inside", "many", 17, 7, strided=False)
    case.fill(np.random.default_rng(4), spread=0.5)
    seen = set()
    for run in range(16):
        case.go(schedule=("ascending", "descending", 7)[run % 3])
        seen.add((case.out.tobytes(), case.lse.tobytes()))
    assert len(seen) == 1


def test_any_number_of_heads() -> None:
    """One row of one head to more than a block's."""
    for rows in (1, 17, 40):
        case = Case("merge_wide", "two", 2, rows, strided=False)
        case.fill(np.random.default_rng(rows))
        case.check()


def test_memory_that_two_dtypes_share() -> None:
    case = Case("merge_odd", "two", 2, 4, strided=False)
    case.fill(np.random.default_rng(5))
    case.out = np.ndarray((2, 5, 71), np.float32, case.outs[0].data)
    case.arguments = {k: v[:2] for k, v in case.arguments.items()}
    case.lse = case.lse[:2]
    with pytest.raises(ArgumentError, match="out: got memory that out_a lies in too"):
        case.go()


def test_a_wrong_log_sum_exp() -> None:
    """Messages name the argument and the spec's field."""
    case = Case("merge_latent", "many", 2, 4, strided=False)
    case.lse = case.lse[:, :1]
    with pytest.raises(ArgumentError, match=r"lse: got .*q_heads"):
        case.go()
    case = Case("merge_latent", "many", 2, 4, strided=False)
    case.arguments["outs"] = case.arguments["outs"][..., :32]
    with pytest.raises(ArgumentError, match=r"outs: got .*latent_dim"):
        case.go()


BULK = KernelSet(
    name="merge_bulk",
    q_heads=32,
    cache=presets.max_paged(dtype="bf16", kv_heads=8, head_dim=128, page_size=16),
    ops=(
        ops.MergeStates(name="two"),
        ops.MergeStates(name="many", states="many"),
        ops.MergeStates(name="partial", states="many", dtype="f32", out_dtype="bf16"),
    ),
)
SETS["merge_bulk"] = BULK


@pytest.mark.parametrize("op", ["two", "many", "partial"])
def test_no_sector_is_moved_twice(op: str) -> None:
    """2048 rows of 32 heads in one launch: values and log-sum-exps once each."""
    states, rows = 2 if op == "two" else 3, 256
    case = Case("merge_bulk", op, states, rows, strided=False)
    case.fill(np.random.default_rng(6))
    scene = Scene(BULK, PLAIN, ())
    with machine(mode="check") as log:
        getattr(package(BULK), op)(
            package(BULK).Cache(**scene.arguments())[0], **case.arguments, out=case.out, lse=case.lse
        )
    (launched,) = log.launches
    traffic = launched.counters.per_buffer
    for name, array in case.arguments.items():
        minimum = array.nbytes // 32
        assert minimum <= traffic[name].load_sectors <= 1.02 * minimum, name
    for name, array in (("out", case.out), ("lse", case.lse)):
        minimum = array.nbytes // 32
        assert minimum <= traffic[name].store_sectors <= 1.02 * minimum, name


def test_rows_first_is_for_many() -> None:
    with pytest.raises(ValueError, match="first: got 'rows' with states='two'"):
        KernelSet(
            name="x",
            q_heads=1,
            cache=BULK.cache.model_copy(update={"kv_heads": 1}),
            ops=(ops.MergeStates(first="rows"),),
        )
