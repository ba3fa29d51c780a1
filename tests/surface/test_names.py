"""No name of the pages is without a proof or a reason, and docs/surface.md says what the tests do."""

from __future__ import annotations

from collections import Counter

from tests.surface import marks


def test_every_name_is_proven_or_has_a_reason() -> None:
    proven, known = marks.proofs(), marks.names()
    missing = [f"{n.page}.{n.name}" for n in known if not n.reason and (n.page, n.name) not in proven]
    assert not missing, f"no test proves {', '.join(missing)}"
    both = [f"{n.page}.{n.name}" for n in known if n.reason and (n.page, n.name) in proven]
    assert not both, f"a reason and a test: {', '.join(both)}"


def test_marks_name_names_of_the_pages() -> None:
    known = Counter((n.page, n.name) for n in marks.names())
    assert max(known.values()) == 1
    assert set(marks.proofs()) <= set(known)


def test_every_name_says_what_it_is() -> None:
    assert all(bool(n.here) != bool(n.reason) for n in marks.names())


def test_the_document_is_in_sync() -> None:
    text = marks.DOCUMENT.read_text(encoding="utf-8") if marks.DOCUMENT.exists() else ""
    assert text == marks.document(), "docs/surface.md is old; run `python -m tests.surface.marks`"
