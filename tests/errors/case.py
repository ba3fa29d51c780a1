"""One error case as text: the command line, its exit status, the project it runs over, and what it says.

    $ kvgen build
    exit 2
    --- specs/x.py
    from kvgen import ...
    --- stderr
    error: ...

A line `--- PATH` begins a file of the project, up to the next such line; `--- PATH (base64)` one that is no such text
(binary, no newline at its end, a line of its own that begins a section); `--- PATH -> TARGET` is a symbolic link, and
`--- PATH/` an empty folder. `--- stderr` is the last section and takes the rest.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_SECTION: Final = "--- "
_ENCODED: Final = " (base64)"
_LINK: Final = " -> "
_STDERR: Final = "stderr"


@dataclass(frozen=True)
class Link:
    """A symbolic link of the project."""

    target: str


@dataclass(frozen=True)
class Case:
    """What `name.txt` holds; `files` maps a path to bytes, a link, or None for an empty folder."""

    command: str
    exit: int
    files: dict[str, bytes | Link | None] = field(default_factory=dict)
    stderr: str = ""

    def lay_out(self, root: Path) -> None:
        """Write the project into `root`; a pyproject.toml is added where there are specs and none."""
        for name, content in self.files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.mkdir(exist_ok=True)
            elif isinstance(content, Link):
                path.symlink_to(content.target)
            else:
                path.write_bytes(content)
        if (root / "specs").is_dir() and "pyproject.toml" not in self.files:
            (root / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")


def _encoded(content: bytes) -> bool:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return True
    odd = "\r" in text or "\x00" in text or (text != "" and not text.endswith("\n"))
    return odd or any(line.startswith(_SECTION) for line in text.split("\n"))


def write_case(case: Case) -> str:
    """The text of a case."""
    parts = [f"$ {case.command}\nexit {case.exit}\n"]
    for name, content in case.files.items():
        if content is None:
            parts.append(f"{_SECTION}{name}/\n")
        elif isinstance(content, Link):
            parts.append(f"{_SECTION}{name}{_LINK}{content.target}\n")
        elif _encoded(content):
            parts.append(f"{_SECTION}{name}{_ENCODED}\n{base64.encodebytes(content).decode('ascii')}")
        else:
            parts.append(f"{_SECTION}{name}\n{content.decode('utf-8')}")
    return "".join([*parts, f"{_SECTION}{_STDERR}\n{case.stderr}"])


def _lines(text: str) -> list[str]:
    """The lines of a text, each with the newline that ends it; nothing else ends a line (as str.splitlines has it)."""
    return [f"{line}\n" for line in text.removesuffix("\n").split("\n")]


def read_case(text: str) -> Case:
    """The case a text holds.

    Raises:
        ValueError: a line that is none of the above, or a path given twice.
    """
    command, status, *lines = _lines(text)
    if not command.startswith("$ ") or not status.startswith("exit "):
        raise ValueError(f"a case begins with `$ COMMAND` and `exit STATUS`, not with {command!r} and {status!r}")
    sections: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith(_SECTION) and (not sections or sections[-1][0] != _STDERR):
            sections.append((line.removeprefix(_SECTION).rstrip("\n"), []))
        elif sections:
            sections[-1][1].append(line)
        else:
            raise ValueError(f"{line!r} stands before the first `{_SECTION}PATH`")
    stderr = "".join(sections.pop()[1]) if sections and sections[-1][0] == _STDERR else ""
    files: dict[str, bytes | Link | None] = {}
    for title, body in sections:
        name, content = _read_file(title, "".join(body))
        if name in files:
            raise ValueError(f"{name}: given twice")
        files[name] = content
    return Case(command.removeprefix("$ ").rstrip("\n"), int(status.removeprefix("exit ")), files, stderr)


def _read_file(title: str, body: str) -> tuple[str, bytes | Link | None]:
    """What a section's title and its text say: a path, and what lies there."""
    name, link, target = title.partition(_LINK)
    if (link or title.endswith("/")) and body:
        raise ValueError(f"{title}: a link or a folder has no content, not {body!r}")
    if link:
        return name, Link(target)
    if title.endswith("/"):
        return title.removesuffix("/"), None
    if title.endswith(_ENCODED):
        return title.removesuffix(_ENCODED), base64.b64decode(body)
    return title, body.encode("utf-8")
