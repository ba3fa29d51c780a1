"""The Typer application: the verbs in the order of a working day, and how errors end the process."""

from __future__ import annotations

import io
import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from kvgen.cli.console import note
from kvgen.cli.settings import Settings, choose, colour, parted
from kvgen.errors import KvgenError, SpecError

HELP: Final = """
KV-cache kernels from typed specs: readable CUDA, checked in, compiled by NVRTC.

\b
kvgen new engine                                  a project with one set, to begin with
kvgen init --from config.json -o specs/llama.py   a spec from a model's config
kvgen build                                       write generated/ from specs/
kvgen check                                       is generated/ in step with specs/?
kvgen diff --against main                         what a change does to the kernels
kvgen compile                                     registers, shared memory, spills; no GPU needed
kvgen bench                                       memory sectors and instructions, counted; no GPU needed
kvgen verify --gpu                                every kernel on this GPU beside the float64 oracle; times
kvgen list                                        the sets, and --presets: other engines' layouts

\b
SELECTOR is SET or SET/OP, with globs: llama3_8b, 'qwen*', '*/append'; none means everything.
The project is the nearest folder, here or above, whose pyproject.toml has a [tool.kvgen] table.
-q, -v and --project may stand behind the verb as well. NO_COLOR=1 turns colours off, FORCE_COLOR=1 on.
Exit status: 0 fine, 1 a finding, 2 a usage, spec or tool error.
"""
SELECTOR: Final = "SELECTOR is SET or SET/OP, with globs: llama3_8b, 'qwen*', '*/append'; none means everything."

_PLACE: Final = re.compile(r"[^ :]+\.\w+(:\d+)?: ")


class Verb(TyperCommand):
    """A verb whose usage line names its arguments as DIR, [SELECTOR] or SELECTOR..., where versions of typer differ."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words behind `kvgen VERB`."""
        pieces = [str(self.options_metavar)]
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                word = str(param.metavar) if param.required else f"[{param.metavar}]"
                pieces.append(word if param.nargs == 1 else f"{word}...")
        return pieces


class Verbs(TyperGroup):
    """Prints kvgen's own errors on stderr without a traceback; anything else is a bug and keeps its traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, in which -q, -v and --project may stand behind the verb."""
        ctx.color = colour()
        return super().parse_args(ctx, [word for words in parted(args) for word in words])

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        started = time.perf_counter()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is: a path may hold what has no encoding
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except KvgenError as error:
            # A spec's lines begin with file:line, for editors to follow; those of an option or a folder have no file.
            if not isinstance(error, SpecError) or not _PLACE.match(str(error)):
                typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
            typer.echo(str(error), err=True)
            raise typer.Exit(error.exit_code) from None
        finally:
            note(f"{ctx.invoked_subcommand}: {time.perf_counter() - started:.2f} s")


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    typer.secho("warning: ", fg="yellow", bold=True, nl=False, err=True)
    typer.echo(str(message), err=True)


def _version(wanted: bool) -> None:
    if wanted:
        from kvgen import __version__

        typer.echo(f"kvgen {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Print findings, errors and what was asked for, nothing else.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Also print what is read and written, and how long it took.")
    ] = False,
    project: Annotated[
        Path | None,
        typer.Option(
            "--project", metavar="DIR", help="Look for the project in this folder and above.", show_default=False
        ),
    ] = None,
) -> None:
    """Options of `kvgen` itself."""
    from kvgen.errors import ConfigError
    from kvgen.files import is_folder, kind_of, named

    if quiet and verbose:
        raise typer.BadParameter("got -q and -v, which contradict each other; give one")
    if project is not None and not is_folder(project):
        what = "nothing" if kind_of(project) == "missing" else f"a {kind_of(project)}"
        raise ConfigError(f"--project: got {named(project)!r}, where {what} is; give the folder of a project")
    if "KVGEN_CPU_MODE" in os.environ:  # else no verb need load what reads it
        from kvgen.runtime.cpu_mode import environment_mode

        environment_mode()
    if "KVGEN_CPU_COMPILE" in os.environ:
        from kvgen.compile.program import quick_on_cpu

        quick_on_cpu()
    choose(Settings(quiet, verbose, project))


# In the order of a working day: the function `module.function` that is the verb, what the list of verbs says of it, and
# whether its help ends with what a SELECTOR is.
VERBS: Final = {
    "new": ("new.new", "Begin a project: a folder with one set in it.", False),
    "init": ("init.init", "Write a spec for a model, from its config.json.", False),
    "build": ("build.build", "Write generated/ from specs/.", True),
    "check": ("check.check", "Is generated/ what specs/ give? For CI.", True),
    "diff": ("diff.diff", "What a change does to the generated code.", True),
    "list": ("list.list_sets", "The sets of the project, or the presets.", True),
    "show": ("show.show", "One set's CUDA, plan, line origins, PTX or SASS.", False),
    "compile": ("compile.compile_kernels", "Compile; registers, shared memory, spills. No GPU.", True),
    "bench": ("bench.bench", "Count sectors, instructions, conflicts. No GPU.", True),
    "verify": ("verify.verify", "Run kernels beside the oracle, on a GPU or without.", True),
    "export": ("export.export", "Kernels for an engine in C++: headers, CUDA, CMake.", True),
    "doctor": ("doctor.doctor", "What kvgen needs and what this machine has.", False),
    "demo": ("demo.demo", "A real model's cache, end to end, on this machine.", False),
}


def application(arguments: Sequence[str] = ()) -> typer.Typer:
    """The application with the verb that the command line `arguments` names; with all verbs where it names none.

    typer reads the signature of every verb it is given: a tenth of the time of `kvgen show`.
    """
    words = parted(arguments)[1][:1]
    alone = words and words[0] in VERBS and "_KVGEN_COMPLETE" not in os.environ
    made = typer.Typer(
        cls=Verbs,
        help=HELP,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_options)
    for name, (place, summary, selects) in VERBS.items():
        if alone and name != words[0]:
            continue
        module, _, function = place.partition(".")
        verb = getattr(import_module(f"kvgen.cli.{module}"), function)
        made.command(name, cls=Verb, short_help=summary, epilog=SELECTOR if selects else None)(verb)
    return made


def __getattr__(name: str) -> Any:
    if name == "app":  # with all verbs: for tests, and for pages made of it
        return application()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
