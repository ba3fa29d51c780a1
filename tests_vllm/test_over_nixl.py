"""Pages of two processes over NIXL without an engine, as docs/disaggregation.md shows it."""

from __future__ import annotations

from pathlib import Path

from tests.docs.blocks import ROOT, project, run


def test_the_program_of_the_page(tmp_path: Path) -> None:
    """The decoding process reads the prompt's pages out of the other one's pool, and makes the same bits."""
    folder = project(tmp_path, ROOT / "docs" / "quickstart.md", ROOT / "docs" / "disaggregation.md")
    folder.kvgen("build", "chat")
    raised, _ = run(folder.root, "over_nixl.py")
    assert not raised, raised["over_nixl.py"]
