"""JSON from outside: what RFC 8259 says, once, bounded; anything else is a ToolError of one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.errors import ToolError
from kvgen.json_file import DEPTH, parse_object, read_object

REFUSED: list[tuple[bytes, str]] = [
    (b"", "not JSON: Expecting value: line 1 column 1 (char 0)"),
    (b"{", "not JSON: Expecting property name"),
    (b"{}{}", "not JSON: Extra data"),
    (b"\xff\xfe{\x00}\x00", "not JSON: no UTF-8 (byte 0)"),
    (b'{"a": "\xed\xa0\x80"}', "not JSON: no UTF-8 (byte 7)"),
    (b"\xef\xbb\xbf\xef\xbb\xbf{}", "not JSON: Unexpected UTF-8 BOM"),
    (b'{"a": NaN}', "not JSON: NaN is not a JSON number"),
    (b'{"a": -Infinity}', "not JSON: -Infinity is not a JSON number"),
    (b'{"a": [1e400]}', "not JSON: 1e400 is larger than any float"),
    (b'{"a": -1' + b"0" * 400 + b".0}", "not JSON: -1000000000000000000... is larger than any float"),
    (b'{"a": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
    (b'{"a": 1, "b": {"c": 1, "d": 2, "c": 1}}', "not JSON: the key 'c' is given twice in one object"),
    (b'{"a": 1, "\\u0061": 2}', "not JSON: the key 'a' is given twice in one object"),
    (b'{"a": ["\\udc00\\ud800"]}', "not JSON: the string '\\udc00\\ud800' has half of a surrogate pair"),
    (b'{"\\ud800": 1}', "not JSON: the string '\\ud800' has half of a surrogate pair"),
    (b'{"a": ' * DEPTH + b"1" + b"}" * DEPTH, "nested too deep: more than 64 levels"),
    (b'{"a": ' + b"[" * 500_000, "nested too deep: more than 64 levels"),
    (b"[]", "got a list of 0; it must be a JSON object, {...}"),
    (b'"' + b"x" * 100 + b'"', f"got '{'x' * 60}...'; it must be a JSON object"),
    (b"null", "got null; it must be"),
    (b'{"a\n": 1}', "not JSON: Invalid control character"),
]


@pytest.mark.parametrize(("data", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_refused(data: bytes, said: str) -> None:
    with pytest.raises(ToolError) as caught:
        parse_object(data, "x.json")
    assert str(caught.value).startswith(f"x.json: {said}")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 200


def test_a_depth_that_the_interpreters_stack_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called from however deep, deep JSON is refused and not a RecursionError."""

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            with pytest.raises(ToolError, match="nested too deep"):
                parse_object(b'{"a": ' * 400 + b"1" + b"}" * 400, "x")

    deep(500)


def test_many_keys_twice_take_no_longer() -> None:
    data = b"{" + b", ".join(b'"%d": 1' % n for n in range(100_000)) + b', "99999": 1}'
    with pytest.raises(ToolError, match="'99999' is given twice"):
        parse_object(data, "x")


def test_accepted(tmp_path: Path) -> None:
    deepest: Any = json.loads("[" * (DEPTH - 2) + "]" * (DEPTH - 2))
    value = {"a": [1, 2.5, -0.0, 1e308, 10**400, True, None], "\u00e9\U0001f600": {}, "deep": deepest}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), "\ufeff" + json.dumps(value, indent=2)):
        (tmp_path / "x.json").write_text(text, encoding="utf-8")
        assert read_object(tmp_path / "x.json", limit=1 << 20) == value
    with pytest.raises(ToolError, match=r"x\.json: larger than 64 bytes"):
        read_object(tmp_path / "x.json", limit=64)


def test_constants_where_they_are_allowed() -> None:
    found = parse_object(b'{"a": [NaN, Infinity, -Infinity]}', "x", constants=True)["a"]
    assert math.isnan(found[0]) and found[1:] == [math.inf, -math.inf]
    for data in (b'{"a": 1e400}', b'{"a": nan}', b'{"a": +Infinity}'):
        with pytest.raises(ToolError, match="x: not JSON: "):
            parse_object(data, "x", constants=True)


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)
FEW = settings(derandomize=True, deadline=None, max_examples=200, database=None)


@FEW
@given(value=st.dictionaries(st.text(max_size=5), VALUES, max_size=5))
def test_what_json_writes_is_read_back(value: dict[str, Any]) -> None:
    assert parse_object(json.dumps(value).encode(), "x") == value


@FEW
@given(data=st.binary(max_size=60) | st.text(alphabet='{}[]",:\\ue19-+.NaIfty \n', max_size=60).map(str.encode))
def test_any_bytes(data: bytes) -> None:
    try:
        value = parse_object(data, "x")
    except ToolError as error:
        assert str(error).startswith("x: ") and str(error).isprintable()
    else:
        assert not any(isinstance(v, float) and not math.isfinite(v) for v in value.values())
        assert json.loads(data.decode("utf-8-sig")) == value
