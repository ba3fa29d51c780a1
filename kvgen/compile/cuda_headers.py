"""NVIDIA's own headers (<cuda_fp16.h> and others), which kernels of the user's may include: where they lie on this machine."""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
from pathlib import Path
from typing import Any, Final

_INCLUDE: Final = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>\n]+)>", re.M)
_VERSION: Final = re.compile(rb"#define\s+CUDA_VERSION\s+(\d+)")


def included(text: str) -> tuple[str, ...]:
    """The headers that a text includes in angle brackets, each once; #include lines in a comment count as well."""
    return tuple(dict.fromkeys(_INCLUDE.findall(text)))


@functools.cache
def header_folder() -> Path | None:
    """The folder with cuda_fp16.h: of the wheel nvidia-cuda-runtime, of Conda, or of a toolkit; None where there is none."""
    try:
        finder: Any = importlib.import_module("cuda.pathfinder")
        found = finder.find_nvidia_header_directory("cudart")
    except (ImportError, AttributeError, RuntimeError, ValueError):  # not there, or older than the function
        return None
    return Path(found) if found and (Path(found) / "cuda_fp16.h").is_file() else None


def missing(major: int) -> str:
    """Advice where there are none, for an NVRTC of this major version."""
    return (
        f"NVIDIA's headers are not on this machine; install them with `pip install 'cuda-toolkit[cudart]=={major}.*'`"
    )


@functools.cache
def header_key(names: tuple[str, ...]) -> str:
    """The version of the headers, and a digest of those with these names: by it the cache tells kernels apart whose texts are
    equal."""
    folder = header_folder()
    if folder is None or not names:
        return ""
    hashed = hashlib.sha256()
    for name in ("cuda.h", *names):
        path = (folder / name).resolve()
        data = path.read_bytes() if path.is_relative_to(folder.resolve()) and path.is_file() else b""
        hashed.update(
            f"{name}\0{len(data)}\0".encode() + (data if name != "cuda.h" else b"".join(_VERSION.findall(data)))
        )
    return hashed.hexdigest()
