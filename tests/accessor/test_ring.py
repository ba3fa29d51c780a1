"""What a ring reaches: every length and token against the rule, and that nothing living is lost to a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import pytest
from ml_dtypes import bfloat16

from kvgen import KernelSet, Paged, Ring, ops
from tests.accessor.places import build, session
from tests.accessor.scene import reached

Lengths = Literal["before", "after"]
TOKENS: Final = 30
TEXT: Final = """#include "cache.cuh"
// A column of `out` a question, about the tokens from `first` on; `stores`: before, every token from the length on gets the
// value 1000 + token.
extern "C" __global__ void ask(const __grid_constant__ Cache cache, float* out, uint32_t tokens,
                               uint32_t stores, uint32_t first) {
  pdl_wait();
  const KeyCache keys = get_key_cache(cache);
  const uint32_t b = blockIdx.x;
  if (threadIdx.x == 0) {
    for (uint32_t t = 0; stores == 1 && t < tokens; ++t) {
      Vec<bf16, 1> x;
      x.e[0] = from_f32<bf16>(1000.0f + t);
      if (t >= cache.length(b)) keys.store<1>(b, 0, t, 0, x);
    }
    for (uint32_t t = 0; t < tokens; ++t) {
      float* to = out + (b * tokens + t) * 4;
      to[0] = keys.load<1, float>(b, 0, first + t, 0).e[0];
      to[1] = keys.page(b, first + t).valid;
      to[2] = keys.block_paged_ptr<1>(b, first + t, 0) != nullptr;
      to[3] = cache.stored(b, first + t);
    }
  }
}
"""


NEAR: Final = (*range(TOKENS - 6), -1)  # every length, and a wrong one


def asked(
    window: int,
    page: int,
    columns: int,
    lengths: Lengths,
    *,
    stores: bool,
    counts: Sequence[int] = NEAR,
    first: int = 0,
) -> tuple[Any, Any, Any]:
    """(answers, pool before, pool after) of requests of these lengths, about TOKENS tokens from `first` on."""
    cache = Paged(
        dtype="bf16", kv_heads=1, head_dim=8, page_size=page, table=Ring(window=window), lengths=lengths,
        lengths_dtype="i64", layout="page layer kv token head dim",
    )  # fmt: skip
    op = ops.Custom(
        name="ask", text=TEXT, grid="B", threads=32, writes=True,
        params=[ops.Array("out", "f32", ("B", "T", 4), "out"), ops.Size("tokens", "T"), ops.Scalar("stores", "u32"),
                ops.Scalar("first", "u32")],
    )  # fmt: skip
    package = build(KernelSet(name=f"ring_{window}_{page}_{lengths}", q_heads=1, cache=cache, ops=[op]))
    table = np.random.default_rng(1).permutation(len(counts) * columns).reshape(len(counts), columns).astype(np.int32)
    pool = np.zeros((len(counts) * columns + 1, 1, 2, page, 1, 8), bfloat16)
    pool[:, 0, 0, :, 0, 0] = np.arange(pool.shape[0] * page).reshape(-1, page) % 256
    before, out = pool.copy(), np.zeros((len(counts), TOKENS, 4), np.float32)
    tables = {"lengths": np.array(counts, np.int64), "page_table": table}
    with session("cpu", package, {"pool": pool}, tables) as run:
        run.launch("ask", 0, out=out, stores=int(stores), first=first)
    return out, (before, table), pool


RINGS: Final = ((5, 4, 2), (5, 4, 3), (6, 4, 2), (5, 1, 5), (8, 4, 3), (5, 4, 1), (5, 4, 7))


@pytest.mark.parametrize("lengths", ["before", "after"])
@pytest.mark.parametrize(("window", "page", "columns"), RINGS)
def test_tokens_are_reached_or_not(window: int, page: int, columns: int, lengths: Lengths) -> None:
    """A load is the element of the token's own page, or 0; `stored` is the same rule for tokens below the length."""
    last = 2**32 - 1
    for counts, first in ((NEAR, 0), ((last - 1, last - window, last, -1), last - TOKENS)):
        out, (pool, table), _ = asked(window, page, columns, lengths, stores=False, counts=counts, first=first)
        for b, n in enumerate(counts):
            for token in range(first, first + TOKENS):
                wanted = 0 <= n < last and reached(n, token, window, page, columns, before=lengths == "before")
                where = table[b, token // page % columns], 0, 0, token % page, 0, 0
                value = float(pool[where]) if wanted else 0.0
                assert out[b, token - first].tolist() == [value, wanted, wanted, wanted and token < n], (n, token)


@pytest.mark.parametrize("lengths", ["before", "after"])
@pytest.mark.parametrize(("window", "page", "columns"), RINGS)
def test_stores_take_nothing_living_away(window: int, page: int, columns: int, lengths: Lengths) -> None:
    """Stores of all tokens from the length on: what the window of this step's first token shows stays, and they come back."""
    out, (pool, table), after = asked(window, page, columns, lengths, stores=True)
    for b, n in enumerate(NEAR[:-1]):
        oldest = max(0, n + (lengths == "before") - window)
        newest = (n - 1) // page
        held = [t for t in range(oldest, n) if newest - t // page < columns]
        for token in held:
            where = table[b, token // page % columns], 0, 0, token % page, 0, 0
            assert after[where] == pool[where], (n, token)
        for token in range(n, TOKENS):
            assert out[b, token, 0] == (float(np.asarray(1000 + token, bfloat16)) if out[b, token, 1] else 0.0)
        enough = -(-(window - 1) // page) + 1 <= columns
        assert not enough or lengths == "after" or out[b, n, 1] == 1, "the step's first token has a place"
    last = len(NEAR) - 1
    assert (after[table[last]] == pool[table[last]]).all(), "a wrong length"


def test_no_columns() -> None:
    out, _, _ = asked(5, 4, 0, "before", stores=True)
    assert not out.any()
