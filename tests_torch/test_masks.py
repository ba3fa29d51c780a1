"""Masks that transformers composes: those that kernels know pass, every other is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from transformers import DynamicCache, Llama4TextConfig, LlamaConfig, MistralConfig
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from kvgen.errors import ArgumentError, ConfigError
from kvgen.integrations.transformers import KvgenCache
from kvgen.integrations.transformers.masks import check_mask
from kvgen.integrations.transformers.versions import ARGUMENT
from tests_torch.test_transformers import COMMON, model_of, prompts

ROWS: Final = torch.zeros(1, 6, 64)


def config(kind: Any = LlamaConfig, **fields: Any) -> Any:
    made = kind(**(COMMON | fields))
    made._attn_implementation = "kvgen"
    return made


def create(factory: Callable[..., Any], made: Any, cache: Any = None, **more: Any) -> Any:
    return factory(
        **{
            "config": made,
            "inputs_embeds": ROWS,
            "attention_mask": None,
            ARGUMENT: cache or DynamicCache(config=made),
            **more,
        }
    )


def skip_three(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return k != 3


def later(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return k < 6


class Masking:
    """A mask that is no function."""

    def __call__(self, batch: Any, head: Any, q: Any, k: Any) -> Any:
        return k != 3


def inner_mask(batch: Any, head: Any, q: Any, k: Any) -> Any:
    """Called as functions of transformers are."""
    return k != 3


WINDOWED: Final = {"kind": MistralConfig, "sliding_window": 4}
CHUNKED: Final = {"kind": Llama4TextConfig, "attention_chunk_size": 4}


@pytest.mark.parametrize("padding", [None, torch.tensor([[0, 0, 1, 1, 1, 1]])], ids=["whole", "padded"])
def test_masks_that_kernels_know(padding: torch.Tensor | None) -> None:
    for factory, made in (
        (create_causal_mask, config()),
        (create_sliding_window_causal_mask, config(**WINDOWED)),
        (create_chunked_causal_mask, config(**CHUNKED)),
    ):
        found = create(factory, made, attention_mask=padding)
        assert found is None if padding is None else torch.equal(found, padding.bool())


@pytest.mark.parametrize(
    ("factory", "fields", "more", "says"),
    [
        (create_causal_mask, {}, {"or_mask_function": later}, "or_masks (tokens that see more than a causal mask"),
        (create_causal_mask, {}, {"and_mask_function": skip_three}, "skip_three of tests_torch.test_masks"),
        (create_causal_mask, {}, {"and_mask_function": inner_mask}, "inner_mask of tests_torch.test_masks"),
        (create_causal_mask, {}, {"and_mask_function": Masking()}, "Masking of tests_torch.test_masks"),
        (create_causal_mask, {}, {"and_mask_function": functools.partial(skip_three)}, "partial of functools"),
        (create_causal_mask, {}, {"or_mask_function": later, "and_mask_function": skip_three}, "or_masks ("),
        (create_causal_mask, {}, {"block_sequence_ids": torch.tensor([[0, 0, 0, -1, -1, -1]])}, "or_masks ("),
        (create_causal_mask, {"is_causal": False}, {}, "bidirectional_mask_function (config.is_causal = False"),
        (create_bidirectional_mask, {}, {}, "bidirectional_mask_function (config.is_causal = False"),
        (create_sliding_window_causal_mask, WINDOWED, {"and_mask_function": skip_three}, "skip_three of"),
        (create_sliding_window_causal_mask, WINDOWED, {"or_mask_function": later}, "or_masks ("),
        (
            create_sliding_window_causal_mask,
            WINDOWED | {"is_causal": False},
            {},
            "sliding_window_bidirectional_overlay (",
        ),
        (create_bidirectional_sliding_window_mask, WINDOWED, {}, "sliding_window_bidirectional_overlay ("),
        (create_chunked_causal_mask, CHUNKED, {"and_mask_function": skip_three}, "skip_three of"),
        (create_chunked_causal_mask, CHUNKED, {"or_mask_function": later}, "or_masks ("),
    ],
)
def test_every_other_mask_is_refused_by_name(
    factory: Callable[..., Any], fields: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    made = config(**{key: value for key, value in fields.items() if key != "is_causal"})
    made.is_causal = fields.get("is_causal", True)
    with pytest.raises(ArgumentError) as error:
        create(factory, made, **more)
    assert str(error.value).startswith(f"mask_function: got {says}")
    assert str(error.value).endswith(
        "; attn_implementation='kvgen' knows causal masks, with the window or the chunks of the model, and padding on the left; "
        "use another attn_implementation"
    )


def test_a_mask_without_the_causal_part() -> None:
    from transformers.masking_utils import and_masks, causal_mask_function, chunked_overlay, sliding_window_overlay

    window, chunk = sliding_window_overlay(4), chunked_overlay(4, torch.zeros(1, dtype=torch.long))
    for mask in (window, and_masks(window), and_masks(window, chunk, causal_mask_function), and_masks()):
        with pytest.raises(ArgumentError, match=r"^mask_function: got "):
            check_mask(mask)


def test_a_model_whose_tokens_see_later_ones() -> None:
    """`config.is_causal = False` makes decoder models encoders; with transformers' mask or one of the caller's own."""
    model = model_of("Llama")
    model.set_attn_implementation("kvgen")
    ids = prompts((5, 3))["input_ids"]
    first, second, third = (KvgenCache(model.config, 16, dtype=model.dtype) for _ in range(3))
    model.config.is_causal = False
    with pytest.raises(ConfigError, match=r"^is_causal: got false; tokens see later ones"):
        KvgenCache(model.config, 16, dtype=model.dtype)
    with torch.no_grad():
        with pytest.raises(
            ArgumentError, match=r"^mask_function: got bidirectional_mask_function \(config.is_causal = False"
        ):
            model(ids, **{ARGUMENT: first})
        with pytest.raises(
            ArgumentError, match=r"^config.is_causal: got False, tokens that see later ones; kernels of"
        ):
            whole = torch.ones(2, 1, 5, 5, dtype=torch.bool)
            model(ids, attention_mask=whole, **{ARGUMENT: second})
        model.config.is_causal = True
        with pytest.raises(ArgumentError, match=r"^attention_mask: got 4 dimensions; padding is"):
            model(ids, attention_mask=whole, **{ARGUMENT: third})
