"""Masks: what a spec cannot say, and what kernels make of it, at places up to the edge of 32 bits."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from kvgen import Mask
from tests.schema.attend import ask, context
from tests.schema.test_validation import mistakes

CASES: Final[list[tuple[dict[str, Any], str]]] = [
    (
        {"window": -1},
        "window: got -1; a row sees at least its own token, so the least window is 1; None or 0 is no window",
    ),
    ({"chunk": -3}, "chunk: got -3; a row sees at least its own token, so the least chunk is 1; None or 0 is no chunk"),
    ({"window": 2**31}, "Mask.window: got 2147483648; input should be less than or equal to 2147483647"),
    (
        {"tree": "packed", "causal": False},
        "tree: got 'packed' with causal=False; its bits stand in for the causal order of a request's new tokens; use "
        "causal=True, or tree='mask', which says everything",
    ),
    (
        {"ahead": 3},
        "ahead: got 3 with causal=True; it is how many tokens after its position a row sees, 1 or more, with causal=False; a "
        "row that sees none has causal=True",
    ),
    (
        {"block": 32, "causal": True},
        "causal: got True with block=32, which says which tokens after its position a row sees; leave one of them out",
    ),
    (
        {"block": 32, "tree": "packed"},
        "tree: got 'packed' with block=32, which says which tokens after its position a row sees; leave one of them out",
    ),
    ({"block": -3}, "block: got -3; a row sees at least its own token, so the least block is 1; None or 0 is no block"),
    ({"tree": "bits"}, "Mask.tree: got 'bits'; input should be 'packed' or 'mask'"),
    ({"sliding": 3}, "Mask.sliding: unknown field; Mask has causal, window, ahead, chunk, block, padding, tree"),
]


@pytest.mark.parametrize(("fields", "message"), CASES)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    assert mistakes(Mask, **fields) == [message]


def test_a_mask_of_its_own_says_everything_unless_it_is_told() -> None:
    assert not Mask(tree="mask").causal and Mask(tree="mask", causal=True).causal
    assert Mask(tree="mask") == Mask(tree="mask", causal=False) and hash(Mask()) == hash(Mask(causal=True))
    assert Mask(tree="packed").causal and Mask(tree="packed").later


def test_what_a_kernel_is_told() -> None:
    plain = context(Mask(window=7))
    assert (
        plain.plain
        and not plain.masked
        and not plain.elementwise_score
        and not plain.params
        and (plain.window, plain.chunk) == (7, 0)
    )
    padded = context(Mask(padding=True))
    assert [p.declaration for p in padded.params] == ["const int32_t* valid_tokens"] and not padded.fields
    assert padded.padding and padded.params[0].untrusted
    tree = context(Mask(tree="mask", padding=True))
    assert [p.name for p in tree.params] == ["valid_tokens", "mask", "mask_stride", "mask_columns"]
    assert tree.masked and tree.elementwise_score and tree.values == ("mask", "mask_stride", "mask_columns")


MASKS: Final = {
    "causal": Mask(),
    "window": Mask(window=5),
    "chunk": Mask(chunk=7),
    "both": Mask(window=9, chunk=16),
    "one": Mask(window=1),
    "all": Mask(causal=False),
    "later_window": Mask(causal=False, window=3),
    "later_chunk": Mask(causal=False, chunk=5),
    "most": Mask(causal=False, window=2**31 - 1, chunk=2**31 - 1),
    "packed": Mask(tree="packed"),
    "packed_window": Mask(tree="packed", window=4, chunk=6),
    "ahead": Mask(causal=False, ahead=4),
    "ahead_window": Mask(causal=False, ahead=2**31 - 1, window=3, chunk=7),
    "given_ahead": Mask(tree="mask", ahead=3),
    "blocks": Mask(block=7),
    "blocks_window": Mask(block=4, window=6),
    "blocks_most": Mask(block=2**31 - 1),
    "given": Mask(tree="mask"),
    "given_causal": Mask(tree="mask", causal=True, window=6),
}
ROWS, COLUMNS = 12, 50


def seen(mask: Mask, at: dict[str, int], tree: NDArray[np.uint32], given: NDArray[np.uint8], *, rows: int) -> bool:
    """The docstring of Mask, word by word."""
    position, token = at["position"], at["token"]
    new = token - (at["tokens"] - rows)  # whose row's token, from 0
    conditions = [token < at["tokens"]]
    if mask.tree == "packed":
        conditions.append(new < 0 or bool(int(tree[at["row"]]) >> new & 1))
    elif mask.causal:
        conditions.append(token <= position)
    if mask.window:
        conditions.append(token > position - mask.window)
    if mask.ahead:
        conditions.append(token <= position + mask.ahead)
    if mask.chunk:
        conditions.append(token // mask.chunk == position // mask.chunk)
    if mask.block:
        conditions.append(token // mask.block <= position // mask.block)
    if mask.tree == "mask":
        conditions.append(token < COLUMNS and given[at["row"], min(token, COLUMNS - 1)] != 0)
    return all(conditions)


def places(rng: np.random.Generator) -> list[tuple[dict[str, int], int]]:
    """(place, rows of its request): short requests, and those that end where 32 bits do."""
    found = []
    for tokens in (1, 2, 7, 8, 9, 30, 49, 50, 51, 70, 2**31 - 1, 2**31 + 1, 2**32 - 2):
        for _ in range(12):
            rows = int(rng.integers(1, min(tokens, 8) + 1))
            i = int(rng.integers(rows))
            position = tokens - rows + i
            near = [0, 1, 5, tokens - 1, tokens - rows, tokens - rows - 1, position, position + 1, position - 1]
            near += [position - w for w in (2, 3, 4, 5, 6, 8, 9, 2**31 - 2, 2**31 - 1)]
            near += [position + a for a in (3, 4, 5, 2**31 - 2, 2**31 - 1, 2**31)]
            near += [position // c * c + d for c in (5, 6, 7, 16, 2**31 - 1) for d in (-1, 0, c - 1, c)]
            near += rng.integers(0, tokens, 4).tolist()
            place = {
                "b": 0,
                "row": int(rng.integers(ROWS)),
                "q_head": 0,
                "i": i,
                "position": position,
                "tokens": tokens,
            }
            found += [(place | {"token": token}, rows) for token in near if 0 <= token < tokens]
    return found


def test_kernels_see_what_the_words_say() -> None:
    rng = np.random.default_rng(0)
    asked = places(rng)
    tree = rng.integers(0, 2**32, ROWS, np.uint32)
    wide = rng.integers(0, 2, (ROWS, COLUMNS + 9)).astype(np.uint8) * 3
    given = wide[:, :COLUMNS]  # rows that are strided
    columns = {name: [place[name] for place, _ in asked] for name in asked[0][0]}
    scores = np.arange(len(asked), dtype=np.float32)
    answers = ask({n: (m, None) for n, m in MASKS.items()}, columns, scores, {"tree_mask": tree, "mask": given})
    for name, mask in MASKS.items():
        found = answers[name]
        wanted = np.array([seen(mask, place, tree, given, rows=rows) for place, rows in asked])
        assert wanted.any() and (found.visible == wanted).all(), name
        assert (found.score == scores).all(), name
        token = np.array(columns["token"])
        inside = (found.first <= token) & (token < found.end)
        assert (inside | ~wanted).all(), name
        # A kernel that asks nothing further of a mask takes its range for all there is.
        assert context(mask).masked or (inside == wanted).all(), name


def test_ranges_never_go_back() -> None:
    """A kernel takes the first row's first token and the last one's end for all rows."""
    positions = np.array([*range(40), 2**31 - 2, 2**31 - 1, 2**31, *range(2**32 - 20, 2**32 - 2)], np.int64)
    columns: dict[str, Any] = dict.fromkeys(("b", "row", "q_head", "i", "token"), np.zeros(len(positions)))
    columns |= {"position": positions, "tokens": np.full(len(positions), 2**32 - 2)}
    no_score = np.zeros(len(positions), np.float32)
    arguments = {"tree_mask": np.zeros(1, np.uint32), "mask": np.zeros((1, 1), np.uint8)}
    for name, found in ask({n: (m, None) for n, m in MASKS.items()}, columns, no_score, arguments).items():
        assert (np.diff(found.first) >= 0).all() and (np.diff(found.end) >= 0).all(), name
        assert (found.end <= 2**32 - 2).all() and (found.first <= positions).all(), name


def test_no_window_and_no_chunk_may_be_written_as_0() -> None:
    assert Mask(window=0, chunk=0) == Mask() and Mask(window=0).window is None
