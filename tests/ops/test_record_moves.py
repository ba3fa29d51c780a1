"""Operations that move or change tokens of DeepSeek V4's 584-byte record and of others: every byte, padding included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest

from kvgen import KernelSet, Latent, Paged, ops
from kvgen.layout.dtypes import dtype
from kvgen.reference import store_scales
from kvgen.reference.elements import Elements, Padded
from kvgen.runtime import describe
from kvgen.schema.cache import Cache
from tests.ops.test_lora_add import flat_rows, stored_scene
from tests.ops.test_records import LATENT, ROWS, powers
from tests.ops.test_rows_add import check_rows, width_of
from tests.support.batches import PLAIN
from tests.support.conversions import check, scenes
from tests.support.harness import Run, hold_memory, index_name, launcher, new_rows, offsets_of
from tests.support.memory import Raw
from tests.support.raw_rows import check_gather_raw, check_scatter, random_stored
from tests.support.scenes import Scene

MOVES: Final = KernelSet(
    name="record_moves",
    q_heads=2,
    cache=LATENT["v4"],
    ops=(
        ops.Scatter(),
        ops.Gather(name="gather_raw", raw=True),
        ops.Scatter(name="scatter_raw", raw=True),
        ops.StoreScales(),
    ),
    arch=("sm_90a",),
)
BATCH: Final = replace(PLAIN, totals=(5, 3, 1), new=(2, 3, 1), padding=1, seed=3)


def scene_of(filled: bool) -> tuple[Scene, dict[str, Any]]:
    """A scene, and where all tokens of the batch go."""
    scene = Scene(MOVES, BATCH, BATCH.totals)
    if filled:
        scene.fill(BATCH.totals)
    return scene, {"row_offsets": offsets_of(BATCH.totals, index_name(MOVES, "scatter")), "starts": None}


def test_scatter() -> None:
    """As append stores them."""
    scene, places = scene_of(False)
    check_scatter(scene, new_rows(scene, 10), raw=False, **places)


def test_raw() -> None:
    """Stored bytes go in and come back; zeros behind scales are no part of them, and are there afterwards."""
    scene, places = scene_of(False)
    new = random_stored(scene, 10)
    assert {n: a.shape[1:] for n, a in new.items()} == {"k_codes": (1, 448), "k_scales": (1, 7), "k_rope": (1, 64)}
    check_scatter(scene, new, raw=True, **places)
    back = check_gather_raw(scene, 10, **places)
    assert all(np.array_equal(back[n][:9].view(np.uint8), a[:9].view(np.uint8)) for n, a in new.items())


def test_store_scales() -> None:
    """The caller's scales, and zeros behind them."""
    scene = stored_scene(MOVES, BATCH)
    soil(scene)
    scales, offsets = exponents(scene, 6), offsets_of(BATCH.new, index_name(MOVES, "store_scales"))
    expected = scene.snapshot()
    word = store_scales(scene.view, scene.rows(expected), scales, row_offsets=offsets, role=0)
    run = Run(scene, "store_scales", launcher(scene, "store_scales"), new_scales=scales, row_offsets=offsets)
    hold_memory(scene, expected)
    run.expect_word(word)


def soil(scene: Scene) -> None:
    """Bytes behind the scales of every token that are no zeros yet, as of memory that nobody cleared."""
    for rows in scene.rows():
        scales = rows.parts[0].scales  # type: ignore[union-attr]
        assert isinstance(scales, Padded)
        for page in range(rows.pages):
            for token in range(rows.tokens):
                row = Elements.read(scales, page, token)
                row.view(np.uint8)[:, scales.dim :] = 0x55
                Elements.write(scales, page, token, row)


def exponents(scene: Scene, rows: int) -> Raw:
    """Scales of every size."""
    return scene.rng.integers(0, 255, (rows, 1, 7), np.uint8).view(dtype("e8m0").numpy())


def test_rows_add() -> None:
    """New sums are quantized as new rows are: K and V of one head, with zeros behind the scales of each."""
    quant = powers("e4m3", 32, amax_min=1e-4, place="page", scale_pad=4)
    cache = Paged(dtype="bf16", kv_heads=1, head_dim=96, page_size=3, quant=quant)
    kernels = KernelSet(name="record_sums", q_heads=2, cache=cache, ops=(ops.RowsAdd(),), arch=("sm_90a",))
    scene = stored_scene(kernels, replace(BATCH, fill="bytes"))
    soil(scene)
    offsets = offsets_of(BATCH.new, index_name(kernels, "rows_add"))
    check_rows(scene, flat_rows(scene, 6, width_of(scene)), offsets, 0)


PLAIN_ROWS: Final = Latent(dtype="bf16", latent_dim=448, rope_dim=64, page_size=2, layout=ROWS, values="row")
PAIRS: Final[dict[str, tuple[Cache, Cache]]] = {
    "into": (PLAIN_ROWS, LATENT["v4"]),
    "across": (LATENT["v4_mxfp4"], LATENT["v41_footer"]),
    "alike": (LATENT["v4"], LATENT["v4"].model_copy(update={"page_size": 2})),
}


@pytest.mark.parametrize("name", PAIRS)
def test_convert(name: str) -> None:
    """From 16 bits, from one record to another, and to pages of another size, whose bytes are copied."""
    source, target = PAIRS[name]
    convert = ops.Convert(source=source)
    kernels = KernelSet(name=f"record_{name}", q_heads=2, cache=target, ops=(convert,), arch=("sm_90a",))
    mine, other = scenes(kernels, replace(BATCH, new=(0, 0, 0)))
    assert describe(check(mine, other)) is None
