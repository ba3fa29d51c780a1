"""The results of a run: a line a piece of work, on the disk before the next one ends; and the table made of them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from kvgen.verify.supervisor import Answer, Key

SCHEMA: Final = 2
_KEY: Final = ("section", "set", "op", "case")
_LINES, _DETAIL, _SHOWN = (
    6,
    1200,
    240,
)  # what is wrong with a case: lines and characters of a record, characters of a table
Record = dict[str, Any]


class Log:
    """An append-only file of JSON lines. A line that cannot be written (the disk is full) waits in memory and is tried again with
    each new line; `trouble` says why it waits."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        """Raises OSError where the file cannot be opened."""
        self.path, self.trouble = path, ""
        self._waiting = b""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._size = _whole_lines(self._file)
        self.add({"schema": SCHEMA, **head})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a line, and see that the disk has it."""
        self._waiting += json.dumps(record, allow_nan=True).encode() + b"\n"
        try:
            _write(self._file, self._waiting)
            os.fsync(self._file)
        except OSError as error:
            self.trouble = f"{self.path}: {error.strerror}"
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)  # half a line is none
            return
        self._size += len(self._waiting)
        self._waiting, self.trouble = b"", ""


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _whole_lines(file: int) -> int:
    """The bytes of the file's whole lines; a process that was killed may have left half a one, which goes."""
    size = os.fstat(file).st_size
    data = os.pread(file, size, 0)
    whole = data.rfind(b"\n") + 1
    if whole < size:
        os.ftruncate(file, whole)
    return whole


def record_of(answer: Answer) -> Record:
    """The line of an answer."""
    content = dict(answer.content)
    status = "failed" if answer.wrong else "skipped" if "skipped" in content else "ok"
    found: Record = dict(zip(_KEY, answer.item.key, strict=True))
    found |= {"status": status, "seconds": round(answer.seconds, 4), "at": time.strftime("%Y/%m/%d %H:%M:%S")}
    if answer.wrong:
        found["detail"] = shortened("; ".join(answer.wrong[:_LINES]), _DETAIL)
        found["wrong"] = len(answer.wrong)
    return found | content


def shortened(text: str, most: int) -> str:
    """The first characters of a text that is longer."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def read(paths: Iterable[Path]) -> tuple[list[Mapping[str, Any]], dict[Key, Record]]:
    """The heads of the runs in these files, and the newest record of each key. Raises ValueError for other files."""
    heads, records = list[Mapping[str, Any]](), dict[Key, Record]()
    for path in paths:
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            try:
                found = json.loads(line)
                if "schema" in found:
                    if found["schema"] != SCHEMA:
                        raise ValueError(f"schema {found['schema']}; this script reads {SCHEMA}")
                    heads.append(found)
                else:
                    key = tuple(str(found[name]) for name in _KEY)
                    records.pop(key, None)
                    records[key] = found
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: is no result of run_gpu.py: {error}") from error
    return heads, records


# The table -----------------------------------------------------------------------------------------------------------


def table(records: Mapping[Key, Record], missed: Sequence[Key] = ()) -> str:
    """Everything in a few lines a section, timings one a line, failures last; `missed` was not reached."""
    lines: list[str] = []
    found = list(records.values())
    for section in dict.fromkeys(r["section"] for r in found):
        own = [r for r in found if r["section"] == section]
        good, left = sum(r["status"] == "ok" for r in own), sum(key[0] == section for key in missed)
        skipped = sum(r["status"] == "skipped" for r in own)
        more = f", {skipped} skipped" if skipped else ""
        more += f", {left} not reached" if left else ""
        lines.append(f"{section:12} {good} of {len(own)} ok{more}, {sum(r['seconds'] for r in own):.1f} s")
    for section in dict.fromkeys(key[0] for key in missed if not any(r["section"] == key[0] for r in found)):
        lines.append(f"{section:12} {sum(key[0] == section for key in missed)} not reached")
    lines += _bandwidth(found) + _figures(found) + _timings(found)
    skipped_lines = [f"{_where(r)}: {r['skipped']}" for r in found if r["status"] == "skipped"]
    lines += ["", f"{len(skipped_lines)} skipped:", *skipped_lines] if skipped_lines else []
    failed = [f"{_where(r)}: {shortened(r['detail'], _SHOWN)}" for r in found if r["status"] == "failed"]
    lines += ["", f"{len(failed)} failed:", *failed] if failed else []
    return "\n".join(lines)


def _where(r: Record) -> str:
    return " ".join((r["section"], "/".join(filter(None, (r["set"], r["op"]))), r["case"])).replace("  ", " ")


def _bandwidth(found: Sequence[Record]) -> list[str]:
    rates = next((r["gb_s"] for r in found if r["section"] == "bandwidth" and r["status"] == "ok"), None)
    if rates is None:
        return []
    return ["", f"memory of this GPU, GB/s: {', '.join(f'{n} {rates[n]:.0f}' for n in ('read', 'write', 'copy'))}"]


def _figures(found: Sequence[Record]) -> list[str]:
    figures = [f for r in found if r["section"] == "calibrate" for f in r.get("figures", ())]
    if not figures:
        return []
    lines = ["", f"{'figure':24}{'value':>10}{'least':>10}{'most':>10} unit"]
    return lines + [f"{f['name']:24}{f['value']:10.4g}{f['low']:10.4g}{f['high']:10.4g} {f['unit']}" for f in figures]


def _timings(found: Sequence[Record]) -> list[str]:
    timed = [r for r in found if r["section"] in ("timings", "peers") and r["status"] == "ok"]
    if not timed:
        return []
    lines = ["", f"{'set':24}{'op':14}{'case':24}{'us':>10}{'GB/s':>9}{'%':>7} of"]
    for r in timed:
        where = f"{r['set']:24}{r['op']:14}{r['case']:24}{r['us']:10.2f}"
        if r.get("host"):
            lines.append(f"{where} a bound call, on the host")
            continue
        rate = f"{r['gb_s']:9.1f}" if "gb_s" in r else f"{'':9}"
        share = f"{r['percent']:7.1f} {r['against']}" if "percent" in r else ""
        lines.append(f"{where}{rate}{share}{_beside(r)}")
    return lines


def _beside(r: Record) -> str:
    """The other measurements of a timed case, in parentheses; "" without any."""
    parts = []
    if r.get("past_l2") is False:
        parts.append("within L2")
    if "tflop_s" in r:
        parts.append(f"{r['tflop_s']:.0f} TFLOP/s")
    if "plan_us" in r:
        parts.append(f"plan {r['plan_us']:.2f} us")
    if "bytes_us" in r:
        parts.append(f"{r['launches']} launches, bytes alone {r['bytes_us']:.1f} us")
    if "empty_us" in r:
        over, plain = r["us"] - r["empty_us"], r["us_no_pdl"] - r["empty_us_no_pdl"]
        parts.append(f"empty + {over:.2f} us; without PDL {r['us_no_pdl']:.2f}, empty + {plain:.2f} us")
        parts.append(f"{r['kernels_apart']} kernels apart {r['apart_us']:.2f} us")
    return f" ({', '.join(parts)})" if parts else ""
