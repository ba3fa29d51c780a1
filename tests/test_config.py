"""[tool.kvgen] and the pyproject.toml around it: what `requires` means, and files that are none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kvgen
from kvgen import config as config_module
from kvgen.config import find_config
from kvgen.errors import ConfigError
from kvgen.files import read_text


def project(root: Path, text: str | bytes) -> Path:
    (root / "pyproject.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def refused(root: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        find_config(root)
    said = str(caught.value)
    assert said.startswith(f"{root}/pyproject.toml: ") and said.isprintable()
    return said.removeprefix(f"{root}/pyproject.toml: ")


@pytest.mark.parametrize("wanted", ["", ">=0.1", "==0.1.*", "~=0.1.0", ">=0.1,<0.2", "!=0.1.1", ">0.1.dev1", "<1"])
def test_requires_that_this_kvgen_meets(wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "__version__", "0.1.0")
    assert find_config(project(tmp_path, f'[tool.kvgen]\nrequires = "{wanted}"\n')).requires == wanted


@pytest.mark.parametrize("wanted", [">=0.2", "<0.1", "==0.1.1", "~=0.2.0", "!=0.1.0", ">0.1.0", ">=0.1,<0.1", ">=1!0"])
def test_requires_that_it_does_not_meet(wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "__version__", "0.1.0")
    said = refused(project(tmp_path, f'[tool.kvgen]\nrequires = "{wanted}"\n'))
    assert said.startswith(f"tool.kvgen.requires: got '{wanted}', but this is kvgen 0.1.0; `pip install 'kvgen")


def test_a_version_that_is_not_released_yet_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who runs one has chosen it: PEP 440 would leave it out of every range."""
    root = project(tmp_path, '[tool.kvgen]\nrequires = ">=0.1"\n')
    monkeypatch.setattr(config_module, "__version__", "0.2.0.dev3")
    assert find_config(root).requires == ">=0.1"
    monkeypatch.setattr(config_module, "__version__", "0.1.0rc1")
    assert "but this is kvgen 0.1.0rc1" in refused(root)


@pytest.mark.parametrize("wanted", ["0.1", "kvgen>=0.1", ">=", ">=0.1 <0.2", "latest", "^0.1"])
def test_what_is_no_specifier(wanted: str, tmp_path: Path) -> None:
    said = refused(project(tmp_path, f'[tool.kvgen]\nrequires = "{wanted}"\n'))
    assert said == (f"tool.kvgen.requires: got '{wanted}'; it must be a version specifier; for example '>=0.1,<0.2'")


def test_the_version_is_stated_once() -> None:
    text = read_text(Path(kvgen.__file__).parents[1] / "pyproject.toml", limit=1 << 20)
    assert f'version = "{kvgen.__version__}"' in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"\xff", "no UTF-8 (byte 0)"),
        (b"x = " + b"[" * 5000, "not valid TOML: nested too deep"),
        (b"x = " + b"9" * 5000, "not valid TOML: Exceeds the limit"),
        (b'tool = "x"\n[tool.kvgen]', "not valid TOML"),
        (b"[tool]\nkvgen = 3", "tool.kvgen: got 3; it must be a table"),
        (b'[tool.kvgen]\nout = "a\\u0000b"', "tool.kvgen.out: got 'a\\x00b'; it must be a path inside the project"),
        (b'[tool.kvgen]\nspecs = "a\\nb"', "tool.kvgen.specs: got 'a\\nb'; it must be a path inside the project"),
        (b'[tool.kvgen]\nspecs = "../x"', "tool.kvgen.specs: got '../x'; it must be a folder below "),
        (b'[tool.kvgen]\nout = "x/../.."', "tool.kvgen.out: got 'x/../..'; it must be a folder below "),
        (b'[tool.kvgen]\nout = "/etc"', "tool.kvgen.out: got '/etc'; it must be a folder below "),
        (b"#" * (1 << 22) + b"\n", "larger than 4 MiB, the most that is read"),
    ],
)
def test_what_is_no_settings(text: bytes, said: str, tmp_path: Path) -> None:
    assert refused(project(tmp_path, text)).startswith(said)


def test_a_name_too_long_for_a_folder(tmp_path: Path) -> None:
    with pytest.raises(kvgen.errors.KvgenError, match="File name too long"):
        find_config(project(tmp_path, f'[tool.kvgen]\nout = "{"x" * 300}"\n'))


@pytest.mark.parametrize("kind", ["folder", "FIFO"])
def test_a_pyproject_that_is_no_file(kind: str, tmp_path: Path) -> None:
    (os.mkdir if kind == "folder" else os.mkfifo)(tmp_path / "pyproject.toml")
    assert refused(tmp_path) == f"not a file but a {kind}"


def test_specs_may_be_a_link_inside_the_project_only(tmp_path: Path) -> None:
    root = tmp_path / "project"
    (root / "real").mkdir(parents=True)
    project(root, "[tool.kvgen]\n")
    (root / "specs").symlink_to("real")
    assert find_config(root).specs == root / "real"
    (root / "specs").unlink()
    (root / "specs").symlink_to(tmp_path)
    assert refused(root).startswith("tool.kvgen.specs: got 'specs'; it must be a folder below")


def test_a_working_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match=r"^the working folder: cannot be looked at \(No such file or directory\)"):
        find_config()
