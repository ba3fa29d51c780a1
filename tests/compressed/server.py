"""One layer served to several requests, as an engine does: pools, page tables, rings, lists, and the calls of a step.

Pages of the window that no token of a later step reads go back to the free ones, filled with NaN codes, and their place in the
table becomes a page id that no pool has: so a window wraps, and a list that is one token too long meets NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvgen.runtime.cpu import machine
from tests.compressed.kits import Kit
from tests.compressed.statement import Floats, Rows, Weights

BF16 = ml_dtypes.bfloat16
POISON = 0x7FFF_FFFF
NAN_CODE = 0x7F  # NaN as e4m3, and in both bytes of a bf16


@dataclass
class Step:
    """What a step gave: o `[T, heads, dim]` of its rows turned back, the entries that each row read, and the indexer's scores of
    those that it sees."""

    o: Floats
    picks: list[NDArray[np.int64]]
    logits: list[Floats]


@dataclass
class Paged:
    """Pages of one cache: its pool, its page table, and the pages that nobody has."""

    made: Any
    table: NDArray[np.int32]
    free: list[int]
    tokens: int
    held: list[dict[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, package: Any, requests: int, columns: int, pages: int, tokens: int, rng: np.random.Generator) -> Paged:
        made = package.Cache.empty(layers=1, requests=requests, pages=pages, device="cpu")
        for pool in made.blocks:
            for layer in pool if isinstance(pool, list | tuple) else [pool]:
                layer.view(np.uint8)[...] = NAN_CODE
        table = np.full((requests, columns), POISON, np.int32)
        free = rng.permutation(pages).tolist()
        return cls(made, table, free, tokens, [{} for _ in range(requests)])

    def cover(self, b: int, first: int, end: int) -> None:
        """Pages for tokens `first` to `end` of a request; what it has before them goes back."""
        for column in [c for c in self.held[b] if (c + 1) * self.tokens <= first]:
            page = self.held[b].pop(column)
            self.table[b, column] = POISON
            self.free.insert(0, page)
        for column in range(first // self.tokens, -(-end // self.tokens)):
            if column not in self.held[b]:
                self.held[b][column] = self.free.pop()
                self.table[b, column] = self.held[b][column]


class Server:
    """A layer with `weights` over the rows of each request."""

    def __init__(self, kit: Kit, weights: Weights, rows: list[Rows], *, seed: int = 0, most: int = 0) -> None:
        self.kit, self.weights, self.rows = kit, weights, rows
        self.done = [0] * len(rows)
        rng, form = np.random.default_rng(seed), kit.form
        longest = max(len(r.q) for r in rows)
        page = kit.window.cache.page_tokens
        held = -(-(form.window + (most or longest)) // page) + 2
        columns = -(-longest // page)
        self.window = Paged.of(
            kit.generated("window"), len(rows), columns, min(held, columns + 1) * len(rows), page, rng
        )
        self.pools: dict[str, Paged] = {}
        self.states: dict[str, Any] = {}
        self.last: list[NDArray[np.int64]] = []
        self.blocks = np.zeros((0, 0), np.int32)
        self.logits: list[Floats] = []
        self.lists: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
        for part in ("entries", "keys"):
            kernels = getattr(kit, part)
            if kernels is not None:
                tokens = kernels.cache.page_tokens * form.rate
                columns = -(-longest // tokens)
                made = kit.generated(part)
                self.pools[part] = Paged.of(made, len(rows), columns, columns * len(rows) + 2, tokens, rng)
                self.states[part] = self._state(made, rng) if hasattr(made, "pool") else {}

    def _state(self, made: Any, rng: np.random.Generator) -> dict[str, Any]:
        """Rings of garbage: a request's first tokens need none."""
        params = {p.name: p for p in made.pool.KERNEL.params}
        if "state" not in params:
            return {}
        shape = tuple(n if isinstance(n, int) else len(self.rows) + 1 for n in params["state"].shape)
        ids = rng.permutation(len(self.rows) + 1)[: len(self.rows)].astype(np.int32)
        return {"state": np.full(shape, np.nan, np.float32), "state_ids": ids}

    def step(self, counts: list[int], *, owner: Server | None = None) -> Step:
        """`counts[b]` new tokens of request b. `owner`: the layer whose entries it reads, and whose picks of this step, or
        blocks."""
        form = self.kit.form
        before, self.done = self.done, [d + n for d, n in zip(self.done, counts, strict=True)]
        lengths = np.array(self.done, np.int32)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        where = [(b, p) for b, n in enumerate(counts) for p in range(before[b], before[b] + n)]
        for b in range(len(counts)):
            self.window.cover(b, max(before[b] - form.window + 1, 0), self.done[b])
            for paged in self.pools.values():
                paged.cover(b, 0, self.done[b])
        new = [Rows(**_cut(vars(r), f, d)) for r, f, d in zip(self.rows, before, self.done, strict=True)]
        with machine(arch="sm_90a", mode="check"):
            q = self._append(new, lengths, offsets)
            if owner is None:
                self._compress(new, lengths, offsets)
            if owner is None or form.candidates is not None:
                picks = self._picks(new, lengths, offsets, where, owner)
            else:
                picks, self.lists = owner.last, owner.lists
            o = self._attend(q, where, lengths, offsets, owner or self)
        self.last = picks
        return Step(o.astype(np.float64), picks, self.logits)

    def take_back(self, b: int, count: int) -> None:
        """The last tokens of a request were drafts, and are rejected."""
        self.done[b] -= count

    # Calls of a step ------------------------------------------------------------------------------------------------------

    def _append(self, new: list[Rows], lengths: NDArray[np.int32], offsets: NDArray[np.int32]) -> NDArray[Any]:
        made = self.kit.generated("window")
        cache = self.window.made.step(lengths=lengths, page_table=self.window.table)
        q, kv = (_rows(new, name) for name in ("q", "kv"))
        out = np.empty_like(q)
        made.append(cache[0], q, kv[:, None], out, self.weights.kv_norm.astype(BF16), offsets)
        return out

    def _compress(self, new: list[Rows], lengths: NDArray[np.int32], offsets: NDArray[np.int32]) -> None:
        """Entries and the indexer's keys of the step's tokens."""
        latent = None
        if "entries" in self.pools:
            latent = self._pool("entries", new, lengths, offsets)
        if "keys" not in self.pools:
            return
        if self.kit.form.index == "pool":
            self._pool("keys", new, lengths, offsets)
            return
        paged = self.pools["keys"]
        cache = paged.made.step(lengths=lengths, page_table=paged.table)
        k = (latent.astype(np.float32) @ self.weights.wk.T.astype(np.float32)).astype(BF16)[:, None]
        self.kit.generated("keys").append(cache[0], k, self.weights.index_norm.astype(BF16), offsets)

    def _pool(self, part: str, new: list[Rows], lengths: NDArray[np.int32], offsets: NDArray[np.int32]) -> Any:
        kind, paged = {"entries": "pool", "keys": "index"}[part], self.pools[part]
        kv, gate = (_rows(new, f"{kind}_{name}", np.float32) for name in ("kv", "gate"))
        given: dict[str, Any] = {"k_weight": getattr(self.weights, f"{kind}_norm").astype(BF16), **self.states[part]}
        ape = self.weights.ape if kind == "pool" else self.weights.index_ape
        if ape is not None:
            given["ape"] = ape.astype(np.float32)
        if self.kit.form.index == "latent":
            given["latent_out"] = np.full((len(kv), self.kit.form.dim), np.nan, BF16)
        x = kv if gate is None else np.concatenate([kv, gate], axis=1)
        cache = paged.made.step(lengths=lengths, page_table=paged.table)
        self.kit.generated(part).pool(cache[0], x=x, row_offsets=offsets, **given)
        return given.get("latent_out")

    def _picks(
        self,
        new: list[Rows],
        lengths: NDArray[np.int32],
        offsets: NDArray[np.int32],
        where: list[tuple[int, int]],
        owner: Server | None,
    ) -> list[NDArray[np.int64]]:
        """The entries that each row reads, with an `owner` of its best blocks; `self.lists` become their rows of the pool and how
        many each row has."""
        form = self.kit.form
        self.logits = [np.zeros(0)] * len(where)
        if not form.rate:
            return [np.zeros(0, np.int64)] * len(where)
        seen = [(p + 1) // form.rate for _, p in where]
        paged, made = (owner or self).pools["entries"], self.kit.generated("entries")
        cache = paged.made.step(lengths=lengths, page_table=paged.table)
        counts = np.full(len(where), -7, np.int32)
        if form.topk is None:
            keys = np.full((len(where), max(seen) + 2), -7, np.int32)
            made.list_keys(cache[0], offsets, keys, counts)
            self.lists = keys, counts
            return [np.arange(n) for n in seen]
        scores = self._scores(new, lengths, offsets, where, owner)
        # As top-k gives them: entries of -inf behind the others, where a row sees fewer.
        best = np.argsort(-scores, axis=1, kind="stable")[:, : form.topk].astype(np.int32)
        picked = np.full((len(where), form.topk), -1, np.int32)
        picked[:, : best.shape[1]] = best
        slots = np.empty_like(picked)
        if owner is None:
            self.logits = [row[:n].astype(np.float64) for row, n in zip(scores, seen, strict=True)]
            made.remap_indices(cache[0], picked, offsets, slots, counts)
        else:  # scores and picks are of columns
            assert form.candidates is not None
            made.remap_candidates(cache[0], picked, owner.blocks, offsets, slots, counts)
            columns, size = np.arange(scores.shape[1]), form.candidates[1]
            entries = owner.blocks[:, columns // size] * size + columns % size
            entries[scores == -np.inf] = -1
            self.logits = [np.full(n, -np.inf) for n in seen]
            for row, named, logits in zip(scores, entries, self.logits, strict=True):
                logits[named[named >= 0]] = row[named >= 0]
            best = np.take_along_axis(entries, best, axis=1)
        self.lists = slots, counts
        return [np.sort(row[(row >= 0) & (row < n)]) for row, n in zip(best, seen, strict=True)]

    def _scores(
        self,
        new: list[Rows],
        lengths: NDArray[np.int32],
        offsets: NDArray[np.int32],
        where: list[tuple[int, int]],
        owner: Server | None,
    ) -> NDArray[np.float32]:
        """The indexer's scores `[T, entries and three more]`, of which `self.blocks` become the best blocks; or those of the
        entries of the owner's best blocks, `[T, columns]`."""
        form, made, paged = self.kit.form, self.kit.generated("keys"), (owner or self).pools["keys"]
        cache = paged.made.step(lengths=lengths, page_table=paged.table)
        positions = np.array([p for _, p in where], np.int64)
        q, w = _rows(new, "index_q"), _rows(new, "index_w", np.float32)
        codes, weights = np.empty(q.shape, ml_dtypes.float8_e4m3fn), np.empty_like(w)
        made.indexer_query(cache[0], q=q, weights=w, q_out=codes, weights_out=weights, positions=positions)
        seen = (positions + 1) // form.rate
        if owner is not None:
            assert form.candidates is not None
            listed = np.full((*owner.blocks.shape, form.candidates[1]), np.nan, np.float32)
            made.candidate_scores(cache[0], codes, weights, owner.blocks, listed, row_offsets=offsets)
            assert not np.isnan(listed).any()
            return listed.reshape(len(listed), -1)
        logits = np.full((len(where), int(seen.max()) + 3), np.nan, np.float32)
        if form.candidates is None:
            made.indexer_scores(cache[0], codes, weights, logits, row_offsets=offsets)
        else:
            blocks, size = form.candidates
            maxima = np.full((len(where), -(-logits.shape[1] // size)), np.nan, np.float32)
            made.indexer_scores(cache[0], codes, weights, logits, maxima, row_offsets=offsets)
            assert not np.isnan(maxima).any()
            # Ascending, as engines sort them; where a row sees fewer blocks, others of -inf are among them.
            self.blocks = np.sort(np.argsort(-maxima, axis=1, kind="stable")[:, :blocks], axis=1).astype(np.int32)
        for row, n in zip(logits, seen, strict=True):
            assert not np.isnan(row[:n]).any() and (row[n:] == -np.inf).all()
        return logits

    def _attend(
        self,
        q: NDArray[Any],
        where: list[tuple[int, int]],
        lengths: NDArray[np.int32],
        offsets: NDArray[np.int32],
        owner: Server,
    ) -> NDArray[Any]:
        kit, form, made = self.kit, self.kit.form, self.kit.generated("window")
        cache = self.window.made.step(lengths=lengths, page_table=self.window.table)
        keys, counts = np.full((len(q), form.window + 1), -7, np.int32), np.full(len(q), -7, np.int32)
        made.list_keys(cache[0], offsets, keys, counts)
        given: dict[str, Any] = {"topk_lengths": counts, "sinks": self.weights.sinks.astype(np.float32)}
        if kit.entries is not None:
            layer = made.MlaDecodeEntriesKeys(*owner.pools["entries"].made.blocks)[0]
            slots, many = self.lists
            given |= {"entries_cache": layer, "entries_indices": slots, "entries_topk_lengths": many}
        found = made.mla_decode(cache[0], q, indices=keys, out=np.empty((len(q), kit.heads, form.dim), BF16), **given)
        o = found.out if hasattr(found, "out") else found
        positions = np.array([p for _, p in where], np.int64)
        return made.attention_output(cache[0], o, o, positions)


def _cut(rows: dict[str, Any], first: int, end: int) -> dict[str, Any]:
    return {name: None if x is None else x[first:end] for name, x in rows.items()}


def _rows(new: list[Rows], name: str, kind: Any = BF16) -> NDArray[Any]:
    """The step's rows of all requests."""
    found = [getattr(r, name) for r in new]
    return None if found[0] is None else np.concatenate(found).astype(kind)
