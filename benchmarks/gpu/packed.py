"""A prepared folder on the machine that has the GPU: its kernels unpacked, its wheels where imports find them."""

from __future__ import annotations

import hashlib
import importlib.util
import lzma
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

KERNELS: Final = "kernels.tar.xz"
WHEELS: Final = "wheels"
SITE: Final = "site"
_MODULES: Final = ("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection")


def unpack(folder: Path, digest: str, into: Path) -> None:
    """Kernels to `into`, and the packages that this Python lacks to `into`/site. Raises ValueError for another archive than
    the plan's."""
    with (folder / KERNELS).open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise ValueError(
                f"{folder / KERNELS}: is not what its plan.json was made with; run --prepare {folder} again"
            )
    with lzma.open(folder / KERNELS) as file, tarfile.open(fileobj=file) as archive:
        archive.extractall(into, filter="data")
    if all(importlib.util.find_spec(name) for name in _MODULES):
        return
    for wheel in sorted((folder / WHEELS).glob("*.whl")):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(into / SITE)


def use_site(unpacked: Path) -> None:
    """Let this process import what was unpacked beside the kernels, before packages of the machine: versions must fit."""
    if (unpacked / SITE).is_dir():
        sys.path.insert(0, str(unpacked / SITE))


def missing() -> list[str]:
    """Packages that cases need and that cannot be imported here."""
    needed = ("numpy", "ml_dtypes", *_MODULES)
    return [name for name in needed if importlib.util.find_spec(name) is None]
