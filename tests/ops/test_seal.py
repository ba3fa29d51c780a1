"""Keys that are quantized R tokens together: step after step, seal, append, and every token read again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvgen.runtime import describe
from tests.support.batches import PLAIN
from tests.support.engine_sets import ENGINES, QUANTIZED
from tests.support.harness import check_append, check_decode, check_gather, index_name, offsets_of, queries
from tests.support.scenes import Scene
from tests.support.sets import ALL, FAMILY, having

# A new token each; a prompt of several groups; one that ends a group; nothing; one that begins a group.
STEPS = ((1, 21, 4, 0), (3, 1, 1, 1), (1, 1, 3, 2), (8, 1, 0, 6))
RESIDUAL = [n for n, s in QUANTIZED.items() if s.cache.storage.residual]
OTHERS = [n for n, s in (FAMILY | ENGINES).items() if s.cache.storage.residual]


def set_lengths(scene: Scene, before: Sequence[int], new: Sequence[int]) -> None:
    """Arguments that the engine gives a step; counts of CSR's last pages too."""
    after = scene.cache.lengths == "after"
    counts = [b + n if after else b for b, n in zip(before, new, strict=True)]
    if "lengths" in scene.tables:
        scene.tables["lengths"][...] = counts
        return
    pages = [-(-n // scene.tokens) for n in counts]
    assert scene.cache.page_tokens is not None
    flat = [scene.entries[b][i][0] for b, n in enumerate(pages) for i in range(n)]
    scene.tables["page_indices"] = np.array([*flat, 0], scene.tables["page_indices"].dtype)
    scene.tables["page_indptr"][...] = np.cumsum([0, *pages])
    scene.tables["last_page_len"][...] = [n - max(p - 1, 0) * scene.tokens for n, p in zip(counts, pages, strict=True)]


def read_all(scene: Scene, tokens: Sequence[int]) -> None:
    """Gather and decode every request's living tokens, of which the cache holds so many."""
    set_lengths(scene, tokens, [0] * len(tokens))
    first = [scene.view.first_token(n) for n in tokens]
    counts = [n - f for n, f in zip(tokens, first, strict=True)]
    index = index_name(scene.kernels, "gather")
    offsets = offsets_of(counts, index)
    check_gather(scene, sum(counts), row_offsets=offsets, starts=np.array(first, offsets.dtype))
    if all(tokens) and any(o.kind == "decode" for o in scene.kernels.ops):
        set_lengths(scene, [n - 1 for n in tokens], [1] * len(tokens))
        _, _, wanted = check_decode(scene, queries(scene, len(tokens)))
        assert describe(wanted.errors) is None


@pytest.mark.parametrize("name", [*RESIDUAL, *OTHERS])
def test_steps(name: str) -> None:
    """Prompts longer than a group, groups that a step ends or begins, a slot that another request takes over."""
    kernels = ALL[name]
    totals = [sum(step[b] for step in STEPS) for b in range(4)]
    scene = Scene(kernels, replace(PLAIN, totals=tuple(totals), new=(0,) * 4, strided=True), [0] * 4)
    held = [0] * 4
    for i, new in enumerate(STEPS):
        if i == 2:  # request 1 is over; another one begins in its place, with the old one's tail and count
            held[1] = 0
        set_lengths(scene, held, new)
        check_append(scene, sum(new) + 1, row_offsets=offsets_of(new, index_name(kernels, "append")))
        held = [h + n for h, n in zip(held, new, strict=True)]
        if name in RESIDUAL or i == 3:
            read_all(scene, held)


@pytest.mark.parametrize("tokens", [33, 45, 64])
def test_a_prompt_longer_than_its_ring(tokens: int) -> None:
    """Groups whose page the prompt's own end takes over are not stored."""
    scene = Scene(ALL["grouped_ring"], replace(PLAIN, totals=(tokens, 3), new=(0, 0)), [0, 0])
    assert scene.ring_pages * scene.tokens == 32
    set_lengths(scene, (0, 0), (tokens, 3))
    check_append(scene, tokens + 3, row_offsets=offsets_of((tokens, 3), index_name(scene.kernels, "append")))
    read_all(scene, (tokens, 3))


@pytest.mark.parametrize("name", [n for n in having(QUANTIZED, "decode") if n in RESIDUAL])
def test_a_bad_page_in_the_middle(name: str) -> None:
    """A prompt whose second page is bad: its groups are lost and reported, those around it are not."""
    kernels = ALL[name]
    scene = Scene(kernels, replace(PLAIN, totals=(30, 30), new=(0, 0)), [0, 0])
    set_lengths(scene, (0, 0), (30, 30))
    scene.tables["page_table"][1, -1 if name == "grouped_ring" else 1] = 2**31 - 1
    new = (30, 30)
    check_append(scene, 60, row_offsets=offsets_of(new, index_name(kernels, "append")))
    offsets = offsets_of(new, index_name(kernels, "gather"))
    set_lengths(scene, new, (0, 0))
    check_gather(scene, 60, row_offsets=offsets, starts=None)
    set_lengths(scene, (29, 29), (1, 1))
    out, _, wanted = check_decode(scene, queries(scene, 2))
    assert np.isfinite(out[0].astype(np.float32)).all() and np.isnan(out[1].astype(np.float32)).all()
    assert describe(wanted.errors) is not None


def test_a_bad_total() -> None:
    """A last offset of 0 makes every row padding; what is wrong is reported nevertheless."""
    scene = Scene(ALL["grouped_own"], replace(PLAIN, totals=(1, 1), new=(0, 0)), [0, 0])
    offsets = offsets_of((1, 1), index_name(scene.kernels, "append"))
    offsets[-1] = 0
    check_append(scene, 1, row_offsets=offsets)


@pytest.mark.parametrize("sealed", [0, 1, 3, 9, 28, 29, 31, 1000, 2**31 - 1, -1, -(2**31)])
@pytest.mark.parametrize("name", ["grouped", "grouped_own"])
def test_any_count_of_sealed_tokens(name: str, sealed: int) -> None:
    """Whatever k_sealed says, only places of the request's pages and of its tail are read."""
    scene = Scene(ALL[name], replace(PLAIN, totals=(30, 22), new=(1, 1), fill="bytes"), [29, 21])
    scene.fill((30, 22))
    tail = scene.arrays()["k_tail"][scene.layer]
    tail[...] = scene.values(*tail.shape)  # a tail is read where no token waits
    scene.arrays()["k_sealed"][0] = sealed
    index = index_name(scene.kernels, "gather")
    check_gather(scene, 52, row_offsets=offsets_of((30, 22), index), starts=None)
    out, _, wanted = check_decode(scene, queries(scene, 2))
    whole = scene.residual * (scene.batch.totals[0] // scene.residual)
    assert np.isnan(out.astype(np.float32)).all(axis=(1, 2)).tolist() == [sealed != whole, False]
    assert (str(wanted.errors and describe(wanted.errors)).startswith("LENGTH")) == (sealed != whole)
    set_lengths(scene, (30, 22), (1, 2))
    check_append(scene, 3, row_offsets=offsets_of((1, 2), index))
