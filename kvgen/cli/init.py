"""`kvgen init`: a spec from a model's config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(
    config: Annotated[
        Path,
        typer.Option("--from", metavar="CONFIG.JSON", help="A Hugging Face model config; read as JSON, nothing else."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to write; by default stdout.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a spec for a model's KV cache: heads, head dim, rope, windows, sinks and latent ranks from its config.

    \b
    kvgen init --from config.json                         look first
    kvgen init --from config.json -o specs/llama3_8b.py   the file's name becomes the set's
    """
    from kvgen import models
    from kvgen.errors import ConfigError, ToolError
    from kvgen.spec.kernel_set import check_name

    text = models.spec_text(models.read(config), source=config.as_posix())
    if output is None:
        typer.echo(text, nl=False)
        return
    if output.suffix != ".py":
        raise ConfigError(f"-o: got {str(output)!r}; specs are Python files; use a name ending in .py")
    try:
        check_name("-o", output.stem)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if output.exists() and not force:
        raise ConfigError(f"-o: {output} exists already; give another name, or --force to overwrite it")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise ToolError(f"{output}: cannot be written ({error.strerror})") from error
    typer.echo(f"wrote {output}; next: kvgen build {output.stem}")
