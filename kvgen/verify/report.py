"""The report of a verification: one object for programs, and the text of an issue for people.

Neither has names of users, hosts or folders.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final, TypedDict

from kvgen.verify.bandwidth import Reading
from kvgen.verify.calibrate import Calibration
from kvgen.verify.results import KernelResult, SetResult, share_text
from kvgen.version import ABI, __version__

SCHEMA: Final = 1
_ISSUE_LIMIT: Final = 60_000  # characters; GitHub takes 65,536


class CaseRecord(TypedDict):
    """See kvgen.verify.results.CaseResult."""

    batch: str
    fault: str
    error: float | None
    share: float | None
    reported: str
    expected: str
    wrong: list[str]
    seconds: float


class TimedRecord(TypedDict):
    """See kvgen.verify.results.Timed."""

    workload: str
    us: float
    us_least: float
    nbytes: int
    gb_s: float
    percent: float
    launches: int
    past_l2: bool


class KernelRecord(TypedDict):
    """One operation: "ok", "wrong", or "not run" with why; `arch` whose code ran."""

    kernel: str
    arch: str
    kind: str
    status: str
    why: str
    cases: list[CaseRecord]
    timed: list[TimedRecord]


class SetRecord(TypedDict):
    """One set; `digest` is the SHA-256 of its generated files, `in_step` whether they are what the spec gives."""

    set: str
    arch: str
    digest: str
    in_step: bool
    kernels: list[KernelRecord]


class ReadingRecord(TypedDict):
    """The bandwidth of reading so many bytes, in 10^9 bytes a second."""

    nbytes: int
    gb_s: float


class FigureRecord(TypedDict):
    """See kvgen.verify.probe.Measured."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    what: str


class Document(TypedDict):
    """The whole report. `read_gb_s` is the best of `bandwidth`, null without times; `calibration` has the figures of the GPU's
    parts, `calibration_wrong` the probes whose kernels left something else than they had to; `device` has a name and, of a GPU,
    capability, cuda_driver, multiprocessors, l2_bytes, free_bytes, total_bytes and what nvidia-smi says."""

    schema: int
    kvgen: str
    abi: int
    nvrtc: str
    python: str
    platform: str
    device: dict[str, Any]
    seed: int
    quick: bool
    selectors: list[str]
    read_gb_s: float | None
    bandwidth: list[ReadingRecord]
    calibration: list[FigureRecord]
    calibration_wrong: list[str]
    sets: list[SetRecord]
    summary: dict[str, int]


def document(
    sets: Sequence[SetResult],
    *,
    device: dict[str, Any],
    nvrtc: str,
    seed: int,
    quick: bool,
    selectors: Sequence[str],
    bandwidth: Sequence[Reading] = (),
    calibration: Calibration | None = None,
) -> Document:
    """What was found, as JSON takes it: numbers that are infinite or no number become null."""
    kernels = [k for s in sets for k in s.kernels]
    return {
        "schema": SCHEMA,
        "kvgen": __version__,
        "abi": ABI,
        "nvrtc": nvrtc,
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "device": device,
        "seed": seed,
        "quick": quick,
        "selectors": list(selectors),
        "read_gb_s": max((r.gb_s for r in bandwidth), default=None),
        "bandwidth": [{"nbytes": r.nbytes, "gb_s": r.gb_s} for r in bandwidth],
        "calibration": [FigureRecord(**asdict(f)) for f in calibration.figures] if calibration else [],  # type: ignore[typeddict-item]
        "calibration_wrong": list(calibration.wrong) if calibration else [],
        "sets": [
            {
                "set": s.name,
                "arch": s.arch,
                "digest": s.digest,
                "in_step": s.in_step,
                "kernels": [_kernel(k, s.arch) for k in s.kernels],
            }
            for s in sets
        ],
        "summary": {
            "kernels": len(kernels),
            "ok": sum(k.status == "ok" for k in kernels),
            "wrong": sum(k.status == "wrong" for k in kernels),
            "not_run": sum(k.status == "not run" for k in kernels),
            "cases": sum(len(k.cases) for k in kernels),
            "hostile": sum(len(k.hostile) for k in kernels),
            "faults_reported": sum(bool(c.reported) for k in kernels for c in k.cases),
        },
    }


def _kernel(kernel: KernelResult, arch: str) -> KernelRecord:
    cases: list[CaseRecord] = [
        {
            "batch": c.batch,
            "fault": c.fault,
            "error": _finite(c.error),
            "share": _finite(c.share),
            "reported": c.reported,
            "expected": c.expected,
            "wrong": list(c.wrong),
            "seconds": c.seconds,
        }
        for c in kernel.cases
    ]
    timed: list[TimedRecord] = [TimedRecord(**asdict(t)) for t in kernel.timed]  # type: ignore[typeddict-item]
    return {
        "kernel": kernel.name,
        "arch": kernel.arch or arch,
        "kind": kernel.kind,
        "status": kernel.status,
        "why": kernel.why,
        "cases": cases,
        "timed": timed,
    }


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def issue(found: Document) -> str:
    """The text of an issue, in Markdown: the machine, a line a kernel, everything that is wrong; its first line is the title."""
    device, summary = found["device"], found["summary"]
    verdict = f"{summary['wrong']} of {summary['kernels']} kernels wrong" if summary["wrong"] else "all right"
    smi = device.get("smi") or {}
    facts = {
        "GPU": device["name"],
        "compute capability": device.get("capability", ""),
        "driver": smi.get("driver_version", ""),
        "CUDA version of the driver": device.get("cuda_driver", ""),
        "memory": f"{device['total_bytes'] / 2**30:.1f} GiB" if "total_bytes" in device else "",
        "read bandwidth, measured": f"{found['read_gb_s']:.0f} GB/s" if found["read_gb_s"] else "",
        "kvgen, NVRTC, Python": f"{found['kvgen']}, {found['nvrtc']}, {found['python']}",
        "platform": found["platform"],
        "command": _command(found),
    }
    lines = [f"GPU report: {device['name']}, kvgen {found['kvgen']}: {verdict}", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items() if value), ""]
    ran = f"{summary['cases']} launches, {summary['hostile']} of them on hostile data"
    lines += [f"{summary['ok']} of {summary['kernels']} kernels right, {summary['not_run']} not run; {ran}.", ""]
    wrong = [(s, k) for s in found["sets"] for k in s["kernels"] if k["status"] == "wrong"]
    if wrong or found["calibration_wrong"]:
        lines += ["## Wrong", ""]
        lines += [f"- calibration, {_cell(w)}" for w in found["calibration_wrong"]]
        for s, k in wrong:
            for c in k["cases"]:
                what = f"wrong data: {c['fault']}" if c["fault"] else f"batch {c['batch']}"
                lines += [f"- `{s['set']}/{k['kernel']}` ({k['arch']}), {what}: {_cell(w)}" for w in c["wrong"][:4]]
        lines.append("")
    edited = [s["set"] for s in found["sets"] if not s["in_step"]]
    if edited:
        lines += [f"Generated files that are not what the spec gives: {', '.join(edited)}.", ""]
    lines += [
        "## Kernels",
        "",
        "| kernel | arch | status | cases | largest error | of its bound | time | GB/s | of read |",
    ]
    lines += ["|---|---|---|--:|--:|--:|--:|--:|--:|"]
    lines += [_row(s, k) for s in found["sets"] for k in s["kernels"]]
    lines += ["", "The whole report is the file that `--json FILE` wrote; please attach it.", ""]
    return _shortened(lines)


def _command(found: Document) -> str:
    words = ["kvgen verify", *found["selectors"], "--gpu" if "capability" in found["device"] else "--cpu"]
    words += ["--quick"] if found["quick"] else []
    words += [f"--seed {found['seed']}"] if found["seed"] else []
    return f"`{' '.join(words)}`"


def _row(s: SetRecord, k: KernelRecord) -> str:
    errors = [c["error"] or 0.0 for c in k["cases"]]
    shares = [float("inf") if c["share"] is None else c["share"] for c in k["cases"]]
    best = k["timed"][-1] if k["timed"] else None
    cells = [
        f"{s['set']}/{k['kernel']}",
        k["arch"],
        k["status"],
        str(len(k["cases"])),
        f"{max(errors, default=0.0):.2g}",
        share_text(max(shares, default=0.0)),
        f"{best['us']:.1f} us ({best['workload']})" if best else "",
        f"{best['gb_s']:.0f}" if best else "",
        f"{best['percent']:.0f}%" if best else "",
    ]
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _shortened(lines: list[str]) -> str:
    """The lines as far as an issue takes them."""
    text = "\n".join(lines)
    if len(text) <= _ISSUE_LIMIT:
        return text
    kept, size = list[str](), 0
    for line in lines:
        size += len(line) + 1
        if size > _ISSUE_LIMIT:
            break
        kept.append(line)
    left = len(lines) - len(kept)
    return "\n".join([*kept, "", f"{left} lines are left out here; the attached report has all of them.", ""])
