"""The operations: one module each, with its spec and its plan; the list below is all there is."""

from kvgen.ops.append import Append
from kvgen.ops.decode import Decode
from kvgen.ops.gather import Gather

ALL = (Append, Decode, Gather)

__all__ = ["ALL", "Append", "Decode", "Gather"]
