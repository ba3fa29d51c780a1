"""One PTX function, .func or .entry, to one C function."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvgen.emulator.classes import instruction_class
from kvgen.emulator.context import Context, Instruction, Modifiers, split_operands
from kvgen.emulator.declarations import Variable, parameters, variables
from kvgen.emulator.errors import TranslateError
from kvgen.emulator.opcodes import OPCODES
from kvgen.emulator.parser import Entry, Function, Statement, place_of
from kvgen.emulator.ptxtypes import TYPES
from kvgen.emulator.symbols import Signature, Symbols, mangle
from kvgen.emulator.wgmma_ops import late_registers

SiteOf = Callable[[str, str, int, int], int]  # place, operation, basic block, number in it

_REG = re.compile(r"\.reg\s+\.(\w+)\s+(.*)$")
_PROTOTYPE = re.compile(
    r"\.callprototype\s*(?:\((.*?)\))?\s*[\w$]+\s*(?:\((.*?)\))?\s*(?:\.noreturn|\.abi_\w+ \d+|\s)*$"
)
_GUARD = re.compile(r"@(!?)\s*(%?[\w$]+)\s+(.*)$")
_BRANCH = re.compile(r"(?:^|\s)bra\b")
_ENDS_BLOCK = ("bra", "brx", "call", "ret", "exit", "trap")
_MOST_REGISTERS = 1 << 17
_REDZONE = 16  # bytes after each local array that no other has
_TEMPORARIES = 8  # bytes of stack an instruction where the host compiler does not optimize, beside registers
_TABLES = (".branchtargets", ".callprototype", ".calltargets")


@dataclass(slots=True)
class BasicBlock:
    """Instructions that run one after another: how many, and how many of each (line of CUDA, class)."""

    instructions: int = 0
    contents: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, where: str, op: str) -> None:
        self.instructions += 1
        self.contents[where.partition("|")[0], instruction_class(op)] += 1


def _loop_heads(statements: Sequence[Statement]) -> frozenset[str]:
    """Labels that a later branch names, or a table: every endless loop passes one of them."""
    seen: set[str] = set()
    heads: set[str] = set()
    for s in statements:
        if s.kind == "label":
            seen.add(s.text)
        elif s.kind == "directive" and s.text.startswith(".branchtargets"):
            heads.update(split_operands(s.text.partition(" ")[2]))
        elif s.kind == "instruction" and _BRANCH.search(s.text) and (target := s.text.split()[-1]) in seen:
            heads.add(target)
    return frozenset(heads)


class FunctionWriter:
    """Basic blocks are numbered from `first_block`: all functions that one entry can reach share one table."""

    def __init__(self, function: Function, name: str, symbols: Symbols, first_block: int, site_of: SiteOf) -> None:
        self.name = name
        self.function = function
        self.is_entry = isinstance(function, Entry)
        self.site_of = site_of
        self.first_block = first_block
        self.blocks: list[BasicBlock] = []
        self.new_block = True
        self.loops = False  # the block that begins is where a loop comes back to
        self.loop_heads: frozenset[str] = _loop_heads(function.statements)
        self.body: list[str] = []
        self.lines: list[str] = []  # the C function, once written
        self.prologue: list[str] = []
        self.cx = Context(function, symbols, self.is_entry, late_registers(function.statements))
        self.frame_bytes = 0
        self._labels()

    def _labels(self) -> None:
        stack, scopes = [0], 0
        previous: Statement | None = None
        for s in self.function.statements:
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
                self.cx.labels[key] = f"L{mangle(s.text, stack[-1])}"
            elif s.kind == "directive" and s.text.startswith(_TABLES):
                if previous is None or previous.kind != "label":
                    raise TranslateError(f"{s.text.split()[0]} without a label", ptx_line=s.line)
                self._table(previous.text, s)
            previous = s
        if len(stack) != 1:
            raise TranslateError(f"a {{ in {self.function.name} is never closed", ptx_line=self.function.line)

    def _table(self, label: str, s: Statement) -> None:
        """What a label names other than a place in the code."""
        word, _, rest = s.text.partition(" ")
        if word == ".callprototype":
            m = _PROTOTYPE.match(s.text)
            if not m:
                raise TranslateError(f"cannot read {s.text!r}", ptx_line=s.line)
            results, params = (tuple(parameters(text or "", s.line)) for text in m.groups())
            self.cx.prototypes[label] = Signature(params, results)
        else:
            table = self.cx.branch_targets if word == ".branchtargets" else self.cx.call_targets
            table[label] = split_operands(rest)

    # ---- statements
    def write(self) -> None:
        for v, offset in zip(self.function.params, self.cx.param_offsets, strict=True):
            if v.space == "reg":
                register = self.cx.declare(v.name, v.type, v.line)
                register.used = True
                self.prologue.append(f"{register.c} = *(const {register.storage}_at*)(P + {offset});")
        for v in self.function.results:
            if v.space == "reg":
                self.cx.declare(v.name, v.type, v.line).used = True
        scopes = 0
        for s in self.function.statements:
            if s.kind == "open":
                scopes += 1
                self.cx.open_scope(scopes)
            elif s.kind == "close":
                self.cx.scopes.pop()
            elif s.kind == "label":
                self.body.append(f"{self.cx.label_here(s.text)}:;")
                self.new_block = True
                self.loops |= s.text in self.loop_heads
            elif s.kind == "directive":
                self._directive(s)
            else:
                self._instruction(s)
        self._finish()

    def _directive(self, s: Statement) -> None:
        word = s.text.split(None, 1)[0]
        if word == ".reg":
            self._registers(s)
        elif word in (".local", ".param"):
            for v in variables(s.text, s.line):
                if word == ".local":
                    self._local(v)
                else:
                    self._param(v)
        elif word not in (".shared", ".pragma", *_TABLES):
            raise TranslateError(f"unknown directive {s.text!r}", ptx_line=s.line)

    def _local(self, v: Variable) -> None:
        if v.name in self.cx.locals:
            raise TranslateError(f".local {v.name!r} is declared twice", ptx_line=v.line)
        self.cx.locals[v.name] = (f"l{mangle(v.name)}", v.nbytes, v.align)
        self.frame_bytes += v.nbytes + _REDZONE + v.align

    def _param(self, v: Variable) -> None:
        place = self.cx.declare_param(v)
        self.frame_bytes += v.nbytes
        self.body.append(f"__builtin_memset({place.c}, 0, {v.nbytes});")

    def _registers(self, s: Statement) -> None:
        m = _REG.match(s.text)
        if not m or m.group(1) not in TYPES:
            raise TranslateError(f"cannot read {s.text!r}", ptx_line=s.line)
        for item in m.group(2).split(","):
            name = item.strip()
            if r := re.match(r"(%?[\w$]+)<(\d+)>$", name):
                if int(r.group(2)) > _MOST_REGISTERS:
                    raise TranslateError(f"{name} are more registers than the emulator holds", ptx_line=s.line)
                for i in range(int(r.group(2))):
                    self.cx.declare(f"{r.group(1)}{i}", TYPES[m.group(1)], s.line)
            elif re.match(r"%?[\w$]+$", name):
                self.cx.declare(name, TYPES[m.group(1)], s.line)
            else:
                raise TranslateError(f"cannot read {s.text!r}", ptx_line=s.line)

    def _instruction(self, s: Statement) -> None:
        text, guard = s.text, ""
        if m := _GUARD.match(text):
            text = m.group(3)
        op, _, rest = text.partition(" ")
        words = op.split(".")
        where = place_of(s.location) if s.location else f"{self.function.name}.ptx:{s.line}"
        if self.new_block:
            self.blocks.append(BasicBlock())
            number = self.first_block + len(self.blocks) - 1
            if self.loops:
                self.body.append(
                    f"if (__builtin_expect(++bb[{number}] == RUNAWAY, 0)) emu_runaway({self.site_of(where, op, number, 0)});"
                )
            else:
                self.body.append(f"++bb[{number}];")
            self.new_block = self.loops = False
        block = self.first_block + len(self.blocks) - 1
        index = self.blocks[-1].instructions
        self.blocks[-1].add(where, op)
        ins = Instruction(
            opcode=words[0],
            modifiers=Modifiers(words[1:], lambda message: ins.fail(message)),
            operands=split_operands(rest),
            text=s.text,
            line=s.line,
            location=s.location,
            site=lambda: str(self.site_of(where, op, block, index)),
        )
        handler = OPCODES.get(words[0])
        if handler is None:
            raise ins.fail(f"unknown opcode {words[0]!r}")
        try:
            if m:
                guard = f"if ({'!' if m.group(1) else ''}{self.cx.predicate(ins, m.group(2))}) "
            code = handler(self.cx, ins)
        except (IndexError, KeyError, ValueError) as e:  # operands that are missing, or no numbers
            raise ins.fail("cannot read the operands") from e
        ins.modifiers.done()
        if code or guard:
            self.body.append(f"{guard}{{ {code} }}")
        if words[0] in _ENDS_BLOCK:
            self.new_block = True

    # ---- C
    @property
    def declaration(self) -> str:
        """The C head. Functions are not inlined, so that one's frame is at most twice what `frame_bytes` says."""
        if self.is_entry:
            return f"EMU_BODY void {self.name}(Thread* const self)"
        return f"EMU_BODY void {self.name}(Thread* const self, const u8* const P, u8* const R)"

    def _finish(self) -> None:
        cx = self.cx
        self.frame_bytes += sum(max(r.type.bits // 8, 1) for r in cx.registers)
        self.frame_bytes += _TEMPORARIES * sum(b.instructions for b in self.blocks)
        by_storage: dict[str, list[str]] = {}
        for r in (r for r in cx.registers if r.used and not r.late):
            by_storage.setdefault(r.storage, []).append(f"{r.c} = 0")
        lines = [
            f"{self.declaration} {{",
            "u32* const bb = self->blocks; u32 carry = 0; (void)bb; (void)carry;",
            f"enum {{ PARAM_BYTES = {cx.param_bytes} }};",
        ]
        if self.is_entry:
            lines.append("const u8* const P = self->params; (void)P; self->locals = nullptr;")
        if cx.locals or cx.allocates:
            lines.append("const LocalArray* const outer = self->locals;")
        for name, nbytes, align in cx.locals.values():
            lines.append(f"u8 room{name}[{nbytes + _REDZONE + align}];")  # few compilers align a stack further than 16
            lines.append(f"u8* const {name} = (u8*)(((u64)room{name} + {align - 1}) & -(u64){align});")
            lines.append(f"const LocalArray a{name} = {{self->locals, {name}, {nbytes}}}; self->locals = &a{name};")
        lines += [f"u8 {name}[{nbytes}] EMU_ALIGNED;" for name, nbytes in cx.param_locals]
        if cx.late_count:
            lines.append(f"enum {{ LATE = {cx.late_count} }}; u32 late[LATE] = {{0}};")
        lines += [f"{storage} {', '.join(names)};" for storage, names in by_storage.items()]
        last = ["self->locals = outer;"] if cx.locals or cx.allocates else []
        self.lines = [*lines, *self.prologue, *self.body, cx.epilogue(), "leave:;", *last, "}"]
