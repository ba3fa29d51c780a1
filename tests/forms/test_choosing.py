"""Which tests of a record may be left to the campaign."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.forms.choosing import LINES, Candidate, left_out, seconds_of

SECONDS = {"append": 0.2, "decode": 2.0}


def of(has: str, *kernels: str, seconds: float = 1.0) -> Candidate:
    return Candidate(frozenset(has.split(", ")), frozenset(kernels), seconds)


def test_a_line_keeps_three_tests_and_a_form_and_a_function_one() -> None:
    tests = {f"f[{n}]": of("function f, line a.cu.j2:1, paged", "append", seconds=n) for n in range(1, 6)}
    assert left_out(tests, [], SECONDS) == {"f[4]", "f[5]"}
    tests["f[5]"] = of("function f, line a.cu.j2:1, a form of its own", "append", seconds=5)
    assert left_out(tests, [], SECONDS) == {"f[3]", "f[4]"}
    assert "f[4]" not in left_out(tests, ["f[4]"], SECONDS)


def test_kernels_that_are_compiled_anyway_cost_nothing() -> None:
    tests = {"f[1]": of("function f", "decode"), "f[2]": of("function f", "append", seconds=2), "g": of("g", "decode")}
    assert left_out(tests, ["g"], SECONDS) == {"f[2]"}
    del tests["g"]
    assert left_out(tests, [], SECONDS) == {"f[1]"}
    cheap = {"f[1]": of("function f", "append"), "f[2]": of("function f", "append", seconds=0.05)}
    assert left_out({**cheap, "g": of("g", "append")}, ["f[1]", "g"], SECONDS) == set()


def test_the_least_share_of_a_test_is_a_kernels() -> None:
    kernels = {"a": frozenset({"x", "y"}), "b": frozenset({"x"}), "c": frozenset({"z"})}
    assert seconds_of({"a": 4.0, "b": 0.5}, kernels) == {"x": 0.5, "y": 2.0, "z": 1.0}


@given(st.data())
def test_of_drawn_records(data: st.DataObject) -> None:
    """Everything that all tests have, what stays has as often as it must."""
    things = st.frozensets(st.sampled_from(["line 1", "line 2", "line 3", "form 1", "form 2"]), min_size=1)
    kernels = st.frozensets(st.sampled_from(list(SECONDS)), min_size=1)
    each = st.builds(Candidate, things, kernels, st.floats(0, 3))
    drawn = data.draw(st.lists(each, max_size=12))
    tests = {f"t[{n}]": candidate for n, candidate in enumerate(drawn)}
    stay = [name for name in tests if data.draw(st.booleans())]
    gone = left_out(tests, stay, SECONDS)
    assert not gone & set(stay)
    counts, kept = (Counter(w for n in names for w in tests[n].has) for names in (tests, tests.keys() - gone))
    assert all(kept[what] >= min(n, LINES if what.startswith("line ") else 1) for what, n in counts.items())
