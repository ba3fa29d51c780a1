"""RMS norm's oracle: against transformers' own modules in float32, and against what is known by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvgen.errors import SpecError
from kvgen.reference.norm import rms_norm, rms_norm_error
from kvgen.reference.rounding import ulp
from kvgen.schema.norm import RmsNorm
from tests.reference.golden import Golden, golden, load

F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("case", [c for c in golden().values() if c.norm is not None], ids=lambda case: case.name)
def test_transformers_norm(case: Golden) -> None:
    """transformers rounds the mean, its root, and two products to f32: 3 ulp of f32."""
    assert case.norm is not None and case.norm.eps == case.arrays["eps"]
    x, weight = case.arrays["x"], case.arrays["weight"]
    found, wanted = rms_norm(x, weight, case.norm, F32), case.output("norm")
    worst = np.max(np.abs(found - wanted) / ulp(found, F32))
    print(f"{case.name}: {worst:.2f} ulp")
    assert worst <= 3 and (np.abs(found - wanted) <= rms_norm_error(x, weight, case.norm, F32)).all()
    if case.norm.dim is not None:
        np.testing.assert_array_equal(found[..., case.norm.dim :], x[..., case.norm.dim :])


def test_transformers_norm_of_rows() -> None:
    """The 4096 elements of a row as 32 heads."""
    found = load("input_norm")
    x, norm = found["x"].reshape(2, 32, 128), RmsNorm(over="row", eps=float(found["eps"]))
    own = rms_norm(x, found["weight"], norm, F32)
    assert np.max(np.abs(own.reshape(2, -1) - found["norm"]) / ulp(own.reshape(2, -1), F32)) <= 2.5


def test_by_hand() -> None:
    x, weight = np.array([[[3.0, -4.0], [0.0, 5.0]]]), np.array([2.0, 10.0])
    root = np.sqrt([[12.5, 12.5], [12.5, 12.5]])
    np.testing.assert_allclose(rms_norm(x, weight, RmsNorm(), F32)[0], x[0] / root * weight, rtol=1e-6)
    shifted = RmsNorm(weight_offset=1.0, multiply="before")
    np.testing.assert_allclose(rms_norm(x, weight, shifted, F32)[0], x[0] / root * (weight + 1), rtol=1e-6)
    row = RmsNorm(over="row", multiply="before", eps=0.5)
    wanted = x[0] / np.sqrt(12.5 + 0.5) * [[1, 2], [3, 4]]
    np.testing.assert_allclose(rms_norm(x, np.array([1, 2, 3, 4]), row, F32)[0], wanted, rtol=1e-6)
    part = rms_norm(np.concatenate([x, x], axis=2), weight, RmsNorm(dim=2, multiply="before"), F32)[0]
    np.testing.assert_allclose(part, np.concatenate([x[0] / root * weight, x[0]], axis=1), rtol=1e-6)


def test_where_the_cast_comes() -> None:
    """1 / sqrt(2) is 0.70703125 in bf16; times 1.0078125 it is no bf16 any more, and is not rounded again here."""
    x, weight = np.array([[[1.0, 0.0]]]), np.array([1.0078125, 1])
    after = rms_norm(x, weight, RmsNorm(eps=1e-30, multiply="after"), BF16)[0, 0, 0]
    before = rms_norm(x, weight, RmsNorm(eps=1e-30, multiply="before"), BF16)[0, 0, 0]
    assert after == 1.4140625 * 1.0078125 and before == pytest.approx(np.sqrt(2) * 1.0078125, rel=1e-12)


def test_what_a_kernel_may_be_off_by() -> None:
    """f32 arithmetic rounded to bf16 stays within it; so does the other neighbour of a number in the middle of two."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, 4, 128)).astype(BF16)
    weight = (rng.standard_normal(128) * 0.25 + 1).astype(BF16)
    for multiply in ("after", "before"):
        norm = RmsNorm(multiply=multiply)
        wide = x.astype(np.float32)
        scaled = wide * (np.float32(1) / np.sqrt((wide * wide).mean(axis=2, keepdims=True) + np.float32(1e-6)))
        if multiply == "after":
            kernel = (scaled.astype(BF16).astype(np.float32) * weight.astype(np.float32)).astype(BF16)
        else:
            kernel = (scaled * weight.astype(np.float32)).astype(BF16)
        off = np.abs(kernel.astype(np.float64) - rms_norm(x, weight, norm, BF16))
        allowed = rms_norm_error(x, weight, norm, BF16)
        assert (off <= allowed).all()
        assert np.mean(allowed > 1.5 * ulp(kernel, BF16)) < 0.01  # the rule, and few exceptions


def test_a_wrong_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight: got \[3\]; 4 elements are normalised together"):
        rms_norm(np.ones((1, 2, 4)), np.ones(3), RmsNorm(), F32)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"over": "row", "dim": 64},
            "dim: got 64 with over='row'; a part is the first elements of each head, and a row is normalised whole; use "
            "over='head', or leave dim out",
        ),
        ({"over": "token"}, "RmsNorm.over: got 'token'; input should be 'head' or 'row'"),
        ({"eps": 0.0}, "RmsNorm.eps: got 0.0; input should be greater than 0"),
        ({"eps": float("nan")}, "RmsNorm.eps: got nan; input should be a finite number"),
        ({"dim": 1}, "RmsNorm.dim: got 1; input should be greater than or equal to 2"),
        ({"multiply": "never"}, "RmsNorm.multiply: got 'never'; input should be 'after' or 'before'"),
        ({"weight_dtype": "bf16"}, "RmsNorm.weight_dtype: got 'bf16'; input should be 'same' or 'f32'"),
    ],
)
def test_refused(fields: dict[str, object], line: str) -> None:
    with pytest.raises(SpecError) as caught:
        RmsNorm(**fields)
    assert str(caught.value) == line


def test_weights() -> None:
    assert [n.weights(8, 128) for n in (RmsNorm(), RmsNorm(dim=64), RmsNorm(over="row"))] == [128, 64, 1024]
