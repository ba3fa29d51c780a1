"""What a result may be off by: units in the last place of a type."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def ulp(x: NDArray[Any], dtype: np.dtype[Any]) -> Floats:
    """The distance of the numbers of `dtype` around each |x|, in float64; of subnormal ones, theirs. NaN for no number."""
    info = ml_dtypes.finfo(dtype)
    least = int(info.minexp)
    _, exponent = np.frexp(np.maximum(np.abs(np.asarray(x, np.float64)), 2.0**least))
    found: Floats = np.exp2(exponent - 1.0 - int(info.nmant))
    found[~np.isfinite(x)] = np.nan
    return found
