"""What engines made with kvgen: the tables of docs/vllm.md and docs/transformers.md, from the versions and docs/engines/*.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvgen.integrations.vllm.signatures import RECORD
from kvgen.integrations.vllm.versions import KNOWN

ROOT: Final = Path(__file__).resolve().parents[1]
_HOW: Final = {
    "proved": "the engine ran with it: the runs below",
    "read": "its signatures were compared with those of {first}; nothing ran",
}


# Rooms of kvgen that no engine's process runs through. Integrations count each for its own engine.
_BESIDE: Final = frozenset(
    {"bench", "cli", "cycles", "export", "integrations", "pages", "reference", "testing", "torch", "verify"}
)


def sources(engine: str) -> list[Path]:
    """The sources that run in an engine's process: its integration, kvgen from specs to launches, and templates."""
    kvgen = ROOT / "kvgen"
    rooms = [path for path in _files(kvgen) if path.relative_to(kvgen).parts[0] not in _BESIDE]
    return sorted([*rooms, *_files(kvgen / "integrations" / engine), *_files(ROOT / "templates")])


def _files(folder: Path) -> list[Path]:
    """The files of a folder but for Markdown and what Python leaves there."""
    found = (path for path in folder.rglob("*") if path.suffix not in (".md", ".pyc"))
    return [path for path in found if path.is_file()]


def digest(engine: str) -> str:
    """SHA-256 of the names and contents of the sources that run in an engine's process, in hex."""
    found = hashlib.sha256()
    for path in sources(engine):
        found.update(f"{path.relative_to(ROOT).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def versions_table() -> str:
    """A row a version of vLLM."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    lines = ["| vLLM | | what is known |", "|---|---|---|"]
    for known in KNOWN:
        text = _HOW[known.how].format(first=record["version"])
        if known.how == "read":
            found = record["compared"][known.version]["differing"]
            text += f": {len(record['found'])} names, {len(found)} differ in what does not matter to kvgen"
        lines.append(f"| {known.version} | {known.how} | {text} |")
    lines.append(
        "| other releases of these minor versions | compared | served where all of these names are as in the known one, which is looked at "
        "when the backend is chosen; else refused by the names that differ |"
    )
    lines.append(
        "| any other | refused | `KVGEN_VLLM_UNTESTED=1` takes the adapter of the nearest one, with a warning |"
    )
    return "\n".join(lines)


def runs_table(engine: str) -> str:
    """A row a run of an engine, as docs/engines/status.json has it; commit and date, and whether sources are as they were."""
    status = json.loads((ROOT / "docs/engines/status.json").read_text(encoding="utf-8"))[engine]
    packages = ", ".join(f"{name} {version}" for name, version in status["versions"].items())
    of = f"Run at commit `{status['commit'][:8]}` of {status['date']}, with {packages}."
    if status["digest"] != digest(engine):
        of += " **An older tree**: the integration, the runtime, code generation or templates have changed since."
    lines = [of, "", "| what | model | dtype | tokens equal | launches |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *sorted(_row(run) for run in status["runs"].values())])


def _row(run: dict[str, Any]) -> str:
    launches = ", ".join(f"{count} {name}" for name, count in run["launches"].items())
    return f"| {run['what']} | {run['model']} | {run['dtype']} | {run['equal']} of {run['tokens']} | {launches} |"


VLLM_BLOCKS: Final[dict[str, Callable[[], str]]] = {"versions": versions_table, "runs": lambda: runs_table("vllm")}
TRANSFORMERS_BLOCKS: Final[dict[str, Callable[[], str]]] = {"runs": lambda: runs_table("transformers")}
