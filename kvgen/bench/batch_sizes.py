"""The batches that `kvgen bench` counts by name."""

from __future__ import annotations

from typing import Final

from kvgen.cases.workload import Workload


def _sizes(count: int) -> Workload:
    """A step of `count` new tokens: of one prompt where they are thousands, else of a request each."""
    if count > 1024:
        return Workload(f"tokens{count}", (count,), (count,))
    return Workload(f"tokens{count}", tuple(24 + 29 * b % 64 for b in range(count)), (1,) * count)


# What append is judged by: one request, a small batch, a large one, a prompt.
SIZES: Final = tuple(_sizes(count) for count in (1, 8, 128, 4096))
WORKLOADS: Final = {
    w.name: w
    for w in (
        Workload("prompt", (4096,), (4096,)),
        Workload("step", tuple(range(64, 1024, 64)), (1,) * 15),
        *SIZES,
    )
}
