"""PTX text to statements: what is where, with the CUDA source line of each instruction; opcodes stay text."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field, replace

from kvgen.emulator.declarations import Variable, parameters, variables
from kvgen.emulator.errors import TranslateError


@dataclass(frozen=True, slots=True)
class Location:
    """A CUDA source line; `callers` are the lines it was inlined at, innermost first."""

    file: str
    line: int
    callers: tuple[tuple[str, int], ...] = ()


@functools.lru_cache(maxsize=4096)
def place_of(location: Location) -> str:
    """ "file:line|file:line": the line, and those it was inlined at."""
    return "|".join(f"{f}:{n}" for f, n in ((location.file, location.line), *location.callers))


@dataclass(frozen=True, slots=True)
class Statement:
    """`kind`: instruction, directive, label, open or close (a scope)."""

    kind: str
    text: str
    line: int
    location: Location | None


@dataclass(slots=True)
class Function:
    """A .func: `body` is None where it is only declared."""

    name: str
    params: list[Variable]
    results: list[Variable]
    line: int
    body: list[Statement] | None = None

    @property
    def statements(self) -> list[Statement]:
        return self.body or []


@dataclass(slots=True)
class Entry(Function):
    """A kernel. `max_threads` and `cluster` (blocks in x, y, z) are what its directives demand of a launch, `max_registers` of
    a thread and `min_blocks` of a multiprocessor what they demand of ptxas."""

    max_threads: int | None = None
    max_registers: int | None = None
    min_blocks: int | None = None
    cluster: tuple[int, int, int] | None = None


@dataclass(slots=True)
class Module:
    target: str = ""
    entries: list[Entry] = field(default_factory=list)
    functions: dict[str, Function] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)


# The last minor version of each major one; of the newest, any: what a new version adds is an unknown opcode or modifier.
_VERSIONS = {3: 2, 4: 3, 5: 0, 6: 5, 7: 8, 8: 8, 9: 9}
_NOISE = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.S)
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"[^\n]*')
_LOC = re.compile(
    r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:\s*,\s*function_name\s+[^\s,]+\s*,\s*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?\s*$"
)
_TOKEN = re.compile(
    r"\s*(?:(?P<loc>\.loc\b[^\n]*)|(?P<brace>[{}])|(?P<label>[$\w]+)\s*:(?!:)"
    r"|(?P<statement>[^;{}]+(?:\{[^;{}]*\}[^;{}]*)*);)"
)
_BLANK = re.compile(r"\s*")
_HEADER = re.compile(r"\.(version|target|address_size)\b([^\n]*)")
_IGNORED = re.compile(r"\.file\b[^\n]*|\.pragma\b[^;]*;")
_SECTION = re.compile(r"\.section\b[^{]*")
_ALIAS = re.compile(r"\.alias\s+([\w$]+)\s*,\s*([\w$]+)\s*;")
_FUNCTION = re.compile(r"(?:\.(?:visible|weak|extern)\s+)*\.(func|entry)\b\s*")
_NAME = re.compile(r"[A-Za-z_$%][\w$]*\s*")
_DIRECTIVE = re.compile(r"\.(?:(attribute)\s*\([^()]*(?:\([^()]*\))?[^()]*\)|(\w+)\s*((?:\d+\s*,?\s*)*))")
_HINTS = ("minnctapersm", "maxnctapersm", "maxnreg", "noreturn", "abi_preserve", "abi_preserve_control", "attribute")
_CLUSTERS = ("explicitcluster", "maxclusterrank")


def _clean(text: str) -> str:
    """Comments become spaces; line breaks stay, so that line numbers do."""

    def keep(m: re.Match[str]) -> str:
        found = m.group()
        return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)

    return _NOISE.sub(keep, text)


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = _clean(text)
        self.files = {int(m.group(1)): m.group(2) for m in _FILE.finditer(self.text)}
        self.module = Module()
        self.seen: set[str] = set()  # header directives
        self.names: dict[str, int] = {}  # lines of the module's definitions
        self.places: dict[tuple[int, int, int], Location] = {}
        self._counted_to = 0
        self._line = 1

    def line(self, position: int) -> int:
        if position < self._counted_to:
            return self.text.count("\n", 0, position) + 1
        self._line += self.text.count("\n", self._counted_to, position)
        self._counted_to = position
        return self._line

    def fail(self, message: str, position: int) -> TranslateError:
        return TranslateError(message, ptx_line=self.line(position))

    def matching(self, position: int, opening: str, closing: str) -> int:
        depth = 0
        for m in re.compile(f"[{re.escape(opening + closing)}]").finditer(self.text, position):
            depth += 1 if m.group() == opening else -1
            if depth == 0:
                return m.end()
        raise self.fail(f"the text ends before the {closing!r} that matches this {opening!r}", position)

    def define(self, name: str, position: int) -> None:
        line = self.line(position)
        if name in self.names:
            raise TranslateError(f"{name!r} is declared twice, first on line {self.names[name]}", ptx_line=line)
        self.names[name] = line

    # ---- module level
    def parse(self) -> Module:
        at = 0
        while True:
            at = self.blank(at)
            if at >= len(self.text):
                return self._finished()
            if m := _HEADER.match(self.text, at):
                self.header(m.group(1), m.group(2).strip(), at)
                at = m.end()
            elif m := _IGNORED.match(self.text, at):
                at = m.end()
            elif m := _SECTION.match(self.text, at):
                at = self.matching(m.end(), "{", "}")
            elif m := _ALIAS.match(self.text, at):
                self.alias(m.group(1), m.group(2), at)
                at = m.end()
            elif m := _FUNCTION.match(self.text, at):
                at = self.function(m.group(1) == "entry", at, m.end())
            else:
                at = self.module_variables(at)

    def blank(self, at: int) -> int:
        m = _BLANK.match(self.text, at)
        return m.end() if m else at

    def _finished(self) -> Module:
        for word in ("target", "version"):
            if word not in self.seen:
                raise TranslateError(f"no .{word} line: this is not PTX, or its beginning is missing", ptx_line=1)
        return self.module

    def header(self, word: str, value: str, position: int) -> None:
        self.seen.add(word)
        if word == "version":
            m = re.match(r"(\d)\.(\d)$", value)
            if not m or int(m.group(2)) > _VERSIONS.get(int(m.group(1)), -1):
                raise self.fail(f"unknown version {value!r}: known are PTX 3.0 to 9.x", position)
        elif word == "target":
            arch, *features = (w.strip() for w in value.split(","))
            if not re.match(r"sm_\d+[af]?$", arch) or any(f not in ("debug", "texmode_unified") for f in features):
                raise self.fail(f"unknown target {value!r}: it is sm_ and a number, perhaps with 'debug'", position)
            self.module.target = arch
        elif value != "64":
            raise self.fail(f"address size {value!r}: only 64 bits are supported", position)

    def alias(self, name: str, other: str, position: int) -> None:
        target = self.module.functions.get(other)
        declared = self.module.functions.get(name)
        if target is None or target.body is None or declared is None or declared.body is not None:
            raise self.fail(f".alias {name}, {other}: it gives a declared function the body of another", position)
        self.same_shape(declared, target, position)
        if any(t.text.startswith(".shared") for t in target.statements):
            raise self.fail(f".alias of {other}, which has shared variables of its own, is not supported", position)
        self.define(name, position)
        self.module.functions[name] = replace(target, name=name)

    def module_variables(self, at: int) -> int:
        end = self.text.find(";", at)
        if end < 0 or not self.text.startswith(".", at):
            raise self.fail(f"unexpected text {self.text[at : at + 40].strip()!r}", at)
        for v in variables(self.text[at:end], self.line(at)):
            if v.space in ("param", "reg", "local"):
                raise self.fail(f".{v.space} variable {v.name!r} outside a function", at)
            if not v.extern:
                self.define(v.name, at)
                self.module.variables = [o for o in self.module.variables if o.name != v.name]
            elif any(o.name == v.name for o in self.module.variables):
                continue
            self.module.variables.append(v)
        return end + 1

    # ---- functions
    def function(self, is_entry: bool, start: int, at: int) -> int:
        line = self.line(start)
        make = Entry if is_entry else Function
        found = make("", [], [], line)
        at = self.directives(found, at)
        if not is_entry and self.text[at : at + 1] == "(":
            found.results, at = self.bracketed(at)
        m = _NAME.match(self.text, at)
        if not m:
            raise self.fail("a function without a name", start)
        found.name, at = m.group().strip(), m.end()
        if self.text[at : at + 1] == "(":
            found.params, at = self.bracketed(at)
        at = self.directives(found, at)
        if isinstance(found, Entry) and any(p.space != "param" for p in found.params):
            raise self.fail(f"a parameter of {found.name} is no .param", start)
        if self.text[at : at + 1] == ";":
            self.declare(found, start)
            return at + 1
        if self.text[at : at + 1] != "{":
            what = self.text[at : at + 40].split("\n")[0]
            message = f"unexpected {what!r} before the body" if what else "the text ends before the body"
            raise self.fail(f"{message} of {found.name}", at)
        end = self.matching(at, "{", "}")
        found.body = self.body(at + 1, end - 1)
        self.declare(found, start)
        return end

    def declare(self, found: Function, position: int) -> None:
        if found.body is not None:
            self.define(found.name, position)
        if isinstance(found, Entry):
            if found.body is not None:
                self.module.entries.append(found)
            return
        known = self.module.functions.get(found.name)
        if known is not None:
            self.same_shape(known, found, position)
        if known is None or found.body is not None:
            self.module.functions[found.name] = found

    def same_shape(self, a: Function, b: Function, position: int) -> None:
        shapes = [[(v.space, v.nbytes, v.align) for v in (*f.results, *f.params)] for f in (a, b)]
        if shapes[0] != shapes[1] or len(a.results) != len(b.results):
            raise self.fail(f"{b.name!r} has other parameters than {a.name!r} on line {a.line}", position)

    def bracketed(self, at: int) -> tuple[list[Variable], int]:
        end = self.matching(at, "(", ")")
        return parameters(self.text[at + 1 : end - 1], self.line(at)), self.blank(end)

    def directives(self, found: Function, at: int) -> int:
        at = self.blank(at)
        while m := _DIRECTIVE.match(self.text, at):
            name, values = m.group(1) or m.group(2), [int(n) for n in re.findall(r"\d+", m.group(3) or "")]
            if isinstance(found, Entry) and name in ("maxntid", "reqntid") and 1 <= len(values) <= 3:
                found.max_threads = math.prod(values)
            elif isinstance(found, Entry) and name == "reqnctapercluster" and 1 <= len(values) <= 3:
                x, y, z = (*values, 1, 1)[:3]
                found.cluster = (x, y, z)
            elif isinstance(found, Entry) and name == "maxnreg" and len(values) == 1:
                found.max_registers = values[0]
            elif isinstance(found, Entry) and name == "minnctapersm" and len(values) == 1:
                found.min_blocks = values[0]
            elif name == "pragma":
                at = self.blank(self.text.find(";", at) + 1 or len(self.text))
                continue
            elif name not in _HINTS and not (isinstance(found, Entry) and name in _CLUSTERS):
                raise self.fail(f"unknown directive {m.group().strip()!r} on {found.name or 'a function'}", at)
            at = self.blank(m.end())
        return at

    def body(self, at: int, end: int) -> list[Statement]:
        out: list[Statement] = []
        where: Location | None = None
        while (at := self.blank(at)) < end:
            m = _TOKEN.match(self.text, at, end)
            if not m:
                raise self.fail(f"cannot read {self.text[at : at + 60].strip()!r}", at)
            start = m.start(m.lastgroup or 0)
            at = m.end()
            if m.group("loc"):
                where = self.location(m.group("loc"), start) or where
            elif brace := m.group("brace"):
                out.append(Statement("open" if brace == "{" else "close", "", self.line(start), where))
            elif label := m.group("label"):
                out.append(Statement("label", label, self.line(start), where))
            else:
                text = " ".join(m.group("statement").split())
                kind = "directive" if text.startswith(".") else "instruction"
                out.append(Statement(kind, text, self.line(start), where))
        return out

    def location(self, text: str, position: int) -> Location | None:
        m = _LOC.match(text)
        if not m:
            raise self.fail(f"cannot read {text.strip()!r}", position)
        file, line, column = int(m.group(1)), int(m.group(2)), int(m.group(3))
        if line == 0:  # code of the compiler's own: keep the line before it
            return None
        callers: tuple[tuple[str, int], ...] = ()
        if m.group(4):
            outer = (int(m.group(4)), int(m.group(5)), int(m.group(6)))
            known = self.places.get(outer)
            callers = ((self.files.get(outer[0], "?"), outer[1]), *(known.callers if known else ()))
        found = Location(self.files.get(file, "?"), line, callers)
        self.places[file, line, column] = found
        return found


def parse(ptx: str) -> Module:
    """Raises TranslateError for text that is not well-formed PTX or uses declarations the emulator does not know."""
    return _Parser(ptx).parse()
