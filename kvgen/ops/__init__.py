"""The operations: one module each, with its spec and its plan; the list below is all that kvgen writes, Custom the user."""

from kvgen.ops.append import Append
from kvgen.ops.arguments import Array, Scalar, Size, TensorMap
from kvgen.ops.custom import Custom
from kvgen.ops.decode import Decode
from kvgen.ops.gather import Gather
from kvgen.ops.seal import Seal

ALL = (Append, Decode, Gather, Seal)

__all__ = ["ALL", "Append", "Array", "Custom", "Decode", "Gather", "Scalar", "Seal", "Size", "TensorMap"]
