"""The files of a run that children leave in parts: few enough, and small enough, to be taken along at once."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

EARLIER: Final = "earlier.npz"  # probes of an earlier run
FILE_LIMIT: Final = 16 << 20  # bytes


def collect(parts: Path, device: str) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each file: golden vectors of a GPU called `device`, the tools' log, ncu's reports."""
    golden = {f"{device}/{p.name.removesuffix('.golden.npz')}.npz": p for p in sorted(parts.glob("*.golden.npz"))}
    probes = {p.name.removesuffix(".probe.npz"): p for p in sorted(parts.glob("*.probe.npz"))}
    earlier, together = parts / EARLIER, parts / "probes.npz"
    if probes:
        from tests.golden_gpu.record import joined

        if not together.is_file() or _newest(probes.values()) > _newest([together]):  # joining takes seconds
            joined(probes, device, together, earlier if earlier.is_file() else None)
        golden[f"{device}/probes.npz"] = together
    elif earlier.is_file():
        golden[f"{device}/probes.npz"] = earlier
    if golden:
        yield "golden.tar", packed(golden)
    logs = sorted(parts.glob("*.log"))
    if logs:
        yield "tools.log", b"".join(p.read_bytes() for p in logs)[-FILE_LIMIT:]
    reports = sorted(parts.glob("*.ncu-rep"))
    if reports:
        yield "ncu.tar.gz", packed({p.name: p for p in reports}, "w:gz")


def _newest(files: Iterable[Path]) -> int:
    return max(p.stat().st_mtime_ns for p in files)


def restore(out: Path, parts: Path) -> None:
    """Give the files of an earlier run in `out` back to `parts`, so that those of this run are added to them."""
    if (out / "golden.tar").is_file():
        with tarfile.open(out / "golden.tar") as archive:
            for entry in archive:
                name = entry.name.rpartition("/")[2]
                target = EARLIER if name == "probes.npz" else f"{name.removesuffix('.npz')}.golden.npz"
                _extract(archive, entry, parts / target)
    if (out / "ncu.tar.gz").is_file():
        with tarfile.open(out / "ncu.tar.gz") as archive:
            for entry in archive:
                _extract(archive, entry, parts / entry.name.rpartition("/")[2])
    if (out / "tools.log").is_file():
        (parts / "0.log").write_bytes((out / "tools.log").read_bytes())  # before those of tools


def _extract(archive: tarfile.TarFile, entry: tarfile.TarInfo, target: Path) -> None:
    file = archive.extractfile(entry)
    if file is not None:
        target.write_bytes(file.read())


def replace_file(path: Path, data: bytes) -> str:
    """Write a file, or leave the one that is there and give the reason; "" where it was written."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        return f"{error.strerror}"
    return ""


def packed(files: Mapping[str, Path], mode: str = "w") -> bytes:
    """An archive of files by name, without the largest ones where it would pass the limit."""
    kept = sorted(files, key=lambda name: files[name].stat().st_size)
    while True:
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode=mode) as archive:  # type: ignore[call-overload]
            for name in sorted(kept):
                archive.add(files[name], name)
        data = target.getvalue()
        if len(data) <= FILE_LIMIT or not kept:
            return data
        kept.pop()
