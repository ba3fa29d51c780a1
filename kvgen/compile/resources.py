"""What a kernel occupies on a GPU, read from the assembler's report (`--ptxas-options=-v`)."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from kvgen.errors import ToolError
from kvgen.json_file import shown


@dataclass(frozen=True)
class Resources:
    """Of one kernel: `registers` a thread, the rest in bytes.

    `static_shared` is per block, without the shared memory asked for at launch. `spill_stores`, `spill_loads` and
    `stack` are per thread. `constant` sums the constant banks the assembler reports (sm_90a and newer report none for
    parameters).
    """

    registers: int
    static_shared: int
    spill_stores: int
    spill_loads: int
    stack: int
    constant: int


def resources_from(fields: Any) -> Resources:
    """The resources that a JSON object states; KeyError or TypeError where it states others, or no integers."""
    counts = {field.name: fields[field.name] for field in dataclasses.fields(Resources)}
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"resources.{name}: got {shown(value)}; it must be an integer")
    return Resources(**counts)


def parse_resources(log: str, entry: str) -> Resources:
    """The resources of the kernel `entry`; ToolError when the report has a form not known here."""
    sections = re.findall(
        r"Compiling entry function '([^']+)' for '[^']+'\n(.*?)(?=[^\n]*Compiling entry function|\Z)", log, re.S
    )
    section = dict(sections).get(entry, "")
    frame = re.search(
        rf"Function properties for {re.escape(entry)}\n"
        r"[^\n]*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
        section,
    )
    used = re.search(r"Used (\d+) registers([^\n]*)", section)
    if frame is None or used is None:
        raise ToolError(f"NVRTC: the resource report of {entry} has an unknown form:\n{log.strip()}")
    shared = re.search(r"(\d+)(?:\+\d+)? bytes smem", used[2])
    return Resources(
        registers=int(used[1]),
        static_shared=int(shared[1]) if shared else 0,
        spill_stores=int(frame[2]),
        spill_loads=int(frame[3]),
        stack=int(frame[1]),
        constant=sum(int(size) for size in re.findall(r"(\d+) bytes cmem\[", used[2])),
    )
