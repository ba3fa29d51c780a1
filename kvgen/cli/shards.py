"""The sets of a project as GPUs share them: for `kvgen compile --tp`, a set a number of GPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kvgen.cli.progress import progress
from kvgen.cli.project import Project
from kvgen.cli.selection import Chosen
from kvgen.codegen.emit import File, device_headers, render_set
from kvgen.errors import SpecError, ToolError
from kvgen.schema.loader import LoadedSet
from kvgen.schema.shard import shard


def tp_sizes(text: str) -> tuple[int, ...]:
    """The numbers of "1,2,4,8"; raises ToolError for other text, and for a number that is there twice."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not re.fullmatch(r"[1-9][0-9]{0,4}", part):
            raise ToolError(
                f"--tp: got {part!r}; it is how many GPUs share the heads, from 1 on, several with commas: --tp 1,2,4,8"
            )
        if parts.count(part) > 1:
            raise ToolError(f"--tp: got {part} twice; each number of GPUs gives one set; drop one")
    return tuple(int(part) for part in parts)


def shards_of(project: Project, sizes: Sequence[int]) -> tuple[Project, dict[str, tuple[str, int]]]:
    """The project with the shards of its chosen sets for each of `sizes` in their place; the name of the whole set and the number
    of GPUs, by a shard's name.

    Raises SpecError for sets that cannot be shared so, all of them, and ToolError where two sets would have one name.
    """
    chosen: list[Chosen] = []
    shards: dict[str, tuple[str, int]] = {}
    refused: list[str] = []
    for item in project.chosen:
        for tp in sizes:
            try:
                part = _shard(item, tp)
            except SpecError as error:
                refused.append(f"--{error}")
                continue
            chosen.append(part)
            if tp != 1:
                shards[part.name] = item.name, tp
    if refused:
        raise SpecError("\n".join(refused))
    names = [item.name for item in chosen]
    for name in (name for name in shards if names.count(name) > 1):
        whole, tp = shards[name]
        raise ToolError(
            f"--tp: got {tp}; the shard of {whole} would be called {name}, as another set is; rename that one, or name sets "
            "without it"
        )
    return replace(project, chosen=chosen, files=_files(project, chosen)), shards


def _shard(item: Chosen, tp: int) -> Chosen:
    if tp == 1:
        return item
    loaded, kernels = item.loaded, shard(item.loaded.kernels, tp)
    heads = f"One of {tp} GPUs: q_heads={kernels.q_heads}, kv_heads={kernels.kv.kv_heads}."
    return replace(item, loaded=LoadedSet(kernels, loaded.source, f"{loaded.doc.rstrip()}\n\n{heads}\n"))


def _files(project: Project, chosen: Sequence[Chosen]) -> dict[str, File]:
    """The project's files, and those of shards that it does not have."""
    files = dict(project.files)
    with progress("rendering", len(chosen)) as done:
        for item in chosen:
            if f"{item.name}/__init__.py" not in files:
                files |= render_set(item.loaded)
            done()
    return dict(sorted((files | device_headers(files)).items()))
