"""The version of what generated packages expect of `kvgen.runtime`."""

from typing import Final

ABI: Final = 7
