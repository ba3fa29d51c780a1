"""RoPE's oracle and its frequencies: against transformers' own modules in float32, and against what is known by hand."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvgen.lowering.frequencies import cos_sin_factor, inverse_frequencies
from kvgen.reference import norm as norms
from kvgen.reference import rope as oracle
from kvgen.reference.rope import Table, rotate, rotate_error
from kvgen.reference.rounding import ulp
from kvgen.schema.model import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling
from tests.models.checkpoints import NAMES
from tests.models.test_models import GOLDEN
from tests.reference.golden import Golden, golden, load, rope_of

F32 = np.dtype(np.float32)
cases = pytest.mark.parametrize("case", golden().values(), ids=lambda case: case.name)


def rotated(case: Golden, x: np.ndarray, **more: Any) -> np.ndarray:
    return rotate(
        x,
        case.arrays["positions"],
        case.rope,
        dims=case.dims,
        part=case.part,
        sections=case.sections,
        **{"local": case.local, "long": case.long, **more},
    )


def bits(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.int32).astype(np.int64)


@cases
def test_transformers_frequencies(case: Golden) -> None:
    """Bit for bit, from both."""
    found = inverse_frequencies(case.rope, case.rotary_dim, local=case.local, long=case.long)
    own = oracle.frequencies(case.rope, case.rotary_dim, local=case.local, long=case.long)
    np.testing.assert_array_equal(bits(found), bits(case.arrays["inv_freq"]))
    np.testing.assert_array_equal(bits(own), bits(case.arrays["inv_freq"]))
    factor = float(case.arrays["factor"])
    assert cos_sin_factor(case.rope, local=case.local) == pytest.approx(factor, rel=1e-15)
    assert oracle.magnitude(case.rope, local=case.local) == pytest.approx(factor, rel=1e-15)


def recorded() -> list[str]:
    return sorted({key.rpartition("/")[0] for key in load("frequencies")})


# Without RoPE; and with plain RoPE, not recorded yet. Configs without golden facts: benchmarks/model_sweep.py compares them.
_UNRECORDED = {"bloom_560m", "mpt_7b", "gemma_2_9b_it"}


def test_every_config_with_rope_is_recorded() -> None:
    assert set(GOLDEN) <= set(NAMES)
    assert {name.partition("/")[0] for name in recorded()} == set(GOLDEN) - _UNRECORDED


@pytest.mark.parametrize("name", recorded())
def test_frequencies_of_every_config(name: str) -> None:
    model, kind = name.split("/")
    wanted, rope = load("frequencies"), rope_of(model)
    inv_freq, which = wanted[f"{name}/inv_freq"], {"local": kind == "local", "long": kind == "long"}
    np.testing.assert_array_equal(bits(inverse_frequencies(rope, 2 * len(inv_freq), **which)), bits(inv_freq))
    np.testing.assert_array_equal(bits(oracle.frequencies(rope, 2 * len(inv_freq), **which)), bits(inv_freq))
    factor = pytest.approx(float(wanted[f"{name}/factor"]), rel=1e-15)
    assert cos_sin_factor(rope, local=which["local"]) == oracle.magnitude(rope, local=which["local"]) == factor


@cases
def test_transformers_rope(case: Golden) -> None:
    """transformers rounds cosine, sine, two products and a sum to f32: 2.5 ulp of f32 at the larger of a pair, and 4 where
    cosine and sine times a factor round again."""
    x = case.arrays["x"]
    two = oracle.pairs(case.rope, x.shape[2], dims=case.dims, part=case.part)
    larger = np.zeros(x.shape)
    for a, b in two:
        larger[..., a] = larger[..., b] = np.maximum(np.abs(x[..., a]), np.abs(x[..., b]))
    off = np.abs(rotated(case, x) - case.output("rope"))
    worst = np.max(off[larger > 0] / ulp(larger[larger > 0] * max(1.0, float(case.arrays["factor"])), F32))
    print(f"{case.name}: {worst:.2f} ulp")
    assert worst <= (2.5 if case.arrays["factor"] == 1 else 4)
    assert (off <= rotate_error(x, case.rope, F32, dims=case.dims, part=case.part)).all()
    assert (off[larger == 0] == 0).all() and len(two) == case.rotary_dim // 2


@pytest.mark.parametrize("case", [c for c in golden().values() if c.norm is not None], ids=lambda case: case.name)
def test_transformers_norm_and_rope(case: Golden) -> None:
    assert case.norm is not None
    normed = norms.rms_norm(case.arrays["x"], case.arrays["weight"], case.norm, F32)
    off = np.abs(rotated(case, normed) - case.output("both"))
    allowed = rotate_error(normed, case.rope, F32, dims=case.dims, part=case.part)
    allowed += norms.rms_norm_error(case.arrays["x"], case.arrays["weight"], case.norm, F32)
    print(f"{case.name}: {np.max(off / allowed):.2f} of what is allowed")
    assert (off <= allowed).all()


@cases
def test_transformers_table(case: Golden) -> None:
    """Its cosines and sines as a table, in both forms, instead of frequencies; row t is token t's, sections or not."""
    cos, sin = case.arrays["cos"], case.arrays["sin"]
    forms = {"halves": np.concatenate([cos, sin], axis=1), "pairs": np.stack([cos, sin], axis=2).reshape(len(cos), -1)}
    x, rows = case.arrays["x"], np.arange(len(cos))
    found = [
        rotate(x, rows, case.rope, dims=case.dims, part=case.part, cos_sin=Table(forms[form], form))
        for form in ("halves", "pairs")
    ]
    np.testing.assert_array_equal(*found)
    off = np.abs(found[0] - case.output("rope"))
    assert (off <= rotate_error(x, case.rope, F32, dims=case.dims, part=case.part)).all()


# By hand -------------------------------------------------------------------------------------------------------------


def rows(*numbers: float) -> np.ndarray:
    return np.array([[numbers]], np.float32)


def quarter(rope: Rope, x: np.ndarray, **given: Any) -> np.ndarray:
    """Every pair turned by 90 degrees."""
    dims = given.get("dims") or rope.dim or x.shape[2]
    table = np.concatenate([np.zeros((1, dims // 2)), np.ones((1, dims // 2))], axis=1)
    return rotate(x, np.zeros(1, np.int64), rope, cos_sin=Table(table, "halves"), **given)


def test_which_elements_make_a_pair() -> None:
    """(a, b) becomes (-b, a)."""
    x = rows(1, 2, 3, 4, 5, 6)
    neox, interleaved = Rope(style="neox", theta=1e4), Rope(style="interleaved", theta=1e4)
    np.testing.assert_array_equal(quarter(neox, x), rows(-4, -5, -6, 1, 2, 3))
    np.testing.assert_array_equal(quarter(interleaved, x), rows(-2, 1, -4, 3, -6, 5))
    np.testing.assert_array_equal(quarter(neox, x, dims=4), rows(-3, -4, 1, 2, 5, 6))
    np.testing.assert_array_equal(quarter(neox, x, dims=4, part="last"), rows(1, 2, -5, -6, 3, 4))
    last = Rope(style="interleaved", theta=1e4, dim=4, part="last")
    np.testing.assert_array_equal(quarter(last, x), rows(1, 2, -4, 3, -6, 5))
    np.testing.assert_array_equal(quarter(last, x, dims=2), rows(1, 2, 3, 4, -6, 5))


def test_sections() -> None:
    """Two pairs by time, one by height, one by width."""
    rope, x = Rope(style="neox", theta=1e4), np.array([[[1, 1, 1, 1, 0, 0, 0, 0]]], np.float32)
    positions = np.array([[3], [5], [7]])
    found = rotate(x, positions, rope, sections=(2, 1, 1))[0, 0]
    speeds = np.array([1, 0.1, 0.01, 0.001], np.float32)
    angles = np.array([3, 3, 5, 7], np.float32) * speeds
    np.testing.assert_allclose(found, [*np.cos(angles.astype(float)), *np.sin(angles.astype(float))], rtol=1e-15)
    for wrong in ((2, 1), (2, 1, 2)):
        with pytest.raises(ValueError, match="sections: got"):
            rotate(x, positions, rope, sections=wrong)


def test_positions_past_the_table() -> None:
    table = Table(np.zeros((4, 8)), "pairs")
    for position in (-1, 4):
        with pytest.raises(IndexError, match="for 4 rows"):
            rotate(np.ones((1, 1, 8)), np.array([position]), Rope(style="neox", theta=1e4), cos_sin=table)


def test_the_angle_is_an_f32() -> None:
    """Position 16 777 217 is none of f32's, and 100 000 times a third rounds."""
    rope, x = Rope(style="neox", theta=1e4), np.array([[[1, 0]]], np.float32)
    np.testing.assert_allclose(rotate(x, np.array([2**24 + 1]), rope)[0, 0, 0], math.cos(2**24), rtol=1e-15)
    third = Rope(style="neox", theta=1e4, scaling=LinearScaling(factor=3.0))
    angle = float(np.float32(100_000) * (np.float32(1) / np.float32(3)))
    np.testing.assert_allclose(rotate(x, np.array([100_000]), third)[0, 0, 0], math.cos(angle), rtol=1e-15)


def test_frequencies_by_hand() -> None:
    plain = Rope(style="neox", theta=1e4, local_theta=100.0, scaling=LinearScaling(factor=2.0))
    np.testing.assert_allclose(inverse_frequencies(plain, 4), [0.5, 0.005], rtol=1e-7)
    np.testing.assert_allclose(inverse_frequencies(plain, 4, local=True), [1, 0.1], rtol=1e-7)
    assert cos_sin_factor(plain) == cos_sin_factor(plain, local=True) == 1.0
    # Wavelengths 2 pi, 62.8, 628, 6283 over 1000 positions: below 250 they stay, above 1000 they are divided.
    bent = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=1000)
    smooth = (1000 / (2 * math.pi / 0.01) - 1) / 3
    wanted = [1, 0.1, 0.01 * ((1 - smooth) / 8 + smooth), 0.001 / 8]
    np.testing.assert_allclose(inverse_frequencies(Rope(style="neox", theta=1e4, scaling=bent), 8), wanted, rtol=1e-6)
    scaling = LongRopeScaling(
        short_factor=(1.0, 2.0), long_factor=(4.0, 8.0), original_max_positions=4096, max_positions=131072
    )
    long = Rope(style="neox", theta=1e4, scaling=scaling)
    np.testing.assert_allclose(inverse_frequencies(long, 4), [1, 0.005], rtol=1e-7)
    np.testing.assert_allclose(inverse_frequencies(long, 4, long=True), [0.25, 0.00125], rtol=1e-7)
    assert cos_sin_factor(long) == pytest.approx(math.sqrt(1 + 5 / 12))
    yarn = Rope(style="neox", theta=1e4, scaling=YarnScaling(factor=4.0, original_max_positions=4096))
    # Pair i turns 4096 / (2 pi) * 10000^(-i/4) times: 652, 65, 6.5, 0.65; 32 turns are at 1.3 and 1 at 2.8.
    np.testing.assert_allclose(inverse_frequencies(yarn, 8), [1, 0.1, 0.01 * (1 + 1 / 4) / 2, 0.001 / 4], rtol=1e-6)
    assert cos_sin_factor(yarn) == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize("dims", [0, -2, 7])
def test_odd_dims_are_refused(dims: int) -> None:
    with pytest.raises(ValueError, match=f"dims: got {dims}; elements rotate in pairs; give an even number from 2"):
        inverse_frequencies(Rope(style="neox", theta=1e4), dims)


def test_long_rope_of_another_size_is_refused() -> None:
    with pytest.raises(
        ValueError, match="dims: got 64 for 48 factors of LongRoPE; there is one for each pair; give 96"
    ):
        inverse_frequencies(rope_of("phi_3_5_mini"), 64)


def test_drawn_frequencies() -> None:
    """The spec's and the oracle's are written apart and agree on every bit."""
    rng = np.random.default_rng(9)
    for _ in range(300):
        dims, n, factor = 2 * int(rng.integers(1, 129)), int(rng.integers(64, 1 << 17)), float(rng.uniform(1, 50))
        short, long = (tuple(float(f) for f in rng.uniform(1, 60, dims // 2)) for _ in range(2))
        scaling = [
            None,
            LinearScaling(factor=factor),
            Llama3Scaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=n),
            YarnScaling(factor=factor, original_max_positions=n, truncate=bool(rng.integers(2))),
            LongRopeScaling(short_factor=short, long_factor=long, original_max_positions=n, max_positions=8 * n),
        ][rng.integers(5)]
        rope = Rope(style="neox", theta=float(rng.uniform(100, 1e7)), scaling=scaling, local_theta=500.0)
        for which in ({}, {"local": True}, {"long": True}):
            found, wanted = inverse_frequencies(rope, dims, **which), oracle.frequencies(rope, dims, **which)
            np.testing.assert_array_equal(bits(found), bits(wanted), str((rope, dims, which)))
        assert cos_sin_factor(rope) == pytest.approx(oracle.magnitude(rope), rel=1e-15)


def test_ulp() -> None:
    x = np.array([1.0, 1.99, 2.0, 0.75, 1e-45, 0.0, -3.0, np.inf, np.nan])
    brain = np.dtype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(ulp(x[:4], brain), [2**-7, 2**-7, 2**-6, 2**-8])
    np.testing.assert_array_equal(ulp(x[:7], F32), np.abs(np.spacing(x[:7].astype(np.float32))).astype(np.float64))
    np.testing.assert_array_equal(ulp(x, np.dtype(np.float16))[[0, 4, 5]], [2**-10, 2**-24, 2**-24])
    assert np.isnan(ulp(x[7:], brain)).all()
