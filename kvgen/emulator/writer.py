"""Parsed PTX modules to a C translation unit, and what the host must know about each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvgen.emulator.callgraph import CallGraph
from kvgen.emulator.classes import CLASSES
from kvgen.emulator.counters import Blocks
from kvgen.emulator.declarations import Address
from kvgen.emulator.errors import TranslateError
from kvgen.emulator.functions import BasicBlock, FunctionWriter
from kvgen.emulator.parser import Entry, Module
from kvgen.emulator.symbols import Callee, Signature, Symbols
from kvgen.emulator.variables import SharedLayout, initial, quoted, readable, storage
from kvgen.emulator.wgmma_ops import starting_registers


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What a launch checks before it starts: parameter sizes and offsets in bytes, limits on the block, the cluster.

    `registers` are a thread's at the start where setmaxnreg moves them and the PTX says how many.
    `blocks` says what the basic blocks are made of: (index in `lines`, index in CLASSES, instructions).
    """

    name: str
    param_sizes: tuple[int, ...]
    param_offsets: tuple[int, ...]
    param_bytes: int
    static_shared: int
    max_threads: int | None
    registers: int | None
    cluster: tuple[int, int, int] | None
    lines: tuple[str, ...]
    blocks: Blocks


@dataclass(slots=True)
class Unit:
    """One build in the making: C of its kernels, and tables that they share."""

    lines: list[str] = field(default_factory=list)
    kernels: list[KernelFacts] = field(default_factory=list)
    infos: list[str] = field(default_factory=list)  # names of the kernels' KernelInfo
    filled: list[str] = field(default_factory=list)  # statements that write addresses into initial values
    sites: dict[tuple[str, str, int, int], int] = field(default_factory=dict)

    def site(self, where: str, op: str, block: int, index: int) -> int:
        return self.sites.setdefault((where, op, block, index), len(self.sites))

    def text(self) -> str:
        """The translation unit."""
        return "\n".join(['#include "kernel.h"', *self.lines, *self._tables(), ""])

    def _tables(self) -> list[str]:
        ops = {op: i for i, op in enumerate(dict.fromkeys(op for _, op, _, _ in self.sites))}
        places = {w: i for i, w in enumerate(dict.fromkeys(w for w, _, _, _ in self.sites))}
        out = [f"static const char op_{i}[] = {quoted(op)};" for op, i in ops.items()]
        out += [f"static const char place_{i}[] = {quoted(w)};" for w, i in places.items()]
        rows = [f"{{place_{places[w]}, op_{ops[op]}, {block}}}" for w, op, block, _ in self.sites]
        out.append(f"static const Site sites[] = {{{', '.join(rows or ['{0, 0, 0}'])}}};")
        out.append(f"static const KernelInfo* const kernels[] = {{{', '.join(f'&{name}' for name in self.infos)}}};")
        initialize = "nullptr"
        if self.filled:
            initialize = "initialize"
            out.append(f"static void initialize(void) {{ {' '.join(self.filled)} }}")
        exported = '__attribute__((visibility("default"))) const'
        out.append(f"{exported} Program emu_program = {{sites, kernels, {initialize}}};")
        return out


class _ModuleWriter:
    """One PTX module. Its C names begin with `prefix`, so that modules may use the same PTX names."""

    def __init__(self, unit: Unit, module: Module, prefix: str) -> None:
        self.unit = unit
        self.module = module
        self.prefix = prefix
        self.graph = CallGraph(module)
        self.layout = SharedLayout(module, self.graph.names)
        self.table = "nullptr, 0"  # of global variables, and their number
        self.globals: dict[str, str] = {}
        self.constants: dict[str, str] = {}
        self.functions = self._callees()
        self.writers: dict[str, FunctionWriter] = {}

    def _callees(self) -> dict[str, Callee]:
        out = {}
        rows = {name: i for i, name in enumerate(self.graph.defined)}
        for name, f in self.module.functions.items():
            signature = Signature(tuple(f.params), tuple(f.results))
            if name in rows:
                address = f"(u64)&{self.prefix}_functions[{rows[name]}]"
                recurses = name in self.graph.recursive
                out[name] = Callee(name, signature, f"{self.prefix}_f{rows[name]}", address, recurses)
            else:
                out[name] = Callee(name, signature, "")
        return out

    def write(self) -> None:
        variables = self._variables()
        blocks: list[BasicBlock] = []
        for name in self.graph.defined:
            offsets = self.layout.common
            shared = self.layout.symbols(name, offsets, "self->dynamic_shared")
            writer = FunctionWriter(
                self.module.functions[name], self.functions[name].c, self._symbols(shared), len(blocks), self.unit.site
            )
            writer.write()
            self.writers[name] = writer
            blocks += writer.blocks
        entries = [line for entry in self.module.entries for line in self._entry(entry, blocks)]
        functions = [line for w in self.writers.values() for line in w.lines]
        self.unit.lines += [*self._function_table(), *variables, *functions, *entries]

    def _symbols(self, shared: dict[str, str]) -> Symbols:
        undefined = [v.name for v in self.module.variables if v.extern and v.space != "shared"]
        return Symbols(
            shared=shared,
            globals=self.globals,
            constants=self.constants,
            functions=self.functions,
            undefined=frozenset(undefined),
            function_table=f"{self.prefix}_functions, {len(self.graph.defined)}"
            if self.graph.defined
            else "nullptr, 0",
            indirect_recurses=bool(self.graph.recursive.intersection(self.graph.taken)),
            most_frame=f"{self.prefix}_frame",
        )

    def _function_table(self) -> list[str]:
        """Declarations of the functions, and what function pointers point to."""
        if not self.writers:
            return []
        most = max(w.frame_bytes for w in self.writers.values())
        lines = [
            f"enum {{ {self.prefix}_frame = {most} }};",
            *(f"{w.declaration};" for w in self.writers.values()),
        ]
        rows = [f"{{{w.name}, {w.cx.param_bytes}, {w.cx.result_bytes}}}" for w in self.writers.values()]
        lines.append(f"static const FunctionInfo {self.prefix}_functions[] = {{{', '.join(rows)}}};")
        return lines

    def _named(self) -> set[str]:
        """The module variables that functions name, or that initial values of such variables point to.

        No kernel can reach another one, and NVRTC writes each constant of a header as a variable, a hundred in a kernel: left
        out, they need not be compiled, and not be written before each launch.
        """
        points_to = {v.name: [x.symbol for x in v.initial if isinstance(x, Address)] for v in self.module.variables}
        named = set(points_to).intersection(frozenset[str]().union(*self.graph.names.values()))
        todo = list(named)
        while todo:
            todo += (more := set(points_to.get(todo.pop(), ())) - named)
            named |= more
        return named

    def _variables(self) -> list[str]:
        named = self._named()
        found = [v for v in self.module.variables if v.space != "shared" and not v.extern]
        generic = {v.name: f"(u64)&{self.prefix}_g{i}" for i, v in enumerate(found)}
        self.constants = {v.name: f"const_from_generic({generic[v.name]})" for v in found if v.space == "const"}
        self.globals = {name: address for name, address in generic.items() if name not in self.constants}
        addresses = generic | {f".const {name}": address for name, address in self.constants.items()}
        addresses |= {name: f.address for name, f in self.functions.items() if f.address}
        storages, initials, rows = [], [], []
        for i, v in enumerate(found):
            name = f"{self.prefix}_g{i}"
            start, bytes_given = "nullptr", 0
            place = storage(v, name)
            value, filled = initial(v, name if v.space == "const" else f"{name}_initial", addresses)
            if v.name not in named:  # checked like the others
                continue
            self.unit.filled += [filled] if filled else []
            if v.space == "const":
                storages.append(value)
            else:
                storages.append(place)
                if v.initial:
                    start, bytes_given = (
                        f"&{name}_initial",
                        sum(8 if isinstance(x, Address) else len(x) for x in v.initial),
                    )
                    initials.append(value)
            writable = "false" if v.space == "const" else "true"
            rows.append(
                f"{{{quoted(readable(v.name))}, (void*)&{name}, {v.nbytes}, {writable}, {start}, {bytes_given}}}"
            )
        if not rows:
            return []
        self.table = f"{self.prefix}_globals, {len(rows)}"
        return [*storages, *initials, f"static const GlobalVariable {self.prefix}_globals[] = {{{', '.join(rows)}}};"]

    def _entry(self, entry: Entry, function_blocks: Sequence[BasicBlock]) -> list[str]:
        """The entry's C function and description; enters it in the unit's list of kernels."""
        if any(k.name == entry.name for k in self.unit.kernels):
            raise TranslateError(f"two kernels of one build are named {entry.name!r}", ptx_line=entry.line)
        reached = self.graph.reach(entry.name)
        window = self.layout.window(entry, reached)
        shared = self.layout.symbols(entry.name, window.offsets, f"(SHARED_ORIGIN + {window.dynamic_offset}u)")
        name = f"{self.prefix}_k{len(self.unit.kernels)}"
        first = len(function_blocks) if reached else 0
        writer = FunctionWriter(entry, name, self._symbols(shared), first, self.unit.site)
        if reached:
            writer.prologue.append(f"self->dynamic_shared = SHARED_ORIGIN + {window.dynamic_offset}u;")
        writer.write()
        blocks = [*function_blocks[:first], *writer.blocks]
        lines = {w: i for i, w in enumerate(dict.fromkeys(w for b in blocks for w, _ in b.contents))}
        frames = {n: w.frame_bytes for n, w in self.writers.items()} | {entry.name: writer.frame_bytes}
        self.unit.kernels.append(
            KernelFacts(
                name=entry.name,
                param_sizes=tuple(p.nbytes for p in entry.params),
                param_offsets=writer.cx.param_offsets,
                param_bytes=writer.cx.param_bytes,
                static_shared=window.nbytes,
                max_threads=entry.max_threads,
                registers=starting_registers(entry),
                cluster=entry.cluster,
                lines=tuple(lines),
                blocks=tuple(
                    tuple((lines[w], CLASSES.index(c), n) for (w, c), n in b.contents.items()) for b in blocks
                ),
            )
        )
        self.unit.infos.append(f"{name}_info")
        info = (
            f"{quoted(entry.name)}, {name}, {writer.cx.param_bytes}, {window.extent}, {window.dynamic_offset}, "
            f"{self.graph.stack_bytes(entry, frames)}, {name}_shared, {len(window.rows)}, {len(blocks)}, {self.table}"
        )
        return [
            *writer.lines,
            f"static const SharedVariable {name}_shared[] = {{{', '.join(window.rows or ['{0, 0, 0}'])}}};",
            f"static const KernelInfo {name}_info = {{{info}}};",
        ]


def translate(modules: Sequence[Module]) -> Unit:
    """Raises TranslateError for what the emulator does not know."""
    unit = Unit()
    for i, module in enumerate(modules):
        _ModuleWriter(unit, module, f"m{i}").write()
    if not unit.kernels:
        raise TranslateError("no .entry: there is no kernel to run")
    return unit
