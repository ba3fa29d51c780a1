"""What users read when they are wrong: one file a case, compared to the letter.

`NAME.txt` holds the command line, its status, the project it runs over and what it says (tests/errors/case.py), with the
project's folder as <project> and NVRTC's version as <nvrtc>. KVGEN_UPDATE_GOLDEN=1 rewrites what it says.

`$ python call.py` is a mistake in a program: lines over the launchers of the set that `kvgen new` begins with and the arrays
of SETUP, and what they raise. `$ python load.py` is one over a folder `cubins` of two sets compiled ahead of time, `small` and
`older`, which has sm_80 alone; digests are <digest> in what it says. `$ python engine.py` is one over kvgen.integrations.vllm,
as far as it goes without vLLM.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kvgen
from kvgen import KernelSet, Paged, ops
from kvgen.cli.project import generated
from kvgen.cli.resources_json import installed
from kvgen.errors import ConfigError, KvgenError
from kvgen.integrations.vllm import mla_shard, refusals, shard, versions
from kvgen.runtime.module import cubin
from tests.cli.conftest import invoke
from tests.errors.case import Case, Link, read_case, write_case

HERE = Path(__file__).parent
CASES = sorted(path.stem for path in HERE.glob("*.txt"))


def test_there_are_cases() -> None:
    assert len(CASES) >= 178 + 60
    assert sum(name.startswith("mistake_") for name in CASES) >= 60
    assert sum(name.startswith("call_") for name in CASES) >= 15
    assert sum(name.startswith("export_") for name in CASES) >= 20
    folders = [path.name for path in HERE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert not folders, "a case is one file"


def test_a_case_is_read_as_it_is_written() -> None:
    for name in CASES:
        text = (HERE / f"{name}.txt").read_text(encoding="utf-8")
        assert write_case(read_case(text)) == text, name
    files: dict[str, bytes | Link | None] = {
        "specs/x.py": b"x = 1\n",
        "specs/empty.py": b"",
        "pyproject.toml": b"no newline at its end",
        "form.py": b'a = "\x0c\x1c\n--- specs/x.py\n"\n',
        "config.json": bytes(range(256)),
        "generated": Link("../elsewhere"),
        "empty": None,
    }
    case = Case("kvgen build 'x y'", 2, files, "--- a\n--- stderr\nno newline")
    assert read_case(write_case(case)) == dataclasses.replace(case, stderr=f"{case.stderr}\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kvgen build\nexit 2\n", "begins with"),
        ("$ kvgen build\nstatus 2\n", "begins with"),
        ("$ kvgen build\nexit 2\nx = 1\n", "before the first"),
        ("$ kvgen build\nexit 2\n--- a\n--- a\n--- stderr\n", "a: given twice"),
        ("$ kvgen build\nexit 2\n--- a -> b\nx\n--- stderr\n", "no content"),
    ],
)
def test_a_case_that_says_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_case(text)


SETUP = """
import ml_dtypes
import numpy as np

bf16 = ml_dtypes.bfloat16
pool = np.zeros((4, 2, 1, 16, 2, 64), bf16)
lengths, page_table, row_offsets = np.array([3], np.int32), np.array([[1, 2]], np.int32), np.array([0, 1], np.int32)
k, v, q, out = (np.zeros((1, heads, 64), bf16) for heads in (2, 2, 8, 8))
cache = Cache(pool, lengths=lengths, page_table=page_table)
"""


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The generated package of `kvgen new`."""
    root = tmp_path_factory.mktemp("small") / "project"
    assert invoke("new", str(root)).exit_code == 0
    assert invoke("build", "--project", str(root)).exit_code == 0
    with generated(root / "generated", "small") as module:
        yield module


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("call_")])
def test_call(name: str, small: ModuleType) -> None:
    path = HERE / f"{name}.txt"
    case = read_case(path.read_text(encoding="utf-8"))
    scope = dict(vars(small))
    exec(SETUP, scope)
    program = case.files["call.py"]
    assert isinstance(program, bytes)
    with pytest.raises((KvgenError, TypeError)) as raised:
        exec(program, scope)
    said = f"{type(raised.value).__name__}: {raised.value}\n"
    if os.environ.get("KVGEN_UPDATE_GOLDEN") == "1":
        path.write_text(write_case(dataclasses.replace(case, stderr=said)), encoding="utf-8")
        pytest.skip("rewritten")
    assert said == case.stderr


SPEC = KernelSet(
    q_heads=4, cache=Paged(dtype="f16", kv_heads=2, head_dim=16, page_size=4), ops=[ops.Append(), ops.Gather()]
)


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets compiled ahead of time."""
    folder = tmp_path_factory.mktemp("shipped") / "cubins"
    kvgen.compile_ahead(folder, SPEC, name="small", arch=["sm_80", "sm_90a"])
    kvgen.compile_ahead(folder, SPEC, name="older", arch=["sm_80"])
    return folder


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("load_")])
def test_load(name: str, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = HERE / f"{name}.txt"
    case = read_case(path.read_text(encoding="utf-8"))
    shutil.copytree(shipped, tmp_path / "cubins")
    monkeypatch.chdir(tmp_path)
    for variable in ("KVGEN_CUBINS", "KVGEN_NO_JIT"):
        monkeypatch.delenv(variable, raising=False)

    def edit(file: str, old: str, new: str) -> None:
        text = Path(file).read_bytes().decode("latin-1")
        assert old in text
        Path(file).write_bytes(text.replace(old, new, 1).encode("latin-1"))

    def on_gpu(module: Any) -> bytes:
        return cubin(module._MODULE, "append.cu", module.append.KERNEL.entry, (9, 0))

    scope = {"kvgen": kvgen, "np": np, "edit": edit, "on_gpu": on_gpu, "spec": SPEC, "setenv": monkeypatch.setenv}
    program = case.files["load.py"]
    assert isinstance(program, bytes)
    with pytest.raises(KvgenError) as raised:
        exec(program, scope | {"remove": lambda file: Path(file).unlink()})
    said = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{12,64}\b", "<digest>", f"{type(raised.value).__name__}: {raised.value}\n")
    if os.environ.get("KVGEN_UPDATE_GOLDEN") == "1":
        path.write_text(write_case(dataclasses.replace(case, stderr=said)), encoding="utf-8")
        pytest.skip("rewritten")
    assert said == case.stderr


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("engine_")])
def test_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = HERE / f"{name}.txt"
    case = read_case(path.read_text(encoding="utf-8"))

    def refused(*reasons: str, **asked: Any) -> None:
        """What vLLM prints, where a backend gives these reasons."""
        found = refusals.in_sentences(reasons, asked, name="KVGEN", kv_dtypes=list(shard.KV_DTYPES), page_multiple=16)
        raise ConfigError("; ".join(found))

    scope = {"Shard": shard.Shard, "check": shard.check, "adapter_of": versions.adapter_of, "refused": refused}
    scope |= {"MlaShard": mla_shard.MlaShard, "check_mla": mla_shard.check_mla}
    program = case.files["engine.py"]
    assert isinstance(program, bytes)
    with pytest.raises(KvgenError) as raised:
        exec(program, scope)
    said = f"{type(raised.value).__name__}: {raised.value}\n"
    if os.environ.get("KVGEN_UPDATE_GOLDEN") == "1":
        path.write_text(write_case(dataclasses.replace(case, stderr=said)), encoding="utf-8")
        pytest.skip("rewritten")
    assert said == case.stderr


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("call_", "load_", "engine_"))])
def test_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, root = HERE / f"{name}.txt", tmp_path / "project"
    case = read_case(path.read_text(encoding="utf-8"))
    root.mkdir()
    case.lay_out(root)
    if "--against" in case.command:
        subprocess.run(["git", "init", "-q", str(root)], check=True)
    monkeypatch.chdir(root)
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "cache"))
    words = shlex.split(case.command)
    while "=" in words[0]:  # variables of the environment, as a shell takes them
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    program, *arguments = words
    assert program == "kvgen"
    result = invoke(*arguments)

    said = result.stderr.replace(str(root.resolve()), "<project>").replace(str(tmp_path.resolve()), "<above>")
    said = said.replace(" --help' for help.", " -h' for help.")  # older versions of typer
    said = said.replace(installed(), "<nvrtc>")
    if os.environ.get("KVGEN_UPDATE_GOLDEN") == "1":
        path.write_text(write_case(dataclasses.replace(case, stderr=said)), encoding="utf-8")
        pytest.skip("rewritten")
    assert said == case.stderr
    assert result.exit_code == case.exit
    assert result.stdout == ""
    assert "Traceback" not in said
    assert not (root / "generated").exists(), "a refused command wrote something"
