"""The results file: written as the run goes on, so that whatever ends it leaves what was found; and the tables."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvgen.errors import ToolError
from kvgen.json_file import read_object

SCHEMA = 1
_LIMIT = 1 << 28  # bytes of a results file
Status = Literal["ok", "failed"]
Key = tuple[str, str, str, str]
_SAVE_EVERY = 2.0


@dataclass
class Results:
    """What a run found. `entries` has one record a (section, set, op, case)."""

    path: Path
    head: dict[str, Any]
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    bandwidth: dict[str, float] = field(default_factory=dict)
    entries: dict[Key, dict[str, Any]] = field(default_factory=dict)
    _saved: float = 0.0

    @property
    def _marker(self) -> Path:
        return self.path.with_name(self.path.name + ".running")

    @classmethod
    def open(cls, path: Path, head: dict[str, Any], *, resume: bool) -> Results:
        """An empty file, or with `resume` what `path` holds; a case that ended the last run is recorded as failed.

        Raises SystemExit for a file of another schema, or of other cubins.
        """
        found = cls(path, head)
        if resume and path.exists():
            try:
                content = read_object(path, limit=_LIMIT)
            except ToolError as error:
                raise SystemExit(f"--resume: {error}") from error
            if content.get("schema") != SCHEMA:
                raise SystemExit(f"--resume: {path} has schema {content.get('schema')}; this script writes {SCHEMA}")
            if content["run"]["cubins_digest"] != head["cubins_digest"]:
                raise SystemExit(f"--resume: {path} is of other cubins; run without --resume")
            found.sections, found.bandwidth = content["sections"], content["bandwidth"]
            for entry in content["entries"]:
                found.entries[(entry["section"], entry["set"], entry["op"], entry["case"])] = entry
        if resume and found._marker.exists():
            try:
                case = read_object(found._marker, limit=_LIMIT)["case"]
            except (ToolError, KeyError):  # the run ended while it wrote the marker
                case = None
            if isinstance(case, list) and len(case) == 4:
                section, name, op, what = map(str, case)
                if (section, name, op, what) not in found.entries:
                    found.record((section, name, op, what), "failed", 0.0, {"detail": "the run ended in this case"})
        found._marker.unlink(missing_ok=True)
        return found

    def begin(self, key: Key) -> None:
        """Note what runs now, for a --resume after it ended the process."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._marker.write_text(json.dumps({"case": key}), encoding="utf-8")

    def record(self, key: Key, status: Status, seconds: float, more: dict[str, Any]) -> None:
        """Keep one result."""
        section, name, op, case = key
        entry = {
            "section": section,
            "set": name,
            "op": op,
            "case": case,
            "status": status,
            "seconds": round(seconds, 4),
        }
        self.entries[key] = entry | more
        if time.monotonic() - self._saved > _SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Write the file, in one step."""
        content = {
            "schema": SCHEMA,
            "run": self.head,
            "bandwidth": self.bandwidth,
            "sections": self.sections,
            "entries": list(self.entries.values()),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(self.path.name + ".new")
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)
        self._saved = time.monotonic()

    def close(self) -> None:
        """Write the file; nothing runs any more."""
        self.save()
        self._marker.unlink(missing_ok=True)

    def failed(self) -> list[dict[str, Any]]:
        """What failed, in every section."""
        return [e for e in self.entries.values() if e["status"] == "failed"]


def _beside_an_empty_kernel(e: dict[str, Any]) -> str:
    """What a launch takes longer than a kernel that does nothing, in a graph of as many; without PDL too."""
    over, plain = e["us"] - e["empty_us"], e["us_no_pdl"] - e["empty_us_no_pdl"]
    apart = f", {e['kernels_apart']} kernels apart {e['apart_us']:.2f} us" if "apart_us" in e else ""
    return f", empty + {over:.2f} us; without PDL {e['us_no_pdl']:.2f}, empty + {plain:.2f} us{apart}"


def table(results: Results) -> str:
    """Everything in a few lines a section, timings one a line, failures last."""
    lines: list[str] = []
    for section, facts in results.sections.items():
        entries = [e for e in results.entries.values() if e["section"] == section]
        good = sum(e["status"] == "ok" for e in entries)
        limit = "" if facts["finished"] else ", stopped before the end"
        lines.append(f"{section:12} {good} of {len(entries)} ok in {facts['seconds']:.1f} s{limit}")
    if results.bandwidth:
        rates = ", ".join(f"{name} {results.bandwidth[name]:.0f}" for name in ("read", "write", "copy"))
        lines += ["", f"memory of this GPU, GB/s: {rates}"]
    for e in (e for e in results.entries.values() if e["section"] == "calibrate"):
        lines += ["", f"{'figure':24}{'value':>10}{'least':>10}{'most':>10} unit"]
        lines += [
            f"{f['name']:24}{f['value']:10.4g}{f['low']:10.4g}{f['high']:10.4g} {f['unit']}"
            for f in e.get("figures", ())
        ]
    timed = [e for e in results.entries.values() if e["section"] == "timings" and e["status"] == "ok"]
    if timed:
        lines.append(f"{'set':24}{'op':14}{'case':12}{'us':>10}{'GB/s':>9}{'%':>7} of")
    for e in timed:
        where = f"{e['set']:24}{e['op']:14}{e['case']:12}"
        if e.get("host"):
            lines.append(f"{where}{e['us']:10.2f} a bound call, on the host")
        else:
            kept = "" if e["past_l2"] else " (within L2)"
            plan = f", plan {e['plan_us']:.2f} us" if "plan_us" in e else ""
            node = _beside_an_empty_kernel(e) if "empty_us" in e else ""
            lines.append(f"{where}{e['us']:10.2f}{e['gb_s']:9.1f}{e['percent']:7.1f} {e['against']}{kept}{plan}{node}")
    failed = results.failed()
    if failed:
        lines += ["", f"{len(failed)} failed:"]
    for e in failed:
        lines.append(f"{e['section']} {e['set']}/{e['op']} {e['case']}: {e.get('detail', '')}")
    return "\n".join(lines)
