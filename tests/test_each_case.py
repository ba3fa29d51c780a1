"""A test over many cases tries all of them, and says which ones fail."""

from __future__ import annotations

import pytest

from tests.support.each_case import each_case


@pytest.mark.parametrize("other", [1, 2])
@each_case("case", "ab")
def test_with_parameters_and_fixtures(case: str, other: int, request: pytest.FixtureRequest) -> None:
    assert case in "ab" and other in (1, 2)
    assert request.node.name == f"test_with_parameters_and_fixtures[{other}]"


def test_every_case_is_tried_and_named() -> None:
    tried = []

    @each_case("case", ["a", "b", "c"])
    def check(case: str, more: int) -> None:
        """A check."""
        tried.append(case)
        if case == "b":
            with pytest.raises(ValueError):
                pass
        assert case != "c"

    assert (check.__name__, check.__doc__) == ("check", "A check.")
    with pytest.raises(BaseExceptionGroup, match="2 of 3 cases") as caught:
        check(more=1)
    assert tried == ["a", "b", "c"]
    assert [error.__notes__ for error in caught.value.exceptions] == [["case: b"], ["case: c"]]


def test_no_cases_are_no_success() -> None:
    with pytest.raises(AssertionError, match="no cases"):
        each_case("case", [])(lambda case: None)()
