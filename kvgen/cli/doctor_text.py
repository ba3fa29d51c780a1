"""The output of `kvgen doctor`, without typer and rich, which an environment with the runtime alone does not have."""

from __future__ import annotations

import json
from collections.abc import Callable

from kvgen.cli.doctor_checks import Finding, examine


def report(*, as_json: bool, line: Callable[[Finding], None] | None = None) -> int:
    """Print every check as it is made, by `line` or as plain text, or all as JSON; 1 where something is broken, else 0."""
    found: list[Finding] = []
    for item in examine():
        found.append(item)
        if not as_json:
            line(item) if line else print(f"{item.level:6} {item.what:14} {item.detail}", flush=True)
    broken = any(f.level == "broken" for f in found)
    if as_json:
        lines = [{"what": f.what, "level": f.level, "detail": f.detail} for f in found]
        print(json.dumps({"ok": not broken, "lines": lines}, indent=2))
    return int(broken)
