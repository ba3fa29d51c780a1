"""benchmarks/run_gpu.py without a GPU: on the CPU machine, and on a libcuda that does nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import run_gpu
from benchmarks.gpu import prepare
from benchmarks.gpu.cases import CaseFile, load
from benchmarks.gpu.correctness import compare_golden, failures, run, store_golden
from benchmarks.gpu.packages import ROOT, generated
from benchmarks.gpu.results import Results
from kvgen.errors import DeviceError
from kvgen.verify.memory import HostMemory

SMALL = "layout_f32"
SCRIPT = ROOT / "benchmarks" / "run_gpu.py"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What --prepare writes for one set."""
    folder = tmp_path_factory.mktemp("prepared")
    assert run_gpu.main(["--prepare", str(folder), "--only", SMALL, "--arch", "sm_90a"]) == 0
    return folder


@pytest.fixture
def on_cpu(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs the script on the CPU machine; returns its status and results."""

    for name in ("KVGEN_CUBINS", "KVGEN_NO_JIT"):  # the script sets them; put back what was there
        monkeypatch.setenv(name, "")

    def go(*arguments: str) -> tuple[int, dict[str, Any]]:
        out = tmp_path / "results.json"
        common = ["--cubins", str(prepared), "--out", str(out), "--device", "cpu", "--only", SMALL]
        status = run_gpu.main([*common, "--golden", str(tmp_path / "golden"), *arguments])
        return status, json.loads(out.read_text())

    return go


@pytest.fixture(scope="module")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda whose launches do nothing."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("the fake libcuda needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("libcuda")
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-o",
        str(folder / "libcuda.so.1"),
        str(ROOT / "tests" / "support" / "fake_gpu.c"),
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return folder


def with_fake(folder: Path, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """The script in a process of its own, as on a machine with a GPU and few packages."""
    blocked = "pydantic jinja2 typer rich hypothesis pytest"
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({blocked.split()})); sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(SCRIPT), *arguments]
    fake = {**os.environ, "LD_LIBRARY_PATH": str(folder), **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=fake, cwd=folder)
    out = Path(arguments[arguments.index("--out") + 1])
    return done, json.loads(out.read_text()) if out.exists() else None


# Prepared cases ----------------------------------------------------------------------------------------------------


def test_prepare_writes_cubins_and_cases(prepared: Path) -> None:
    manifest = json.loads((prepared / "manifest.json").read_text())
    assert {(k["set"], k["kernel"]) for k in manifest["kernels"]} == {
        ("bandwidth", "bandwidth"),
        ("calibrate", "calibrate"),
        *((SMALL, op) for op in ("append", "gather", "decode")),
    }
    file = load(prepared / "cases" / f"{SMALL}.npz")
    assert {c.op for c in file.cases} == {"append", "gather", "decode"}
    assert {c.op for c in file.cases if c.golden} == {"append", "gather", "decode"}
    assert (prepared / "cases" / f"{SMALL}.npz").stat().st_size < 2_000_000


def test_cases_are_the_same_each_time(prepared: Path, tmp_path: Path) -> None:
    prepare.prepare(tmp_path, [SMALL], ["sm_90a"])
    for name in ("manifest.json", f"cases/{SMALL}.npz"):
        assert (tmp_path / name).read_bytes() == (prepared / name).read_bytes()


@pytest.fixture(scope="module")
def cases(prepared: Path) -> CaseFile:
    return load(prepared / "cases" / f"{SMALL}.npz")


def test_every_wrong_byte_is_seen(cases: CaseFile) -> None:
    """A flipped bit in any memory, inside or around any array, fails the case."""
    rng = np.random.default_rng(0)
    for case in cases.cases:
        good = run(case, cases.blobs, generated(SMALL), HostMemory())
        assert failures(case, cases.blobs, good) == []
        for name, memory in good.items():
            if not len(memory):
                continue
            bad = dict(good)
            for at in (0, len(memory) - 1, int(rng.integers(len(memory)))):
                bad[name] = memory.copy()
                bad[name][at] ^= 0x40  # an exponent bit, where it is one
                argument = next((a for a, v in case.arguments.items() if v.memory == name), "")
                if argument in case.close or case.nan_rows.get(argument):
                    at = len(memory) - 1  # an output's last bytes are canaries
                    bad[name] = memory.copy()
                    bad[name][at] ^= 0x40
                assert failures(case, cases.blobs, bad), (case.key, name, at)


def test_outputs_must_be_close(cases: CaseFile) -> None:
    for case in cases.cases:
        good = run(case, cases.blobs, generated(SMALL), HostMemory())
        for argument in case.close:
            view = case.arguments[argument]
            for change in (lambda x: np.where(np.isfinite(x), x + 1e-3, 1.0), lambda x: np.full_like(x, np.nan)):
                bad = {n: m.copy() for n, m in good.items()}
                values = view.of(bad[view.memory])
                values[...] = change(values)
                assert failures(case, cases.blobs, bad), (case.key, argument)


# The script on the CPU machine --------------------------------------------------------------------------------------


def test_correctness_on_the_cpu_machine(on_cpu: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    status, content = on_cpu("--section", "correctness", "--date", "2026-01-02", "--commit", "abc")
    assert status == 0
    assert content["schema"] == 1 and content["run"]["date"] == "2026-01-02" and content["run"]["commit"] == "abc"
    assert content["sections"]["correctness"]["finished"] is True
    names = {(e["op"], e["case"]) for e in content["entries"]}
    for op, few in {
        "append": ("ragged", "shared", "hostile", "offsets"),
        "gather": ("boundaries", "starts", "hostile", "offsets"),
        "decode": ("boundaries", "rows", "hostile", "conversions"),
    }.items():
        assert {(op, "small"), *((op, name) for name in few)} <= names
    for entry in content["entries"]:
        assert entry["status"] == "ok" and entry["section"] == "correctness" and entry["set"] == SMALL
        assert isinstance(entry["seconds"], float)


def test_calibration_on_the_cpu_machine(
    on_cpu: Callable[..., tuple[int, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    status, content = on_cpu("--section", "calibrate")
    (entry,) = content["entries"]
    assert status == 0 and entry["status"] == "ok" and content["sections"]["calibrate"]["budget"] == 60
    figures = {f["name"]: f for f in entry["figures"]}
    assert {"ldg", "hgmma_256", "box_4096", "node"} <= set(figures)
    assert set(figures["ldg"]) == {"name", "value", "low", "high", "unit", "what"}
    assert "figure                       value     least      most unit\nfma " in capsys.readouterr().out


def test_resume_skips_what_is_there(
    on_cpu: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = on_cpu("--section", "correctness")
    begun: list[Any] = []
    monkeypatch.setattr(Results, "begin", lambda self, key: begun.append(key))
    status, second = on_cpu("--section", "correctness", "--resume")
    assert status == 0 and begun == [] and second["entries"] == first["entries"]
    on_cpu("--section", "correctness")
    assert len(begun) == len(first["entries"])


def test_resume_names_the_case_that_ended_the_run(
    on_cpu: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    on_cpu("--section", "correctness", "--budget", "0")
    (tmp_path / "results.json.running").write_text(json.dumps({"case": ["correctness", SMALL, "append", "ragged"]}))
    status, content = on_cpu("--section", "correctness", "--resume")
    ended = [e for e in content["entries"] if e["status"] == "failed"]
    assert status == 1 and [(e["op"], e["case"], e["detail"]) for e in ended] == [
        ("append", "ragged", "the run ended in this case")
    ]
    assert not (tmp_path / "results.json.running").exists()


def test_budget_stops_a_section(
    on_cpu: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, content = on_cpu("--section", "correctness", "--budget", "0")
    assert status == 0 and content["entries"] == [] and content["sections"]["correctness"]["finished"] is False

    now = 0.0

    def slow(*_: Any) -> dict[str, Any]:
        nonlocal now
        now += 20
        return {}

    monkeypatch.setattr("benchmarks.gpu.correctness.run", slow)
    monkeypatch.setattr("benchmarks.run_gpu.time", SimpleNamespace(**{**vars(time), "monotonic": lambda: now}))
    status, content = on_cpu("--section", "correctness", "--budget", "30")
    assert len(content["entries"]) == 2 and content["sections"]["correctness"]["finished"] is False


def test_a_failure_is_recorded_and_the_run_goes_on(
    on_cpu: Callable[..., tuple[int, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from benchmarks.gpu import correctness

    real = correctness.run

    def sometimes(case: Any, *rest: Any) -> Any:
        if case.key[1:] == ("gather", "starts"):
            raise DeviceError("no such luck")
        got = real(case, *rest)
        if case.key[1:] == ("decode", "rows"):
            case_view = case.arguments["out"]
            case_view.of(got[case_view.memory])[...] = 0
        return got

    monkeypatch.setattr(correctness, "run", sometimes)
    status, content = on_cpu("--section", "correctness")
    failed = {(e["op"], e["case"]): e for e in content["entries"] if e["status"] == "failed"}
    assert status == 1 and set(failed) == {("gather", "starts"), ("decode", "rows")}
    assert failed["gather", "starts"]["detail"] == "DeviceError: no such luck"
    assert "Traceback" in failed["gather", "starts"]["traceback"]
    assert failed["decode", "rows"]["detail"].startswith("out: ")
    assert content["sections"]["correctness"]["finished"] is True
    assert "2 failed:" in capsys.readouterr().out


def test_golden_vectors_are_compared_bit_by_bit(
    on_cpu: Callable[..., tuple[int, dict[str, Any]]], cases: CaseFile, tmp_path: Path
) -> None:
    outputs = {c.key: run(c, cases.blobs, generated(SMALL), HostMemory()) for c in cases.cases if c.golden}
    path = store_golden(cases, outputs, tmp_path / "golden")
    status, content = on_cpu("--section", "golden")
    assert status == 0 and len(content["entries"]) == len(outputs)
    assert all(e["different"] == 0 and e["ulps"] == 0 for e in content["entries"])
    assert sum(e["elements"] for e in content["entries"]) > 0

    stored = load(path)
    for case in stored.cases:
        got = run(case, stored.blobs, generated(SMALL), HostMemory())
        for argument in case.close:
            view = case.arguments[argument]
            near = {n: m.copy() for n, m in got.items()}
            values = view.of(near[view.memory])
            values[...] = np.nextafter(values, np.float32(9))
            wrong, facts = compare_golden(case, stored.blobs, near)
            assert wrong == [] and facts["ulps"] == 1 and facts["different"] == values.size
            values[...] = values * 2 + 1
            wrong, _ = compare_golden(case, stored.blobs, near)
            assert len(wrong) == 1 and wrong[0].startswith(argument)
        flipped = {n: m.copy() for n, m in got.items()}
        flipped["pool.0"][0] ^= 1
        assert compare_golden(case, stored.blobs, flipped)[0] == ["pool.0: differs from the stored bits in 1 bytes"]


def test_usage_errors(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "r.json")]
    for arguments, words in (
        ([], "--cubins and --out"),
        (["--cubins", str(tmp_path), *out], "manifest.json"),
        (["--cubins", str(prepared), *out, "--section", "speed"], "got 'speed'"),
        (["--cubins", str(prepared), *out, "--section", "timings", "--device", "cpu"], "no timings"),
    ):
        with pytest.raises(SystemExit) as error:
            run_gpu.main(arguments)
        assert error.value.code == 2 and words in capsys.readouterr().err


def test_other_cubins_are_not_resumed(on_cpu: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path) -> None:
    on_cpu("--section", "correctness", "--budget", "0")
    path = tmp_path / "results.json"
    path.write_text(path.read_text().replace('"cubins_digest": "', '"cubins_digest": "0'))
    with pytest.raises(SystemExit, match="other cubins"):
        on_cpu("--section", "correctness", "--resume")


# The script on a libcuda that does nothing ----------------------------------------------------------------------------


def test_timings_through_the_bindings(prepared: Path, fake_cuda: Path, tmp_path: Path) -> None:
    """Every driver call of the timings; numbers are the fake's, so only their form is held to anything."""
    out = tmp_path / "r.json"
    common = ("--cubins", str(prepared), "--out", str(out), "--only", SMALL, "--section", "timings")
    done, content = with_fake(fake_cuda, *common, "--buffer-mib", "16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert content["run"]["device"]["name"] == "Fake GPU" and content["run"]["device"]["capability"] == "9.0"
    assert set(content["bandwidth"]) == {"read", "write", "copy"}
    assert content["bandwidth"]["copy"] == pytest.approx(2 * content["bandwidth"]["read"])
    found = {(e["op"], e["case"]): e for e in content["entries"]}
    assert {("append", f"rows {n}") for n in (1, 8, 128, 4096)} <= set(found)
    assert {("decode", n) for n in ("1x4096", "32x4096", "128x1024", "ragged 64")} <= set(found)
    row = 2 * 2 * 64 * 4  # K and V of two heads of 64 floats
    assert found["append", "rows 128"]["least_bytes"] == 2 * 128 * row
    assert {"us_no_pdl", "empty_us", "empty_us_no_pdl", "percent_copy"} <= set(found["append", "rows 1"])
    assert found["decode", "32x4096"]["least_bytes"] == 32 * 4096 * row + 2 * 32 * 8 * 64 * 4
    for entry in found.values():
        assert entry["status"] == "ok" and entry["us"] > 0
        if not entry.get("host"):
            assert entry["gb_s"] == pytest.approx(entry["least_bytes"] / entry["us"] / 1e3)
            assert entry["percent"] == pytest.approx(100 * entry["gb_s"] / content["bandwidth"][entry["against"]])
    assert "memory of this GPU" in done.stdout


def test_calibration_through_the_bindings(prepared: Path, fake_cuda: Path, tmp_path: Path) -> None:
    """Launches that do nothing leave no sums: every probe with one says so, and the figures of graphs are the fake's."""
    common = ("--cubins", str(prepared), "--out", str(tmp_path / "r.json"), "--only", SMALL, "--section", "calibrate")
    done, content = with_fake(fake_cuda, *common)
    (entry,) = content["entries"]
    assert done.returncode == 1 and entry["status"] == "failed" and "traceback" not in entry, done.stdout + done.stderr
    assert [f["name"] for f in entry["figures"]] == ["node", "pdl"] and "calibrate_fma: steps: got 0" in entry["detail"]


def test_a_lost_context_does_not_end_the_run(prepared: Path, fake_cuda: Path, tmp_path: Path) -> None:
    """Launches that do nothing are wrong results; after the tenth the context is gone, and a new process goes on."""
    out = tmp_path / "r.json"
    common = ("--cubins", str(prepared), "--out", str(out), "--only", SMALL, "--section", "correctness,golden")
    done, content = with_fake(fake_cuda, *common, "--golden", str(tmp_path / "golden"), FAKE_LOST_AFTER="10")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("Fake GPU: 1 sets") >= 2
    assert content["sections"]["correctness"]["finished"] and content["sections"]["golden"]["finished"]
    assert all(e["status"] == "failed" for e in content["entries"])
    assert len([e for e in content["entries"] if e["section"] == "correctness"]) == 15
    assert not list(tmp_path.glob("golden/*"))  # wrong bits are not kept


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """Prepare for this GPU, then the real thing."""
    assert run_gpu.main(["--prepare", str(tmp_path), "--only", SMALL]) == 0
    out = tmp_path / "r.json"
    command = [sys.executable, str(SCRIPT), "--cubins", str(tmp_path), "--out", str(out), "--only", SMALL]
    done = subprocess.run([*command, "--golden", str(tmp_path / "golden")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text())
    assert all(s["finished"] for s in content["sections"].values())
    assert content["bandwidth"]["read"] > 10
