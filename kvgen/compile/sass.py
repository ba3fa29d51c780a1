"""A cubin's machine code as text, and how often each instruction occurs in it.

Counting works anywhere; disassembling needs NVIDIA's tools, which `kvgen[sass]` installs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvgen.compile.cubin_cache import Cache
from kvgen.errors import ToolError

# nvdisasm: `/*0070*/  @!P0 LDG.E.128 R4, ...`; cuobjdump the same with the encoding in a comment behind it.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)", re.M)

# What a kernel does to memory and with tensor cores, by opcode without modifiers: what resources.json keeps of a listing.
# docs/review.md says what each of them means.
CLASSES: Final[Mapping[str, re.Pattern[str]]] = {
    "global_loads": re.compile(r"LDG?"),
    "global_stores": re.compile(r"STG?"),
    "shared_loads": re.compile(r"LDSM?"),
    "shared_stores": re.compile(r"STSM?"),
    "async_copies": re.compile(r"LDGSTS|UBLKCP|UTMA(LDG|STG)"),
    "tensor_cores": re.compile(r"(UTC)?[A-Z]G?MMA"),
}


def _find_tool(name: str) -> Path | None:
    """The program `name` from its wheel, else from PATH."""
    for distribution in (f"nvidia-cuda-{name}", f"nvidia-cuda-{name}-cu12"):
        try:
            files = importlib.metadata.files(distribution) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.stem == name and file.parent.name == "bin":
                found = Path(str(file.locate()))
                if os.access(found, os.X_OK):
                    return found
    on_path = shutil.which(name)
    return Path(on_path) if on_path else None


def sass(cubin: bytes, *, cache: Cache | None = None, encodings: bool = False) -> str:
    """Disassemble a cubin, or take its listing from the cache: a disassembler takes half a second to start.

    With `encodings`, which nvdisasm alone prints beside its labels, each instruction is followed by its two words. ToolError when
    no disassembler is installed or it refuses the bytes.
    """
    tools = [("nvdisasm", ["--print-code", *(["--print-instruction-encoding"] if encodings else [])])]
    for name, options in tools if encodings else [*tools, ("cuobjdump", ["-sass"])]:
        tool = _find_tool(name)
        if tool is None:
            continue
        key = _key(tool, cubin, encodings)
        if cache is not None and (known := cache.get(key)) is not None:
            return known.decode()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cubin"  # both tools read files only
            path.write_bytes(cubin)
            done = subprocess.run([tool, *options, path], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ToolError(f"{name}: cannot disassemble {len(cubin)} bytes: {(done.stderr or done.stdout).strip()}")
        if cache is not None:
            cache.put(key, done.stdout.encode())
        return done.stdout
    wanted = "nvdisasm: it is not installed" if encodings else "nvdisasm, cuobjdump: neither is installed"
    raise ToolError(f"{wanted}; install one with `pip install 'kvgen[sass]'`")


def _key(tool: Path, cubin: bytes, encodings: bool = False) -> bytes:
    """Another release of the tool is another file: its size and time say so without starting it."""
    state = tool.stat()
    what = "words" if encodings else "sass"
    return hashlib.sha256(f"{what} {tool.name} {state.st_size} {state.st_mtime_ns}\n".encode() + cubin).digest()


def instructions_of(sass_text: str) -> str:
    """A listing's lines of machine code, without what names the file and its sections."""
    return "\n".join(line for line in sass_text.splitlines() if "/*" in line)


def histogram(sass_text: str) -> dict[str, int]:
    """How often each opcode occurs, modifiers included ("LDG.E.128.CONSTANT"), the most frequent first."""
    return dict(Counter(_INSTRUCTION.findall(sass_text)).most_common())


def count(opcodes: Mapping[str, int], pattern: str) -> int:
    """How many instructions have the pattern's opcode and all its modifiers: "LDG.128" counts LDG.E.128.CONSTANT."""
    base, *modifiers = pattern.split(".")
    total = 0
    for opcode, number in opcodes.items():
        name, *has = opcode.split(".")
        if name == base and set(modifiers) <= set(has):
            total += number
    return total


def count_classes(opcodes: Mapping[str, int]) -> dict[str, int]:
    """How many instructions of each of CLASSES there are."""
    bases: Counter[str] = Counter()
    for opcode, number in opcodes.items():
        bases[opcode.partition(".")[0]] += number
    return {name: sum(n for base, n in bases.items() if known.fullmatch(base)) for name, known in CLASSES.items()}
