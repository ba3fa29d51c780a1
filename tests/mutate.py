"""`make mutate`: do the tests notice a wrong template?

    python -m tests.mutate [--count 100] [--seed 1] [--only ops/decode_mma.cu.j2] [--timeout 600] [--jobs 2]

Draws single-line mutations of the templates, at least one of each template, and runs against each, in a copy of the project,
tests that execute its line: those recorded by `tests.template_cover`, whose record is made first where there is none of these
sources. A few cheap ones of different kinds first, then more, then all parameters of some functions. A mutant that a test fails
over or that does not compile is killed; so is one over which tests do not end that do without it. Mutants that are known to
change nothing are in tests/equivalent_mutants.txt, with why. Prints the survivors; exit 1 below 95 % killed.

Verdicts are kept in build/mutants.jsonl as they come: a campaign that was stopped goes on where it stood, as long as templates,
kvgen and tests are the same.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Literal

from tests import template_cover
from tests.mutants import Mutant, drawn, mutants
from tests.template_cover import ROOT, Cover, Ran

EQUIVALENT: Final = ROOT / "tests" / "equivalent_mutants.txt"
LEAST: Final = 0.95  # of the mutants are killed
ROUNDS: Final = (4, 20, 40)  # tests that a mutant is shown, and how many more if it survives them
WHOLE: Final = 5  # test functions that it is shown then with all their parameters
VERDICTS: Final = ROOT / "build" / "mutants.jsonl"
Verdict = Literal["killed", "SURVIVED", "no test", "too slow"]


def equivalents(text: str) -> dict[tuple[str, str, str], str]:
    """(template, line, changed line) of mutants that change no result -> why.

    Four lines each: the template, `- ` and the line, `+ ` and the changed one (nothing: dropped), `= ` and why; then an
    empty one. Lines that begin with # are comments.
    """
    found = {}
    for block in "\n".join(x for x in text.splitlines() if not x.startswith("#")).strip().split("\n\n"):
        if block:
            template, before, after, why = block.split("\n")
            found[template, before.removeprefix("- ").strip(), after.removeprefix("+").strip()] = why.removeprefix("= ")
    return found


def including(header: str) -> set[str]:
    """The templates that include a header, by its file's name."""
    named = re.compile(rf'#include "(?:[^"]*/)?{re.escape(Path(header).name)}"')
    folder = ROOT / "templates"
    files = (path for path in folder.rglob("*") if path.is_file())
    return {p.relative_to(folder).as_posix() for p in files if named.search(p.read_text(encoding="utf-8"))}


@functools.cache
def defined() -> dict[str, list[tuple[str, int, int]]]:
    """Functions of device/ by name: the header, the definition's first line and its last one."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    folder = ROOT / "templates"
    for path in sorted((folder / "device").rglob("*.cuh")):
        text, header = path.read_text(encoding="utf-8"), path.relative_to(folder).as_posix()
        for one in re.finditer(r"^__device__[^;{]*?\b(\w+)\([^;]*?\{.*?^\}", text, re.MULTILINE | re.DOTALL):
            first, last = (text.count("\n", 0, at) + 1 for at in one.span())
            found.setdefault(one[1], []).append((header, first, last))
    return found


def calling(mutant: Mutant, cover: Cover) -> list[Ran]:
    """Tests that execute both the mutant's template and functions that its line calls.

    The instructions of a line that only calls an inlined function belong to the function.
    """
    places = {
        (header, n)
        for name in re.findall(r"\b(\w+)(?:<[^;]*?>)?\(", mutant.before)
        for header, first, last in defined().get(name, [])
        for n in range(first, last + 1)
    }
    if not places:
        return []
    here = {r for line, its in cover.lines.items() if line.rpartition(":")[0] == mutant.template for r in its}
    there = (ran for header, n in sorted(places) for ran in cover.lines.get(f"{header}:{n}", []))
    return [ran for ran in dict.fromkeys(there) if ran in here]


def showing(mutant: Mutant, cover: Cover) -> list[Ran]:
    """Tests that execute the mutant's line: those of different functions, of what it calls, and cheap ones first.

    Lines without instructions of their own (calls, constants, declarations) have those of what they call and of the nearest
    lines of the template that do; so have conditions at compile time, which run in the kernels of one side only. A header
    without such lines has the tests of the templates that include it.
    """
    found, called = cover.lines.get(mutant.place, []), list[Ran]()
    if not found or "constexpr" in mutant.before:
        called = calling(mutant, cover)
        numbers = [int(n) for t, _, n in (line.rpartition(":") for line in cover.lines) if t == mutant.template]
        nearest = sorted(numbers, key=lambda n: (abs(n - mutant.line), n < mutant.line))[:3]
        beside = (ran for n in nearest for ran in cover.lines[f"{mutant.template}:{n}"])
        found = list(dict.fromkeys((*found, *called, *beside)))
    if not found:  # a header of declarations: tests of what includes it
        above = including(mutant.template)
        found = list(
            dict.fromkeys(r for x, its in cover.lines.items() if x.rpartition(":")[0] in above for r in its[:2])
        )
    turns: Counter[str] = Counter()
    ranked = []
    for ran in sorted(found, key=lambda r: r.seconds):
        ranked.append((turns[ran.function], ran not in called, ran.seconds, ran.test, ran))
        turns[ran.function] += 1
    return [ran for *_, ran in sorted(ranked, key=lambda r: r[:4])]


def rounds(shown: Sequence[Ran]) -> Iterator[list[str]]:
    """The tests among these that a mutant is shown, until it is killed."""
    begin = 0
    for count in ROUNDS:
        if some := [r.test for r in shown[begin : begin + count]]:
            yield some
        begin += count
    yield list(dict.fromkeys(r.function for r in shown))[:WHOLE]


@dataclass(frozen=True)
class Copy:
    """A copy of the project to run tests in; `cache` is where compiled kernels go."""

    root: Path
    cache: Path

    @staticmethod
    def make(folder: Path, cache: Path) -> Copy:
        """The files that git knows of the project, as they stand now."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        return Copy(folder, cache)

    def fails(self, tests: Sequence[str], timeout: float) -> bool | None:
        """True if one of these tests fails; None if they do not end in time."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            *tests,
        ]
        environment = os.environ | {"PYTHONPATH": str(self.root), "KVGEN_CACHE_DIR": str(self.cache)}
        try:
            done = subprocess.run(
                command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return None
        if done.returncode < 0:  # the kernel has brought the process down
            return True
        if done.returncode not in (0, 1):
            if "Error" in done.stdout + done.stderr and done.returncode in (
                2,
                4,
            ):  # templates that cannot be imported over
                return True
            raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.returncode == 1

    def judge(self, mutant: Mutant, cover: Cover, timeout: float) -> Verdict:
        """The verdict of the tests on a mutant."""
        shown = showing(mutant, cover)
        if not shown:
            return "no test"
        path = self.root / "templates" / mutant.template
        original = path.read_text(encoding="utf-8")
        lines = original.split("\n")
        lines[mutant.line - 1] = mutant.after
        for some in rounds(shown):
            path.write_text("\n".join(lines), encoding="utf-8")
            failed = self.fails(some, timeout)
            path.write_text(original, encoding="utf-8")
            if failed is None:
                return "killed" if self.fails(some, timeout / 2) is False else "too slow"
            if failed:
                return "killed"
        return "SURVIVED"


def record() -> Cover:
    """The lines that tests execute, recorded now unless that was done for these sources."""
    cover = template_cover.read()
    if cover is None:
        print("recording which tests execute which template lines (a run of all tests)", flush=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "auto",
            "--dist",
            "worksteal",
            "-p",
            "tests.template_cover",
        ]
        done = subprocess.run(command, cwd=ROOT)
        cover = template_cover.read()
        if done.returncode or cover is None:
            raise SystemExit("the tests must pass on the unchanged templates first")
    return cover


def judged(file: Path, key: str) -> dict[str, Verdict]:
    """The verdicts that a campaign over the sources `key` has left in `file`, by mutant."""
    if not file.is_file():
        return {}
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return {row["mutant"]: row["verdict"] for row in rows if row["key"] == key}


def main() -> int:
    """Run the campaign; 0 if at least 95 % of the mutants are killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    cover = record()
    known = equivalents(EQUIVALENT.read_text(encoding="utf-8"))
    everything = [m for m in mutants(ROOT / "templates") if options.only in m.template]
    chosen = drawn(
        everything, options.count, options.seed, lambda m: m.place in cover.rendered and m.change not in known
    )
    print(
        f"{len(everything)} mutations of {len({m.template for m in everything})} templates; no test renders "
        f"{sum(m.place not in cover.rendered for m in everything)}, {sum(m.change in known for m in everything)} are known "
        f"to change nothing; {len(chosen)} drawn",
        flush=True,
    )
    key = template_cover.key()
    before = judged(VERDICTS, key)
    verdicts: list[tuple[Verdict, Mutant]] = [(before[str(m)], m) for m in chosen if str(m) in before]
    if verdicts:
        print(f"{len(verdicts)} of them were judged before: {VERDICTS.relative_to(ROOT)}", flush=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for n in range(options.jobs):
            copies.put(Copy.make(Path(scratch) / f"copy{n}", Path(scratch) / "cache"))

        def one(mutant: Mutant) -> None:
            copy, begin = copies.get(), time.monotonic()
            try:
                verdict = copy.judge(mutant, cover, options.timeout)
            finally:
                copies.put(copy)
            verdicts.append((verdict, mutant))
            with VERDICTS.open("a", encoding="utf-8") as kept:
                kept.write(json.dumps({"key": key, "mutant": str(mutant), "verdict": verdict}) + "\n")
            print(f"{verdict:8} {time.monotonic() - begin:4.0f} s  {mutant}", flush=True)

        list(pool.map(one, [m for m in chosen if str(m) not in before]))
    counts = Counter(verdict for verdict, _ in verdicts)
    total = counts["killed"] + counts["SURVIVED"] + counts["no test"]
    share = counts["killed"] / max(total, 1)
    print(f"\n{counts['killed']} of {total} killed ({100 * share:.0f} %), {counts['too slow']} too slow to tell")
    for verdict, mutant in verdicts:
        if verdict != "killed":
            print(f"{verdict} {mutant}")
    return 0 if total and share >= LEAST else 1


if __name__ == "__main__":
    raise SystemExit(main())
