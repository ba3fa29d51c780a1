"""The README shows what is there: its spec and kernel are files of the repository, its program runs. tests/cli/test_demo.py
compares its output of the demo."""

from __future__ import annotations

from pathlib import Path

import pytest

from docpages.blocks import block_of, filled
from docpages.readme import BLOCKS, ROOT, demo_block, without_times
from kvgen.schema.loader import load_file
from tests.docs.blocks import files, run

README = ROOT / "README.md"


def test_its_blocks_are_those_of_the_repository() -> None:
    text = README.read_text(encoding="utf-8")
    assert filled(text, BLOCKS) == text, "`python -m docpages` writes them"
    assert block_of(text, "kernel").count("\n") >= 10


def test_a_readme_without_a_place_is_told() -> None:
    with pytest.raises(ValueError, match="<!-- spec -->"):
        filled("# kvgen\n", {"spec": BLOCKS["spec"]})


def test_times_alone_are_left_out() -> None:
    text = "```text\na  1 row   0.15 s\n\nnext: x\n```"
    assert without_times(text) == without_times("a 1 row 12.01 s")
    assert without_times(text) != without_times("a 2 row 0.15 s")
    assert demo_block.__doc__


def test_its_specs_load(tmp_path: Path) -> None:
    spec = tmp_path / "variants.py"
    spec.write_text(files(README)["specs/variants.py"], encoding="utf-8")
    (loaded,) = load_file(spec, "specs/variants.py")
    assert loaded.kernels.q_heads == 32


def test_its_program_runs(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(files(README)["use.py"], encoding="utf-8")
    (tmp_path / "generated").symlink_to(ROOT / "generated")
    raised, _ = run(tmp_path, "use.py")
    assert not raised, raised["use.py"]
