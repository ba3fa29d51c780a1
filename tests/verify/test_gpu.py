"""kvgen verify --gpu without a GPU: through the CPU machine, and through the bindings to a libcuda that does nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from kvgen.cases import operation, token_rows
from kvgen.cases.operation import cases_of
from kvgen.cases.scene import Scene
from kvgen.cases.workload import Workload
from kvgen.cli import verify_gpu
from kvgen.cli.project import generated
from kvgen.compile import compile_unit, default_cache
from kvgen.emulator import build
from kvgen.errors import DeviceError
from kvgen.runtime import gpu as backend
from kvgen.runtime.tensor_map import encode
from kvgen.schema.loader import load_file
from kvgen.verify.bandwidth import BYTES_AT_MOST, PIECE, Reading, bandwidth_unit, filler, read_bandwidth
from kvgen.verify.batches import batches
from kvgen.verify.calibrate import Calibration, calibrate, calibrate_unit
from kvgen.verify.memory import GpuMemory
from kvgen.verify.probe import SMALL, GpuMachine
from kvgen.verify.probes import PROBES
from kvgen.verify.results import KernelResult, Timed
from kvgen.verify.run import Plan, Verifier
from kvgen.verify.supervisor import Answer, Item
from kvgen.verify.timing import Timer, works
from tests.support.emulated_gpu import EmulatedDriver, use_emulated

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["layout_f32", "deepseek_v2_lite_sglang"])
def test_device_arrays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases and times on device memory, whose launches the CPU machine makes: all right, and every number adds up."""
    kernels = load_file(ROOT / "specs" / f"{name}.py", f"specs/{name}.py")[0].kernels
    monkeypatch.setattr(token_rows, "STEPS", ((3, 40, 1), (1, 20, 20)))
    monkeypatch.setattr(operation, "READS", (2, 40))
    image = compile_unit(bandwidth_unit(), "sm_90a", "ptx", cache=default_cache())
    with generated(ROOT / "generated", name) as package:
        driver = EmulatedDriver([package], build([image.data.decode()], mode="check"))
        gpu = use_emulated(monkeypatch, driver)
        verifier = Verifier(kernels, package, GpuMemory(0), quick=True)
        timer = Timer(gpu, kernels, package, filler(gpu, b""), read_gb_s=2.0)
        for op in kernels.ops:
            result = verifier.run(op)
            assert result.status == "ok", [c.wrong for c in result.cases]
            found_works = works(kernels, op)
            assert [w.name for w in found_works] == (["3 x 40, 1 new", "1 x 20"] if op.kind == "append" else ["2 x 40"])
            for work in found_works[:1]:
                found = timer.run(op, work)
                assert found.us == found.us_least == 1.0  # as the emulated GPU has it
                assert found.gb_s == pytest.approx(found.nbytes / 1e3)
                assert found.percent == pytest.approx(found.gb_s / 2.0 * 100)
                assert found.launches % 2 == 0 and found.past_l2 == (found.nbytes * found.launches >= 4 * 4096)
        assert not driver.memory or gpu.driver is driver
    backend._function.cache_clear()


def test_the_fewest_bytes_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fewest bytes of one request times the requests are, nearly, those of the batch."""
    kernels = load_file(ROOT / "specs" / "layout_f32.py", "specs/layout_f32.py")[0].kernels
    with generated(ROOT / "generated", "layout_f32") as package:
        timer = Timer(None, kernels, package, None, read_gb_s=1.0)  # type: ignore[arg-type]
        for op in kernels.ops:
            work = Workload("4 x 64", (64,) * 4, (1,) * 4)
            scene = Scene(kernels, package, work)
            cases = cases_of(op)
            whole = 32 * sum(cases.minimum(cases.call(scene)).values())
            # Four requests share a sector of lengths, of offsets and of the table, at most.
            assert whole <= timer.least(op, work) <= whole + 3 * 4 * 32
        row = 2 * 2 * 64 * 4  # K and V of two heads of 64 floats
        gather = next(op for op in kernels.ops if op.kind == "gather")
        assert timer.least(gather, Workload("4 x 64", (64,) * 4, (1,) * 4)) >= 2 * 4 * 64 * row


def test_bandwidth_is_measured_at_several_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size is several times L2, whole pieces, and as large as memory allows at most."""
    image = compile_unit(bandwidth_unit(), "sm_90a", "ptx", cache=default_cache())
    driver = EmulatedDriver([], build([image.data.decode()], mode="check"))
    gpu = use_emulated(monkeypatch, driver)
    monkeypatch.setattr("kvgen.verify.bandwidth.BYTES_AT_LEAST", 0)
    gpu.l2_bytes = PIECE // 2
    found = read_bandwidth(gpu, b"")
    assert [r.nbytes for r in found] == [2 * PIECE, 8 * PIECE, 32 * PIECE]
    assert all(r.gb_s == pytest.approx(r.nbytes / 1e3) for r in found)  # a launch takes a microsecond there
    gpu.l2_bytes = BYTES_AT_MOST
    monkeypatch.setattr(gpu, "free_bytes", lambda: 3 * PIECE)
    assert [r.nbytes for r in read_bandwidth(gpu, b"")] == [PIECE]


def test_calibration_through_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's side of it (device memory, functions of a cubin, graphs): what the CPU machine finds right is right there."""
    image = compile_unit(calibrate_unit(), "sm_90a", "ptx", cache=default_cache())
    driver = EmulatedDriver([], build([image.data.decode()], mode="check"))
    gpu = use_emulated(monkeypatch, driver)
    monkeypatch.setattr("kvgen.verify.probe.encode", lambda plan, device: encode(plan, "cpu"))
    found = calibrate(GpuMachine(gpu, "sm_90a", b""), SMALL)
    assert (
        found.wrong == () and found.values()["node"] == found.values()["pdl"] == 1.0
    )  # a launch takes a microsecond there
    assert found.values()["read_64"] == pytest.approx(SMALL.stream_bytes / 1e3)


@pytest.fixture(scope="module")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda whose launches do nothing."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("the fake libcuda needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("libcuda")
    source = ROOT / "tests" / "support" / "fake_gpu.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(source), "-ldl"], check=True)
    return folder


def test_through_the_bindings(fake_cuda: Path, tmp_path: Path) -> None:
    """Every driver call of the command; kernels that do nothing are wrong, and are timed. One that never returns costs the case,
    and its time."""
    files = {name: tmp_path / name for name in ("r.json", "i.md")}
    command = [sys.executable, "-m", "kvgen", "verify", "layout_f32", "--gpu", "--quick"]
    command += ["--json", str(files["r.json"]), "--issue", str(files["i.md"]), "--patience", "1"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(fake_cuda), "FAKE_FAULTS": "layout_f32_gather:2=hang"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("Fake GPU: 1 set(s)\ncalibration: 2 figures in ")
    assert "\nread bandwidth of this GPU, GB/s: " in done.stdout
    found = json.loads(files["r.json"].read_text())
    assert found["device"]["name"] == "Fake GPU" and found["device"]["capability"] == "9.0"
    assert found["read_gb_s"] == max(r["gb_s"] for r in found["bandwidth"])
    assert [f["name"] for f in found["calibration"]] == ["node", "pdl"] and len(found["calibration_wrong"]) == len(
        PROBES
    ) - 1
    (only,) = found["sets"]
    assert [k["kernel"] for k in only["kernels"]] == ["append", "gather", "decode"] and only["arch"] == "sm_90a"
    hung = only["kernels"][1]
    assert hung["cases"][1]["wrong"] == ["no answer after 1 s"] and hung["why"] == "not timed: no answer after 3.75 s"
    for kernel in only["kernels"]:
        assert kernel["status"] == "wrong" and len(kernel["cases"]) == 2
    for kernel in (k for k in only["kernels"] if k is not hung):
        (timed,) = kernel["timed"]
        assert timed["gb_s"] == pytest.approx(timed["nbytes"] / timed["us"] / 1e3)
        assert timed["percent"] == pytest.approx(100 * timed["gb_s"] / found["read_gb_s"])
    text = files["i.md"].read_text()
    assert text.startswith("GPU report: Fake GPU, kvgen ") and "3 of 3 kernels wrong" in text.splitlines()[0]
    assert "- calibration, instructions: calibrate_fma: steps: got 0 " in text
    assert "| read bandwidth, measured | " in text and str(tmp_path) not in text and str(ROOT) not in text


def test_what_was_measured_stays_when_the_gpu_is_lost() -> None:
    """No process can start any more: the case that could not run is wrong, later kernels are not run, and a time is missing."""

    time = Timed("3 x 40", 1.0, 1.0, 1, 1.0, 1.0, 1, True)

    class Children:
        def run(self, items: Sequence[Item]) -> Iterator[Answer]:
            for item in items:
                if item.key[-1] == "1":
                    raise DeviceError("got CUDA_ERROR_UNKNOWN")
                yield Answer(item, (), asdict(time) if item.key[0] == "time" else {}, 0.1)

    kernels = load_file(ROOT / "specs" / "layout_f32.py", "specs/layout_f32.py")[0].kernels
    plans = [Plan(work, None) for work in batches(kernels, kernels.ops[0], quick=False)[:3]]
    gpu, how = verify_gpu.OnGpu({}, Calibration((), (), 0.0), (Reading(1, 1.0),)), verify_gpu.How(False, 0, 8)

    def run(cases: int) -> KernelResult:
        kernel = verify_gpu._Kernel(kernels.ops[0], KernelResult("append", "append"), plans[:cases], 2)
        return verify_gpu._kernel(Children(), "layout_f32", kernel, gpu, how)  # type: ignore[arg-type]

    found = run(3)
    assert [c.wrong for c in found.cases] == [(), ("no process can use the GPU any more: got CUDA_ERROR_UNKNOWN",)]
    assert found.status == "wrong" and gpu.lost == "got CUDA_ERROR_UNKNOWN"
    found = run(3)
    assert found.status == "not run" and found.why == "not run: the GPU was lost before (got CUDA_ERROR_UNKNOWN)"
    gpu.lost = ""
    found = run(1)
    assert found.status == "ok" and found.timed == [time] and found.why == "not timed: got CUDA_ERROR_UNKNOWN"


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """The real thing: all right, and no kernel faster than the memory it was measured against allows by far."""
    out = tmp_path / "r.json"
    command = [sys.executable, "-m", "kvgen", "verify", "layout_f32", "llama3_8b", "--gpu", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["summary"]["wrong"] == 0 and found["read_gb_s"] > 10
    figures = {f["name"]: f["value"] for f in found["calibration"]}
    assert found["calibration_wrong"] == [] and 100 < figures["ldg_l2"] < figures["ldg_idle"] <= 1.1 * figures["ldg"]
    assert figures["sub_cores"] == 4 and 16 < figures["lds"] < 64 and 64 < figures["shared_bytes"] < 140
    timed = [t for s in found["sets"] for k in s["kernels"] for t in k["timed"] if t["past_l2"]]
    assert timed and all(0 < t["percent"] < 130 for t in timed)
