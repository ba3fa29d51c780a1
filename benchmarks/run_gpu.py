"""Hold every generated kernel to its oracle on a GPU, time it, and measure the GPU's parts, in some minutes.

    python benchmarks/run_gpu.py --prepare cubins --arch sm_90a --python 3.12    where there is no GPU
    python benchmarks/run_gpu.py --prepared cubins --out results                 where there is one
    python benchmarks/run_gpu.py --prepared cubins --out results --device cpu    a rehearsal
    python benchmarks/run_gpu.py --table results/results.jsonl                   the table again

Exit status: 0, 1 if a kernel did something wrong, 2 for a usage error. See benchmarks/README.md; benchmarks/gpu_15min.sh is
the command for a GPU that is there for 15 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script, from a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from benchmarks.gpu import plan as plans  # noqa: E402
from benchmarks.gpu import results  # noqa: E402
from benchmarks.gpu.clocks import sampled  # noqa: E402
from benchmarks.gpu.packages import set_names, use  # noqa: E402
from benchmarks.gpu.packed import SITE, missing, unpack, use_site  # noqa: E402
from benchmarks.gpu.plan import SECTIONS, Patience, Plan, Wanted  # noqa: E402
from benchmarks.gpu.setup import Setup  # noqa: E402
from kvgen.errors import DeviceError  # noqa: E402
from kvgen.verify.supervisor import Item, Key, Supervisor  # noqa: E402

CPU_SECTIONS: Final = ("calibrate", "probes", "correctness")
RESULTS: Final = "results.jsonl"
JOBS: Final = 6
COLLECT_EACH: Final = 60.0  # seconds after which the files of children are written again
LINE: Final = 160  # characters of what is wrong with a case, on stdout


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print; the exit status."""
    begin, options = time.monotonic(), _options(arguments)
    if options.table is not None:
        return _table(options.table)
    use(options.project)
    if options.prepare is not None:
        return _prepare(options)
    try:
        plan = plans.load(options.prepared)
    except ValueError as error:
        raise _usage(f"--prepared: {error}") from error
    with ExitStack() as stack:
        unpacked = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgen-gpu-")))
        try:
            unpack(options.prepared, plan.digest, unpacked / "kernels")
        except (OSError, ValueError) as error:
            raise _usage(f"--prepared: {error}") from error
        use_site(unpacked / "kernels")
        if lacking := missing():
            raise _usage(f"packages: {', '.join(lacking)} cannot be imported; --prepare --python adds wheels for them")
        return Run(options, plan, unpacked, begin).all()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run_gpu.py", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--prepare", type=Path, metavar="DIR", help="compile everything into DIR, which travels; no GPU needed")
    add("--arch", action="append", metavar="ARCH", help="with --prepare: instead of the specs'; repeatable")
    add("--python", default="", metavar="X.Y", help="with --prepare: wheels for this Python on Linux, x86-64")
    add("--nvrtc", default="", metavar="X.Y.Z", help="with --prepare: this older NVRTC compiles a few kernels besides")
    add("--probes", default="*", metavar="GLOB", help="with --prepare: these probes of tests/golden_gpu")
    add("--prepared", type=Path, metavar="DIR", help="what --prepare wrote")
    add("--out", type=Path, metavar="DIR", help="a folder for the results")
    add("--table", type=Path, nargs="+", metavar="FILE", help="print the table of results.jsonl files, and run nothing")
    add("--project", type=Path, default=ROOT, metavar="DIR", help="the folder with specs/ and generated/; this one")
    add("--only", default="*", metavar="GLOB", help="these sets")
    add("--section", default=",".join(SECTIONS), help=f"some of {', '.join(SECTIONS)}; default all")
    add("--again", type=Path, metavar="FILE", help="earlier results: repeat what failed, go on where they end")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the CPU machine, no timings")
    add("--ordinal", type=int, default=0, help="which GPU")
    add("--jobs", type=int, default=JOBS, help="processes that check cases at once; timings run alone")
    add("--items", type=int, default=100, help="pieces of work a process")
    add("--deadline", type=float, metavar="S", help="seconds for everything")
    add("--tools-before", type=float, default=110.0, metavar="S", help="seconds before the deadline kept for the tools")
    for name, value in asdict(Patience()).items():
        add(f"--patience-{name}", type=float, default=value, metavar="S", help="seconds without an answer")
    add("--sample", type=float, default=1.0, metavar="S", help="seconds between samples of the clocks")
    add("--date", default="", help="a date to note in the results")
    add("--commit", default="", help="the commit, where git cannot say")
    add("--buffer-mib", type=int, default=4096, help="size of the buffers bandwidth is measured with")
    options = parser.parse_args(arguments)
    options.sections = [s for s in options.section.split(",") if s]
    if options.prepare is not None or options.table is not None:
        return options
    unknown = [s for s in options.sections if s not in SECTIONS]
    if unknown or not options.sections:
        parser.error(f"--section: got {options.section!r}; it must be some of {', '.join(SECTIONS)}")
    if options.prepared is None or options.out is None:
        parser.error("--prepared and --out are needed (or --prepare, or --table)")
    if options.device == "cpu":
        asked = [] if options.section == parser.get_default("section") else options.sections
        if wrong := [s for s in asked if s not in CPU_SECTIONS]:
            parser.error(f"--section {wrong[0]}: got the CPU machine, which has {', '.join(CPU_SECTIONS)}; use a GPU")
        options.sections = [s for s in options.sections if s in CPU_SECTIONS]
    return options


def _usage(text: str) -> SystemExit:
    print(f"run_gpu.py: error: {text}", file=sys.stderr)
    return SystemExit(2)


def _prepare(options: argparse.Namespace) -> int:
    from benchmarks.gpu.prepare import prepare, sizes

    begin, names = time.monotonic(), set_names(options.only)
    plan = prepare(
        options.prepare, names, options.arch, python=options.python, nvrtc=options.nvrtc, probes=options.probes
    )
    found = sizes(options.prepare)
    for name, size in found:
        print(f"{size:12,} {name}")
    cases, timed = (sum(len(getattr(s, what)) for s in plan.sets.values()) for what in ("cases", "timings"))
    print(f"{sum(size for _, size in found) / 2**20:12.2f} MiB travel beside the repository")
    work = f"{len(plan.sets)} sets, {cases} cases, {timed} timings, {len(plan.probes)} probes"
    print(f"{work} in {options.prepare} ({time.monotonic() - begin:.0f} s)")
    return 0


def _table(paths: Sequence[Path]) -> int:
    try:
        _, records = results.read(paths)
    except (OSError, ValueError) as error:
        raise _usage(f"--table: {error}") from error
    print(results.table(records))
    return 1 if any(r["status"] == "failed" for r in records.values()) else 0


class Run:
    """One run: its plan under one deadline, its results, and the files beside them."""

    def __init__(self, options: argparse.Namespace, plan: Plan, unpacked: Path, begin: float) -> None:
        self.options, self.plan = options, plan
        self.kernels, self.parts = unpacked / "kernels", unpacked / "parts"
        self.parts.mkdir()
        self.patience = Patience(**{n: getattr(options, f"patience_{n}") for n in asdict(Patience())})
        wanted = set(set_names(options.only))
        self.names = [n for n in plan.names() if n in wanted]
        self.begin = begin
        self.end = None if options.deadline is None else self.begin + options.deadline
        self.records: dict[Key, results.Record] = {}
        self.bandwidth: Mapping[str, float] = {}
        self.asked: dict[Key, Item] = {}
        self.answered: set[Key] = set()
        self.collected = begin

    def all(self) -> int:
        """Everything; the exit status."""
        earlier = self._earlier()
        done = frozenset(key for key, record in earlier.items() if record["status"] != "failed")
        self.wanted = Wanted(self.options.sections, self.patience, done)
        self.records |= earlier
        self._bandwidth_of(earlier.values())
        head = {"date": self.options.date, "commit": self.options.commit or _commit(), "kernels": self.plan.digest}
        head["device"] = self.options.device
        try:
            self.options.out.mkdir(parents=True, exist_ok=True)
            log = results.Log(self.options.out / RESULTS, {"run": head})
        except OSError as error:
            raise _usage(f"--out: {error}") from error
        self._restore()
        status = 2
        with log, self._clocks() as why:
            self.log = log
            if why:
                self._say(f"clocks are not sampled: {why}")
            self._say(
                f"{len(self.names)} sets, sections {', '.join(self.options.sections)}, kernels {self.plan.digest[:12]}"
            )
            try:
                with Supervisor(self._command(), cwd=ROOT, environment=self._environment(), **self._jobs()) as children:
                    self._stages(children)
                status = 1 if self._failed() else 0
            except DeviceError as error:
                self._say(f"run_gpu.py: error: {error}")
            except KeyboardInterrupt:
                status = 128 + signal.SIGINT
            finally:
                self._collect()
                self._say(results.table(self.records, [k for k in self.asked if k not in self.records]))
                if log.trouble:
                    self._say(f"NOT WRITTEN: {log.trouble}; lines that are not in the file stand above")
        return status

    def _clocks(self) -> AbstractContextManager[str]:
        if self.options.device == "cpu":
            return nullcontext("")
        return sampled(self.options.out / "clocks.csv", self.options.ordinal, self.options.sample)

    # The work --------------------------------------------------------------------------------------------------------

    def _stages(self, children: Supervisor) -> None:
        """Earlier failures; the work that all other needs; the sets by value; tools; then everything that was not reached."""
        wanted, plan = self.wanted, self._chosen()
        kept = self.options.tools_before if "tools" in wanted.sections else 0.0
        before = None if self.end is None else self.end - kept
        everything = plans.everything(plan, wanted, self.bandwidth)
        self.asked = {item.key: item for item in everything}
        self._do(children, [item for item in everything if item.key in self.records], before)
        self._do(children, plans.facts(plan, wanted), self._until("facts", before))
        self._collect()
        self._do(children, plans.measures(wanted), self._until("calibrate", before))
        self._bandwidth_of(self.records.values())
        if not self.bandwidth and "timings" in wanted.sections:
            self._say("timings are left out: the bandwidth of this GPU is not known")
            wanted = replace(wanted, sections=[s for s in wanted.sections if s != "timings"])
        first, rest = ([n for n in plan.names() if (n in plans.BY_VALUE) == valued] for valued in (True, False))
        self._do(children, plans.golden_probes(plan, wanted), self._until("probes", before))
        self._do(children, plans.by_set(plan, first, wanted, self.bandwidth), before)
        self._do(children, plans.peers(wanted), before)
        self._do(children, [i for n in rest for i in plans.correctness(plan, n, wanted)], before)
        self._collect()
        self._do(children, plans.tools(plan, wanted), self.end)
        self._do(children, plans.everything(plan, wanted, self.bandwidth), self.end)

    def _until(self, section: str, before: float | None) -> float | None:
        return plans.until(section, time.monotonic(), before, self.options.deadline)

    def _do(self, children: Supervisor, items: Iterable[Item], until: float | None) -> None:
        """Run the items that this run has not done yet, and keep each answer before the next one comes."""
        for answer in children.run([item for item in items if item.key not in self.answered], until):
            record = results.record_of(answer)
            self.answered.add(answer.item.key)
            self.records[answer.item.key] = record
            self.log.add(record)
            if time.monotonic() - self.collected > COLLECT_EACH:
                self._collect()
            if record["status"] == "failed":
                said = results.shortened(record["detail"], LINE)
                self._say(f"FAILED {' '.join(filter(None, answer.item.key))}: {said}")
            if self.log.trouble:
                self._say(json.dumps(record))

    def _chosen(self) -> Plan:
        """The plan of the sets that --only names."""
        sets = {n: self.plan.sets[n] for n in self.names}
        return replace(self.plan, sets=sets)

    def _failed(self) -> bool:
        return any(record["status"] == "failed" for record in self.records.values())

    # Children --------------------------------------------------------------------------------------------------------

    def _setup(self) -> Setup:
        specs = {name: self.plan.sets[name].spec for name in self.names}
        where = {"project": str(self.options.project), "kernels": str(self.kernels), "parts": str(self.parts)}
        how = {"device": self.options.device, "ordinal": self.options.ordinal, "buffer_mib": self.options.buffer_mib}
        return Setup(**where, **how, specs=specs, patience=asdict(self.patience))

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "benchmarks.gpu.worker", json.dumps(asdict(self._setup()))]

    def _environment(self) -> dict[str, str]:
        """One thread a process for linear algebra, since several check cases at once. On a GPU they compile nothing."""
        paths = [str(ROOT), os.environ.get("PYTHONPATH", ""), str(self.kernels / SITE)]
        threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        kernels = {"KVGEN_CUBINS": str(self.kernels), "KVGEN_NO_JIT": "1"} if self.options.device == "cuda" else {}
        return {**os.environ, **threads, **kernels, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def _jobs(self) -> dict[str, Any]:
        return {"jobs": max(1, min(self.options.jobs, os.cpu_count() or 1)), "items_each": self.options.items}

    # Files -----------------------------------------------------------------------------------------------------------

    def _earlier(self) -> dict[Key, results.Record]:
        """The results that --again goes on from; without it OUT must have none."""
        own = self.options.out / RESULTS
        if self.options.again is None:
            if own.is_file():
                raise _usage(f"--out: {own} is there; give another folder, or --again {own}")
            return {}
        try:
            heads, records = results.read([self.options.again, *([own] if own.is_file() else [])])
        except (OSError, ValueError) as error:
            raise _usage(f"--again: {error}") from error
        if any(head["run"]["kernels"] != self.plan.digest for head in heads):
            raise _usage(f"--again: {self.options.again} is of other kernels than {self.options.prepared}")
        return records

    def _restore(self) -> None:
        """Keep the files of an earlier run in OUT."""
        from benchmarks.gpu.outputs import restore

        try:
            restore(self.options.out, self.parts)
        except Exception as error:  # files are worth less than the run
            self._say(f"files in {self.options.out}: {type(error).__name__}: {error}")

    def _bandwidth_of(self, records: Iterable[Mapping[str, Any]]) -> None:
        found = next((r["gb_s"] for r in records if r["section"] == "bandwidth" and r["status"] == "ok"), None)
        self.bandwidth = found or self.bandwidth

    def _collect(self) -> None:
        """Write the facts, and the children's files as few archives."""
        from benchmarks.gpu.outputs import collect

        facts = {"/".join(filter(None, key[1:])): record for key, record in self.records.items() if key[0] == "facts"}
        if facts:
            self._write("facts.json", (json.dumps(facts, indent=1) + "\n").encode())
        device = facts.get("versions", {}).get("device", {}).get("name", self.options.device)
        try:
            for name, data in collect(self.parts, "_".join(device.lower().split())):
                self._write(name, data)
        except Exception as error:  # files are worth less than the run
            self._say(f"files of the children: {type(error).__name__}: {error}")
        self.collected = time.monotonic()

    def _write(self, name: str, data: bytes) -> None:
        from benchmarks.gpu.outputs import replace_file

        if why := replace_file(self.options.out / name, data):
            self._say(f"{name}: cannot be written: {why}")

    def _say(self, text: str) -> None:
        """To stdout and to the log; a full disk stops neither the run nor stdout."""
        print(text, flush=True)
        try:
            with (self.options.out / "log.txt").open("a", encoding="utf-8") as file:
                file.write(f"{time.monotonic() - self.begin:7.1f} s {text}\n")
        except OSError:
            return


def _commit() -> str:
    """The commit of this checkout, "" where git does not say."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
