"""The time around the trip: what a launch takes in all, from its planner's chunks, as an interval.

A launch is its node in a graph; in each block the loads that come one behind the other before the first copy, the latency of
that, and the trips of its chunks; and where requests were cut, a merge by the blocks that finish last. The blocks of the SM part
with the most to do end last, and once copies have begun no earlier than all bytes have come at the reachable bandwidth. The
planner, which runs once a step for all layers, is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvgen.cycles.device import Device

# Loads one behind the other in a merge: of the other chunks' maxima, then of their sums.
_MERGE_LOADS: Final = 2
# Before the first copy of a chunk that is not a block's first: its own numbers, and a page id.
_NEXT_LOADS: Final = 2


@dataclass(frozen=True)
class Work:
    """Chunks of each SM part, in tokens; `columns` blocks share them, a kv head and tile of columns each. `pieces`: the most
    chunks that a request has."""

    parts: tuple[tuple[int, ...], ...]
    columns: int
    pieces: int

    @property
    def tokens(self) -> int:
        """Tokens of all requests."""
        return sum(map(sum, self.parts))


@dataclass(frozen=True)
class BlockTrip:
    """A trip as a block makes it: cycles, tokens, and bytes. `ends`: cycles of what a chunk runs outside the loop, which does
    `done` of its tiles itself; `has_producer`: other warps copy, so that the next chunk's first copies come meanwhile."""

    cycles: float
    tokens: int
    nbytes: float
    dependent_loads: int
    ends: float = 0.0
    done: int = 0
    has_producer: bool = False


@dataclass(frozen=True)
class Launch:
    """Microseconds of a launch's stages. `head`: until the first copies have landed, while nothing streams; `stream`: trips, and
    the beginnings of a block's other chunks; `bandwidth` is what bytes alone take, `idle` what the mean SM part waits for the
    longest one."""

    node: float
    head: float
    stream: float
    merge: float
    bandwidth: float
    idle: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.node + self.head + max(self.stream, self.bandwidth) + self.merge

    @property
    def reached(self) -> float:
        """% of the reachable bandwidth, node and merge included."""
        return 100 * self.bandwidth / self.total


def launch(trip: BlockTrip, work: Work, device: Device) -> Launch:
    """A launch on an idle device whose caches hold none of the bytes."""
    clock = device.clock_memory.value * 1e3  # cycles a microsecond
    fill = device.ldgsts.value / clock
    first = trip.dependent_loads * device.dependent.value + fill
    following = min(_NEXT_LOADS, trip.dependent_loads) * device.dependent.value + fill

    def stream(chunks: Sequence[int]) -> float:
        trips = sum(max(0, -(-tokens // trip.tokens) - trip.done) for tokens in chunks)
        ends = trip.ends / clock
        between = max(following, ends) if trip.has_producer else following + ends
        return ends + (len(chunks) - 1) * between + trips * trip.cycles / clock

    parts = [stream(chunks) for chunks in work.parts if chunks]
    longest = max(parts, default=0.0)
    mean = sum(first + x for x in parts) / len(work.parts) if parts else 0.0
    nbytes = work.tokens * work.columns * trip.nbytes / trip.tokens
    return Launch(
        node=device.node.value,
        head=first if parts else 0.0,
        stream=longest,
        merge=device.atomic.value + _MERGE_LOADS * device.dependent.value if work.pieces > 1 else 0.0,
        bandwidth=nbytes / device.reachable.value / 1e3,
        idle=first + longest - mean if parts else 0.0,
    )
