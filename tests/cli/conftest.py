"""A small project in a temporary folder, and kvgen run in it."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import typer.main
from typer import testing
from typer.testing import CliRunner, Result

from kvgen.cli.app import app
from kvgen.compile import Image, compile_many, sass
from kvgen.compile.cubin_cache import default_cache

SPEC = '''"""A cache for tests."""

from kvgen import KernelSet, Paged, ops

kernels = KernelSet(
    q_heads={q_heads},
    cache=Paged(dtype="bf16", kv_heads=2, head_dim={head_dim}, page_size={page_size}),
    ops=[{ops}],
    arch=["sm_80", "sm_90a"],
)
'''


command: Final = functools.cache(typer.main.get_command)


def invoke(*arguments: str) -> Result:
    """Run kvgen in this process and in the working folder; typer works out its verbs once, not again for every run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", command)
        return CliRunner().invoke(app, list(arguments), prog_name="kvgen")


@dataclass(frozen=True)
class Folder:
    """A project's folder; `kvgen` runs a command in it, in this process."""

    root: Path

    @property
    def out(self) -> Path:
        return self.root / "generated"

    def spec(
        self, name: str, *, q_heads: int = 8, head_dim: int = 64, page_size: int = 16, ops: str = "ops.Append()"
    ) -> None:
        (self.root / "specs").mkdir(exist_ok=True)
        text = SPEC.format(q_heads=q_heads, head_dim=head_dim, page_size=page_size, ops=ops)
        (self.root / "specs" / f"{name}.py").write_text(text, encoding="utf-8")

    def kvgen(self, *arguments: str, code: int = 0) -> Result:
        before = Path.cwd()
        os.chdir(self.root)
        try:
            result = invoke(*arguments)
        finally:
            os.chdir(before)
        assert result.exit_code == code, f"exit {result.exit_code}\n{result.stdout}\n{result.stderr}"
        return result

    def tree(self) -> dict[str, bytes]:
        """Every file of the output folder."""
        files = sorted(p for p in self.out.rglob("*") if p.is_file())
        return {p.relative_to(self.out).as_posix(): p.read_bytes() for p in files}

    def change(self, path: str, old: str, new: str) -> None:
        """Replace text in one of the project's files; the old text must be there."""
        file = self.root / path
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new), encoding="utf-8")


def two_sets(folder: Folder) -> None:
    """The specs of two sets."""
    folder.spec("tiny")
    folder.spec("wide", head_dim=128, ops="ops.Append(), ops.Gather()")


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A project with a pyproject.toml and nothing else."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
    return Folder(root)


@pytest.fixture
def project(empty: Folder) -> Folder:
    """Two sets, not built yet."""
    two_sets(empty)
    return empty


@pytest.fixture(scope="session")
def tree_of_two_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `kvgen build` writes for the two sets, once a process; to be copied."""
    root = tmp_path_factory.mktemp("two_sets")
    (root / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
    folder = Folder(root)
    two_sets(folder)
    folder.kvgen("build")
    return folder.out


@pytest.fixture
def built(project: Folder, tree_of_two_sets: Path) -> Folder:
    """Two sets, built."""
    shutil.copytree(tree_of_two_sets, project.out)
    return project


@pytest.fixture
def demo_from_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvgen demo` compiles without the cache, to show how long that takes: here what was compiled before is taken."""

    def compiled(*arguments: Any, cache: None, **options: Any) -> list[Image]:
        return compile_many(*arguments, cache=default_cache(), **options)

    monkeypatch.setattr("kvgen.compile.compile_many", compiled)


@pytest.fixture(scope="package", autouse=True)
def one_disassembly_a_cubin() -> Iterator[None]:
    """`kvgen compile --record` of the same kernels in many tests: nvdisasm takes half a second a cubin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sass, "sass", functools.cache(sass.sass))
        yield
