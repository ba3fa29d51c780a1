"""Parsed PTX modules to one C++ translation unit, and what the host must know about each kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvgen.emulator.context import Context, Instruction, Modifiers, Symbols, mangle, split_operands
from kvgen.emulator.errors import TranslateError
from kvgen.emulator.opcodes import OPCODES
from kvgen.emulator.parser import Entry, Module, Statement, Variable
from kvgen.emulator.ptxtypes import TYPES

_REDZONE = 64
_SHARED_LIMIT = 232448
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(.*)$")
_ARRAY = re.compile(r"\.(shared|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)((?:\[\d+\])*)$")
_GUARD = re.compile(r"@(!?)\s*(%?[\w$]+)\s+(.*)$")
_ENDS_BLOCK = ("bra", "brx", "ret", "exit", "trap")


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What a launch checks before it starts: parameter sizes and offsets in bytes, limits on the block."""

    name: str
    param_sizes: tuple[int, ...]
    param_offsets: tuple[int, ...]
    param_bytes: int
    static_shared: int
    max_threads: int | None


@dataclass(slots=True)
class Unit:
    """A translation unit in the making: tables that all modules of a build share."""

    modules: list[str] = field(default_factory=list)
    kernels: list[KernelFacts] = field(default_factory=list)
    infos: list[str] = field(default_factory=list)
    sites: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def site(self, where: str, op: str, block: int) -> int:
        return self.sites.setdefault((where, op, block), len(self.sites))

    def text(self) -> str:
        ops = {op: i for i, op in enumerate(dict.fromkeys(op for _, op, _ in self.sites))}
        places = {w: i for i, w in enumerate(dict.fromkeys(w for w, _, _ in self.sites))}
        out = ['#include "device.h"', *self.modules]
        out += [f"static const char op_{i}[] = {_quoted(op)};" for op, i in ops.items()]
        out += [f"static const char place_{i}[] = {_quoted(w)};" for w, i in places.items()]
        rows = [f"{{place_{places[w]}, op_{ops[op]}, {block}}}" for w, op, block in self.sites]
        hidden = 'extern "C" __attribute__((visibility("hidden"))) const'
        out.append(f"{hidden} Site emu_sites[] = {{{', '.join(rows or ['{0, 0, 0}'])}}};")
        out.append(f"{hidden} KernelInfo emu_kernels[] = {{{', '.join(self.infos)}}};")
        return "\n".join(out) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("??", "?\\?") + '"'


def readable(symbol: str) -> str:
    """The last identifier of a mangled variable: _ZZ5racesE1s is s."""
    rest = symbol
    if not rest.startswith("_Z"):
        return symbol
    names = []
    while m := re.search(r"\d+", rest):
        length = int(m.group())
        name = rest[m.end() : m.end() + length]
        if not re.match(r"[A-Za-z_]\w*$", name):
            break
        names.append(name)
        rest = rest[m.end() + length :]
    return names[-1] if names else symbol


@dataclass(frozen=True, slots=True)
class _Shared:
    name: str
    align: int
    nbytes: int


class _EntryWriter:
    def __init__(self, unit: Unit, module: Module, entry: Entry, symbols: dict[str, str], prefix: str) -> None:
        self.unit = unit
        self.entry = entry
        self.prefix = prefix
        self.body: list[str] = []
        self.blocks = [0]
        self.new_block = True
        self.shared: list[_Shared] = []
        offsets: dict[str, int] = {}
        at = 0
        for p in entry.params:
            at = -(-at // p.align) * p.align
            offsets[p.name] = at
            at += p.nbytes
        self.param_bytes = at
        self.static_bytes = 0
        self.shared_end = 0
        self.shared_rows: list[str] = []
        self.local_bytes = 0
        self.cx = Context(entry, Symbols(globals=symbols), offsets)
        self.collect_shared(module)
        self.collect_labels()

    # ---- what must be known before the first instruction
    def collect_shared(self, module: Module) -> None:
        text = "\n".join(s.text for s in self.entry.statements)
        words = set(re.findall(r"[\w$]+", text))
        found = [
            _Shared(v.name, v.align, v.nbytes)
            for v in module.variables
            if v.space == "shared" and not v.extern and v.name in words
        ]
        for s in self.entry.statements:
            if s.kind == "directive" and s.text.startswith(".shared"):
                name, align, nbytes = self.array(s)
                found.append(_Shared(name, align, nbytes))
        at = real = 0
        for array in found:
            at, real = (-(-x // array.align) * array.align for x in (at, real))
            self.cx.symbols.shared[array.name] = f"(SHARED_ORIGIN + {at}u)"
            self.shared_rows.append(f"{{{_quoted(readable(array.name))}, {at}, {array.nbytes}}}")
            at += array.nbytes + _REDZONE
            real += array.nbytes
        self.static_bytes = real
        self.shared_end = at
        dynamic = [v for v in module.variables if v.space == "shared" and v.extern]
        align = max([16, *(v.align for v in dynamic)])
        self.dynamic_offset = -(-at // align) * align
        for v in dynamic:
            self.cx.symbols.shared[v.name] = f"(SHARED_ORIGIN + {self.dynamic_offset}u)"
        if real > _SHARED_LIMIT:
            raise TranslateError(f"{self.entry.name} declares {real} bytes of shared memory", ptx_line=self.entry.line)

    def collect_labels(self) -> None:
        stack, scopes = [0], 0
        previous: Statement | None = None
        for s in self.entry.statements:
            if s.kind == "open":
                scopes += 1
                stack.append(scopes)
            elif s.kind == "close":
                if len(stack) == 1:
                    raise TranslateError("a } without its {", ptx_line=s.line)
                stack.pop()
            elif s.kind == "label":
                key = (stack[-1], s.text)
                if key in self.cx.labels:
                    raise TranslateError(f"label {s.text!r} is declared twice", ptx_line=s.line)
                self.cx.labels[key] = f"L{mangle(s.text)}_s{stack[-1]}"
            elif s.kind == "directive" and s.text.startswith(".branchtargets"):
                if previous is None or previous.kind != "label":
                    raise TranslateError(".branchtargets without a label", ptx_line=s.line)
                self.cx.branch_targets[previous.text] = split_operands(s.text.split(None, 1)[1])
            previous = s
        if len(stack) != 1:
            raise TranslateError(f"a {{ in {self.entry.name} is never closed", ptx_line=self.entry.line)

    def array(self, s: Statement) -> tuple[str, int, int]:
        m = _ARRAY.match(s.text)
        if not m or m.group(3) not in TYPES:
            raise TranslateError(f"cannot read {s.text!r}", ptx_line=s.line)
        size = TYPES[m.group(3)].bits // 8
        nbytes = size
        for d in re.findall(r"\d+", m.group(5)):
            nbytes *= int(d)
        return m.group(4), int(m.group(2) or size), nbytes

    # ---- statements
    def write(self) -> str:
        scopes = 0
        for s in self.entry.statements:
            if s.kind == "open":
                scopes += 1
                self.cx.scopes.append((scopes, {}))
            elif s.kind == "close":
                self.cx.scopes.pop()
            elif s.kind == "label":
                self.body.append(f"{self.cx.labels[self.cx.scopes[-1][0], s.text]}:;")
                self.new_block = True
            elif s.kind == "directive":
                self.directive(s)
            else:
                self.instruction(s)
        return self.function()

    def directive(self, s: Statement) -> None:
        word = s.text.split(None, 1)[0]
        if word == ".reg":
            self.registers(s)
        elif word == ".local":
            name, align, nbytes = self.array(s)
            self.cx.locals[name] = (mangle(name), nbytes, align)
            self.local_bytes += nbytes
        elif word not in (".shared", ".pragma", ".branchtargets"):
            raise TranslateError(f"unknown directive {s.text!r}", ptx_line=s.line)

    def registers(self, s: Statement) -> None:
        m = _REG.match(s.text)
        if not m or m.group(1) not in TYPES:
            raise TranslateError(f"cannot read {s.text!r}", ptx_line=s.line)
        for item in m.group(2).split(","):
            name = item.strip()
            if r := re.match(r"(%?[\w$]+)<(\d+)>$", name):
                for i in range(int(r.group(2))):
                    self.cx.declare(f"{r.group(1)}{i}", TYPES[m.group(1)])
            elif re.match(r"%?[\w$]+$", name):
                self.cx.declare(name, TYPES[m.group(1)])
            else:
                raise TranslateError(f"cannot read {s.text!r}", ptx_line=s.line)

    def instruction(self, s: Statement) -> None:
        text, guard = s.text, ""
        if m := _GUARD.match(text):
            text = m.group(3)
        op, _, rest = text.partition(" ")
        words = op.split(".")
        where = s.location.text() if s.location else f"{self.entry.name}.ptx:{s.line}"
        if self.new_block:
            self.new_block = False
            self.blocks.append(0)
            self.body.append(
                f"if (__builtin_expect(++bb[{len(self.blocks) - 1}] == RUNAWAY, 0)) "
                f"emu_runaway({self.unit.site(where, op, len(self.blocks) - 1)});"
            )
        block = len(self.blocks) - 1
        self.blocks[block] += 1
        ins = Instruction(
            opcode=words[0],
            modifiers=Modifiers(words[1:], lambda message: ins.fail(message)),
            operands=split_operands(rest),
            text=s.text,
            line=s.line,
            location=s.location,
            site=lambda: str(self.unit.site(where, op, block)),
        )
        handler = OPCODES.get(words[0])
        if handler is None:
            raise ins.fail(f"unknown opcode {words[0]!r}")
        code = handler(self.cx, ins)
        ins.modifiers.done()
        if m:
            guard = f"if ({'!' if m.group(1) else ''}{self.cx.predicate(ins, m.group(2))}) "
        if code or guard:
            self.body.append(f"{guard}{{ {code} }}")
        if words[0] in _ENDS_BLOCK:
            self.new_block = True

    def frame_bytes(self) -> int:
        """Bytes the function's variables take on the stack, at most."""
        return self.local_bytes + sum(max(r.type.bits // 8, 1) for r in self.cx.registers)

    def function(self) -> str:
        by_storage: dict[str, list[str]] = {}
        for r in self.cx.registers:
            by_storage.setdefault(r.type.storage, []).append(f"{r.c} = 0")
        lines = [
            f"static void {self.prefix}(Thread* const self) {{",
            "const u8* const P = self->params; u32* const bb = self->blocks; u32 carry = 0; (void)P; (void)carry;",
            f"enum : u64 {{ PARAM_BYTES = {self.param_bytes} }};",
        ]
        for name, nbytes, align in self.cx.locals.values():
            lines.append(f"alignas({max(align, 16)}) u8 {name}[{max(nbytes, 1)}];")
        lines += [f"{storage} {', '.join(names)};" for storage, names in by_storage.items()]
        lines += self.body
        lines.append("}")
        sizes = ", ".join(str(n) for n in self.blocks)
        lines.append(f"static const u32 {self.prefix}_blocks[] = {{{sizes}}};")
        rows = ", ".join(self.shared_rows or ["{0, 0, 0}"])
        lines.append(f"static const SharedVariable {self.prefix}_shared[] = {{{rows}}};")
        return "\n".join(lines)


def _global(v: Variable, name: str) -> list[str]:
    out = [f"alignas({max(v.align, 16)}) static u8 {name}[{max(v.nbytes, 1)}]"]
    data = ", ".join(str(b) for b in v.initial)
    if v.space == "const":
        return [f"{out[0]} = {{{data or '0'}}};"]
    return [f"{out[0]};", f"static const u8 {name}_initial[] = {{{data or '0'}}};"]


def add_module(unit: Unit, module: Module, index: int) -> None:
    """Append the kernels of one PTX module; raises TranslateError."""
    lines: list[str] = []
    symbols: dict[str, str] = {}
    rows: list[str] = []
    for i, v in enumerate(module.variables):
        if v.space == "shared":
            continue
        if v.extern or v.space == "local":
            raise TranslateError(f"{v.space} variable {v.name!r} cannot be declared here", ptx_line=v.line)
        name = f"m{index}_g{i}"
        symbols[v.name] = name
        lines += _global(v, name)
        writable = "false" if v.space == "const" else "true"
        initial = "0" if v.space == "const" else f"{name}_initial"
        rows.append(f"{{{_quoted(readable(v.name))}, {name}, {v.nbytes}, {writable}, {initial}, {len(v.initial)}}}")
    table = f"m{index}_globals"
    lines.append(f"static const GlobalVariable {table}[] = {{{', '.join(rows or ['{0, 0, 0, false, 0, 0}'])}}};")
    known = {k.name for k in unit.kernels}
    for entry in module.entries:
        if entry.name in known:
            raise TranslateError(f"two kernels of one build are named {entry.name!r}", ptx_line=entry.line)
        known.add(entry.name)
        prefix = f"m{index}_k{len(unit.kernels)}"
        writer = _EntryWriter(unit, module, entry, symbols, prefix)
        lines.append(writer.write())
        unit.kernels.append(
            KernelFacts(
                name=entry.name,
                param_sizes=tuple(p.nbytes for p in entry.params),
                param_offsets=tuple(writer.cx.param_offsets.values()),
                param_bytes=writer.param_bytes,
                static_shared=writer.static_bytes,
                max_threads=entry.max_threads,
            )
        )
        unit.infos.append(
            f"{{{_quoted(entry.name)}, {prefix}, {writer.param_bytes}, {writer.shared_end}, {writer.dynamic_offset}, "
            f"{writer.frame_bytes()}, {prefix}_shared, {len(writer.shared_rows)}, "
            f"{prefix}_blocks, {len(writer.blocks)}, {table}, {len(rows)}}}"
        )
    unit.modules.append("\n".join(lines))


def translate(modules: Sequence[Module]) -> Unit:
    unit = Unit()
    for i, module in enumerate(modules):
        add_module(unit, module, i)
    if not unit.kernels:
        raise TranslateError("no .entry: there is no kernel to run")
    return unit
