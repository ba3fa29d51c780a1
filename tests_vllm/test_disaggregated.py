"""Prefill and decode in two engines, pages moved by vLLM's NixlConnector, between equal and different numbers of ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from transformers import Gemma3TextConfig, PretrainedConfig

from tests.support.engine_runs import Show
from tests_vllm import models, two_engines
from tests_vllm.engine import run
from tests_vllm.two_engines import ROLES

TOKENS: Final = 12
# Prompts come in chunks; nothing comes from an earlier request.
OPTIONS: Final[dict[str, Any]] = {"max_num_batched_tokens": 96, "enable_prefix_caching": False}
GEMMA3: Final = Gemma3TextConfig(
    **{
        **models.COMMON,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 32,
        "query_pre_attn_scalar": 64,
    }
)


@dataclass(frozen=True)
class Case:
    """A model, the ranks of either engine, options of both.

    `reference`: the backend of the one engine whose tokens are to be made; None is vLLM's own. `attention`: the kernel of rows
    that decode.
    """

    model: PretrainedConfig
    text: str
    prefill: int
    decode: int
    options: dict[str, Any] = field(default_factory=dict)
    reference: str | None = None
    dtype: str = "float32"
    attention: str = "decode"


LATENT: Final[dict[str, Any]] = {"attention_backend": "KVGEN_MLA", "block_size": 16, "num_gpu_blocks_override": 96}
CASES: Final = {
    "one_to_one": Case(GEMMA3, "Gemma 3, 2 sliding layers and a full one, 8/2 heads of 64", 1, 1),
    "one_to_two": Case(models.llama(), "Llama, 2 layers, 8/2 heads of 64", 1, 2),
    "one_to_two_with_one_kv_head": Case(models.llama(num_key_value_heads=1), "Llama, 2 layers, 8/1 heads of 64", 1, 2),
    "two_to_one_in_fp8": Case(
        models.llama(), "Llama, 2 layers, 8/2 heads of 64, fp8 cache", 2, 1, {"kv_cache_dtype": "fp8"}, "KVGEN"
    ),
    "one_to_two_with_latent_rows": Case(
        models.deepseek(), "DeepSeek V3, 2 layers, 4 heads", 1, 2, LATENT, "KVGEN_MLA", "float16", "mla_decode"
    ),
}


def prompts() -> list[list[int]]:
    draw = random.Random(2)
    return [[draw.randrange(3, 512) for _ in range(n)] for n in (70, 40, 200)]


@pytest.mark.parametrize("name", CASES)
def test_pages_move_and_prompts_are_not_computed_again(name: str, tmp_path: Path, shown: Show) -> None:
    case = CASES[name]
    # Behind latent rows, with weights of 0.06, one token would follow every prompt.
    model = models.save(case.model, tmp_path, 1.5 if case.attention == "mla_decode" else None)
    options = {**OPTIONS, "dtype": case.dtype}
    alone = {name: value for name, value in case.options.items() if name != "attention_backend"}
    one = run(model, prompts(), tokens=TOKENS, backend=case.reference, **options, **alone).tokens

    ranks = dict(zip(ROLES, (case.prefill, case.decode), strict=True))
    sides = two_engines.run(model, prompts(), tokens=TOKENS, options=options | case.options, ranks=ranks)
    assert sides["decode"].tokens == one
    assert sides["prefill"].tokens == [tokens[:1] for tokens in one]
    for role, side in sides.items():
        assert side.own == 0
        assert len([counts for counts in side.by_process.values() if counts]) == ranks[role]
    assert sides["prefill"].launches["extend"] > 0

    # The decoder appends a row a request to each layer in each step, and attends with it: nothing else.
    for counts in sides["decode"].by_process.values():
        assert counts.keys() == {"append", case.attention, f"{case.attention}_plan"}
        assert counts["append"] == counts[case.attention] >= case.model.num_hidden_layers * TOKENS
    count = sum(map(len, one))
    shown(
        f"prefill on {case.prefill} rank(s), decode on {case.decode}, over NIXL; launches of the decoder",
        model=case.text,
        dtype=case.dtype,
        equal=count,
        of=count,
        launches=sides["decode"].launches,
    )
