"""A layer of compressed attention (DeepSeek V4, V4.1) in NumPy, float64: what it means, over a whole sequence at once.

Written from the models' published inference code (DeepSeek-V4 `inference/model.py`; V4.1's), and from nothing of kvgen. One KV
head whose row is key and value; a window of rows, and entries that stand for `rate` tokens each, under one softmax with a
sink a head. `Rows` are what the layer's projections give for each token; matrices are no part of the statement.

`Form.exact` leaves out every rounding: that is the mathematics (transformers' f32 code has it so). Otherwise the official
recipe: bf16 where the inference code casts, rows and index keys quantized as their caches hold them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Codes:
    """How a row is quantized: groups of `group` values, e4m3 or e2m1 codes, and where the row's turned part stays bf16, `plain`.

    `scale` "pow2" is 2 ** ceil(log2(amax / largest)) with amax at `floor` or more; "e4m3" is amax / largest, rounded to
    e4m3, at 2 ** -9 or more.
    """

    group: int
    codes: Literal["e4m3", "e2m1"] = "e4m3"
    plain: bool = True
    scale: Literal["pow2", "e4m3"] = "pow2"
    floor: float = 1e-4

    def stored(self, x: Floats, turned: int) -> Floats:
        """What readers get back of rows `[..., dim]` whose last `turned` dims are turned."""
        whole = x.shape[-1] - (turned if self.plain else 0)
        coded = self._coded(x[..., :whole].reshape(*x.shape[:-1], whole // self.group, self.group))
        plain = x[..., whole:].astype(ml_dtypes.bfloat16).astype(np.float64)
        return np.concatenate([coded.reshape(*x.shape[:-1], whole), plain], axis=-1)

    def _coded(self, x: Floats) -> Floats:
        largest = {"e4m3": 448.0, "e2m1": 6.0}[self.codes]
        amax = np.maximum(
            np.abs(x).max(axis=-1, keepdims=True), self.floor if self.scale == "pow2" else largest * 2.0**-9
        )
        if self.scale == "pow2":
            fraction, exponent = np.frexp((amax.astype(np.float32) * np.float32(1 / largest)).astype(np.float64))
            scale = np.ldexp(1.0, exponent - (fraction == 0.5))
        else:
            scale = np.minimum(amax / largest, 448.0).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return _nearest(x / scale, self.codes) * scale


def _nearest(x: Floats, codes: str) -> Floats:
    kind = ml_dtypes.float8_e4m3fn if codes == "e4m3" else ml_dtypes.float4_e2m1fn
    largest = 448.0 if codes == "e4m3" else 6.0
    return np.clip(x, -largest, largest).astype(kind).astype(np.float64)


@dataclass(frozen=True)
class Yarn:
    """YaRN without a factor of cos and sin."""

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0


@dataclass(frozen=True)
class Form:
    """Sizes and recipe of a layer. `rate` 0: a window alone. `topk` None: every entry. `turned`: the row's last dims with RoPE.

    `overlap`: entry j is pooled from windows j - 1 and j. `gated` False (rate 1): an entry is the token's row. `index` None:
    no indexer; "pool": its keys are pooled by a compressor of its own (V4); "latent": they are projected from the entry
    before its RoPE (V4.1). `q_norm`: q's rows are divided by their root mean square. `hadamard`: the indexer's q and keys are
    turned by a Hadamard matrix. `once`: what RoPE or a Hadamard matrix turned, the window's rows and keys that are projected are
    rounded by their quantization alone, not to bf16 before it.
    `candidates` (blocks, entries of a block): a layer that reads another's entries picks among that layer's best blocks, by its
    own q and weights of the indexer (V4.1). `row`, `entry`, `key`: how they are stored.
    """

    dim: int
    turned: int
    window: int
    rate: int = 0
    overlap: bool = False
    gated: bool = True
    topk: int | None = None
    candidates: tuple[int, int] | None = None
    index: Literal["pool", "latent"] | None = None
    index_dim: int = 0
    q_norm: bool = True
    hadamard: bool = False
    eps: float = 1e-6
    theta: float = 160_000.0
    yarn: Yarn | None = None
    exact: bool = False
    once: bool = False
    row: Codes = field(default_factory=lambda: Codes(64))
    entry: Codes = field(default_factory=lambda: Codes(64))
    key: Codes = field(default_factory=lambda: Codes(128, plain=False))

    @property
    def columns(self) -> int:
        """How often a pooled row's width the compressor's projections are."""
        return 2 if self.overlap else 1

    def bf16(self, x: Floats) -> Floats:
        """x as the inference code casts it."""
        return x if self.exact else x.astype(ml_dtypes.bfloat16).astype(np.float64)


@dataclass(frozen=True)
class Rows:
    """What a layer's projections give for the tokens of one request, first to last.

    q `[T, heads, dim]` and kv `[T, dim]`, before their norms; the compressor's kv and gate `[T, columns * dim]`; the
    indexer's q `[T, heads, index_dim]`, weights `[T, heads]` (factors included) and its compressor's kv and gate.
    """

    q: Floats
    kv: Floats
    pool_kv: Floats | None = None
    pool_gate: Floats | None = None
    index_q: Floats | None = None
    index_w: Floats | None = None
    index_kv: Floats | None = None
    index_gate: Floats | None = None

    def first(self, count: int) -> Rows:
        """Those of the first tokens alone."""
        return replace(self, **{name: x[:count] for name, x in vars(self).items() if x is not None})


@dataclass(frozen=True)
class Weights:
    """A layer's vectors: norms, positions added to gates `[rate, columns * dim]`, sinks `[heads]`; V4.1's `wk`
    `[index_dim, dim]`."""

    kv_norm: Floats
    sinks: Floats
    pool_norm: Floats | None = None
    ape: Floats | None = None
    index_norm: Floats | None = None
    index_ape: Floats | None = None
    wk: Floats | None = None


@dataclass(frozen=True)
class Layer:
    """What a layer keeps and gives: rows `[T, dim]`, entries `[T // rate, dim]` and index keys as their caches hold them, the
    indexer's scores `[T, T // rate]` (-inf where a token does not see an entry), the entries each token reads, o
    `[T, heads, dim]` turned back."""

    rows: Floats
    entries: Floats
    keys: Floats | None
    scores: Floats | None
    picks: list[NDArray[np.int64]]
    o: Floats


def layer(
    form: Form,
    rows: Rows,
    weights: Weights,
    *,
    owner: Layer | None = None,
    picks: list[NDArray[np.int64]] | None = None,
) -> Layer:
    """The layer over a whole sequence. `owner`: the layer whose entries it reads, and whose picks, or which chooses the blocks
    that it picks among (V4.1). `picks`: in place of the indexer's own."""
    count = len(rows.q)
    positions = np.arange(count)
    q = form.bf16(_unit(rows.q, form.eps)) if form.q_norm else rows.q
    q = form.bf16(turn(q, positions, form))
    kept = _kept(form, rows.kv, weights.kv_norm)
    entries, keys, scores = np.zeros((0, form.dim)), None, None
    if owner is not None:
        entries, chosen = owner.entries, owner.picks
        if form.candidates is not None:
            assert owner.keys is not None and owner.scores is not None
            scores = np.where(_candidates(form, owner.scores), _scores(form, rows, owner.keys), -np.inf)
            chosen = _picks(form, count, scores)
    elif form.rate:
        assert rows.pool_kv is not None
        latent = _pooled(form, rows.pool_kv, rows.pool_gate, weights.ape, weights.pool_norm)
        entries = _placed(form, latent, form.entry)
        if form.index is not None:
            keys = _keys(form, rows, weights, latent)
            scores = _scores(form, rows, keys)
        chosen = _picks(form, count, scores)
    else:
        chosen = [np.zeros(0, np.int64)] * count
    chosen = chosen if picks is None else picks
    o = np.stack([_attended(form, q[t], t, kept, entries[chosen[t]], weights.sinks) for t in range(count)])
    return Layer(kept, entries, keys, scores, chosen, turn(o, -positions, form))


def _kept(form: Form, kv: Floats, weight: Floats) -> Floats:
    """The window's rows as their cache holds them."""
    positions, normed = np.arange(len(kv)), _unit(kv, form.eps) * weight
    if form.exact:
        return turn(normed, positions, form)
    if form.once:
        return form.row.stored(turn(normed, positions, form), form.turned)
    return form.row.stored(form.bf16(turn(form.bf16(normed), positions, form)), form.turned)


def turn(x: Floats, positions: NDArray[np.int64], form: Form) -> Floats:
    """RoPE of the last `form.turned` dims of x `[T, ..., dim]`, pairs (2 i, 2 i + 1); negative positions turn back."""
    two = form.turned
    exponents = np.arange(0, two, 2) / two
    speeds = form.theta**-exponents
    if form.yarn is not None:
        y = form.yarn
        low, high = (
            two * math.log(y.original / (turns * 2 * math.pi)) / (2 * math.log(form.theta))
            for turns in (y.fast, y.slow)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), two - 1)
        slow = np.clip((np.arange(two // 2) - low) / max(high - low, 1e-3), 0, 1)
        speeds = speeds / y.factor * slow + speeds * (1 - slow)
    angles = positions.reshape(-1, *([1] * (x.ndim - 1))) * speeds
    pairs = x[..., -two:].reshape(*x.shape[:-1], two // 2, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    back = np.stack([turned.real, turned.imag], axis=-1).reshape(*x.shape[:-1], two)
    return np.concatenate([x[..., :-two], back], axis=-1)


def hadamard(x: Floats) -> Floats:
    """x times the Hadamard matrix of its last axis, a power of two, times its size ** -0.5."""
    size = x.shape[-1]
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return x @ matrix * size**-0.5


def _unit(x: Floats, eps: float) -> Floats:
    """x over its root mean square."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def _pooled(form: Form, kv: Floats, gate: Floats | None, ape: Floats | None, norm: Floats | None) -> Floats:
    """Entries before their RoPE: kv's tokens, weighed channel by channel by a softmax of the gate over an entry's tokens."""
    assert norm is not None
    rate, dim, count = form.rate, kv.shape[1] // form.columns, len(kv) // form.rate
    if not form.gated:
        return form.bf16(_unit(form.bf16(kv), form.eps) * norm)
    assert gate is not None
    kv, gate = (x[: count * rate].reshape(count, rate, form.columns, dim) for x in (kv, gate))
    if ape is not None:
        gate = gate + ape.reshape(rate, form.columns, dim)
    found = np.zeros((count, dim))
    for j in range(count):
        values, logits = kv[j, :, -1], gate[j, :, -1]
        if form.overlap and j:
            values, logits = np.concatenate([kv[j - 1, :, 0], values]), np.concatenate([gate[j - 1, :, 0], logits])
        parts = np.exp(logits - logits.max(axis=0))
        found[j] = (parts * values).sum(axis=0) / parts.sum(axis=0)
    return form.bf16(_unit(form.bf16(found), form.eps) * norm)


def _placed(form: Form, rows: Floats, codes: Codes) -> Floats:
    """Entries or keys as their cache holds them: turned by the position of their first token, quantized."""
    turned = turn(rows, np.arange(len(rows)) * form.rate, form)
    if form.exact:
        return turned
    return codes.stored(turned if form.once else form.bf16(turned), form.turned)


def _keys(form: Form, rows: Rows, weights: Weights, latent: Floats) -> Floats:
    assert weights.index_norm is not None
    if form.index == "pool":
        assert rows.index_kv is not None
        keys = _pooled(form, rows.index_kv, rows.index_gate, weights.index_ape, weights.index_norm)
    else:
        assert weights.wk is not None
        keys = _unit(form.bf16(latent @ weights.wk.T), form.eps) * weights.index_norm
        keys = keys if form.once else form.bf16(keys)
    keys = turn(keys, np.arange(len(keys)) * form.rate, form)
    return _index_stored(form, keys if form.once else form.bf16(keys))


def _index_stored(form: Form, x: Floats) -> Floats:
    if form.hadamard:
        x = hadamard(x) if form.once else form.bf16(hadamard(x))
    return x if form.exact else form.key.stored(x, form.turned)


def _scores(form: Form, rows: Rows, keys: Floats) -> Floats:
    """`[T, entries]`: what the indexer gives each entry; -inf where entry j is not whole at the token: (j + 1) * rate > t + 1."""
    assert rows.index_q is not None and rows.index_w is not None
    count = len(rows.index_q)
    q = turn(rows.index_q, np.arange(count), form)
    q = _index_stored(form, q if form.once else form.bf16(q))
    scores = np.einsum("th,thj->tj", rows.index_w, np.maximum(np.einsum("thd,jd->thj", q, keys), 0))
    visible = np.arange(len(keys)) < (np.arange(count)[:, None] + 1) // form.rate
    return np.where(visible, scores, -np.inf)


def _candidates(form: Form, scores: Floats) -> NDArray[np.bool_]:
    """`[T, entries]`: which entries lie in a token's best blocks, by the largest score of each; the block of the newest entry
    that the token sees is among them, whatever its scores."""
    assert form.candidates is not None
    blocks, size = form.candidates
    found = np.zeros(scores.shape, np.bool_)
    for t, row in enumerate(scores):
        seen = (t + 1) // form.rate
        best = [row[first : min(first + size, seen)].max() for first in range(0, seen, size)]
        older = np.argsort(-np.array(best[:-1]), kind="stable")[: blocks - 1].tolist()
        for block in [*older, len(best) - 1] if best else []:
            found[t, block * size : min((block + 1) * size, seen)] = True
    return found


def _picks(form: Form, count: int, scores: Floats | None) -> list[NDArray[np.int64]]:
    """The entries each token reads: those of the best scores, first ones of equals, or every one that it sees; ascending."""
    found = []
    for t in range(count):
        seen = (t + 1) // form.rate
        order = np.arange(seen) if scores is None else np.argsort(-scores[t, :seen], kind="stable")
        order = order if scores is None else order[scores[t, order] > -np.inf]
        found.append(np.sort(order[: form.topk]))
    return found


def _attended(form: Form, q: Floats, t: int, kept: Floats, entries: Floats, sinks: Floats) -> Floats:
    """o `[heads, dim]` of the token at position t: its window's rows and its entries under one softmax with the sinks."""
    keys = np.concatenate([kept[max(t - form.window + 1, 0) : t + 1], entries])
    logits = q @ keys.T * form.dim**-0.5
    top = np.maximum(logits.max(axis=1), sinks)[:, None]
    parts = np.exp(logits - top)
    return parts @ keys / (parts.sum(axis=1, keepdims=True) + np.exp(sinks[:, None] - top))
