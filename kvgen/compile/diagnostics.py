"""NVRTC's complaints, traced back to the generated line and to the template line behind it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvgen.compile.nvrtc import PROGRAM_NAME
from kvgen.errors import CompileError

Origin = Callable[[str, int], str | None]
"""(generated file, line) -> "templates/ops/append/append.cu.j2:5", or None where no template line is known."""

_MOST_SHOWN: Final = 8  # the first error explains; those after it are mostly its consequences

_HEAD = re.compile(
    r"^(?P<file>\S.*?)\((?P<line>\d+)\): (?P<severity>[a-z ]*error|warning|note|remark)[^:]*: (?P<text>.*)$"
)
_LINE_DIRECTIVE = re.compile(r'^\s*#\s*(?:line\s+)?(\d+)(?:\s+"([^"]*)")?\s*$')
_ASSEMBLER = re.compile(r"^\s*ptxas\s+(?:\S.*?, line (?P<line>\d+); )?(?:error|fatal)\s*: (?P<text>.*)$")
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s")
_FILE = re.compile(r'^(\s*\.file\s+(\d+)\s+)"([^"]*)"(?:,\s*\d+,\s*\d+)?', re.M)


class UnitError(CompileError):
    """One kernel was refused for one target; `body` is what to show, without the heading."""

    def __init__(self, unit_name: str, arch: str, body: str) -> None:
        super().__init__(f"{unit_name} for {arch}: does not compile\n{body}")
        self.unit_name = unit_name
        self.arch = arch
        self.body = body


@dataclass(frozen=True)
class Diagnostic:
    """One message: where in the generated files (line 0: nowhere in particular), how bad, and what.

    `severity` is "error", "warning", "note" or "remark"; `source` is the PTX instruction when the assembler complained.
    """

    file: str
    line: int
    severity: str
    text: str
    source: str = ""


def source_lines(text: str) -> dict[tuple[str, int], str]:
    """(file, line) -> text of that line, following the #line directives."""
    lines: dict[tuple[str, int], str] = {}
    file, number = PROGRAM_NAME, 1
    for line in text.splitlines():
        directive = _LINE_DIRECTIVE.match(line)
        if directive:
            number = int(directive[1])
            file = directive[2] if directive[2] is not None else file
            continue
        lines[file, number] = line
        number += 1
    return lines


def source_files(text: str) -> list[str]:
    """The file names of the #line directives, each once, in order."""
    matches = (_LINE_DIRECTIVE.match(line) for line in text.splitlines())
    return list(dict.fromkeys(match[2] for match in matches if match and match[2]))


def relative_file_table(ptx: str, files: list[str]) -> str:
    """PTX with its `.file` entries named as in the #line directives.

    NVRTC makes them absolute with the working folder, which would make the text differ from machine to machine.
    """

    def rename(match: re.Match[str]) -> str:
        path = match[3].replace("\\", "/")
        fitting = [file for file in files if path == file or path.endswith("/" + file)]
        return f'{match[1]}"{max(fitting, key=len)}"' if fitting else match[0]

    return _FILE.sub(rename, ptx)


def compiler_diagnostics(log: str, lines: dict[tuple[str, int], str]) -> list[Diagnostic]:
    """The compiler's messages in a log. Explanations under a message stay with it; its copy of the line does not."""
    found: list[Diagnostic] = []
    text: list[str] = []
    head: re.Match[str] | None = None

    def close() -> None:
        if head:
            severity = "error" if head["severity"].endswith("error") else head["severity"]
            found.append(Diagnostic(head["file"], int(head["line"]), severity, "\n".join(text)))

    for line in log.splitlines():
        match = _HEAD.match(line)
        if match:
            close()
            head, text = match, [match["text"]]
        elif not line.strip():
            close()
            head = None
        elif head:
            shown = lines.get((head["file"], int(head["line"])))
            if line.strip() != "^" and (shown is None or line.strip() != shown.strip()):
                text.append("    " + line.strip())
    close()
    return found


def refused_ptx_lines(log: str) -> bool:
    """Whether the assembler names PTX lines it refuses: inline PTX that the compiler had passed on unread."""
    return any((match := _ASSEMBLER.match(line)) and match["line"] for line in log.splitlines())


def assembler_diagnostics(log: str, ptx: str, files: list[str]) -> list[Diagnostic]:
    """The assembler's messages in a log, traced through the `.loc` directives of the PTX it was given."""
    named = relative_file_table(ptx, files)
    table = {int(match[2]): match[3] for match in _FILE.finditer(named)}
    ptx_lines = named.splitlines()
    found = []
    for line in log.splitlines():
        match = _ASSEMBLER.match(line)
        if match is None:
            continue
        number = int(match["line"] or 0)
        file, at = "", 0
        for candidate in reversed(ptx_lines[:number]):
            loc = _LOC.match(candidate)
            if loc:
                file, at = table.get(int(loc[1]), ""), int(loc[2])
                break
        source = ptx_lines[number - 1].strip() if 0 < number <= len(ptx_lines) else ""
        found.append(Diagnostic(file, at, "error", match["text"].strip(), source))
    if len(found) > 1:  # what follows the reason only says that there was one
        found = [diagnostic for diagnostic in found if not diagnostic.text.endswith("aborted due to errors")]
    return found


def warnings_of(log: str) -> tuple[str, ...]:
    """The warnings in a log of a successful compile, one line each, with the assembler's performance losses."""
    compiler = (d for d in compiler_diagnostics(log, {}) if d.severity == "warning")
    found = [f"{d.file}:{d.line}: {d.text.splitlines()[0]}" for d in compiler]
    for line in log.splitlines():
        if re.match(r"\s*ptxas\s+warning", line) or "Potential Performance Loss" in line:
            found.append(line.strip())
    return tuple(found)


def describe(log: str, text: str, ptx: str, origin: Origin | None) -> str:
    """The errors of a refused compile: each with its generated line, and the template line where `origin` knows it."""
    lines = source_lines(text)
    errors = [d for d in compiler_diagnostics(log, lines) if d.severity == "error"]
    errors += assembler_diagnostics(log, ptx, source_files(text))
    if not errors:
        return log.strip() or "it gave no reason"
    shown: list[str] = []
    for error in errors[:_MOST_SHOWN]:
        if not error.line:
            shown.append(f"error: {error.text}")
            continue
        shown.append(f"{error.file}:{error.line}: error: {error.text}")
        line = lines.get((error.file, error.line))
        if line is not None:
            shown.append(f"    {line.strip()}")
        if error.source:
            shown.append(f"    PTX: {error.source}")
        template = origin(error.file, error.line) if origin else None
        if template:
            shown.append(f"    from {template}")
    if len(errors) > _MOST_SHOWN:
        shown.append(f"and {len(errors) - _MOST_SHOWN} more errors")
    return "\n".join(shown)
