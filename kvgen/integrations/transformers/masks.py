"""Masks of transformers that kernels know: causal, with a window, or in chunks; every other is refused by name.

transformers composes a mask of functions. Functions that one factory makes share their code, which tells them apart from any
other function; a name does not.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, Final

import torch
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_overlay,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sliding_window_overlay,
)

from kvgen.errors import ArgumentError
from kvgen.integrations.transformers import versions

_ALL_OF: Final[CodeType] = and_masks().__code__
_REMAPPED: Final[CodeType] = remap_positions_for_packed_sequence(causal_mask_function, torch.zeros(0)).__code__
_WINDOW: Final[CodeType] = sliding_window_overlay(1).__code__
_CHUNK: Final[CodeType] = chunked_overlay(1, torch.zeros(0)).__code__
_APART: Final[CodeType] = packed_sequence_mask_function(torch.zeros(0)).__code__
_CAUSAL: Final[CodeType] = causal_mask_function.__code__
# The functions whose intersection a mask is. Sequences that are packed into one row come from continuous batching alone, whose
# kernels keep requests apart; where its modules update the cache, it asks for no mask at all.
_KNOWN: Final = [{_CAUSAL}, {_CAUSAL, _WINDOW}, {_CAUSAL, _CHUNK}]
_KNOWN_PACKED: Final = [] if versions.MODULES_UPDATE else [known | {_APART} for known in _KNOWN]
# Functions of transformers, and factories of functions, by what they are for.
_FACTORIES: Final = {
    "bidirectional_mask_function": "config.is_causal = False, tokens that see later ones",
    "or_masks": "tokens that see more than a causal mask (images, prefixes, or_mask_function)",
    "packed_sequence_mask_function": "sequences packed into one row",
    "sliding_window_bidirectional_overlay": "config.is_causal = False, tokens that see later ones",
    "blockwise_overlay": "blocks of tokens that see each other (images, block_sequence_ids)",
}


def check_mask(mask: Any) -> None:
    """Raise ArgumentError, with the name of the function that is not known, unless kernels compute `mask`."""
    parts = list(_parts(mask))
    codes = {getattr(part, "__code__", None) for part in parts}
    if codes in _KNOWN or codes in _KNOWN_PACKED:
        return
    known = set().union(*_KNOWN, *_KNOWN_PACKED)
    odd = next((part for part in parts if getattr(part, "__code__", None) not in known), None)
    raise ArgumentError(
        f"mask_function: got {_named(odd) if odd is not None else _all_named(parts)}; attn_implementation='kvgen' knows causal "
        "masks, with the window or the chunks of the model, and padding on the left; use another attn_implementation"
    )


def _parts(mask: Any) -> list[Any]:
    """The functions that a mask is the intersection of, each of them once."""
    code = getattr(mask, "__code__", None)
    if code is _ALL_OF:
        return [part for inner in _cell(mask, "mask_functions") for part in _parts(inner)]
    if code is _REMAPPED:
        return _parts(_cell(mask, "mask_function"))
    return [mask]


def _cell(function: Callable[..., Any], name: str) -> Any:
    """The value of the factory's variable `name` when it made the function."""
    assert function.__closure__ is not None
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def _named(function: Any) -> str:
    """The function's name, and what it does where it is transformers' own."""
    name = getattr(function, "__qualname__", type(function).__name__)
    module = getattr(function, "__module__", None)
    if module == masking_utils.__name__:
        name = name.partition(".<locals>")[0]
        return name + (f" ({_FACTORIES[name]})" if name in _FACTORIES else "")
    return f"{name} of {module}"


def _all_named(functions: list[Any]) -> str:
    return " and ".join(dict.fromkeys(map(_named, functions)))
