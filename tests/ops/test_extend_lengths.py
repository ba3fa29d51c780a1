"""extend of prompts and prefixes of all lengths, by mma.sync and by warpgroups: ends of tiles, padding, chunks, long ones."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Final

import pytest

from kvgen import KernelSet
from tests.ops import test_extend_sm90
from tests.support import extend_sets
from tests.support.batches import PLAIN, Batch
from tests.support.extend_steps import Step, step

CAMPAIGN: Final = "KVGEN_FAMILY" in os.environ
MMA: Final = extend_sets.SETS
WGMMA: Final = test_extend_sm90.SETS | test_extend_sm90.MORE
PLAIN_ONES: Final[dict[str, KernelSet]] = {"mma": MMA["paged"], "wgmma": WGMMA["llama"]}
KERNELS: Final = PLAIN_ONES | {"window": MMA["window"], "wgmma_window": WGMMA["window"], "early": WGMMA["falcon"]}
Numbers = tuple[int, ...]
# What every run has, and what a campaign has besides.
LONG: Final[dict[str, tuple[str, Numbers, Numbers]]] = {"prefixes": ("mma", (5000, 4989, 0), (1, 5, 40))}
ENDS: Final[list[tuple[str, Numbers, Numbers]]] = [("wgmma", (0, 1, 127, 16), (33, 31, 1, 32))]
PARTS: Final[list[tuple[str, Numbers]]] = [("window", (30, 1, 40))]
if CAMPAIGN:
    LONG["very_long_prefixes"] = ("mma", (20000, 19989, 0), (1, 5, 40))
    for kind in PLAIN_ONES:
        LONG |= {
            f"{kind}_prompts": (kind, (30, 0, 0, 0), (1, 0, 3, 5000)),
            f"{kind}_prefixes": (kind, (20000, 19999, 0), (300, 1, 7)),
            f"{kind}_mixed": (kind, (4000,) * 60 + (0,), (1,) * 60 + (4000,)),
        }
    PARTS += [(kind, parts) for kind in KERNELS for parts in ((1,) * 12 + (138,), (50, 1, 99), (64, 64, 22), (149, 1))]
    # Rows before the first token, as a batch padded on the left has them.
    ENDS.append(("early", (-3, -20, 0, 5), (40, 30, 7, 9)))
    ENDS += [
        (kind, *lengths)
        for kind in KERNELS
        for lengths in (
            ((0, 0, 0, 0, 0), (1, 31, 32, 33, 64)),
            ((0, 1, 15, 16, 17), (300, 63, 2, 129, 1)),
            ((127, 128, 129, 20000), (32, 31, 33, 1)),
            ((255, 256, 257, 300), (128, 1, 127, 300)),
        )
    ]


def plain(*totals: int, **fields: Any) -> Batch:
    return replace(PLAIN, totals=totals, new=(0,) * len(totals), **fields)


def bits(found: Step, out: Any, lse: Any, b: int) -> bytes:
    """The bytes of request b's rows, and of their log-sum-exps."""
    begin = found.scene.batch.leading + sum(found.counts[:b])
    rows = slice(begin, begin + found.counts[b])
    return bytes(out[rows].tobytes() + lse[rows].tobytes())


@pytest.mark.parametrize("name", PLAIN_ONES if CAMPAIGN else ["mma"])
def test_left_and_graph_padding(name: str) -> None:
    """Rows before the first token see none and give 0; rows of nobody, before and behind, are 0; all others have the bits that
    they have without."""
    kernels, rows = PLAIN_ONES[name], (40, 71, 5)
    alone = step(kernels, plain(40, 90, 30), rows, dominant=False)
    right = alone.check(multiprocessors=2)
    padded = step(kernels, plain(40, 90, 30, leading=40, padding=130), rows, dominant=False)
    padded.q[40:-130] = alone.q
    for to, of in zip(padded.scene.tensors.values(), alone.scene.tensors.values(), strict=True):
        to[0].memory[...] = of[0].memory
    found = padded.check(multiprocessors=2)
    assert not found[0][:40].any() and not found[0][-130:].any()
    for b in range(3):
        assert bits(padded, *found, b) == bits(alone, *right, b)


@pytest.mark.parametrize("name", LONG)
def test_long_ones(name: str) -> None:
    """5,000 tokens before a row and before some; in a campaign 20,000, a prompt of 5,000 rows, and one of 4,000 beside 60
    decoding requests."""
    which, before, rows = LONG[name]
    batch = plain(*(a + b for a, b in zip(before, rows, strict=True)), padding=5)
    step(PLAIN_ONES[which], batch, rows).check(multiprocessors=16)


@pytest.mark.parametrize(("name", "before", "rows"), ENDS)
def test_ends_of_tiles_and_pages(name: str, before: tuple[int, ...], rows: tuple[int, ...]) -> None:
    """And of windows; the longest request last. All is right, and all tokens are counted."""
    batch = plain(*(a + b for a, b in zip(before, rows, strict=True)), padding=3, leading=2)
    for level in (False, True):
        step(KERNELS[name], batch, rows, level=level).check(multiprocessors=5)


@pytest.mark.parametrize(("name", "parts"), PARTS)
def test_chunks_are_the_whole_prompt(name: str, parts: tuple[int, ...]) -> None:
    """A prompt by parts, each over what came before, is the prompt: as near as the oracle asks of both."""
    done = 0
    for rows in parts:
        step(KERNELS[name], plain(done + rows, seed=8), (rows,), dominant=False).check()
        done += rows
    step(KERNELS[name], plain(done, seed=8), (done,), dominant=False).check()
