"""Layers of compressed attention and rows for them, drawn from a seed."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from tests.compressed.statement import Floats, Form, Rows, Weights, Yarn

RECORDED = Path(__file__).parent / "recorded"
SMALL_YARN = Yarn(factor=16.0, original=64)


def draw(
    form: Form, tokens: int, heads: int, *, index_heads: int = 0, seed: int = 0, spread: float = 1.0
) -> tuple[Rows, Weights]:
    """Rows of `tokens` tokens and a layer's weights, bf16 numbers all; `spread` is q's, by which scores differ."""
    rng = np.random.default_rng(seed)

    def some(*shape: int, at: float = 0.0, by: float = 1.0) -> Floats:
        return bf16(at + by * rng.standard_normal(shape))

    c, dim, index = form.columns, form.dim, form.index_dim
    pooled, own = form.rate > 0, form.index == "pool"
    rows = Rows(
        q=some(tokens, heads, dim, by=spread),
        kv=some(tokens, dim),
        pool_kv=some(tokens, c * dim) if pooled else None,
        pool_gate=some(tokens, c * dim, by=2.0) if pooled and form.gated else None,
        index_q=some(tokens, index_heads, index) if form.index else None,
        index_w=some(tokens, index_heads) if form.index else None,
        index_kv=some(tokens, c * index) if own else None,
        index_gate=some(tokens, c * index, by=2.0) if own else None,
    )
    weights = Weights(
        kv_norm=some(dim, at=1.0, by=0.2),
        sinks=some(heads),
        pool_norm=some(dim, at=1.0, by=0.2) if pooled else None,
        ape=some(form.rate, c * dim) if pooled and form.overlap | (form.rate > 2) else None,
        index_norm=some(index, at=1.0, by=0.2) if form.index else None,
        index_ape=some(form.rate, c * index) if own else None,
        wk=some(index, dim, by=dim**-0.5) if form.index == "latent" else None,
    )
    return rows, weights


def bf16(x: Floats) -> Floats:
    """x rounded to bf16."""
    return np.asarray(x.astype(ml_dtypes.bfloat16), np.float64)


EXACT = {
    "window": Form(dim=64, turned=16, window=8, theta=10_000.0, exact=True),
    "sparse": Form(
        dim=64,
        turned=16,
        window=8,
        rate=4,
        overlap=True,
        topk=3,
        index="pool",
        index_dim=32,
        yarn=SMALL_YARN,
        exact=True,
    ),
    "heavy": Form(dim=64, turned=16, window=8, rate=8, yarn=SMALL_YARN, exact=True),
}
TOKENS, HEADS, INDEX_HEADS = 41, 2, 6  # of two heads, both relu of a row are often 0, and entries tie


def exact(name: str) -> tuple[Form, Rows, Weights]:
    """The layer of one kind that is recorded from transformers."""
    form = EXACT[name]
    return form, *draw(form, TOKENS, HEADS, index_heads=INDEX_HEADS if form.index else 0, seed=len(name))
