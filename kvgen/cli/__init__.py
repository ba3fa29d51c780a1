"""The command line: one module per verb, each a thin view of `emit.render_all`."""

from __future__ import annotations

import sys

from kvgen.extras import BUILD, extras_of, missing, needs_build


def main() -> None:
    """Run `kvgen`; ends the process with 0 (fine), 1 (a finding) or 2 (a usage, spec or tool error)."""
    absent = missing(BUILD)
    if absent:
        _without_build(sys.argv[1:], absent)
    from kvgen.cli.app import app

    app(prog_name="kvgen")


def _without_build(arguments: list[str], absent: list[str]) -> None:
    """End the process where only the runtime is installed: the version, or what to install for the verb."""
    if arguments[:1] == ["--version"]:
        from kvgen.version import __version__

        print(f"kvgen {__version__}")
        sys.exit(0)
    verb = next((a for a in arguments if not a.startswith("-")), "")
    print(f"error: {needs_build(f'kvgen {verb}'.rstrip(), absent, extras_of(verb))}", file=sys.stderr)
    sys.exit(2)
