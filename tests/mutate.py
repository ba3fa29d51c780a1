"""`make mutate`: do the tests notice a wrong template?

    python -m tests.mutate [--count 40] [--seed 1] [--only ops/decode.cu.j2] [--timeout 600]

Draws single-line mutations of the templates (a comparison moved by one, an operator swapped, a constant off by one, a
statement dropped), re-renders, and runs against each the tests that cover its template (`COVER`) and nothing else. A mutant
that renders the same text for every checked-in set is skipped; one that NVRTC refuses or a test fails is killed. Prints the
survivors; exit 1 below 90 % killed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
TARGETS: Final = ("ops/*.cu.j2", "cache/*.j2", "write/*.j2", "find/*.j2", "heads/*.j2", "device/*.cuh")
# Templates -> the tests that must notice, those that are likeliest to notice first; the first pattern that fits counts.
COVER: Final[tuple[tuple[str, str], ...]] = (
    ("device/bytes device/elements device/fp4 device/fp8 device/integers device/quantize", "tests/quant tests/ops"),
    ("device/cp_async device/mbarrier device/tma device/tma_tile", "tests/tma tests/accessor"),
    ("device/kv_cache device/operands", "tests/surface tests/accessor"),
    ("device/angles", "tests/device"),
    ("device/heads heads/* find/*", "tests/ops/test_fused.py tests/ops/test_in_place.py tests/ops/test_append.py"),
    ("device/add", "tests/ops/test_lora_add.py tests/ops/test_rows_add.py"),
    ("device/new_rows", "tests/ops/test_rows_add.py tests/ops/test_lora_add.py tests/ops/test_store_scales.py"),
    (
        "device/pages",
        "tests/ops/test_copy_pages.py tests/ops/test_swap_pages.py tests/ops/test_reorder.py tests/ops/test_compact.py",
    ),
    ("device/scan", "tests/ops/test_lengths.py tests/ops/test_page_lists.py tests/ops/test_slots.py"),
    (
        "device/stored",
        "tests/ops/test_gather.py tests/ops/test_gather_rows.py tests/ops/test_scatter.py tests/ops/test_convert.py",
    ),
    ("ops/advance ops/row_offsets", "tests/ops/test_lengths.py"),
    ("ops/to_csr ops/to_dense", "tests/ops/test_page_lists.py"),
    ("ops/slot_mapping ops/remap_indices", "tests/ops/test_slots.py"),
    ("ops/merge_states", "tests/ops/test_merge_states.py tests/ops/test_cascade.py"),
    ("ops/copy_pages*", "tests/ops/test_copy_pages.py"),
    ("ops/compact*", "tests/ops/test_compact.py"),
    ("ops/gather", "tests/ops/test_gather.py tests/ops/test_hostile.py tests/ops/test_residual.py"),
    *(
        (f"ops/{name}", f"tests/ops/test_{name}.py")
        for name in (
            *("lora_add", "rows_add", "sliced_add", "store_scales", "swap_pages", "reorder", "gather_rows"),
            *("scatter", "convert", "mla_plan", "mla_decompress"),
        )
    ),
    ("*", "tests/ops"),
)
# (pattern, replacements): one occurrence on one line is replaced.
SWAPS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    (r" < ", (" <= ", " > ")),
    (r" >= ", (" > ", " < ")),
    (r" <= ", (" < ",)),
    (r" > ", (" >= ", " < ")),
    (r" == ", (" != ",)),
    (r" != ", (" == ",)),
    (r" && ", (" || ",)),
    (r" \|\| ", (" && ",)),
    (r" \+ ", (" - ",)),
    (r" - ", (" + ",)),
    (r" \* (?!\*)", (" + ",)),
    (r" / ", (" % ", " * ")),
    (r" % ", (" / ",)),
    (r"\+= ", ("-= ", "= ")),
    (r"\b0\b", ("1",)),
    (r"\b1\b", ("2",)),
    (r"\bmin\(", ("max(",)),
    (r"\bmax\(", ("min(",)),
    (r"fmaxf\(", ("fminf(",)),
    (r"\bbegin\b", ("end",)),
    (r"\bk_id\b", ("v_id",)),
)
DROPS: Final = re.compile(r"^\s*(?!return\b|\}|//|#|\{%)[^{}]*;\s*(?://.*)?$")
# What the CPU machine cannot see: launch order on a GPU, and hints to the compiler.
UNSEEN: Final = re.compile(r"pdl_|griddepcontrol|__builtin_assume|__CUDA_ARCH__")


@dataclass(frozen=True)
class Mutant:
    """One changed line of one template."""

    template: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.template}:{self.line}\n    - {self.before.strip()}\n    + {self.after.strip() or '(dropped)'}"


def mutants(root: Path) -> list[Mutant]:
    """Every single-line mutation of the templates, in file order."""
    found = []
    for pattern in TARGETS:
        for path in sorted(root.glob(pattern)):
            name = path.relative_to(root).as_posix()
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                code = line.split("//")[0]
                if UNSEEN.search(code):
                    continue
                if not code.strip() or code.lstrip().startswith(
                    ("{%", "{#", "#", "using ", "template <", "static constexpr")
                ):
                    continue
                for pattern_text, replacements in SWAPS:
                    for match in re.finditer(pattern_text, code):
                        found += [
                            Mutant(name, number, line, line[: match.start()] + new + line[match.end() :])
                            for new in replacements
                        ]
                if DROPS.match(line) and "const " not in line:
                    found.append(Mutant(name, number, line, ""))
    return found


def _rendered(templates: Path) -> subprocess.CompletedProcess[str]:
    """All generated text over these templates, or the reason why there is none."""
    code = (
        "import tests.mutated_templates as m; m.use_mutated_templates()\n"
        "from kvgen.config import find_config\nfrom kvgen.emit import load_and_render, body_of\n"
        "print(''.join(body_of(f.text) for f in load_and_render(find_config())[1].values()))"
    )
    environment = os.environ | {"KVGEN_MUTATED_TEMPLATES": str(templates)}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)


def covering(template: str) -> tuple[str, ...]:
    """The folders of tests that run against mutants of a template."""
    name = template.partition(".")[0]
    return next(tuple(tests.split()) for names, tests in COVER if any(fnmatch(name, n) for n in names.split()))


def _tests_fail(templates: Path, tests: Sequence[str], timeout: float) -> bool | None:
    """Whether one of these tests fails over these templates; None if they did not end in time."""
    command = [sys.executable, "-m", "pytest", *tests, "-x", "-q", "-n", "2", "-p", "tests.mutated_templates"]
    environment = os.environ | {"KVGEN_MUTATED_TEMPLATES": str(templates)}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return None
    stopped = done.returncode == 2 and "stopping after" in done.stdout  # how xdist ends at the first failure
    if done.returncode not in (0, 1) and not stopped:
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode != 0


def main() -> int:
    """Run the campaign; 0 if at least 90 % of the mutants are killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--timeout", type=float, default=600)
    options = parser.parse_args()
    source = ROOT / "templates"
    candidates = [m for m in mutants(source) if options.only in m.template]
    random.Random(options.seed).shuffle(candidates)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "templates"
        shutil.copytree(source, copy)
        clean = _rendered(copy).stdout
        every = list(dict.fromkeys(folder for m in candidates for folder in covering(m.template)))
        if _tests_fail(copy, every, options.timeout) is not False:
            raise SystemExit(f"{' '.join(every)} do not pass in time on the unchanged templates")
        killed, same, slow = 0, 0, 0
        survivors: list[Mutant] = []
        for mutant in candidates:
            if killed + len(survivors) == options.count:
                break
            path = copy / mutant.template
            original = path.read_text(encoding="utf-8")
            lines = original.split("\n")
            lines[mutant.line - 1] = mutant.after
            path.write_text("\n".join(lines), encoding="utf-8")
            rendered = _rendered(copy)
            if rendered.returncode == 0 and rendered.stdout == clean:
                same += 1
            elif rendered.returncode != 0 or (failed := _tests_fail(copy, covering(mutant.template), options.timeout)):
                killed += 1
                print(f"killed   {mutant}", flush=True)
            elif failed is None:
                slow += 1
                print(f"too slow {mutant}", flush=True)
            else:
                survivors.append(mutant)
                print(f"SURVIVED {mutant}", flush=True)
            path.write_text(original, encoding="utf-8")
    total = killed + len(survivors)
    print(
        f"\n{killed} of {total} killed ({100 * killed / max(total, 1):.0f} %), {same} without effect on any set, "
        f"{slow} too slow to tell, seed {options.seed}"
    )
    for mutant in survivors:
        print(f"survivor {mutant}")
    return 0 if total and killed >= 0.9 * total else 1


if __name__ == "__main__":
    raise SystemExit(main())
