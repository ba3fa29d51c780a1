"""Does a change of templates or generator change what runs? `generated/` of a git revision against what the specs render now.

    python -m benchmarks.replay main                   every kernel, for the architectures of its spec
    python -m benchmarks.replay main --only 'llama3_*'
    python -m benchmarks.replay main --json

The kernels of both are flattened and compiled. Where their machine code is the same, that is all there is to say. Where it is
not, a table has registers, spills, shared memory, instructions and compile seconds of both, and both run on the CPU machine, in
check mode, on the batches of `kvgen verify`: every byte of every memory is compared. Nothing of the revision is executed
but its kernels: they run under today's launchers, in the sizes that their own launchers say, and only where their parameters
are today's.

Exit status 0 where all machine code is the same, 1 where some is not, 2 for a usage error.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from benchmarks.launch_sizes import give, launch_sizes
from kvgen.cli.git_versions import at_revision, on_disk
from kvgen.cli.project import Project, open_project
from kvgen.codegen.emit import TABLE, kernel_files
from kvgen.compile import Image, Job, Unit, compile_many, compile_unit, default_cache
from kvgen.compile.flatten import flatten
from kvgen.compile.sass import histogram, instructions_of, sass
from kvgen.errors import KvgenError, ToolError

if TYPE_CHECKING:
    from kvgen.verify.run import Plan

_ENTRY: Final = re.compile(r"__global__ void\s+(?:__\w+__\([^)]*\)\s*)*(\w+)\(")
_PARAMS: Final = re.compile(r"\.entry\s+\w+\s*\(([^)]*)\)")


@dataclass(frozen=True)
class Code:
    """A compiled kernel in numbers: registers a thread, bytes spilled, bytes of static shared memory, instructions but
    for padding, and the seconds that NVRTC took without a cache."""

    registers: int
    spills: int
    shared: int
    instructions: int
    seconds: float


@dataclass(frozen=True)
class Change:
    """A kernel ("set/name") whose machine code for `arch` is another than at the revision."""

    kernel: str
    arch: str
    before: Code
    after: Code


@dataclass(frozen=True)
class Replay:
    """What came of it.

    `same` counts (kernel, architecture) pairs with the same machine code, `unchanged` those of them whose text is the same too.
    `added` and `removed` are kernels that one side lacks. `ran` has a line for each operation with another machine code.
    """

    same: int
    unchanged: int
    changes: tuple[Change, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    ran: tuple[str, ...]


@dataclass(frozen=True)
class Pair:
    """A kernel of both sides, for the architectures of today's spec."""

    before: Unit
    after: Unit
    archs: tuple[str, ...]

    @property
    def name(self) -> str:
        """ "set/kernel"."""
        return self.after.name


def pairs_of(project: Project, before: Mapping[str, str], only: str) -> tuple[list[Pair], list[str], list[str]]:
    """Kernels of both sides, and the names of those that are new and of those that are gone. `before`: path -> text."""
    out = project.config.out.name
    found, added = [], []
    archs = {f"{s.kernels.name}/{kernel.name}": own for s in project.sets for kernel, own in kernel_files(s)}
    after = {unit.name: unit for units in project.units.values() for unit in units}
    for name, unit in after.items():
        if not fnmatchcase(name.partition("/")[0], only):
            continue
        if f"{name}.cu" not in before:
            added.append(name)
            continue
        text = flatten(f"{out}/{name}.cu", lambda path: before[path.removeprefix(f"{out}/")])
        entry = _ENTRY.search(before[f"{name}.cu"])
        old = Unit(name, entry[1] if entry else unit.entry, text)
        found.append(Pair(old, unit, archs[name]))
    kernels = {path.removesuffix(".cu") for path in before if path.endswith(".cu") and not path.startswith("device/")}
    removed = sorted(n for n in kernels - after.keys() if fnmatchcase(n.partition("/")[0], only))
    return found, sorted(added), removed


def compare(pairs: Sequence[Pair]) -> tuple[int, int, list[Change]]:
    """How many (kernel, architecture) pairs have the same machine code, how many of them the same text, and the others."""
    unchanged = sum(len(p.archs) for p in pairs if p.before.text == p.after.text)
    asked = [(p, arch) for p in pairs if p.before.text != p.after.text for arch in p.archs]
    jobs: list[Job] = [(unit, arch, "cubin") for p, arch in asked for unit in (p.before, p.after)]
    images = _compiled(jobs)
    with ThreadPoolExecutor() as pool:
        same = list(pool.map(_same, images[0::2], images[1::2]))
    changes = []
    for (pair, arch), alike in zip(asked, same, strict=True):
        if not alike:
            changes.append(Change(pair.name, arch, _code(pair.before, arch), _code(pair.after, arch)))
    return unchanged + sum(same), unchanged, changes


def _compiled(jobs: list[Job]) -> list[Image]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("compiling", total=len(jobs))
        return compile_many(jobs, cache=default_cache(), progress=lambda _: bar.advance(task))


def _same(before: Image, after: Image) -> bool:
    if before.data == after.data:
        return True
    first, second = (instructions_of(sass(image.data, cache=default_cache())) for image in (before, after))
    return first == second and before.resources == after.resources


def _code(unit: Unit, arch: str) -> Code:
    image = compile_unit(unit, arch, cache=None)
    used, opcodes = image.resources, histogram(sass(image.data, cache=default_cache()))
    assert used is not None
    spills, count = used.spill_stores + used.spill_loads, sum(opcodes.values()) - opcodes.get("NOP", 0)
    return Code(used.registers, spills, used.static_shared, count, round(image.seconds, 2))


def run_both(project: Project, before: Mapping[str, str], pairs: Iterable[Pair]) -> list[str]:
    """Launch the operations of these kernels with the kernels of either side; a line for each operation."""
    lines: list[str] = []
    by_set: dict[str, dict[str, list[Pair]]] = {}
    for pair in pairs:
        name, _, kernel = pair.name.partition("/")
        by_set.setdefault(name, {}).setdefault(kernel, []).append(pair)
    for name, kernels in by_set.items():
        lines += _run_set(project, before, name, {k: found[0] for k, found in kernels.items()})
    return lines


def _launchers(name: str, before: Mapping[str, str]) -> str:
    """The file with the launch sizes of a set of the revision."""
    return f"{name}/{TABLE}" if f"{name}/{TABLE}" in before else f"{name}/__init__.py"


def _run_set(project: Project, before: Mapping[str, str], name: str, changed: Mapping[str, Pair]) -> list[str]:
    from kvgen.cli.project import generated
    from kvgen.codegen.emit import set_plans
    from kvgen.verify.launch import launch
    from kvgen.verify.memory import HostMemory
    from kvgen.verify.run import Verifier

    loaded = next(s for s in project.sets if s.kernels.name == name)
    ops = {op.name: op for op in loaded.kernels.ops}
    lines = []

    def plans_of(op: str) -> list[Plan]:
        with generated(project.config.out, name) as now:
            return Verifier(loaded.kernels, now, HostMemory()).plans(ops[op])

    def left(op: str, plan: Plan, texts: Mapping[str, str] | None) -> dict[str, bytes]:
        """All memory that a case leaves with the kernels of one side; texts None: those in the folder."""
        with generated(project.config.out, name) as package:
            if texts is not None:
                package._MODULE.texts = texts
                give(package, launch_sizes(texts[_launchers(name, before)]))
            memory = HostMemory()
            found = launch(Verifier(loaded.kernels, package, memory).built(ops[op], plan), memory)
        return {array: values.tobytes() for array, values in found.contents.flat().items()}

    def both(op: str, plan: Plan) -> list[str]:
        """The arrays in which the kernels of either side leave other bytes."""
        first, second = left(op, plan, before), left(op, plan, None)
        return [f"{plan.name}: {array}" for array in first if first[array] != second[array]]

    for op, plans in set_plans(loaded).items():
        own = [changed[kernel.name] for plan in plans for kernel, _ in plan.files(()) if kernel.name in changed]
        if not own:
            continue
        arch = own[0].archs[0]
        mine = plans_of(op)
        if any(_parameters(p.before, arch) != _parameters(p.after, arch) for p in own):
            said = "not run: the kernel's parameters are others"
        elif not mine:
            said = "not run: no fixed batches are known for it"
        else:
            try:
                wrong = [array for plan in mine for array in both(op, plan)]
                said = f"differs in {', '.join(wrong)}" if wrong else f"the same bytes in {len(mine)} batches"
            except ToolError as error:
                said = f"not run: generated/{_launchers(name, before)} of the revision: {error}"
        lines.append(f"{name}/{op}: {said}")
    return lines


def _parameters(unit: Unit, arch: str) -> str | None:
    """Sizes and types of the parameters, as PTX has them."""
    found = _PARAMS.search(compile_unit(unit, arch, "ptx", cache=default_cache()).data.decode())
    return re.sub(r"\w+_param_\d+", "", found[1]) if found else None


def replay(project: Project, revision: str, only: str = "*") -> Replay:
    """Compare `generated/` at a git revision with what the project renders. ToolError where the folder is not what it renders,
    or git has no such revision."""
    now = on_disk(project)
    stale = sorted(path for path, file in project.files.items() if now.get(path) != file.text)
    if stale:
        raise ToolError(f"{project.shown(stale[0])}: not what the specs render now; run `kvgen build`")
    before = at_revision(project, revision)
    pairs, added, removed = pairs_of(project, before, only)
    same, unchanged, changes = compare(pairs)
    changed = {change.kernel for change in changes}
    ran = run_both(project, before, [p for p in pairs if p.name in changed])
    return Replay(same, unchanged, tuple(changes), tuple(added), tuple(removed), tuple(ran))


def _print(found: Replay, revision: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    total, alike = (
        found.same + len(found.changes),
        f"the machine code of {revision}; {found.unchanged} of them its text",
    )
    console.print(f"{found.same} of {total} kernels, by architecture, have {alike}", soft_wrap=True)
    for title, names in (("new", found.added), ("gone", found.removed)):
        if names:
            console.print(f"{title}: {', '.join(names)}")
    if not found.changes:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("kernel", "arch", "registers", "spills", "shared", "instructions", "seconds"):
        table.add_column(column, justify="left" if column in ("kernel", "arch") else "right", overflow="fold")
    for change in found.changes:
        cells = []
        for name, was in asdict(change.before).items():
            value = asdict(change.after)[name]
            worse = value > was and name != "seconds"
            cells.append(f"{was}" if value == was else f"{was} -> [{'red' if worse else 'green'}]{value}[/]")
        table.add_row(change.kernel, change.arch, *cells)
    console.print(table)
    for line in found.ran:
        console.print(line, soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    """Replay and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("revision", help="a git revision, such as main or HEAD~1")
    parser.add_argument("--only", default="*", metavar="GLOB", help="sets of this name")
    parser.add_argument("--json", action="store_true", help="print JSON for a program to read")
    options = parser.parse_args(arguments)
    try:
        found = replay(open_project(), options.revision, options.only)
    except KvgenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        shown: dict[str, Any] = asdict(found)
        print(json.dumps(shown, indent=2))
    else:
        _print(found, options.revision)
    return 1 if found.changes or found.added or found.removed else 0


if __name__ == "__main__":
    sys.exit(main())
