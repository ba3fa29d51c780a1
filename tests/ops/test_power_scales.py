"""e8m0 scales of groups of dims on tensor cores: every exponent, NaN, and blocks of zeros, as gather reads them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest

from tests.ops import test_extend_sm90
from tests.ops.test_decode_scales import SETS
from tests.support import decode_steps, extend_sets, extend_steps
from tests.support.batches import PLAIN
from tests.support.memory import Raw

# Scales of V that weights carry, and of sums with K; of elements of both, where requests have several rows; extend's kernels.
DECODES: Final = {name: SETS[name][0] for name in ("mxfp8", "mxfp4", "mxfp8_rows", "mxfp4_rows")}
EXTENDS: Final = {"mma": extend_sets.SETS["mxfp4"], "wgmma": test_extend_sm90.SETS["mxfp4"]}
NAMES: Final = (*DECODES, *EXTENDS)
NAN: Final = 255
CAMPAIGN: Final = "KVGEN_FAMILY" in os.environ
TOTALS: Final = (150, 33, 64)


def laid(name: str) -> tuple[Any, Raw, Raw]:
    """A step of the last rows of three requests, and the exponents of its scales of K and of V, of all pages and layers."""
    batch = replace(PLAIN, totals=TOTALS, new=(0, 0, 0), schedule=3)
    found: Any = (
        decode_steps.step(DECODES[name], batch)
        if name in DECODES
        else extend_steps.step(EXTENDS[name], batch, (20, 33, 1))
    )
    (scales,) = (a for n, a in found.scene.arrays().items() if n.endswith("scales"))
    keys, values = (scales.view(np.uint8)[:, i] for i in range(2))
    return found, keys, values


def of_token(found: Any, exponents: Raw, b: int, token: int) -> Raw:
    """The scales of a request's token in the step's layer, [head, group]."""
    scene = found.scene
    mine: Raw = exponents[scene.entries[b][token // scene.tokens][0], scene.layer, token % scene.tokens]
    return mine


@pytest.mark.parametrize("exponents", [(0, 4), (30, 220), (200, 240), *(CAMPAIGN * [(20, 45), (107, 147)])], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_exponents_of_v(name: str, exponents: tuple[int, int]) -> None:
    """Subnormal, far apart, large; in a campaign small and usual ones too."""
    found, _, values = laid(name)
    values[...] = np.random.default_rng(5).integers(*exponents, values.shape)
    found.check()


@pytest.mark.parametrize(
    ("exponents", "times"), [((0, 4), 2.0**100), ((20, 24), 2.0**96), ((200, 204), 2.0**-84)], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_exponents_of_k(name: str, exponents: tuple[int, int], times: float) -> None:
    """Beside q so large, or so small, that scores are neither."""
    found, keys, _ = laid(name)
    keys[...] = np.random.default_rng(6).integers(*exponents, keys.shape)
    found.q[...] = (found.q.astype(np.float64) * times).astype(found.q.dtype)
    found.check()


@pytest.mark.parametrize("role", ["k", "v"])
@pytest.mark.parametrize("name", NAMES)
def test_a_scale_that_is_no_number(name: str, role: str) -> None:
    """A NaN scale of head 1's second group in the last token but one: rows of request 0 that see it have NaN in those dims, or by
    K everywhere, in the query heads of that head; all else keeps its bits."""
    outs = []
    for nan in (False, True):
        found, keys, values = laid(name)
        if nan:
            of_token(found, keys if role == "k" else values, 0, TOTALS[0] - 2)[1, 1] = NAN
        outs.append([np.array(x, np.float32) for x in found.run()[:2]])
    (was, was_lse), (out, lse) = outs
    group, rows = found.scene.kernels.group, found.counts[0]
    quant = found.scene.cache.quants[role]
    assert quant is not None and quant.block.dim is not None
    sees = slice(rows - 2 if rows > 1 else 0, rows)
    dims = slice(None) if role == "k" else slice(quant.block.dim, 2 * quant.block.dim)
    heads = slice(group, 2 * group)
    assert np.isnan(out[sees, heads, dims]).all() and np.isnan(lse[sees, heads]).all() == (role == "k")
    out[sees, heads, dims] = was[sees, heads, dims]
    if role == "k":
        lse[sees, heads] = was_lse[sees, heads]
    assert (out.tobytes(), lse.tobytes()) == (was.tobytes(), was_lse.tobytes())


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_zeros(name: str) -> None:
    """Groups whose codes are 0 under the least scales, which a write and a pool without writes have: of every fourth token, and
    of all of the last request."""
    found, keys, values = laid(name)
    (codes,) = (a for n, a in found.scene.arrays().items() if not n.endswith("scales"))
    width = codes.shape[-1] // keys.shape[-1]
    for b, total in enumerate(TOTALS):
        for token in range(0, total, 1 if b == 2 else 4):
            page, offset = found.scene.entries[b][token // found.scene.tokens][0], token % found.scene.tokens
            codes.view(np.uint8)[page, :, found.scene.layer, offset, :, width : 2 * width] = 0
            for exponents in (keys, values):
                of_token(found, exponents, b, token)[:, 1] = token % 2
    found.check()
