"""generate_batch of transformers with attn_implementation="kvgen": tokens are those of eager attention, nothing is gathered."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache_allocators.full_attention import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.cache_allocators.sliding_attention import (
    SlidingAttentionCacheAllocator,
)

from kvgen.integrations.transformers import paged
from tests.support.engine_runs import Show
from tests_torch.test_transformers import model_of

NEW: Final = 8
# Three requests share 40 tokens; one is a token long; two are longer than a step, and than the window of 12.
LENGTHS: Final = (3, 17, 9), (50, 1, 20)


def requests() -> list[list[int]]:
    draw = random.Random(1)
    shared = [draw.randrange(3, 256) for _ in range(40)]
    behind, alone = ([[draw.randrange(3, 256) for _ in range(n)] for n in lengths] for lengths in LENGTHS)
    return [shared + tokens for tokens in behind] + alone


def answers(
    model: Any, how: str, inputs: list[list[int]], *, page_size: int = 8, most: int = 32, new: int = NEW
) -> Any:
    """The tokens of each request, and the tokens of its prompt that were found cached; steps of at most `most` rows."""
    model.set_attn_implementation(how)
    found = model.generate_batch(
        inputs=inputs,
        generation_config=GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=1
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=page_size, num_blocks=64, max_batch_tokens=most, auto_switch_to_flash=False
        ),
        progress_bar=False,
        warmup=False,
    )
    assert not [answer.error for answer in found.values() if answer.error]
    return [found[name].generated_tokens for name in sorted(found, key=lambda name: int(name.split("_")[-1]))]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, paged.PagedKernels]]:
    """Kernels of the caches of a test, which transformers drops; its own ways to read a cache are refused."""
    found: dict[Any, paged.PagedKernels] = {}
    monkeypatch.setattr(paged, "_KERNELS", found)
    yield found


def not_gathered(*_: Any, **__: Any) -> Any:
    raise AssertionError("transformers gathered keys and values")


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Gemma3Text", "Glm", "GptOss", "Qwen2"])
def test_tokens_are_those_of_eager_attention(
    name: str, made: dict[Any, paged.PagedKernels], monkeypatch: pytest.MonkeyPatch, shown: Show
) -> None:
    model = model_of(name)
    windows = model.config.to_dict().get("layer_types", []).count("sliding_attention")
    if windows:
        model.config.sliding_window = 12  # not whole pages
        for layer in model.model.layers:
            if layer.self_attn.sliding_window:
                layer.self_attn.sliding_window = 12
    right = answers(model, "eager", requests())
    for place in (FullAttentionCacheAllocator, SlidingAttentionCacheAllocator):
        monkeypatch.setattr(place, "update", not_gathered)
    found = answers(model, "kvgen", requests())
    assert found == right
    (kernels,) = made.values()
    kinds = {type(group).__name__ for group in kernels._groups.values()}
    assert kinds == ({"FullGroup", "RingGroup"} if windows else {"FullGroup"})
    assert kernels.launches >= 2 * model.config.num_hidden_layers * NEW
    shown(
        "continuous batching with shared prefixes and prompts in chunks, beside eager attention",
        engine="transformers",
        model=name,
        dtype="float32",
        equal=sum(a == b for x, y in zip(found, right, strict=True) for a, b in zip(x, y, strict=True)),
        of=sum(map(len, right)),
        launches={"append, plan and attention": kernels.launches},
    )


def test_a_prefix_is_read_where_it_lies(made: dict[Any, paged.PagedKernels], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request fills the first step; the two behind it begin with its pages, and do not compute them again."""
    model = model_of("Llama")
    inputs = requests()[:3]
    right = answers(model, "eager", inputs, most=43)
    rows: list[int] = []
    step = paged._step

    def counted(allocator: Any, count: int, given: Any) -> paged.Step:
        rows.append(count)
        return step(allocator, count, given)

    monkeypatch.setattr(paged, "_step", counted)
    assert answers(model, "kvgen", inputs, most=43) == right
    computed = sum(map(len, inputs)) + len(inputs) * (NEW - 1)
    assert computed - sum(rows) == 2 * 40, rows


def test_other_attention_is_left_alone() -> None:
    """transformers' own check still takes the names it knows, and refuses others."""
    model = model_of("Llama")
    assert answers(model, "sdpa", requests()[3:], new=2) == answers(model, "eager", requests()[3:], new=2)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="not supported for continuous batching"):
        answers(model, "flex_attention", requests()[3:], new=2)


def test_what_is_refused(made: dict[Any, paged.PagedKernels]) -> None:
    model = model_of("Llama")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="block_table: got one"):
        patch.setattr(paged, "_step", _with_block_table(paged._step))
        answers(model, "kvgen", requests()[3:], new=2)
    other = model_of("Gemma3Text")
    other.model.layers[0].self_attn.sliding_window = 5  # the cache keeps what the config says
    with pytest.raises(AssertionError, match="sliding_window: got 5 from the model, where its config was read as 16"):
        answers(other, "kvgen", requests()[3:], new=2)


def _with_block_table(step: Any) -> Any:
    def given_one(allocator: Any, rows: int, given: Any) -> paged.Step:
        return step(allocator, rows, {**given, "block_table": torch.zeros(1, 1, 1)})  # type: ignore[no-any-return]

    return given_one
