"""`kvgen export`: sets for engines in C++, as files that need no Python."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvgen.cli.console import complete_selector, say
from kvgen.files import named


def export(
    selectors: Annotated[
        list[str],
        typer.Argument(
            metavar="SELECTOR",
            hidden=True,  # the help ends with what it is
            autocompletion=complete_selector,
            show_default=False,
        ),
    ],
    folder: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="The folder to write; made if missing.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that were changed by hand, too.")] = False,
) -> None:
    """Write a C++17 header, one .cu file a kernel, CMakeLists.txt, README.md and an example for each set.

    The header has the structs that kernels take, with checked offsets, and launch functions over the CUDA driver API. nvcc
    compiles the .cu files; cubins of `kvgen compile -o` do as well.

    \b
    kvgen export llama3_8b -o kernels            one set
    kvgen export llama3_8b/decode -o kernels     one operation of it
    kvgen export llama3_8b gemma3_4b -o kernels  several, in one folder with one CMakeLists.txt
    """
    from kvgen.cli.project import open_project
    from kvgen.export.folder import export_files, write_folder

    project = open_project(selectors=selectors)
    chosen = [(item.loaded, item.ops) for item in project.chosen]
    files = export_files(chosen, project.files, project.config.out.name)
    written = write_folder(folder, files, force=force)
    names = ", ".join(loaded.kernels.name for loaded, _ in chosen)
    say(f"{names}: {len(files)} files in {named(folder)}, {len(written)} written")
    say(f'#include "{chosen[0][0].kernels.name}.h"; {named(folder / "README.md")} says how to build')
    project.end(named(folder))
