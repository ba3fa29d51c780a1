"""Extend steps: a scene, any number of query rows of several requests, run and held to the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvgen import Continuous, KernelSet
from kvgen.ops import Extend
from kvgen.reference import Extended, extend
from tests.support.batches import OPEN_TOKENS, PLAIN, Batch, capacity
from tests.support.decode_steps import arguments_of
from tests.support.dominant_tokens import raise_edges
from tests.support.harness import Run, hold_untouched, index_name, launcher, offsets_of, planned, surroundings
from tests.support.memory import CANARY, Raw, rows_array
from tests.support.scenes import Scene
from tests.support.tolerance import Numerics, hold, hold_counts, numerics


@dataclass
class Step:
    """One step of extend `op`: request b has `counts[b]` rows of q, behind `row_offsets` or, without, T // B each."""

    scene: Scene
    op: Extend
    counts: tuple[int, ...]
    q: Raw
    row_offsets: Raw | None
    arguments: dict[str, Any]
    level: bool = False

    @property
    def numerics(self) -> Numerics:
        """The numerics that the oracle computes in."""
        return numerics(self.scene.kernels, self.op, self.arguments)

    def wanted(self) -> Extended:
        """The oracle's result."""
        given = {name: value for name, value in self.numerics.oracle().items() if name != "rows"}
        most = 32 if self.op.mask.tree == "packed" else 2**31
        rows = self.scene.rows()
        return extend(self.scene.view, rows, self.q, row_offsets=self.row_offsets, most_rows=most, **given)

    def run(
        self, *, workspace: Any = None, lse: bool = True, multiprocessors: int | None = None
    ) -> tuple[Raw, Raw, int]:
        """Run it, with a workspace planned here where none is given: out, log-sum-exp and the error word. Nothing beside them
        is written."""
        shape, element = (len(self.q), self.q.shape[1]), self.numerics.out
        out, around = rows_array(
            len(self.q), (self.q.shape[1], self.scene.cache.v_dim), element, strided=self.scene.batch.strided
        )
        sums, sums_around = rows_array(shape[0], (shape[1],), "f32", strided=False)
        pool = self.scene.snapshot()
        workspace = workspace or self.planned(multiprocessors=multiprocessors)
        given = {n: a for n, a in self.arguments.items() if n != "valid_tokens"}
        call = launcher(self.scene, self.op.name)
        run = Run(
            self.scene, self.op.name, call, q=self.q, out=out, lse=sums if lse else None, workspace=workspace, **given
        )
        for array, memory in ((out, around), (sums, sums_around)):
            assert (surroundings(array, memory) == CANARY).all(), "written beside the rows"
        hold_untouched(self.scene, pool)
        return out, sums, run.word

    def check(self, *, lse: bool = True, workspace: Any = None, multiprocessors: int | None = None) -> tuple[Raw, Raw]:
        """Run it and hold out, log-sum-exp and the error word to the oracle; out and log-sum-exp."""
        out, sums, word = self.run(workspace=workspace, lse=lse, multiprocessors=multiprocessors)
        self.hold(out, sums if lse else None, word)
        return out, sums

    def hold(self, out: Raw, lse: Raw | None, word: int) -> None:
        """Every row against the oracle."""
        wanted = self.wanted()
        # A tile of columns may have some of a row's heads.
        excused = np.isnan(out.astype(np.float32)).all(axis=2) & wanted.doubtful[:, None]
        assert lse is None or np.isnan(lse[excused]).all()
        out = np.where(excused[:, :, None], wanted.out, out.astype(np.float64))
        hold(wanted, self.numerics, self.q, out, None if lse is None else np.where(excused, wanted.lse, lse))
        if self.scene.batch.errors:
            assert word == wanted.errors
        if self.level and lse is not None and self.op.score is None and self.op.sinks is None:
            hold_counts(wanted, self.numerics, lse)

    def planned(self, more: int = 1, multiprocessors: int | None = None) -> Any:
        """A workspace of garbage, then planned for this step; for `more` rows more than needed."""
        return planned(
            self.scene,
            len(self.q),
            self.op.name,
            arguments=self.arguments,
            row_offsets=self.row_offsets,
            more=more,
            multiprocessors=multiprocessors,
        )


def extend_of(kernels: KernelSet, name: str = "extend") -> Extend:
    """A set's extend of that name."""
    return next(op for op in kernels.ops if isinstance(op, Extend) and op.name == name)


def step(
    kernels: KernelSet,
    batch: Batch,
    counts: Sequence[int],
    *,
    op: str = "extend",
    offsets: bool = True,
    dominant: bool = True,
    level: bool = False,
) -> Step:
    """A scene whose request b holds batch.totals[b] tokens, the last counts[b] of them this step's, and a row of q each;
    `level` queries are 0: every token weighs the same, and a log-sum-exp counts them.

    With `offsets` batch.leading rows of nobody come first and batch.padding last; without, counts are all the same.
    """
    spec = extend_of(kernels, op)
    counts = tuple(counts)
    assert offsets or len(set(counts)) <= 1
    before = kernels.cache.lengths == "before" and not spec.cross
    totals = tuple(max(n, c) if before else n for n, c in zip(batch.totals, counts, strict=True))
    batch = replace(batch, totals=totals, new=(0,) * len(totals))
    if not offsets:
        batch = replace(batch, leading=0, padding=0)
    scene = Scene(kernels, batch, [n - c * before for n, c in zip(totals, counts, strict=True)])
    scene.fill(totals)
    rows = batch.leading + sum(counts) + batch.padding
    q, _ = rows_array(
        rows, (kernels.q_heads, scene.cache.head_dim), spec.q_dtype or scene.cache.dtype, strided=batch.strided
    )
    q[...] = 0 if level else scene.values(*q.shape)
    starts = np.cumsum([batch.leading, *counts])
    ranges = [(int(a), int(b)) for a, b in pairwise(starts)]
    found = Step(scene, spec, counts, q, None, arguments_of(scene, spec, ranges, rows), level)
    if offsets:
        found.row_offsets = offsets_of(counts, index_name(kernels, op), batch.leading)
    if dominant and not level:
        # The last rows alone, if there are many: the more tokens are dominant, the less each one weighs.
        raise_edges(scene, q, totals, rows=[(a if b - a <= 32 else b - 8, b) for a, b in ranges], given=found.numerics)
    return found


def hold_bits_of_rows(
    kernels: KernelSet, total: int, most: int, tries: Sequence[tuple[int, int, tuple[int, ...]]]
) -> None:
    """The last rows of a request of `total` tokens have the bits that they have among its last `most` rows, whose keys one
    block reads: `tries` are how many of them, on how many multiprocessors, and the rows of other requests, with as many rows
    of padding. Keys are cut in some of the tries."""
    rng = np.random.default_rng(5)

    def scene(rows: int, others: tuple[int, ...]) -> Step:
        totals = (total, *others)
        batch = replace(PLAIN, totals=totals, new=(0,) * len(totals), seed=6, padding=len(others))
        found = step(kernels, batch, (rows, *others), dominant=False)
        tokens, roles = np.random.default_rng(11), found.scene.rows()
        for token in range(total):  # the same ones in every scene
            found.scene.write(0, token, [tokens.standard_normal((x.heads, x.dim)).astype(found.q.dtype) for x in roles])
        return found

    whole, cut = scene(most, ()), False
    whole.q[...] = rng.standard_normal(whole.q.shape)
    expected = whole.check(multiprocessors=1)
    for rows, multiprocessors, others in tries:
        again = scene(rows, others)
        again.q[:rows] = whole.q[most - rows :]
        workspace = again.planned(multiprocessors=multiprocessors)
        cut |= not others and chunks_of(workspace) > -(-rows * kernels.group // 64)
        out, lse, word = again.run(workspace=workspace)
        assert word == 0
        assert out[:rows].tobytes() == expected[0][most - rows :].tobytes(), (rows, multiprocessors, others)
        assert lse[:rows].tobytes() == expected[1][most - rows :].tobytes(), (rows, multiprocessors, others)
    assert cut, "no keys were cut"


def chunks_of(workspace: Any) -> int:
    """Pieces of a plan."""
    return int(np.frombuffer(workspace.view.owner[:64].tobytes(), np.uint32)[9])


@st.composite
def steps(draw: st.DrawFn, kernels: KernelSet, op: str = "extend", most: int = 150) -> Step:
    """Steps of a set: up to four requests, whose rows and tokens crowd around the ends of pages, tiles and windows."""
    spec, cache = extend_of(kernels, op), kernels.cache
    page, group = cache.page_tokens or 16, kernels.group
    window = getattr(cache.page_table, "window", None)
    if cache.ragged:
        most = min(most, OPEN_TOKENS - 7)  # of a prefix and of rows; the pool has no more
    elif isinstance(cache, Continuous):
        most = min(most, capacity(kernels) // 2)
    edges = {0, 1, 2, most} | {e + d for e in (page, 2 * page, 64, 128, 128 // group) for d in (-1, 0, 1)}
    extents = [n for n in (spec.mask.window, spec.mask.chunk, spec.mask.ahead, window) if n]
    edges |= {n * times + d for n in extents for times in (1, 2) for d in (-1, 0, 1)}
    number = st.one_of(st.sampled_from(sorted(e for e in edges if 0 <= e <= most)), st.integers(0, most))
    prefixes, counts = draw(st.lists(number, max_size=3)), list[int]()
    most_rows = 32 if spec.mask.tree == "packed" else most
    # A ring holds the tokens of one step's rows that it keeps: no more rows than that.
    counts = [min(draw(number), most_rows, window or most) for _ in prefixes]
    offsets = draw(st.booleans())
    if not offsets:
        counts = counts[:1] * len(counts)
    # Rows may be more than tokens where these are counted without them.
    apart = spec.cross or (cache.lengths == "after" and window is None and draw(st.booleans()))
    batch = Batch(
        totals=tuple(a + b * (not apart) for a, b in zip(prefixes, counts, strict=True)),
        new=(0,) * len(counts),
        padding=draw(st.integers(0, 3)),
        shared=draw(st.booleans()),
        fill=draw(st.sampled_from(("nan", "inf", "bytes"))),
        strided=draw(st.booleans()),
        errors=draw(st.sampled_from((True, True, False))),
        schedule=draw(st.sampled_from(("ascending", "descending", 7))),
        seed=draw(st.integers(0, 2**32 - 1)),
        leading=draw(st.sampled_from((0, 2))),
    )
    return step(kernels, batch, counts, op=op, offsets=offsets, level=draw(st.sampled_from((False, False, True))))
