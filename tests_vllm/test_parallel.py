"""Tensor parallelism: each worker process of vLLM has kernels of its own shard, and the tokens are those of one rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.engine_runs import Show
from tests_vllm import models
from tests_vllm.engine import OWN, Result, run

RANKS: Final = 2
# Two workers beside each other on a machine of few cores: vLLM would give each a NUMA node of its own.
ENV: Final = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
PARALLEL: Final[dict[str, Any]] = {"tensor_parallel_size": RANKS, "distributed_executor_backend": "mp"}
# Prompts come in chunks, and the second round finds the first one's pages.
OPTIONS: Final[dict[str, Any]] = {"max_num_batched_tokens": 96, "enable_prefix_caching": True}
TOKENS: Final = 12


def prompts() -> list[list[int]]:
    """Four that begin alike for 130 tokens, and three of 200, 1 and 33."""
    draw = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, 512) for _ in range(count)]

    shared = tokens(130)
    return [shared + tokens(n) for n in (3, 40, 9, 70)] + [tokens(n) for n in (200, 1, 33)]


@pytest.fixture(scope="session")
def one_kv_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose only KV head each of two ranks has a copy of."""
    return models.save(models.llama(num_key_value_heads=1), tmp_path_factory.mktemp("one_kv_head"))


def workers(result: Result) -> list[int]:
    """The processes in which any attention ran."""
    return [process for process, counts in result.by_process.items() if counts]


@pytest.mark.parametrize("name", ["llama", "one_kv_head"])
def test_two_workers_make_the_tokens_of_one(name: str, request: pytest.FixtureRequest, shown: Show) -> None:
    model = request.getfixturevalue(name)
    own = run(model, prompts(), tokens=TOKENS, rounds=2, backend=None, env=ENV, **OPTIONS)
    assert own.own and not own.launches

    found = run(model, prompts(), tokens=TOKENS, rounds=2, env=ENV, **OPTIONS, **PARALLEL)
    assert found.tokens == own.tokens
    assert found.cached == own.cached and sum(found.cached)
    assert len(workers(found)) == RANKS
    for counts in found.by_process.values():
        assert counts[OWN] == 0
        assert {"append", "decode", "extend"} <= {kernel.split("_")[0] for kernel in counts}
    first, second = found.by_process.values()
    assert first == second, "each rank launches the same kernels as often"
    count = sum(map(len, own.tokens))
    heads = "8/2" if name == "llama" else "8/1"
    shown(
        f"tensor parallelism, {RANKS} workers; prefix hits, chunked prompts",
        model=f"Llama, 2 layers, {heads} heads of 64",
        dtype="float32",
        equal=count,
        of=count,
        launches=found.launches,
    )
