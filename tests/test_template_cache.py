"""Compiled templates on disk: used again, never trusted when damaged, and no obstacle where the folder is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from jinja2 import Environment, FileSystemLoader

from kvgen.codegen.template_cache import TemplateCache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache/templates"


@pytest.fixture
def render(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, int]]:
    """The text of a template, as a new process would render it, and how many templates were compiled for it."""
    compiled: list[str] = []
    real = Environment.compile

    def compile_(self: Environment, source: str, *rest: object, **named: object) -> object:
        compiled.append(source)
        return real(self, source, *rest, **named)  # type: ignore[arg-type,call-overload]

    monkeypatch.setattr(Environment, "compile", compile_)

    def render_(text: str, maker: str = "") -> tuple[str, int]:
        (tmp_path / "t.j2").write_text(text, encoding="utf-8")
        compiled.clear()
        environment = Environment(loader=FileSystemLoader(tmp_path), bytecode_cache=TemplateCache(maker))
        return environment.get_template("t.j2").render(x=3), len(compiled)

    return render_


def files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file()]


def test_a_template_is_compiled_once(render: Callable[..., tuple[str, int]], folder: Path) -> None:
    assert render("a {{ x }}") == ("a 3", 1)
    assert render("a {{ x }}") == ("a 3", 0)
    assert render("b {{ x }}") == ("b 3", 1), "another text"
    assert render("b {{ x }}", maker="other") == ("b 3", 1), "another way to compile it"
    assert len(files(folder)) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        lambda data: b"",
        lambda data: data + b"x",
    ],
)
def test_what_is_damaged_is_compiled_anew(
    render: Callable[..., tuple[str, int]], folder: Path, damage: Callable[[bytes], bytes]
) -> None:
    render("a {{ x }}")
    (path,) = files(folder)
    path.write_bytes(damage(path.read_bytes()))
    assert render("a {{ x }}") == ("a 3", 1)
    assert render("a {{ x }}") == ("a 3", 0)


def test_a_folder_that_is_none_costs_time_alone(
    render: Callable[..., tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "file"))
    assert render("a {{ x }}") == ("a 3", 1)
    assert render("a {{ x }}") == ("a 3", 1)
