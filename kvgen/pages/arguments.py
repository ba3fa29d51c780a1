"""Checks of arguments, made before any work: whole numbers within their range, token ids, mappings of a step's requests."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from kvgen.errors import ArgumentError

# Page ids, lengths and row offsets are i32 in kernels.
I32_MAX: Final = 2**31 - 1
_TOKEN_RULE: Final = "token ids are whole numbers of 64 bits"


class PageError(ArgumentError):
    """A page, a request or a number is not what the call takes it for."""


def whole(name: str, given: Any, rule: str, *, least: int, most: int = I32_MAX) -> int:
    """`given` as an int; raises PageError unless it is a whole number in [least, most]. `rule` says what the number is."""
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
        raise PageError(f"{name}: got {given!r}; {rule}; pass a whole number")
    if given < least:
        raise PageError(f"{name}: got {given}; {rule}")
    if given > most:
        raise PageError(f"{name}: got {given}; at most {most} fit into the 32 bits that kernels read")
    return int(given)


def token_ids(name: str, tokens: Any) -> list[int]:
    """Token ids as ints; raises PageError for what is no sequence of whole numbers of 64 bits."""
    try:
        given = list(tokens)
    except TypeError:
        raise PageError(f"{name}: got {tokens!r}; pass the ids of the tokens, or how many there are") from None
    ids = []
    for i, token in enumerate(given):
        try:
            number = int(token)
        except (TypeError, ValueError, OverflowError):  # None, words, nan, inf
            raise PageError(f"{name}[{i}]: got {token!r}; {_TOKEN_RULE}") from None
        if number != token or not -(2**63) <= number < 2**63:
            raise PageError(f"{name}[{i}]: got {token!r}; {_TOKEN_RULE}")
        ids.append(number)
    return ids


def of_the_step(
    name: str, given: Mapping[Hashable, Any] | None, requests: Sequence[Hashable]
) -> Mapping[Hashable, Any]:
    """`given`, a mapping whose keys are all among `requests`; raises PageError where it is something else."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise PageError(f"{name}: got {given!r}; pass a mapping from requests of the step")
    among = set(requests)
    for request in given:
        if request not in among:
            raise PageError(f"{name}[{request!r}]: the step has no such request; its requests are {list(requests)!r}")
    return given
