"""docs/vllm.md as a reader has it: kvgen's wheel in an environment without a checkout, the page's programs in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.engine_runs import Show
from tests_vllm.engine import ON_PATH, OWN, environment

ROOT: Final = Path(__file__).resolve().parents[1]
PROGRAM: Final = re.compile(r"^```python\n(?P<text># (?P<name>\w+\.py)\n.*?)^```$", re.MULTILINE | re.DOTALL)


def programs() -> dict[str, str]:
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    found = {match["name"]: match["text"] for match in PROGRAM.finditer(page)}
    assert page.count("```python") == len(found)
    return found


def run(python: Path, *arguments: str, folder: Path, **env: str) -> str:
    """What a program prints in the clean environment; nothing of the checkout is on its path but the test plugin."""
    done = subprocess.run(
        [str(python), *arguments],
        cwd=folder,
        env={**environment(), "PYTHONPATH": str(ON_PATH), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def pip(*arguments: str) -> None:
    """Run pip without PYTHONPATH, where a checkout would count as installed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments], check=True, env=env
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(ROOT))
    (found,) = folder.glob("kvgen-*.whl")
    return found


@pytest.fixture
def clean(wheel: Path, tmp_path: Path) -> Path:
    """The Python of a new environment: kvgen's wheel, and links to all packages of this one but kvgen, which lies here."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for others in (Path(path) for path in sys.path if path.endswith("site-packages")):
        for package in others.iterdir():
            ours = package.name.lstrip("_").startswith(("kvgen", "editable__")) or package.suffix == ".pth"
            if not ours and not (site / package.name).exists():
                (site / package.name).symlink_to(package)
    python = folder / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    return python


def test_the_programs(clean: Path, tmp_path: Path, shown: Show) -> None:
    said = run(clean, "-c", "import kvgen; print(kvgen.__file__)", folder=tmp_path)
    assert said.startswith(str(clean.parents[1]))
    folder, counts = tmp_path / "elsewhere", tmp_path / "counts"
    folder.mkdir()
    counts.touch()
    for name, text in programs().items():
        (folder / name).write_text(text, encoding="utf-8")
    run(clean, "tiny.py", folder=folder)
    made = run(clean, "generate.py", folder=folder, KVGEN_TEST_COUNTS=str(counts)).splitlines()[-1]
    kernels = [line.split()[1] for line in counts.read_text(encoding="utf-8").splitlines()]
    (folder / "own.py").write_text(
        programs()["generate.py"].replace('attention_backend="KVGEN", ', ""), encoding="utf-8"
    )
    own = run(clean, "own.py", folder=folder).splitlines()[-1]
    assert made == own and re.fullmatch(r"\[(\d+, ){7}\d+\]", made)
    assert OWN not in kernels and kernels.count("append") == kernels.count("extend") + kernels.count("decode") > 0
    shown(
        "the programs of this page, with the wheel, in an environment without a checkout",
        model="Llama: 2 layers, 8 query heads over 2 KV heads of 64",
        dtype="float32",
        equal=8,
        of=8,
        launches={name: kernels.count(name) for name in set(kernels)},
    )


def test_uninstalled_it_leaves_nothing(clean: Path, tmp_path: Path) -> None:
    """vLLM finds one plugin, that of the tests, and no such name; and it says which names it has."""
    pip("--python", str(clean), "uninstall", "--yes", "kvgen")
    program = (
        "from vllm.plugins import load_plugins_by_group\n"
        "print(sorted(load_plugins_by_group('vllm.general_plugins')))\n"
        "from vllm.config.attention import AttentionConfig\n"
        "try:\n"
        "    AttentionConfig(backend='KVGEN')\n"
        "except ValueError as error:\n"
        "    print(error)"
    )
    said = run(clean, "-c", program, folder=tmp_path)
    assert "Unknown attention backend: 'KVGEN'" in said
    assert "['kvgen_on_cpu', " in said and "'kvgen'" not in said
