"""Every exception kvgen raises on purpose.

A message names the field or argument, the value it got, the rule, and what would be valid. The command line prints it
without a traceback and exits with `exit_code`.
"""

from __future__ import annotations

from collections.abc import Sequence


class KvgenError(Exception):
    """A mistake or an obstacle that the user can act on."""

    exit_code = 2


class SpecError(KvgenError, ValueError):
    """A spec does not describe a cache or an operation that can exist."""


class FieldError(SpecError):
    """Fields of a spec that are wrong, a line each; `located` has with each line the constructor's argument to blame."""

    def __init__(self, located: Sequence[tuple[str, str]]) -> None:
        super().__init__("\n".join(line for _, line in located))
        self.located = tuple(located)


class ConfigError(KvgenError):
    """`[tool.kvgen]` or a model's config.json cannot be used."""


class ToolError(KvgenError):
    """A tool or file that a command needs is missing or unusable."""


class CompileError(KvgenError):
    """NVRTC refused a generated kernel."""


class DeviceError(KvgenError):
    """The CUDA driver, a GPU or the CPU machine refused or failed an operation."""


class ArgumentError(KvgenError, ValueError):
    """A launcher's argument contradicts the spec its kernel was generated from."""


class CallError(ArgumentError, TypeError):
    """A launcher or a cache was called without an argument that it needs, or with one that it does not have."""
