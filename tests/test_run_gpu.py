"""benchmarks/run_gpu.py without a GPU: on the CPU machine, and rehearsed on a libcuda whose launches do nothing, or worse."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from benchmarks import run_gpu
from benchmarks.gpu import golden, older, plan, prepare, worker
from benchmarks.gpu.outputs import collect, replace_file, restore
from benchmarks.gpu.packages import ROOT, generated, set_names
from benchmarks.gpu.packed import missing, unpack
from benchmarks.gpu.plan import Patience, Plan, SetPlan, Wanted
from benchmarks.gpu.results import Log, read, record_of, table
from benchmarks.gpu.setup import Setup
from kvgen.schema.loader import LoadedSet, load_file, spec_files
from kvgen.verify.batches import batches
from kvgen.verify.memory import HostMemory
from kvgen.verify.probes import PROBES
from kvgen.verify.run import Verifier
from kvgen.verify.supervisor import Answer, Item, Key
from tests.golden_gpu.probes import probes
from tests.golden_gpu.record import save_part, vectors_of

SMALL: Final = "layout_f32"
PROBE: Final = "library_copy"
Records = Mapping[Key, dict[str, Any]]


@cache
def spec(name: str) -> LoadedSet:
    """A checked-in set."""
    files = sorted(spec_files(ROOT / "specs", ROOT), key=lambda f: (name in f.expected, len(f.path.stem)), reverse=True)
    likely = (f for f in files if name in f.expected or name.startswith(f.path.stem))
    sets = (s for f in likely for s in load_file(f.path, f.source, ROOT))
    return next(s for s in sets if s.kernels.name == name)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder for one set. The tools look at two of its kernels."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "SANITIZED", ((SMALL, "gather", "small"),))
        patch.setattr(prepare, "PROFILED", ((SMALL, "decode", "1x4096"),))
        patch.setattr(prepare, "OCCUPANCY", ((SMALL, "decode"),))
        patch.setattr(prepare, "OLDER", ((SMALL, "gather"),))
        # By this process's NVRTC; tests/versions runs others.
        patch.setattr(older, "compile_older", lambda *given: prepare.write_ops(*given[:3]))
        arguments = ["--prepare", str(folder), "--only", SMALL, "--arch", "sm_90a", "--probes", PROBE]
        arguments += ["--nvrtc", "13.0.88"]
        assert run_gpu.main(arguments) == 0
    return folder


# The prepared folder --------------------------------------------------------------------------------------------------


def test_what_travels(prepared: Path, tmp_path: Path) -> None:
    assert sorted(p.name for p in prepared.iterdir()) == ["kernels.tar.xz", "plan.json"]
    found = plan.load(prepared)
    (only,) = found.sets.values()
    assert {op for op, _ in only.cases} == {"append", "gather", "decode"}
    assert {"small", "mixed", "long", "page ids and lengths"} <= {case for op, case in only.cases if op == "decode"}
    assert {"1x4096", "8x4096", "32x4096", "64x8192", "128x1024"} <= {c for op, c in only.timings if op == "decode"}
    assert found.probes == (("device_library", PROBE),) and set(found.units) == {"device_library"}
    unpack(prepared, found.digest, tmp_path)
    kernels = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.cubin")}
    assert kernels == {
        *("probes/device_library.cubin", "bandwidth/bandwidth.sm_90a.cubin", "calibrate/calibrate.sm_90a.cubin"),
        *(f"{SMALL}/{op}.sm_90a.cubin" for op in ("append", "gather", "decode")),
        *(f"lines/{SMALL}/{op}.sm_90a.cubin" for op in ("gather", "decode")),
        f"older/{SMALL}/gather.sm_90a.cubin",
    }
    assert missing() == [] and not (tmp_path / "site").exists()
    with pytest.raises(ValueError, match=r"is not what its plan\.json was made with"):
        unpack(prepared, "0" * 64, tmp_path)


def test_it_is_the_same_each_time(prepared: Path, tmp_path: Path) -> None:
    unpack(prepared, plan.load(prepared).digest, tmp_path)
    digest = prepare._pack(tmp_path, tmp_path.with_suffix(".tar.xz"))
    assert digest == plan.load(prepared).digest and prepare.set_plan(spec(SMALL)) == plan.load(prepared).sets[SMALL]


def test_packages_that_are_missing_come_from_wheels(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "prepared"
    shutil.copytree(prepared, folder)
    (folder / "wheels").mkdir()
    with zipfile.ZipFile(folder / "wheels" / "pydantic-9-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pydantic/__init__.py", "VERSION = '9'\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pydantic" else object())
    assert missing() == ["pydantic"]
    unpack(folder, plan.load(folder).digest, tmp_path / "kernels")
    assert (tmp_path / "kernels" / "site" / "pydantic" / "__init__.py").is_file()


V4: Final = ("deepseek_v4_flash_tp8", "deepseek_v4_flash_window", "deepseek_v4_index_keys", "deepseek_v41_flash_c2")


@pytest.mark.parametrize("name", set_names("*") if "KVGEN_FAMILY" in os.environ else V4)
def test_every_set_has_work(name: str) -> None:
    """In a campaign all sets; here those whose pages are aligned to 576 bytes."""
    found, kernels = prepare.set_plan(spec(name)), spec(name).kernels
    assert {op for op, _ in found.cases} == {op.name for op in kernels.ops if op.kind != "custom"}
    assert len(set(found.cases)) == len(found.cases) and len(set(found.timings)) == len(found.timings)
    timed = {op for op, _ in found.timings}
    assert {op.name for op in kernels.ops if op.kind in ("mla_decode", "pool_tokens", "indexer_scores")} <= timed


def test_the_names_in_the_plan() -> None:
    assert {*plan.BY_VALUE, *plan.GOLDEN, *plan.COMPARED, plan.STEPPED} <= set(set_names("*"))
    for name, op in (*plan.OCCUPANCY, *plan.OLDER, *((n, o) for n, o, _ in (*plan.SANITIZED, *plan.PROFILED))):
        assert op in {o.name for o in spec(name).kernels.ops}, (name, op)
    for name, op, case in plan.PROFILED:
        assert (op, case) in prepare.timed_cases(spec(name).kernels, generated(name))
    for name, op, case in plan.SANITIZED:
        kernels = spec(name).kernels
        (found,) = (o for o in kernels.ops if o.name == op)
        assert case in {w.name for w in batches(kernels, found, quick=True)}
    steps = prepare.timed_cases(spec(plan.STEPPED).kernels, generated(plan.STEPPED))
    assert {"1x4096", "8x4096", "64x4096"} == {case for op, case in steps if op == "step"}


def test_the_order_of_work() -> None:
    """Sets by value, then those with few cases; each set's cases, then its timings, which run alone; without what is done."""
    counts = {"x": 3, "y": 1, "gemma2_9b": 2, "llama3_8b": 1}
    sets = {n: SetPlan("", (("decode", "small"),) * count, (("decode", "1x4096"),)) for n, count in counts.items()}
    found = Plan(sets, (("tma", "t"), ("quantize", "q")), {"quantize": "1", "tma": "2"})
    assert found.names() == ["llama3_8b", "gemma2_9b", "y", "x"]
    wanted = Wanted(plan.SECTIONS, Patience(case=3.0), frozenset({("correctness", "gemma2_9b", "decode", "small")}))
    items = list(plan.by_set(found, found.names()[:2], wanted, {"read": 1.0}))
    assert [(i.key[:2], i.exclusive) for i in items] == [
        (("correctness", "llama3_8b"), False), (("timings", "llama3_8b"), True), (("timings", "gemma2_9b"), True)
    ]  # fmt: skip
    assert items[0].patience == 3.0 and items[1].given == {"bandwidth": {"read": 1.0}}
    assert [i.key[3] for i in plan.golden_probes(found, wanted)] == ["t", "q"]
    assert not list(plan.by_set(found, found.names(), Wanted(("tools",), Patience()), {}))
    assert [i.key[0] for i in plan.measures(wanted)][:2] == ["bandwidth", "calibrate"]
    assert plan.until("probes", 100.0, 400.0, 500.0) == 150.0 and plan.until("probes", 390.0, 400.0, 500.0) == 400.0
    assert plan.until("probes", 100.0, None, None) is None


# The results ---------------------------------------------------------------------------------------------------------


def record(case: str, status: str = "ok", **more: Any) -> dict[str, Any]:
    return {
        "section": "correctness",
        "set": SMALL,
        "op": "append",
        "case": case,
        "status": status,
        "seconds": 0.5,
    } | more


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines in the file stay whole. Lines that found no room are written once there is room."""
    path = tmp_path / "results.jsonl"
    (tmp_path / "facts.json").write_text("earlier")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Log(path, {"run": {}}) as log:
        log.add(record("first"))
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, hard))
            log.add(record("second"))
            log.add(record("third"))
            assert log.trouble.endswith("results.jsonl: File too large")
            assert replace_file(tmp_path / "facts.json", bytes(1 << 16)) == "File too large"
            assert list(read([path])[1]) == [("correctness", SMALL, "append", "first")]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.add(record("fourth"))
        assert log.trouble == ""
    assert [key[3] for key in read([path])[1]] == ["first", "second", "third", "fourth"]
    assert [(tmp_path / "facts.json").read_text(), len(list(tmp_path.iterdir()))] == ["earlier", 2]
    with Log(Path("/dev/full"), {}) as log:
        assert log.trouble == "/dev/full: No space left on device"


def test_half_a_line_goes(tmp_path: Path) -> None:
    """A process that was killed while it wrote leaves half a line; results that follow begin on one of their own."""
    path = tmp_path / "results.jsonl"
    with Log(path, {"run": {}}) as log:
        log.add(record("first"))
    with path.open("ab") as file:
        file.write(b'{"section": "corr')
    assert len(read([path])[1]) == 1
    with Log(path, {"run": {}}) as log:
        log.add(record("first", "failed", detail="wrong"))
    heads, records = read([path])
    assert len(heads) == 2 and [r["status"] for r in records.values()] == ["failed"]
    path.write_text('{"schema": 1}\n')
    with pytest.raises(ValueError, match=r"results\.jsonl:1: is no result of run_gpu\.py: schema 1"):
        read([path])


def test_the_table() -> None:
    item = Item(("timings", SMALL, "append", "rows 1"), 1.0)
    content = {"us": 4.0, "gb_s": 100.0, "percent": 50.0, "against": "write", "past_l2": False, "us_no_pdl": 5.0}
    content |= {"empty_us": 1.0, "empty_us_no_pdl": 2.0, "kernels_apart": 3, "apart_us": 9.0}
    found = [
        record_of(Answer(item, (), content, 0.25)),
        record("small"),
        record("mixed", "failed", detail="pool: 3 bytes differ"),
        record("x", "skipped", skipped="no torch", section="peers"),
        record("all", section="bandwidth", gb_s={"read": 1.0, "write": 2.0, "copy": 3.0}),
    ]
    keys = [tuple(r[name] for name in ("section", "set", "op", "case")) for r in found]
    text = table(
        dict(zip(keys, found, strict=True)), [("correctness", SMALL, "append", "long"), ("tools", "", "", "x")]
    )
    for line in (
        "correctness  1 of 2 ok, 1 not reached, 1.0 s",
        "peers        0 of 1 ok, 1 skipped, 0.5 s",
        "tools        1 not reached",
        "memory of this GPU, GB/s: read 1, write 2, copy 3",
        f"correctness {SMALL}/append mixed: pool: 3 bytes differ",
        f"peers {SMALL}/append x: no torch",
    ):
        assert line in text.splitlines(), text
    assert "50.0 write (within L2, empty + 3.00 us; without PDL 5.00, empty + 3.00 us, 3 kernels apart 9.00 us)" in text


def test_what_comes_back_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("a.golden.npz", 10), ("b.golden.npz", 30_000), ("m.log", 10), ("n.log", 20), ("x.ncu-rep", 5)):
        (tmp_path / name).write_bytes(bytes(size))
    monkeypatch.setattr("benchmarks.gpu.outputs.FILE_LIMIT", 20_480)
    found = dict(collect(tmp_path, "a_gpu"))
    assert set(found) == {"golden.tar", "tools.log", "ncu.tar.gz"} and len(found["tools.log"]) == 30
    (tmp_path / "golden.tar").write_bytes(found["golden.tar"])
    with tarfile.open(tmp_path / "golden.tar") as archive:
        assert archive.getnames() == ["a_gpu/a.npz"]  # the other one would pass the limit


def test_a_second_run_adds_to_the_files_of_the_first(tmp_path: Path) -> None:
    """Vectors of probes and cases, reports, the tools' log: a later one of a name replaces the earlier one."""
    first, second, out = (tmp_path / name for name in ("first", "second", "out"))
    for folder in (first, second, out):
        folder.mkdir()

    def leave(parts: Path, probes: dict[str, int], golden: str, log: str) -> dict[str, bytes]:
        for name, value in probes.items():
            save_part(
                parts / f"{name}.probe.npz", {"out/before": np.zeros(1, np.uint8), "out/after": np.uint8([value])}
            )
        (parts / f"{golden}.golden.npz").write_bytes(golden.encode())
        (parts / f"{log}.log").write_text(f"{log}\n")
        (parts / f"{log}.ncu-rep").write_text(log)
        return dict(collect(parts, "a_gpu"))

    one, other = (p.name for p in probes()[:2])
    for name, data in leave(first, {one: 1, other: 1}, "x.decode", "ncu.x").items():
        (out / name).write_bytes(data)
    restore(out, second)
    assert dict(collect(second, "a_gpu"))["tools.log"] == b"ncu.x\n"  # before anything is new
    found = leave(second, {other: 2}, "y.decode", "memcheck.y")
    assert found["tools.log"] == b"ncu.x\nmemcheck.y\n"
    (out / "golden.tar").write_bytes(found["golden.tar"])
    with tarfile.open(out / "golden.tar") as archive:
        assert set(archive.getnames()) == {"a_gpu/x.decode.npz", "a_gpu/y.decode.npz", "a_gpu/probes.npz"}
        archive.extractall(tmp_path, filter="data")
    vectors, _ = vectors_of(tmp_path / "a_gpu" / "probes.npz")
    assert {name: int(own["out/after"][0]) for name, own in vectors.items()} == {one: 1, other: 2}
    (out / "ncu.tar.gz").write_bytes(found["ncu.tar.gz"])
    with tarfile.open(out / "ncu.tar.gz") as archive:
        assert set(archive.getnames()) == {"ncu.x.ncu-rep", "memcheck.y.ncu-rep"}


# On the CPU machine --------------------------------------------------------------------------------------------------


def test_everything_is_right_on_the_cpu_machine(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(
        "benchmarks.gpu.outputs.replace_file", lambda path, data: written.append(path.name) or replace_file(path, data)
    )
    monkeypatch.setattr(run_gpu, "COLLECT_EACH", 0.0)
    common = ["--prepared", str(prepared), "--out", str(tmp_path / "out"), "--device", "cpu", "--jobs", "1"]
    assert run_gpu.main([*common, "--section", "correctness,probes", "--date", "2026-01-02", "--commit", "abc"]) == 0
    (head,), records = read([tmp_path / "out" / "results.jsonl"])
    assert head["run"]["date"] == "2026-01-02" and head["run"]["commit"] == "abc"
    cases = plan.load(prepared).sets[SMALL].cases
    assert {key[2:] for key in records if key[0] == "correctness"} == set(cases) and len(records) == len(cases) + 1
    assert all(r["status"] == "ok" and r["seconds"] > 0 for r in records.values())
    share = records["correctness", SMALL, "decode", "long"]["share"]
    assert 0 < share < 1 and f"correctness  {len(cases)} of {len(cases)} ok" in capsys.readouterr().out
    assert written.count("golden.tar") > len(cases)  # as they come
    with tarfile.open(tmp_path / "out" / "golden.tar") as archive:
        assert archive.getnames() == ["cpu/probes.npz"]
    with pytest.raises(SystemExit):
        run_gpu.main(common)
    assert "--out: " in capsys.readouterr().err  # there are results


def test_one_case_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """For sanitizers a case three times, and nothing else; for other cubins a case beside its oracle."""
    from benchmarks.gpu import launch_one

    setup = Setup(str(ROOT), "", "", "cpu", 0, {SMALL: spec(SMALL).source}, asdict(Patience()), 16)
    case = [json.dumps(asdict(setup)), SMALL, "gather"]
    assert launch_one.main([*case, "small", "--held"]) == 0
    launched: list[Any] = []
    monkeypatch.setattr(
        "kvgen.verify.launch.launch", lambda case, memory: launched.append((case.call.op.name, case.batch))
    )
    assert launch_one.main([*case, "mixed"]) == 0
    assert launched == [("gather", "mixed")] * 3


def test_golden_vectors_that_cannot_be_written_cost_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "GOLDEN", (SMALL,))
    parts = tmp_path / "none"
    setup = Setup(str(ROOT), "", str(parts), "cpu", 0, {SMALL: spec(SMALL).source}, asdict(Patience()), 16)
    done = worker.start(setup).do(("correctness", SMALL, "gather", "small"), {}, lambda _: None)
    assert done.wrong == () and done.content["not_kept"] == "No such file or directory"
    parts.mkdir()
    done = worker.start(setup).do(("correctness", SMALL, "gather", "small"), {}, lambda _: None)
    assert "not_kept" not in done.content and (parts / f"{SMALL}.gather.golden.npz").is_file()


def test_golden_vectors_are_compared_bit_by_bit(tmp_path: Path) -> None:
    """A case of a decode and of an append, kept as a GPU's would be; what another machine may answer, and what it may not."""
    kernels, package = spec(SMALL).kernels, generated(SMALL)
    for name, output in (("decode", "out"), ("append", "pool")):
        op = next(o for o in kernels.ops if o.name == name)
        verifier = Verifier(kernels, package, HostMemory())
        assert not verifier.case(op, verifier.plans(op)[0]).wrong and verifier.last is not None
        case, left = verifier.last
        path = tmp_path / f"{SMALL}.{name}.npz"
        golden.store(path, case.before, left.contents)
        wrong, facts = golden.compare(path, kernels, package, name)
        assert wrong == [] and facts["elements"] > 0 and facts["different"] == facts["ulps"] == 0
        changed = left.contents.flat()[output]
        changed[changed == changed] = np.nextafter(changed[changed == changed], np.float32(9))
        golden.store(path, case.before, left.contents)
        wrong, facts = golden.compare(path, kernels, package, name)
        assert facts["ulps"] == 1 and bool(wrong) == (name == "append"), wrong  # attention may round otherwise
        changed[...] = changed * 2 + 1
        golden.store(path, case.before, left.contents)
        wrong, _ = golden.compare(path, kernels, package, name)
        assert wrong and wrong[0].startswith("the GPU: "), wrong


def test_usage_errors(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--prepared", str(prepared), "--out", str(tmp_path / "out")]
    other = tmp_path / "other.jsonl"
    other.write_text('{"schema": 2, "run": {"kernels": "0"}}\n')
    for arguments, words in (
        ([], "--prepared and --out are needed"),
        (["--prepared", str(tmp_path), *here[2:]], "has no plan.json; make it with --prepare"),
        ([*here, "--section", "speed"], "got 'speed'"),
        ([*here, "--section", "timings", "--device", "cpu"], "got the CPU machine"),
        ([*here, "--again", str(tmp_path / "none")], "--again: "),
        ([*here, "--again", str(other)], "is of other kernels"),
        (["--table", str(tmp_path / "none")], "--table: "),
    ):
        with pytest.raises(SystemExit) as error:
            run_gpu.main(arguments)
        assert error.value.code == 2 and words in capsys.readouterr().err, arguments


# The rehearsal -------------------------------------------------------------------------------------------------------

TOOLS: Final = {
    # One line each time it is asked, and each tenth of a second with --loop-ms.
    "nvidia-smi": """
case "$*" in
    *loop-ms*) echo "timestamp, clocks"; while :; do echo "2026/01/02, 1980 MHz"; sleep 0.1; done ;;
    *) echo "580.1, 100 W, 40, 345 MHz, 2619 MHz, 1980 MHz, 2619 MHz, 0" ;;
esac""",
    # test_one_case_is_launched has the program that it would run.
    "compute-sanitizer": """echo "========= ERROR SUMMARY: 0 errors" """,
    "ncu": """
while [ "$1" != -m ]; do [ "$1" != --export ] || report=$2; python=$1; shift; done
"$python" "$@" && echo profile >"$report" """,
}
ABSENT: Final = ("jinja2", "typer", "rich", "hypothesis", "pytest", "torch")


@dataclass
class Machine:
    """A machine with a GPU: what travelled (a copy of the checkout, the prepared folder), a fake driver, few packages."""

    folder: Path
    cuda: Path

    def start(self, *arguments: str, faults: str = "", **how: Any) -> subprocess.Popen[str]:
        """gpu_15min.sh with these arguments; PREPARED and OUT come first."""
        own = {"PYTHON": sys.executable, "LD_LIBRARY_PATH": str(self.cuda), "FAKE_FAULTS": faults}
        own |= {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(self.folder / "bin")}
        command = [str(self.folder / "checkout" / "benchmarks" / "gpu_15min.sh"), "prepared", "out", *arguments]
        quick = ["--jobs", "1", "--items", "1000", "--buffer-mib", "16", "--sample", "0.1", "--patience-probe", "20"]
        return subprocess.Popen(
            [*command, *quick],
            cwd=self.folder,
            env=os.environ | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **how,
        )

    def records(self) -> Records:
        return read([self.folder / "out" / "results.jsonl"])[1]


@pytest.fixture
def machine(prepared: Path, tmp_path: Path, fake_cuda: Path) -> Iterator[Machine]:
    checkout = tmp_path / "checkout"
    for name in ("benchmarks", "kvgen", "templates", "tests"):
        # With what Python made of the modules: their times stay.
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("models", "surface", "docs"))
    for name in (SMALL, "device"):
        shutil.copytree(ROOT / "generated" / name, checkout / "generated" / name)
    (checkout / "specs").mkdir()
    shutil.copy2(ROOT / "specs" / f"{SMALL}.py", checkout / "specs")
    shutil.copytree(prepared, tmp_path / "prepared")
    (tmp_path / "bin").mkdir()
    for name, text in TOOLS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin" / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n")
    # facts.json shows that the copy ran.
    version = checkout / "kvgen" / "version.py"
    version.write_text(version.read_text().replace('__version__: Final = "', '__version__: Final = "copy of '))
    yield Machine(tmp_path, fake_cuda)


@pytest.fixture(scope="module")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda whose launches do nothing."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("the fake libcuda needs Linux and a C compiler")
    folder, source = tmp_path_factory.mktemp("libcuda"), ROOT / "tests" / "support" / "fake_gpu.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(source), "-ldl"], check=True)
    return folder


def test_both_commands_from_the_packed_folder_alone(machine: Machine) -> None:
    """A launch that sleeps, one that never returns, one that loses the context: the first one is waited for, the others cost
    their cases, and the run goes on behind them. The second command does again what failed, and what the first one did not."""
    faults = "append:2=sleep,gather:4=hang,decode:3=lost"
    first = ("--section", "facts,calibrate,bandwidth,probes,correctness", "--patience-case", "2")
    run = machine.start(*first, faults=faults)
    said, _ = run.communicate()
    assert run.returncode == 1, said
    records = machine.records()
    checked = {key[2:]: r["detail"] for key, r in records.items() if key[0] == "correctness"}
    assert list(checked) == list(plan.load(machine.folder / "prepared").sets[SMALL].cases), said
    ended = {
        key: why for key, why in checked.items() if "differ" not in why and "off by" not in why and "NaN" not in why
    }
    said_of = {
        "gather": "no answer after 2 s",
        "decode": "cuMemcpyDtoH: got CUDA_ERROR_ILLEGAL_ADDRESS",
    }
    assert all(why.startswith(said_of[op]) for (op, _), why in ended.items()), ended
    assert len(ended) == 2 and records["correctness", SMALL, "append", "mixed"]["seconds"] >= 0.5
    assert records["bandwidth", "", "", "all"]["gb_s"].keys() == {"read", "write", "copy"}
    figures = [f["name"] for key, r in records.items() if key[0] == "calibrate" for f in r.get("figures", ())]
    assert figures == ["node", "pdl"]  # of graphs; launches that do nothing leave no sums
    facts = json.loads((machine.folder / "out" / "facts.json").read_text())
    assert facts["versions"]["device"]["name"] == "Fake GPU" and facts["versions"]["kvgen"].startswith("copy of ")
    assert facts[f"{SMALL}/tensor_maps/all"]["encoded"] > 0 and facts[f"{SMALL}/decode/occupancy"]["blocks"] > 0
    older_one = facts[f"{SMALL}/gather/nvrtc 13.0.88"]
    assert older_one["status"] == "failed" and older_one["detail"].startswith("k_out: "), "launches do nothing"
    assert "bytes" in facts["tensor_map/launchers"] and "refused" in facts["tensor_map/bindings"]
    assert (machine.folder / "out" / "clocks.csv").read_text().count("1980 MHz") > 5
    assert "17 failed" not in said and f"correctness  0 of {len(checked)} ok" in said
    assert f"correctness  0 of {len(checked)} ok" in (machine.folder / "out" / "log.txt").read_text()

    run = machine.start("again", "--section", "correctness,timings,peers,tools")
    said, _ = run.communicate()
    again = machine.records()
    assert run.returncode == 1, said
    assert not any(r["detail"].startswith(("no answer", "cuMemcpy")) for r in again.values() if "detail" in r), said
    timed = {key[2:]: r for key, r in again.items() if key[0] == "timings"}
    assert set(timed) == set(plan.load(machine.folder / "prepared").sets[SMALL].timings)
    rates = again["bandwidth", "", "", "all"]["gb_s"]
    for key, r in timed.items():
        assert r["status"] == "ok" and r["us"] > 0, (key, r)
        if not r.get("host"):
            assert r["gb_s"] == pytest.approx(r["least_bytes"] / r["us"] / 1e3)
            assert r["percent"] == pytest.approx(100 * r["gb_s"] / rates[r["against"]])
    row = 2 * 2 * 64 * 4  # K and V of two heads of 64 floats
    assert timed["append", "rows 128"]["least_bytes"] == 2 * 128 * row
    assert timed["decode", "32x4096"]["least_bytes"] == 32 * 4096 * row + 2 * 32 * 8 * 64 * 4
    tools = {key[2]: r["status"] for key, r in again.items() if key[0] == "tools"}
    assert tools == {"memcheck": "ok", "racecheck": "ok", "ncu": "ok"}
    assert {r["skipped"] for key, r in again.items() if key[0] == "peers"} == {"PyTorch cannot be imported here"}
    out = {p.name: p.stat().st_size for p in (machine.folder / "out").iterdir()}
    assert (
        set(out)
        == {
            *("results.jsonl", "log.txt", "facts.json", "clocks.csv", "golden.tar", "tools.log", "ncu.tar.gz"),
        }
        and max(out.values()) < 16 << 20
    )
    assert (machine.folder / "out" / "tools.log").read_text().count("ERROR SUMMARY: 0 errors") == 2


def test_a_full_disk_and_the_end_of_the_lease(machine: Machine) -> None:
    """Results that find no room on the disk are printed; so is the table when somebody ends the run."""
    (machine.folder / "out").mkdir()
    (machine.folder / "out" / "results.jsonl").symlink_to("/dev/full")
    first = ("--section", "bandwidth,calibrate,correctness", "--patience-case", "100")
    run = machine.start(*first, faults="append:1=hang")
    assert run.stdout is not None
    said = ""
    while said.count('"section": "calibrate"') < len(PROBES):
        line = run.stdout.readline()
        assert line, said
        said += line
    run.send_signal(signal.SIGTERM)
    said += run.communicate()[0]
    assert run.returncode in (124, 143), said
    printed = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [r["section"] for r in printed] == ["bandwidth"] + ["calibrate"] * len(PROBES)
    assert "bandwidth    1 of 1 ok" in said and f"calibrate    1 of {len(PROBES)} ok" in said
    assert "correctness  18 not reached" in said and "NOT WRITTEN: out/results.jsonl: No space left on device" in said


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """Prepare for this GPU, then the real thing."""
    assert run_gpu.main(["--prepare", str(tmp_path / "prepared"), "--only", SMALL]) == 0
    command = [str(ROOT / "benchmarks" / "gpu_15min.sh"), str(tmp_path / "prepared"), str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--only", SMALL], capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = read([tmp_path / "out" / "results.jsonl"])[1]
    assert records["bandwidth", "", "", "all"]["gb_s"]["read"] > 10
