"""PTX text to statements: what is where, with the CUDA source line of each instruction; opcodes stay text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kvgen.emulator.errors import TranslateError
from kvgen.emulator.ptxtypes import TYPES


@dataclass(frozen=True, slots=True)
class Location:
    """A CUDA source line; `callers` are the lines it was inlined at, innermost first."""

    file: str
    line: int
    callers: tuple[tuple[str, int], ...] = ()

    def text(self) -> str:
        return "|".join(f"{f}:{n}" for f, n in ((self.file, self.line), *self.callers))


@dataclass(frozen=True, slots=True)
class Statement:
    """`kind`: instruction, directive, label, open or close (a scope)."""

    kind: str
    text: str
    line: int
    location: Location | None


@dataclass(frozen=True, slots=True)
class Variable:
    space: str
    name: str
    align: int
    element: str
    nbytes: int
    initial: bytes
    extern: bool
    line: int


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    nbytes: int
    align: int


@dataclass(slots=True)
class Entry:
    name: str
    params: list[Parameter]
    statements: list[Statement]
    line: int
    max_threads: int | None = None


@dataclass(slots=True)
class Module:
    target: str = ""
    entries: list[Entry] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)


_NOISE = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.S)
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"[^\n]*')
_LOC = re.compile(
    r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:\s*,\s*function_name\s+[^\s,]+\s*,\s*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?\s*$"
)
_TOKEN = re.compile(
    r"\s*(?:(?P<loc>\.loc\b[^\n]*)|(?P<brace>[{}])|(?P<label>[$\w]+)\s*:(?!:)"
    r"|(?P<statement>[^;{}]+(?:\{[^;{}]*\}[^;{}]*)*);)"
)
_ENTRY = re.compile(r"(?:\.(?:visible|weak)\s+)?\.entry\s+([\w$]+)\s*")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"(?:\.ptr(?:\s+\.(?:global|shared|const|local))?(?:\s+\.align\s+\d+)?\s+)?([\w$]+)(?:\[(\d+)\])?\s*$"
)
_VARIABLE = re.compile(
    r"(?:\.(visible|extern|weak|common)\s+)?\.(global|const|shared|local)\s+(?:\.attribute\([^)]*\)\s*)?"
    r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)((?:\[\d*\])*)\s*(?:=\s*(.+))?$",
    re.S,
)
_PERFORMANCE = re.compile(r"\.(maxntid|reqntid|minnctapersm|maxnctapersm|maxnreg|noreturn)\b([^.{]*)")


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

    # ---- module level
    def parse(self) -> Module:
        at = 0
        space = re.compile(r"\s*")
        header = re.compile(r"\.(version|target|address_size|pragma|file)\b([^\n]*)")
        while True:
            blank = space.match(self.text, at)
            at = blank.end() if blank else at
            if at >= len(self.text):
                return self._finished()
            if m := header.match(self.text, at):
                if m.group(1) == "target":
                    self.module.target = m.group(2).strip()
                at = m.end()
            elif m := re.compile(r"\.section\b[^{]*").match(self.text, at):
                at = self.matching(m.end(), "{", "}")
            elif m := _ENTRY.match(self.text, at):
                at = self.entry(m, at)
            elif m := re.compile(r"(?:\.(?:visible|weak|extern)\s+)*\.func\b[^;{]*").match(self.text, at):
                raise self.fail("device functions (.func) are not supported: declare them __forceinline__", at)
            else:
                end = self.text.find(";", at)
                if end < 0:
                    raise self.fail(f"unexpected text {self.text[at : at + 40].strip()!r}", at)
                self.module.variables.append(self.variable(self.text[at:end], at))
                at = end + 1

    def _finished(self) -> Module:
        if not self.module.target:
            raise TranslateError("no .target line: this is not PTX, or its beginning is missing", ptx_line=1)
        return self.module

    def variable(self, text: str, position: int) -> Variable:
        line = self.line(position)
        m = _VARIABLE.match(text.strip())
        if not m or m.group(4) not in TYPES:
            raise TranslateError(f"unknown declaration {' '.join(text.split())[:80]!r}", ptx_line=line)
        linkage, space, align, element, name, dims, init = m.groups()
        size = TYPES[element].bits // 8
        count = 1
        for d in re.findall(r"\[(\d*)\]", dims):
            count *= int(d or 0)
        return Variable(
            space=space,
            name=name,
            align=int(align or size),
            element=element,
            nbytes=count * size,
            initial=_initial(init, element, line) if init else b"",
            extern=linkage == "extern",
            line=line,
        )

    def entry(self, m: re.Match[str], position: int) -> int:
        line = self.line(position)
        at = m.end()
        params: list[Parameter] = []
        if self.text[at : at + 1] == "(":
            end = self.matching(at, "(", ")")
            for part in self.text[at + 1 : end - 1].split(","):
                if part.strip():
                    params.append(self.parameter(part, at))
            at = end
        body = self.text.find("{", at)
        if body < 0:
            raise self.fail(f"the text ends before the body of {m.group(1)}", at)
        found = Entry(m.group(1), params, [], line)
        rest = self.text[at:body]
        for d in _PERFORMANCE.finditer(rest):
            if d.group(1) in ("maxntid", "reqntid"):
                found.max_threads = 1
                for n in re.findall(r"\d+", d.group(2)):
                    found.max_threads *= int(n)
        if leftover := _PERFORMANCE.sub("", rest).strip():
            raise self.fail(f"unknown directive {leftover!r} on entry {found.name}", at)
        end = self.matching(body, "{", "}")
        found.statements = self.body(body + 1, end - 1)
        self.module.entries.append(found)
        return end

    def parameter(self, text: str, position: int) -> Parameter:
        m = _PARAM.match(text.strip())
        if not m or m.group(2) not in TYPES:
            raise self.fail(f"unknown parameter declaration {' '.join(text.split())!r}", position)
        size = TYPES[m.group(2)].bits // 8
        return Parameter(m.group(3), size * int(m.group(4) or 1), int(m.group(1) or size))

    # ---- function bodies
    def body(self, at: int, end: int) -> list[Statement]:
        out: list[Statement] = []
        where: Location | None = None
        while self.text[at:end].strip():
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


def _initial(text: str, element: str, line: int) -> bytes:
    kind = TYPES[element]
    size = kind.bits // 8
    out = bytearray()
    for part in text.replace("{", " ").replace("}", " ").split(","):
        item = part.strip()
        if not item:
            continue
        try:
            value = int(item[2:], 16) if item[:2].lower() in ("0f", "0d") else int(item.rstrip("U"), 0)
        except ValueError:
            raise TranslateError(f"initial value {item!r} is not a number", ptx_line=line) from None
        out += (value & ((1 << kind.bits) - 1)).to_bytes(size, "little")
    return bytes(out)


def parse(ptx: str) -> Module:
    """Raises TranslateError for text that is not well-formed PTX or uses declarations the emulator does not know."""
    return _Parser(ptx).parse()
