"""The command line: one module per verb, each a thin view of `emit.render_all`."""

from __future__ import annotations

import gc
import os
import sys

from kvgen.extras import BUILD, extras_of, missing, needs_build


def main() -> None:
    """Run `kvgen`; ends the process with 0 (fine), 1 (a finding) or 2 (a usage, spec or tool error)."""
    absent = missing(BUILD)
    if absent:
        _without_build(sys.argv[1:], absent)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # looking for them reads every package's metadata
    gc.set_threshold(
        100_000, 20, 20
    )  # loading specs makes objects that last: looking at them is a seventh of `kvgen show`
    from kvgen.cli.app import application

    application(sys.argv[1:])(prog_name="kvgen")


def _without_build(arguments: list[str], absent: list[str]) -> None:
    """End the process where only the runtime is installed: the version, what `doctor` finds, or what to install for the verb."""
    if arguments[:1] in (["--version"], ["-V"]):
        from kvgen.version import __version__

        print(f"kvgen {__version__}")
        sys.exit(0)
    if arguments[:1] == ["doctor"] and set(arguments[1:]) <= {"--json"}:
        from kvgen.cli.doctor_text import report

        sys.exit(report(as_json="--json" in arguments))
    verb = next((a for a in arguments if not a.startswith("-")), "")
    print(f"error: {needs_build(f'kvgen {verb}'.rstrip(), absent, extras_of(verb))}", file=sys.stderr)
    sys.exit(2)
