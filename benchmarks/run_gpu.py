"""Correctness, golden vectors and timings of every generated kernel on a real GPU.

    python benchmarks/run_gpu.py --prepare cubins                            where there is no GPU: compile, write cases
    python benchmarks/run_gpu.py --cubins cubins --out results.json          where there is one: numpy, ml_dtypes, cuda-bindings
    python benchmarks/run_gpu.py --cubins cubins --out results.json --device cpu --section correctness

Exit status: 0, 1 if a kernel did something wrong, 2 for a usage error. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script, from a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from benchmarks.gpu.packages import generated, set_names, use  # noqa: E402
from benchmarks.gpu.results import Key, Results, table  # noqa: E402

SECTIONS = ("calibrate", "correctness", "golden", "timings")
BUDGETS = {"calibrate": 60.0, "correctness": 300.0, "golden": 60.0, "timings": 270.0}
GOLDEN = ROOT / "tests" / "golden_gpu" / "vectors"
Outcome = tuple[list[str], dict[str, Any]]


class ContextLost(Exception):
    """The GPU's context is gone: nothing more runs in this process."""


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(given)
    use(options.project)
    if options.prepare is not None:
        from benchmarks.gpu.prepare import prepare

        begin = time.monotonic()
        cubins, cases = prepare(options.prepare, set_names(options.only), options.arch)
        print(f"{cubins} cubins and {cases} cases in {options.prepare} ({time.monotonic() - begin:.0f} s)")
        return 0
    # The launchers take cubins from there, and from nowhere else: what was measured is what was prepared.
    os.environ["KVGEN_CUBINS"], os.environ["KVGEN_NO_JIT"] = str(options.cubins), "1"
    if options.device == "cpu":
        del os.environ["KVGEN_CUBINS"], os.environ["KVGEN_NO_JIT"]  # the CPU machine runs PTX, compiled here
    run = Run(options)
    try:
        run.all()
    except ContextLost:
        run.results.save()
        if options.device == "cuda":
            # A kernel destroyed the context. It is recorded; a new process goes on behind it.
            sys.stdout.flush()
            again = [a for a in given if a not in ("--resume", "--continued")]
            script = str(Path(__file__).resolve())
            os.execv(sys.executable, [sys.executable, script, *again, "--resume", "--continued"])
    finally:
        run.results.close()
    print(table(run.results))
    return 1 if run.results.failed() else 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run_gpu.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--prepare", type=Path, metavar="DIR", help="compile everything and write the cases; no GPU needed"
    )
    parser.add_argument("--cubins", type=Path, metavar="DIR", help="what --prepare wrote")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results, as JSON")
    parser.add_argument(
        "--project",
        type=Path,
        default=ROOT,
        metavar="DIR",
        help="the folder with specs/ and generated/; default this one",
    )
    parser.add_argument("--only", default="*", metavar="GLOB", help="these sets")
    parser.add_argument(
        "--arch", action="append", metavar="ARCH", help="with --prepare: instead of the specs'; repeatable"
    )
    parser.add_argument("--section", default=",".join(SECTIONS), help=f"some of {', '.join(SECTIONS)}; default all")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help=f"limit of each section; default {BUDGETS}")
    parser.add_argument("--resume", action="store_true", help="skip what --out has already")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the CPU machine, no timings")
    parser.add_argument("--ordinal", type=int, default=0, help="which GPU")
    parser.add_argument(
        "--golden", type=Path, default=GOLDEN, metavar="DIR", help="golden vectors; a GPU writes, cpu compares"
    )
    parser.add_argument("--date", default="", help="a date to note in the results")
    parser.add_argument("--commit", default="", help="the commit, where git cannot say")
    parser.add_argument("--buffer-mib", type=int, default=4096, help="size of the buffers bandwidth is measured with")
    parser.add_argument("--continued", action="store_true", help=argparse.SUPPRESS)  # after a lost context
    options = parser.parse_args(arguments)
    options.sections = [s for s in options.section.split(",") if s]
    if options.prepare is not None:
        return options
    unknown = [s for s in options.sections if s not in SECTIONS]
    if unknown or not options.sections:
        parser.error(f"--section: got {options.section!r}; it must be some of {', '.join(SECTIONS)}")
    if options.cubins is None or options.out is None:
        parser.error("--cubins and --out are needed (or --prepare)")
    if options.device == "cpu" and options.section != parser.get_default("section") and "timings" in options.sections:
        parser.error("--section timings: the CPU machine has no timings; use a GPU")
    if options.device == "cpu":
        options.sections = [s for s in options.sections if s != "timings"]
    if not (options.cubins / "manifest.json").is_file():
        parser.error(f"--cubins: {options.cubins} has no manifest.json; make it with --prepare {options.cubins}")
    return options


class Run:
    """One run over sections, sets and cases."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.names = set_names(options.only)
        digest = hashlib.sha256((options.cubins / "manifest.json").read_bytes()).hexdigest()
        head: dict[str, Any] = {
            "date": options.date,
            "commit": options.commit or _commit(),
            "cubins_digest": digest,
            "python": sys.version.split()[0],
            "device": {"name": "CPU machine"},
        }
        self.gpu: Any = None
        if options.device == "cuda":
            from kvgen.verify.device import Gpu

            self.gpu = Gpu(options.ordinal)
            head["device"] = self.gpu.describe()
        self.results = Results.open(options.out, head, resume=options.resume)
        print(f"{head['device']['name']}: {len(self.names)} sets, sections {', '.join(options.sections)}", flush=True)

    def all(self) -> None:
        """Every section, each within its budget."""
        for section in self.options.sections:
            self._section(section)
            self.results.save()

    def _section(self, section: str) -> None:
        facts = self.results.sections.setdefault(section, {"seconds": 0.0})
        budget = self.options.budget if self.options.budget is not None else BUDGETS[section]
        facts |= {"budget": budget, "finished": False}
        begin, before = time.monotonic(), facts["seconds"]
        # A --resume has a budget of its own; what goes on after a lost context is still the same run.
        end = begin + budget - (before if self.options.continued else 0.0)
        work = {
            "calibrate": self._calibrate,
            "correctness": self._correctness,
            "golden": self._golden,
            "timings": self._timings,
        }[section]
        try:
            for key, case in work():
                if key in self.results.entries and self.options.resume:
                    continue
                if time.monotonic() >= end:
                    return
                self._one(key, case)
            facts["finished"] = True
        finally:
            facts["seconds"] = round(before + time.monotonic() - begin, 2)

    def _one(self, key: Key, case: Callable[[], Outcome]) -> None:
        """Run one case and keep what came of it, whatever that is."""
        self.results.begin(key)
        begin = time.monotonic()
        try:
            wrong, more = case()
        except Exception as error:
            wrong, more = [f"{type(error).__name__}: {error}"], {"traceback": traceback.format_exc()}
        if wrong:
            more = more | {"detail": "; ".join(wrong)}
            print(f"FAILED {' '.join(key)}: {more['detail']}", flush=True)
        self.results.record(key, "failed" if wrong else "ok", time.monotonic() - begin, more)
        if wrong and self.gpu is not None:
            try:
                self.gpu.wait()
            except Exception as error:
                raise ContextLost(str(error)) from error

    # Sections ----------------------------------------------------------------------------------------------------

    def _file(self, name: str) -> Any:
        from benchmarks.gpu.cases import load

        return load(self.options.cubins / "cases" / f"{name}.npz")

    def _memory(self) -> Any:
        from kvgen.verify.memory import GpuMemory, HostMemory

        return HostMemory() if self.gpu is None else GpuMemory(self.options.ordinal)

    def _each_set(self, section: str) -> Iterator[tuple[str, Any]]:
        """(set, its cases); a set whose file cannot be read is a failure of its own."""
        for name in self.names:
            try:
                yield name, self._file(name)
            except (OSError, ValueError, KeyError) as error:
                detail = f"{type(error).__name__}: {error}; run --prepare {self.options.cubins}"
                self.results.record((section, name, "", "cases"), "failed", 0.0, {"detail": detail})

    def _calibrate(self) -> Iterator[tuple[Key, Callable[[], Outcome]]]:
        """All probes in one entry, for later ones use what earlier ones found; on the CPU machine of a few steps each."""
        from kvgen.verify.calibrate import NAME, calibrate, calibrate_unit
        from kvgen.verify.probe import SMALL, CpuMachine, GpuMachine

        def one() -> Outcome:
            if self.gpu is None:
                found = calibrate(CpuMachine(calibrate_unit(), "sm_90a"), SMALL)
            else:
                found = calibrate(GpuMachine(self.gpu, *self._measuring(NAME, calibrate_unit())))
            return list(found.wrong), {"figures": [dataclasses.asdict(f) for f in found.figures]}

        yield ("calibrate", "", "", "all"), one

    def _correctness(self) -> Iterator[tuple[Key, Callable[[], Outcome]]]:
        from benchmarks.gpu.correctness import failures, run

        for name, file in self._each_set("correctness"):
            for case in file.cases:

                def one(case: Any = case, file: Any = file, name: str = name) -> Outcome:
                    return failures(case, file.blobs, run(case, file.blobs, generated(name), self._memory())), {}

                yield ("correctness", *case.key), one

    def _golden(self) -> Iterator[tuple[Key, Callable[[], Outcome]]]:
        """On a GPU: a set's golden cases are one entry, which writes its file. On the CPU: compare, case by case."""
        from benchmarks.gpu.cases import load
        from benchmarks.gpu.correctness import compare_golden, failures, run, store_golden

        if self.gpu is None:
            for path in sorted(self.options.golden.rglob("*.npz")):
                if path.stem not in self.names:
                    continue
                file = load(path)
                for case in file.cases:

                    def compare(case: Any = case, file: Any = file, name: str = path.stem) -> Outcome:
                        return compare_golden(case, file.blobs, run(case, file.blobs, generated(name), self._memory()))

                    yield ("golden", *case.key), compare
            return
        for name, file in self._each_set("golden"):

            def store(file: Any = file, name: str = name) -> Outcome:
                outputs = {c.key: run(c, file.blobs, generated(name), self._memory()) for c in file.cases if c.golden}
                cases = [c for c in file.cases if c.golden]
                wrong = [f"{c.op} {c.name}: {w}" for c in cases for w in failures(c, file.blobs, outputs[c.key])]
                if wrong:  # wrong bits are no vectors
                    return wrong, {}
                path = store_golden(file, outputs, self.options.golden / self.gpu.folder())
                return [], {"file": path.name, "bytes": path.stat().st_size}

            yield ("golden", name, "", "store"), store

    def _timings(self) -> Iterator[tuple[Key, Callable[[], Outcome]]]:
        from benchmarks.gpu.apart import Apart
        from benchmarks.gpu.timings import Timer
        from benchmarks.gpu.workload import empty_node
        from kvgen.verify.bandwidth import NAME, bandwidth_unit, filler, measure

        _, cubin = self._measuring(NAME, bandwidth_unit())
        # Always anew: percentages are of what this run found.
        self.results.bandwidth = measure(self.gpu, cubin, self.options.buffer_mib << 20)
        for name, file in self._each_set("timings"):
            fill, empty = filler(self.gpu, cubin), empty_node(self.gpu, cubin)
            apart = Apart(self.options.cubins, name) if file.facts.apart else None
            timer = Timer(self.gpu, generated(name), file.facts, fill, empty, self.results.bandwidth, apart)
            for timed in timer.cases():

                def one(timed: Any = timed) -> Outcome:
                    return [], timed.run()

                yield ("timings", name, timed.op, timed.case), one
        self.results.head["device"]["smi_after"] = _smi(self.options.ordinal)

    def _measuring(self, name: str, unit: Any) -> tuple[str, bytes]:
        """The architecture and the cubin of the measuring kernels `name`."""
        from kvgen.compile import find, read_folder, select_arch, text_digest

        manifest = read_folder(self.options.cubins)
        arch = select_arch(self.gpu.driver.capability(self.options.ordinal), manifest.archs(name, name))
        return arch, find(manifest, name, name, arch, text_digest(unit.text))


def _smi(ordinal: int) -> dict[str, str] | None:
    from kvgen.verify.device import smi

    return smi(ordinal)


def _commit() -> str:
    """The commit of this checkout, "" where git does not say."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
