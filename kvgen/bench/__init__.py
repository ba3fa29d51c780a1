"""Operations counted on the CPU machine, beside the fewest sectors that their batch and layout leave possible.

What is counted comes from the compiled kernel, what is possible from the semantics: neither knows of the other.
"""

from kvgen.bench.measure import Measured, measure
from kvgen.bench.minimum import minimum_sectors
from kvgen.bench.scene import Call, Scene
from kvgen.bench.workload import WORKLOADS, Workload

__all__ = ["WORKLOADS", "Call", "Measured", "Scene", "Workload", "measure", "minimum_sectors"]
