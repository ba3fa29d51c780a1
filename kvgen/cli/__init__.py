"""The command line: one module per verb, each a thin view of `emit.render_all`."""

from __future__ import annotations


def main() -> None:
    """Run `kvgen`; ends the process with 0 (fine), 1 (a finding) or 2 (a usage, spec or tool error)."""
    from kvgen.cli.app import app

    app(prog_name="kvgen")
