"""What engines made with kvgen: the tables of docs/vllm.md and docs/transformers.md, from the versions and docs/engines/*.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvgen.integrations.vllm.versions import KNOWN

ROOT: Final = Path(__file__).resolve().parents[1]
_HOW: Final = {
    "proved": "the engine ran with it: the runs below",
    "read": "its signatures were compared with those of {first}; nothing ran",
}


def versions_table() -> str:
    """A row a version of vLLM."""
    record = json.loads((ROOT / "docs/engines/signatures.json").read_text(encoding="utf-8"))
    lines = ["| vLLM | | what is known |", "|---|---|---|"]
    for known in KNOWN:
        text = _HOW[known.how].format(first=record["version"])
        if known.how == "read":
            found = record["compared"][known.version]["differing"]
            text += f": {len(record['found'])} names, {len(found)} differ in what does not matter to kvgen"
        lines.append(f"| {known.version} | {known.how} | {text} |")
    lines.append(
        "| any other | refused | `KVGEN_VLLM_UNTESTED=1` takes the adapter of the nearest one, with a warning |"
    )
    return "\n".join(lines)


def runs_table(engine: str) -> str:
    """A row a run of an engine, as docs/engines/status.json has it."""
    status = json.loads((ROOT / "docs/engines/status.json").read_text(encoding="utf-8"))[engine]
    packages = ", ".join(f"{name} {version}" for name, version in status["versions"].items())
    lines = [f"With {packages}:", "", "| what | model | dtype | tokens equal | launches |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *sorted(_row(run) for run in status["runs"].values())])


def _row(run: dict[str, Any]) -> str:
    launches = ", ".join(f"{count} {name}" for name, count in run["launches"].items())
    return f"| {run['what']} | {run['model']} | {run['dtype']} | {run['equal']} of {run['tokens']} | {launches} |"


VLLM_BLOCKS: Final[dict[str, Callable[[], str]]] = {"versions": versions_table, "runs": lambda: runs_table("vllm")}
TRANSFORMERS_BLOCKS: Final[dict[str, Callable[[], str]]] = {"runs": lambda: runs_table("transformers")}
