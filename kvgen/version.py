"""The version of kvgen, as pyproject.toml states it."""

from typing import Final

__version__: Final = "0.2.0"

# What generated packages expect of kvgen.runtime.
ABI: Final = 8
