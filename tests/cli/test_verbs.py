"""The application as a whole: help, errors, selectors' completion, `init` and `doctor`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvgen import models
from kvgen.cli import doctor_checks
from kvgen.cli.console import complete_selector
from kvgen.errors import DeviceError
from kvgen.runtime import cuda
from tests.test_packaging import WITHOUT

from .conftest import Folder

VERBS = ("init", "build", "check", "diff", "show", "compile", "export", "bench", "verify", "doctor", "demo")


@pytest.mark.parametrize("verb", [v for v in VERBS if v != "doctor"])
def test_help_teaches_by_example(empty: Folder, verb: str) -> None:
    said = empty.kvgen(verb, "--help").stdout
    assert said.count(f"kvgen {verb}") >= 3, "the usage line and two examples"


def test_help_lists_the_verbs_and_version(empty: Folder) -> None:
    said = empty.kvgen("--help").stdout
    for verb in VERBS:
        assert f"\n  {verb} " in said
    assert "..." not in said.partition("Commands:")[2]
    assert empty.kvgen("--version").stdout.startswith("kvgen ")


def test_help_loads_nothing_heavy() -> None:
    heavy = ("jinja2", "pydantic", "numpy", "cuda", "rich.table")
    code = (
        "import sys\nfrom kvgen.cli import main\nsys.argv = ['kvgen', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print([n for n in {heavy!r} if n in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("arguments", [["biuld"], ["build", "--nope"], ["show"], ["init"], ["demo", "--device", "tpu"]])
def test_usage_errors_exit_2(empty: Folder, arguments: list[str]) -> None:
    said = empty.kvgen(*arguments, code=2).stderr
    assert said
    assert "Traceback" not in said


def test_a_bug_keeps_its_traceback(project: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("kvgen.cli.project.render_set", broken)
    with pytest.raises(AssertionError, match="exit 1"):
        project.kvgen("build")


def test_completion_offers_sets_and_operations(project: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.root)
    assert complete_selector("w") == ["wide", "wide/append", "wide/gather"]
    assert complete_selector("wide/g") == ["wide/gather"]
    assert complete_selector("") == ["tiny", "wide"]
    (project.root / "specs/tiny.py").write_text("kernels = (\n", encoding="utf-8")
    assert complete_selector("w") == ["wide", "wide/append", "wide/gather"]
    assert complete_selector("tiny/") == []


def test_near_names(project: Folder) -> None:
    assert "did you mean wide/gather?" in project.kvgen("build", "wide/gathr", code=2).stderr
    assert "did you mean tiny?" in project.kvgen("check", "tinny", code=2).stderr
    assert "there are tiny, wide" in project.kvgen("compile", "zzz", code=2).stderr


def test_an_unwritable_cache_warns_once_and_goes_on(project: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = project.root / "blocked"
    blocked.write_text("a file in the way\n", encoding="utf-8")
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(blocked))
    result = project.kvgen("compile", "wide")
    assert result.stderr.count("warning: compile cache") == 1
    assert "KVGEN_CACHE_DIR" in result.stderr
    assert ".py:" not in result.stderr


def test_init(empty: Folder) -> None:
    config = empty.root / "config.json"
    config.write_text(json.dumps(models.example()), encoding="utf-8")
    text = empty.kvgen("init", "--from", "config.json").stdout
    assert text == models.spec_text(models.example(), source="config.json")
    said = empty.kvgen("init", "--from", "config.json", "-o", "specs/llama.py").stdout
    assert said.endswith("next: kvgen build llama\n")
    path = empty.root / "specs/llama.py"
    assert path.read_text(encoding="utf-8") == text
    path.write_text("mine\n", encoding="utf-8")
    assert "--force" in empty.kvgen("init", "--from", "config.json", "-o", "specs/llama.py", code=2).stderr
    assert path.read_text(encoding="utf-8") == "mine\n"
    empty.kvgen("init", "--from", "config.json", "-o", "specs/llama.py", "--force")
    assert "import Cache, append" in empty.kvgen("build", "llama").stdout.splitlines()[-1]
    empty.kvgen("check")


def test_init_refuses_other_files(empty: Folder) -> None:
    (empty.root / "config.json").write_text(json.dumps(models.example()), encoding="utf-8")
    assert ".py" in empty.kvgen("init", "--from", "config.json", "-o", "specs/llama.txt", code=2).stderr
    assert "No such file" in empty.kvgen("init", "--from", "nothing.json", code=2).stderr


def lines(folder: Folder, code: int = 0) -> dict[str, tuple[str, str]]:
    """What doctor says: matter -> (level, detail)."""
    content = json.loads(folder.kvgen("doctor", "--json", code=code).stdout)
    assert content["ok"] == (code == 0)
    return {line["what"]: (line["level"], line["detail"]) for line in content["lines"]}


def test_doctor(project: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(project.root / "own-cache"))
    found = lines(project)
    for what in (
        "Python",
        "kvgen",
        "numpy",
        "pydantic",
        "templates",
        "project",
        "NVRTC",
        "host compiler",
        "SASS tools",
    ):
        assert found[what][0] == "ok", (what, found[what])
    assert "2 set(s)" in found["project"][1]
    assert "sm_90a" in found["NVRTC"][1]
    assert "1 entries" in found["compile cache"][1]
    assert "just now 1 hit(s), 1 miss(es)" in found["compile cache"][1]
    said = project.kvgen("doctor").stdout.splitlines()
    assert all(line.split()[0] in ("ok", "note") for line in said)


def test_doctor_without_a_gpu_is_well(project: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> cuda.Driver:
        raise DeviceError("cuda: no GPU here")

    monkeypatch.setattr(cuda, "driver", none)
    level, detail = lines(project)["GPU"]
    assert level == "note"
    assert "CPU machine" in detail


def test_doctor_without_a_host_compiler(project: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> cuda.Driver:
        raise DeviceError("cuda: no GPU here")

    monkeypatch.setattr(cuda, "driver", none)
    monkeypatch.setenv("CXX", "no-such-compiler")
    level, detail = lines(project, code=1)["host compiler"]
    assert level == "broken"
    assert "apt install g++" in detail


def test_doctor_names_a_broken_spec_and_a_lost_cache(project: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    project.change("specs/tiny.py", "q_heads=8", "q_heads=7")
    blocked = project.root / "blocked"
    blocked.write_text("a file in the way\n", encoding="utf-8")
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(blocked))
    found = lines(project, code=1)
    assert found["project"][0] == "broken"
    assert "specs/tiny.py:6" in found["project"][1]
    assert found["compile cache"][0] == "note"
    assert "KVGEN_CACHE_DIR" in found["compile cache"][1]


def test_doctor_outside_a_project(tmp_path: Path) -> None:
    assert lines(Folder(tmp_path))["project"][0] == "note"


def test_doctor_without_nvrtc(project: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvgen.errors import ToolError

    def lost() -> doctor_checks.Finding:
        raise ToolError("NVRTC: its library cannot be loaded; install it")

    monkeypatch.setattr(doctor_checks, "_nvrtc", lost)
    found = lines(project, code=1)
    assert found["NVRTC"] == ("broken", "NVRTC: its library cannot be loaded; install it")


def test_doctor_with_the_runtime_alone(built: Folder) -> None:
    """The environment of a server, where things break: no typer, no rich, no pydantic."""
    built.kvgen("compile", "tiny", "-o", "cubins")
    here = os.environ | {"KVGEN_CUBINS": str(built.root / "cubins")}
    run = [sys.executable, "-c", f"{WITHOUT}\nfrom kvgen.cli import main; main()"]
    done = subprocess.run([*run, "doctor"], capture_output=True, text=True, check=False, env=here)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    said = {line[7:21].rstrip(): (line[:6].rstrip(), line[22:]) for line in done.stdout.splitlines()}
    assert said["project"] == (
        "note",
        "not looked at: specs and templates need kvgen[build]; generated packages run without",
    )
    assert said["cubins"] == ("ok", f"KVGEN_CUBINS={built.root / 'cubins'}: 2 cubins of 1 set(s) for sm_80, sm_90a")
    assert said["NVRTC"][0] == said["host compiler"][0] == "ok" and said["GPU"][0] in ("ok", "note")
    refused = subprocess.run([*run, "build"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "pip install 'kvgen[build]'" in refused.stderr


@pytest.mark.parametrize("arguments", [["demo", "--device", "cpu"], ["verify", "tiny"], ["bench", "tiny"]])
def test_the_host_compiler_is_asked_for_first(
    built: Folder, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """Nothing is compiled, and no spec is written, before it is known that the CPU machine can run."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("kvgen.compile.compile_many", never)
    monkeypatch.setattr("kvgen.compile.compile_unit", never)
    result = built.kvgen(*arguments, code=2)
    assert (
        "the C++ compiler 'no-such-compiler' is not installed" in result.stderr and "apt install g++" in result.stderr
    )
    assert "kernel" not in result.stdout and "spec " not in result.stdout


def test_init_says_what_comes_next(empty: Folder, tmp_path: Path) -> None:
    """Beside the folder of specs, and outside of a project, `kvgen build` would not find the spec."""
    (empty.root / "config.json").write_text(json.dumps(models.example()), encoding="utf-8")
    said = empty.kvgen("init", "--from", "config.json", "-o", "other/llama.py").stdout
    assert said == (
        f"wrote other/llama.py; next: move it into {empty.root / 'specs'}, where `kvgen build` looks for specs, then kvgen build "
        "llama\n"
    )
    outside = Folder(tmp_path)
    said = outside.kvgen("init", "--from", "project/config.json", "-o", "llama.py").stdout
    assert (
        said
        == "wrote llama.py; next: `kvgen new DIR` makes a project; move the spec into its specs/, and run `kvgen build` there\n"
    )
