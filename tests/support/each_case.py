"""A check over many cases as one test: a test of its own for each of hundreds of cases costs more than most such checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each_case(name: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """In the place of `pytest.mark.parametrize(name, cases)`: one test, which gives the check each case in turn.

    All cases are tried; the test fails with every failure, under the name of its case. The cases share the check's fixtures.
    """

    def decorated(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)  # with the marks of pytest
        def test(**fixtures: Any) -> None:
            tried, failures = 0, []
            for case in cases:
                tried += 1
                try:
                    check(**fixtures, **{name: case})
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"{name}: {case}")
                    failures.append(error)
            assert tried, "no cases"
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {tried} cases", failures)

        takes = inspect.signature(check).parameters.values()
        test.__signature__ = inspect.Signature([p for p in takes if p.name != name])  # type: ignore[attr-defined]
        return test

    return decorated
