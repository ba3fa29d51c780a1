"""Single-line mutations of the templates."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TARGETS: Final = (
    "ops/*.cu.j2",
    "attention/*.j2",
    "cache/*.j2",
    "places/*.j2",
    "device/*/*.cuh",
    "device/*/*/*.cuh",
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

    @property
    def place(self) -> str:
        """ "ops/decode_mma.cu.j2:31"."""
        return f"{self.template}:{self.line}"

    @property
    def change(self) -> tuple[str, str, str]:
        """The change, wherever in its template the line stands."""
        return self.template, self.before.strip(), self.after.strip()

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


def drawn(
    found: list[Mutant], count: int, seed: int, wanted: Callable[[Mutant], bool] = lambda mutant: True
) -> list[Mutant]:
    """`count` of those `wanted` or one of each template, whichever is more; every template's share is its share of the lines.

    Which are not wanted changes nothing about the order of the others.
    """
    everything = found[:]
    random.Random(seed).shuffle(everything)
    shuffled = [m for m in everything if wanted(m)]
    first = {mutant.template: mutant for mutant in reversed(shuffled)}
    rest = [m for m in shuffled if first[m.template] is not m]
    return [*first.values(), *rest[: max(0, count - len(first))]]
