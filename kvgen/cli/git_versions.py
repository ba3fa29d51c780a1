"""Versions of the output folder and of the specs: as they lie there, and as git has them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from kvgen.cli.ondisk import LIMIT, names_on_disk, source_of
from kvgen.cli.project import Project
from kvgen.errors import ToolError
from kvgen.files import read_bytes, reason
from kvgen.schema.loader import is_spec


def on_disk(project: Project) -> dict[str, str]:
    """Path below the output folder -> text, now."""
    out = project.config.out
    return {
        path: read_bytes(out / path, limit=LIMIT).decode("utf-8", "replace")
        for path, kind in names_on_disk(out)
        if kind == "file" and source_of(path) is None
    }


def at_revision(project: Project, revision: str) -> dict[str, str]:
    """Path below the output folder -> text at a git revision; ToolError where git has no such revision."""
    return _folder_at(project, project.config.out, revision)


def specs_at(project: Project, revision: str) -> dict[str, str]:
    """The spec files, as name -> text, at a git revision; ToolError where git has no such revision."""
    return {name: text for name, text in _folder_at(project, project.config.specs, revision).items() if is_spec(name)}


def specs_built(project: Project, texts: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """The spec files of HEAD, and the names of the sets of which the output folder, `texts`, has exactly the files of HEAD, so
    that these specs are what it was built from. Nothing where there is no git."""
    try:
        head, specs = at_revision(project, "HEAD"), specs_at(project, "HEAD")
    except ToolError:
        return {}, set()
    moved = {path.partition("/")[0] for path in head.keys() | texts.keys() if head.get(path) != texts.get(path)}
    return specs, {path.partition("/")[0] for path in head if "/" in path} - moved


def _folder_at(project: Project, folder: Path, revision: str) -> dict[str, str]:
    root = project.config.root
    name = folder.relative_to(root).as_posix()
    if revision.startswith("-"):
        raise ToolError(f"--against: got {revision!r}; it must be a git revision, such as main or HEAD~1")
    done = _git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip() or "no such revision"
        raise ToolError(f"--against: got {revision!r}; {reason}; it must be a git revision, such as main or HEAD~1")
    listing = _git(root, "ls-tree", "-r", "-z", done.stdout.decode().strip(), "--", f"{name}/").stdout
    objects: dict[str, str] = {}
    for entry in filter(None, listing.decode("utf-8", "replace").split("\0")):
        head, _, path = entry.partition("\t")
        mode, kind, digest = head.split()
        if kind == "blob" and mode != "120000":
            objects[path.removeprefix(f"{name}/")] = digest
    return dict(zip(objects, _blobs(root, list(objects.values())), strict=True))


def _blobs(root: Path, digests: list[str]) -> list[str]:
    """The texts of git objects, read by one process."""
    data = _git(root, "cat-file", "--batch", stdin="".join(f"{d}\n" for d in digests)).stdout
    texts, at = [], 0
    for digest in digests:
        end = data.index(b"\n", at)
        fields = data[at:end].split()
        if len(fields) != 3:
            raise ToolError(f"git: object {digest} cannot be read")
        size = int(fields[2])
        texts.append(data[end + 1 : end + 1 + size].decode("utf-8", "replace"))
        at = end + size + 2
    return texts


def _git(root: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], input=stdin.encode(), capture_output=True, check=False
        )
    except FileNotFoundError as error:
        raise ToolError("git: not found; `kvgen diff --against` reads the old files from it; install git") from error
    except (OSError, ValueError) as error:
        raise ToolError(f"git: cannot be run ({reason(error)})") from error
