"""The Typer application: the verbs in the order of a working day, and how errors end the process."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from kvgen.cli import bench, build, check, demo, diff, doctor, init, show
from kvgen.cli import compile as compile_verb
from kvgen.errors import KvgenError, SpecError

HELP: Final = """
KV-cache kernels from typed specs: readable CUDA, checked in, compiled by NVRTC.

\b
kvgen init --from config.json -o specs/llama.py   a spec from a model's config
kvgen build                                       write generated/ from specs/
kvgen check                                       is generated/ in step with specs/?
kvgen diff --against main                         what a change does to the kernels
kvgen compile                                     registers, shared memory, spills; no GPU needed
kvgen bench                                       memory sectors and instructions, counted; no GPU needed

\b
SELECTOR is SET or SET/OP, with globs: llama3_8b, 'qwen*', '*/append'; none means everything.
The project is the nearest folder, here or above, whose pyproject.toml has a [tool.kvgen] table.
Exit status: 0 fine, 1 a finding, 2 a usage, spec or tool error.
"""


class Verbs(TyperGroup):
    """Prints kvgen's own errors on stderr without a traceback; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is: a path may hold what has no encoding
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except KvgenError as error:
            if not isinstance(error, SpecError):  # whose lines begin with file:line, for editors to follow
                typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
            typer.echo(str(error), err=True)
            raise typer.Exit(error.exit_code) from None


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    typer.secho("warning: ", fg="yellow", bold=True, nl=False, err=True)
    typer.echo(str(message), err=True)


def _version(wanted: bool) -> None:
    if wanted:
        from kvgen import __version__

        typer.echo(f"kvgen {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Verbs,
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of `kvgen` itself."""


app.command("init", short_help="Write a spec for a model, from its config.json.")(init.init)
app.command("build", short_help="Write generated/ from specs/.")(build.build)
app.command("check", short_help="Is generated/ what specs/ give? For CI.")(check.check)
app.command("diff", short_help="What a change does to the generated code.")(diff.diff)
app.command("show", short_help="One set's CUDA, plan, line origins, PTX or SASS.")(show.show)
app.command("compile", short_help="Compile; registers, shared memory, spills. No GPU.")(compile_verb.compile_kernels)
app.command("bench", short_help="Count sectors, instructions, conflicts. No GPU.")(bench.bench)
app.command("doctor", short_help="What kvgen needs and what this machine has.")(doctor.doctor)
app.command("demo", short_help="A real model's cache, end to end, on this machine.")(demo.demo)
