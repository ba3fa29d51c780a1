"""docs/cli.md: the help of every verb, as the command prints it."""

from __future__ import annotations

from typing import Any, Final

import typer

from kvgen.cli.app import app

WIDTH: Final = 110
_HEAD: Final = """# Command line

`kvgen VERB --help` prints what is here. The command needs the extra `build`; verbs that compile need `cu13` or `cu12` as well, and
`kvgen doctor` says what is missing. In an environment with the runtime alone a verb names the extra that it needs.

| exit status | |
|---|---|
| 0 | fine |
| 1 | a finding: files out of step, a kernel that spills under `--strict`, a wrong number in the demo |
| 2 | a usage error, a mistake in a spec or in `pyproject.toml`, or a tool that is missing |

Settings are in `pyproject.toml` ([shipping](shipping.md) has package data):

| `[tool.kvgen]` | default | |
|---|---|---|
| `specs` | `"specs"` | folder of spec files |
| `out` | `"generated"` | folder that `kvgen build` writes; imported under its path, without a leading `src` |
| `requires` | | versions of kvgen that may read this project, as `">=0.1,<0.2"` (PEP 440) |
| `nvrtc` | | version of NVRTC that `resources.json` is recorded with, as `"13.5"` |

| environment variable | |
|---|---|
| `KVGEN_CACHE_DIR` | compiled kernels and objects of the CPU machine; default `$XDG_CACHE_HOME/kvgen`, else `~/.cache/kvgen` |
| `KVGEN_CUBINS` | folder of `kvgen compile -o`: launchers take kernels from there that the folder `cubins` of their package does not have, and refuse one of another text |
| `KVGEN_NO_JIT` | `1`: launchers compile nothing |
| `KVGEN_CPU_MODE` | `fast`, `hardware` or `check`: which mistakes of kernels calls on host arrays report ([testing](testing.md#modes)); default `hardware`. `verify`, `bench` and `demo` run in `check` |
| `KVGEN_CPU_COMPILE` | `full` or `quick`: how NVRTC (13 and later) compiles kernels for the CPU machine; default `full`, as for a GPU. `quick` leaves out long optimizations: half of the time to compile, for tests; counts of sectors and bank conflicts are then not a GPU's |
| `KVGEN_PROGRESS` | `0`: no line on stderr where a process's first long compile in a call takes more than 2 seconds |

<!-- Written by `python -m docpages` from the verbs' help. -->
"""


def cli_page() -> str:
    """The page."""
    group: Any = typer.main.get_command(app)
    parts = [_HEAD, f"\n## kvgen\n\n```text\n{_help(group, 'kvgen')}\n```\n"]
    for name, command in group.commands.items():
        parts.append(f"\n## kvgen {name}\n\n```text\n{_help(command, f'kvgen {name}')}\n```\n")
    return "".join(parts)


def _help(command: Any, title: str) -> str:
    with command.context_class(
        command, info_name=title, terminal_width=WIDTH, max_content_width=WIDTH, help_option_names=["-h", "--help"]
    ) as context:
        return "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
