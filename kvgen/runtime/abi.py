"""The version of what generated packages expect of `kvgen.runtime`; the number is in `kvgen.version`, which loads nothing."""

from kvgen.version import ABI as ABI
