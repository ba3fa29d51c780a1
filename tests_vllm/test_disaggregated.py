"""Prefill and decode in two engines, pages moved by vLLM's NixlConnector; also between engines of different tensor-parallel sizes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import pytest

from tests_vllm import two_engines
from tests_vllm.engine import run
from tests_vllm.two_engines import Role

TOKENS: Final = 12
# Prompts come in chunks; nothing comes from an earlier request.
OPTIONS: Final[dict[str, Any]] = {"max_num_batched_tokens": 96, "enable_prefix_caching": False}


def prompts() -> list[list[int]]:
    draw = random.Random(2)
    return [[draw.randrange(3, 512) for _ in range(n)] for n in (70, 40, 200)]


@pytest.fixture(scope="module")
def own_tokens(llama: Path) -> list[list[int]]:
    """Of one engine with vLLM's own attention."""
    return run(llama, prompts(), tokens=TOKENS, backend=None, **OPTIONS).tokens


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 2), (2, 1)])
def test_pages_move_and_prompts_are_not_computed_again(
    prefill: int, decode: int, llama: Path, own_tokens: list[list[int]]
) -> None:
    ranks: dict[Role, int] = {"prefill": prefill, "decode": decode}
    sides = two_engines.run(llama, prompts(), tokens=TOKENS, options=OPTIONS, ranks=ranks)
    assert sides["decode"].tokens == own_tokens
    assert sides["prefill"].tokens == [tokens[:1] for tokens in own_tokens]
    for role, side in sides.items():
        assert side.own == 0
        assert len([counts for counts in side.by_process.values() if counts]) == ranks[role]
    assert sum(n for kernel, n in sides["prefill"].launches.items() if kernel.startswith("extend"))

    # The decoder's launches: each step of each layer appends its rows and attends with one row a request, and that is all.
    for counts in sides["decode"].by_process.values():
        kinds = {kernel.split("_")[0] for kernel in counts}
        assert kinds == {"append", "decode"}
