"""Operations counted on the CPU machine, beside the fewest sectors that their batch and layout leave possible.

What is counted comes from the compiled kernel, what is possible from the semantics: neither knows of the other.
"""

from kvgen.bench.batch_sizes import SIZES, WORKLOADS, Workload
from kvgen.bench.calls import KNOWN, Call, call_of
from kvgen.bench.measure import Measured, measure
from kvgen.bench.minimum import minimum_sectors
from kvgen.bench.synthetic_batch import Scene
from kvgen.bench.unfused import Pass, separate_passes

__all__ = [
    "KNOWN",
    "SIZES",
    "WORKLOADS",
    "Call",
    "Measured",
    "Pass",
    "Scene",
    "Workload",
    "call_of",
    "measure",
    "minimum_sectors",
    "separate_passes",
]
