"""Operations counted on the CPU machine, beside the fewest sectors that their batch and layout leave possible.

What is counted comes from the compiled kernel, what is possible from the semantics: neither knows of the other.
"""

from kvgen.bench.calls import KNOWN, Call, call_of
from kvgen.bench.measure import Measured, measure
from kvgen.bench.minimum import minimum_sectors
from kvgen.bench.scene import Scene
from kvgen.bench.separate import Pass, separate_passes
from kvgen.bench.workload import SIZES, WORKLOADS, Workload

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
