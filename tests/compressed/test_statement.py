"""The statement of a layer of compressed attention against transformers' code, which is written by others from the same model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.compressed.drawn import EXACT, RECORDED, exact
from tests.compressed.statement import layer


@pytest.mark.parametrize("name", EXACT)
def test_as_transformers_has_it(name: str) -> None:
    form, rows, weights = exact(name)
    with np.load(RECORDED / f"{name}.npz") as found:
        np.testing.assert_allclose(layer(form, rows, weights).o, found["o"], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("window", {"window": 7}),
        ("window", {"theta": 12_000.0}),
        ("sparse", {"overlap": False}),
        ("sparse", {"topk": 4}),
        ("heavy", {"yarn": None}),
        ("heavy", {"q_norm": False}),
    ],
)
def test_a_wrong_fact_is_seen(name: str, wrong: dict[str, object]) -> None:
    form, rows, weights = exact(name)
    changed = replace(form, **wrong)
    if changed.overlap != form.overlap:
        half = form.dim, form.index_dim
        rows = replace(
            rows,
            **{
                field: getattr(rows, field)[:, -half[field.startswith("index")] :]
                for field in ("pool_kv", "pool_gate", "index_kv", "index_gate")
            },
        )
        weights = replace(weights, ape=weights.ape[:, -half[0] :], index_ape=weights.index_ape[:, -half[1] :])
    with np.load(RECORDED / f"{name}.npz") as found:
        assert np.abs(layer(changed, rows, weights).o - found["o"]).max() > 1e-2
