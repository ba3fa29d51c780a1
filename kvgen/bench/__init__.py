"""Operations counted on the CPU machine, beside the fewest sectors that their batch and layout leave possible.

What is counted comes from the compiled kernel, what is possible from the semantics: neither knows of the other.
"""

from kvgen.bench.batch_sizes import SIZES, WORKLOADS
from kvgen.bench.measure import Measured, measure

__all__ = ["SIZES", "WORKLOADS", "Measured", "measure"]
