"""`kvgen verify`: what it prints and writes, how it ends, and kernels that were broken on purpose."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import pytest

from kvgen.cli import verify as verb
from kvgen.errors import DeviceError
from kvgen.runtime import cuda
from kvgen.verify import report
from kvgen.verify.bandwidth import Reading
from kvgen.verify.calibrate import Calibration
from kvgen.verify.probe import Measured
from kvgen.verify.report import Document, document, issue
from kvgen.verify.results import CaseResult, KernelResult, SetResult, Timed
from tests.cli.conftest import Folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A project with a copy of one checked-in set, as it was built."""
    root = tmp_path / "project"
    (root / "specs").mkdir(parents=True)
    (root / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
    shutil.copy(ROOT / "specs" / "layout_f32.py", root / "specs")
    for name in ("device", "layout_f32"):
        shutil.copytree(ROOT / "generated" / name, root / "generated" / name)
    return Folder(root)


def fits(value: Any, kind: Any, where: str = "report") -> None:
    """Whether JSON has the fields that a TypedDict names, of those types, and no others."""
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        assert isinstance(value, dict) and set(value) == set(hints), (where, set(value) ^ set(hints))
        for name, inner in hints.items():
            fits(value[name], inner, f"{where}.{name}")
    elif get_origin(kind) is list:
        assert isinstance(value, list), where
        for i, item in enumerate(value):
            fits(item, get_args(kind)[0], f"{where}[{i}]")
    elif get_origin(kind) is dict:
        of = get_args(kind)[1]
        assert isinstance(value, dict) and all(isinstance(k, str) for k in value), where
        assert of is Any or all(type(v) is of for v in value.values()), where
    else:
        kinds = get_args(kind) or (kind,)
        assert type(value) in kinds, (where, value)


def valid(content: Any) -> Document:
    """The report, which has to be as kvgen.verify.report says."""
    fits(content, Document)
    assert content["schema"] == report.SCHEMA
    found: Document = content
    return found


@pytest.mark.parametrize("change", [{"seed": "0"}, {"more": 1}, {"summary": {"ok": 1.0}}, {"sets": [{}]}])
def test_a_report_of_another_form_is_seen(change: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        valid(json.loads(json.dumps(sample() | change)))


def test_all_right(folder: Folder) -> None:
    done = folder.kvgen("verify", "--quick", "--json", "gpu.json", "--issue", "gpu.md")
    lines = done.stdout.splitlines()
    assert lines[0] == "CPU machine: 1 set(s)"
    assert [line.split()[:3] for line in lines if line.startswith("layout_f32/")] == [
        [f"layout_f32/{op}", "sm_90a", "ok"] for op in ("append", "gather", "decode")
    ]
    assert "3 kernel(s), 6 launches, 3 of them on hostile data, 0 kernel(s) not run: all right" in lines
    assert lines[-2:] == ["the report: gpu.json", "the text of an issue: gpu.md"]
    found = valid(json.loads((folder.root / "gpu.json").read_text(encoding="utf-8")))
    assert found["device"] == {"name": "CPU machine"} and found["read_gb_s"] is None and found["bandwidth"] == []
    assert found["summary"] == {
        "kernels": 3, "ok": 3, "wrong": 0, "not_run": 0, "cases": 6, "hostile": 3, "faults_reported": 3
    }  # fmt: skip
    (only,) = found["sets"]
    assert only["in_step"] and len(only["digest"]) == 64
    text = (folder.root / "gpu.md").read_text(encoding="utf-8")
    assert text.splitlines()[0] == f"GPU report: CPU machine, kvgen {found['kvgen']}: all right"
    assert "| command | `kvgen verify --cpu --quick` |" in text
    assert text.count("| layout_f32/") == 3 and "## Wrong" not in text


def test_json_alone_is_printed(folder: Folder) -> None:
    done = folder.kvgen("verify", "layout_f32/gather", "--quick", "--seed", "7", "--json", "-")
    found = valid(json.loads(done.stdout))
    assert found["seed"] == 7 and found["selectors"] == ["layout_f32/gather"] and found["quick"]
    assert [k["kernel"] for k in found["sets"][0]["kernels"]] == ["gather"]
    text = folder.kvgen("verify", "layout_f32/gather", "--quick", "--issue", "-").stdout
    assert text.startswith("GPU report: ") and text.endswith("please attach it.\n")


PAST_THE_POOL = ("global_out_of_bounds", "race: read of global")  # other arrays may lie there, whose writes race
BROKEN = {
    # V's rows are K's.
    "numbers": (
        "generated/layout_f32/gather.cu",
        "store_rows<ValueValues, kThreads, kInFlight>(v_out, v_out_stride, first, rows, slots, cache)",
        "store_rows<KeyValues, kThreads, kInFlight>(v_out, v_out_stride, first, rows, slots, cache)",
        ("v_out: ",),
    ),
    # The first page id past the pool passes the check.
    "bounds": ("generated/layout_f32/cache.cuh", "id < num_pages", "id <= num_pages", PAST_THE_POOL),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_kernel_is_found(folder: Folder, how: str) -> None:
    path, old, new, said = BROKEN[how]
    folder.change(path, old, new)
    done = folder.kvgen("verify", "layout_f32/gather", "--quick", "--json", "r.json", "--issue", "i.md", code=1)
    assert "layout_f32/gather  sm_90a  wrong" in done.stdout
    assert "1 kernel(s), 2 launches, 1 of them on hostile data, 0 kernel(s) not run: 1 wrong" in done.stdout
    assert "layout_f32: its generated files are not what the spec gives; `kvgen check` shows where" in done.stdout
    found = valid(json.loads((folder.root / "r.json").read_text(encoding="utf-8")))
    (kernel,) = found["sets"][0]["kernels"]
    assert kernel["status"] == "wrong" and not found["sets"][0]["in_step"]
    wrong = {c["fault"] for c in kernel["cases"] if c["wrong"]}
    assert "page ids and lengths" in wrong and (how == "bounds") == ("" not in wrong)
    text = (folder.root / "i.md").read_text(encoding="utf-8")
    lines = " ".join(w for c in kernel["cases"] for w in c["wrong"])
    assert any(words in lines for words in said), lines
    assert "## Wrong" in text and "- `layout_f32/gather` (sm_90a), wrong data: page ids and lengths: " in text
    assert "Generated files that are not what the spec gives: layout_f32." in text


def test_a_set_that_nothing_here_runs(folder: Folder) -> None:
    """It is not run, and that is said."""
    folder.change("specs/layout_f32.py", '["sm_80", "sm_90a"]', '["sm_120f"]')
    folder.kvgen("build")
    done = folder.kvgen("verify", "--quick")
    assert "the set is generated for sm_120f, none of which runs on the CPU machine" in done.stdout
    assert "3 kernel(s), 0 launches, 0 of them on hostile data, 3 kernel(s) not run: all right" in done.stdout


def test_patience_is_a_second_at_least(folder: Folder) -> None:
    assert "got 0; it must be at least 1" in folder.kvgen("verify", "--gpu", "--patience", "0", code=2).stderr


def test_no_gpu(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise DeviceError("cuda: libcuda not found; device arrays need an NVIDIA GPU and its driver")

    monkeypatch.setattr(cuda, "driver", none)
    done = folder.kvgen("verify", "--gpu", code=2)
    assert done.stderr == (
        "error: --gpu: cuda: libcuda not found; device arrays need an NVIDIA GPU and its driver; `kvgen doctor` shows what "
        "this machine has, and `kvgen verify --cpu` needs no GPU\n"
    )
    assert done.stdout == ""


def test_a_set_that_was_not_built(folder: Folder) -> None:
    shutil.rmtree(folder.root / "generated")
    said = folder.kvgen("verify", "--quick", code=2).stderr
    assert "generated/" in said and "Traceback" not in said and "kvgen build" in said


def test_a_report_that_cannot_be_written(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "_on_cpu", None)  # nothing runs
    said = folder.kvgen("verify", "--json", "nowhere/r.json", code=2).stderr
    assert said.startswith("error: --json: nowhere/r.json is in no folder; make nowhere, or ")
    (folder.root / "r.json").symlink_to(folder.root.parent / "outside.json")
    for option, name, kind in (("--json", "r.json", "link"), ("--issue", "specs", "folder")):
        assert folder.kvgen("verify", option, name, code=2).stderr.startswith(
            f"error: {option}: {name} is a {kind}; give "
        )
    assert not (folder.root.parent / "outside.json").exists()


# The report ----------------------------------------------------------------------------------------------------------


def sample(kernels: int = 1, wrong: tuple[str, ...] = ()) -> Document:
    cases = [
        CaseResult("small", "", 0.001, 0.5, "", "", wrong, 0.1),
        CaseResult("hostile", "slots", 0.0, 0.0, "a", "a", (), 0.1),
    ]
    timed = [Timed("32 x 2048", 10.0, 9.5, 10**7, 1000.0, 50.0, 300, True)]
    found = [KernelResult(f"gather_{i}", "gather", cases, timed) for i in range(kernels)]
    device = {
        **{"name": "NVIDIA H200", "capability": "9.0", "cuda_driver": "13.0", "total_bytes": 139 << 30},
        **{"smi": {"driver_version": "580.1"}},
    }
    sets = [SetResult("some", "sm_90a", "0" * 64, True, found)]
    how: dict[str, Any] = {"device": device, "nvrtc": "13.5", "seed": 3, "quick": False, "selectors": ["some"]}
    figures = (Measured("ldg", 800.0, 750.0, 900.0, "clk", "a load"),)
    calibration = Calibration(figures, ("fences: calibrate_atomic: sum: got 1 | 2",), 3.5)
    how["calibration"] = calibration
    return document(sets, **how, bandwidth=[Reading(1 << 30, 2000.0), Reading(1 << 32, 1999.0)])


def test_the_report_is_as_its_types_say() -> None:
    found = valid(json.loads(json.dumps(sample())))
    assert found["read_gb_s"] == 2000.0 and [r["nbytes"] for r in found["bandwidth"]] == [1 << 30, 1 << 32]
    assert found["calibration"] == [
        {"name": "ldg", "value": 800.0, "low": 750.0, "high": 900.0, "unit": "clk", "what": "a load"}
    ]
    assert found["calibration_wrong"] == ["fences: calibrate_atomic: sum: got 1 | 2"]
    case = CaseResult("small", "", float("inf"), float("inf"), "", "", ("NaN",), 0.1)
    sets = [SetResult("some", "-", "", True, [KernelResult("decode", "decode", [case])])]
    odd = document(sets, device={"name": "x"}, nvrtc="", seed=0, quick=True, selectors=())
    kernel = json.loads(json.dumps(odd, allow_nan=False))["sets"][0]["kernels"][0]
    assert kernel["cases"][0]["error"] is None and kernel["status"] == "wrong"


def test_the_text_of_an_issue() -> None:
    lines = issue(sample(wrong=("k_out: 3 of 64 bytes | differ",))).splitlines()
    assert lines[0] == f"GPU report: NVIDIA H200, kvgen {sample()['kvgen']}: 1 of 1 kernels wrong"
    for line in (
        "| compute capability | 9.0 |",
        "| driver | 580.1 |",
        "| memory | 139.0 GiB |",
        "| read bandwidth, measured | 2000 GB/s |",
        "| command | `kvgen verify some --gpu --seed 3` |",
        "- calibration, fences: calibrate_atomic: sum: got 1 / 2",
        "- `some/gather_0` (sm_90a), batch small: k_out: 3 of 64 bytes / differ",
        "| some/gather_0 | sm_90a | wrong | 2 | 0.001 | 50% | 10.0 us (32 x 2048) | 1000 | 50% |",
    ):
        assert line in lines, line
    long = issue(sample(kernels=2000))
    assert len(long) < 65_536 and "lines are left out here; the attached report has all of them" in long


def test_the_issue_template_asks_for_it() -> None:
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "gpu_report.md").read_text(encoding="utf-8")
    assert text.startswith("---\nname: GPU report\n") and "kvgen verify --gpu --issue gpu.md --json gpu.json" in text
