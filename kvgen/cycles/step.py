"""A step of extend on a GPU: blocks take entries of a plan in the order of its list, and share memory's bandwidth while they run.

An entry takes what its trips and its ends take of a multiprocessor, or longer where its bytes do not come so fast. Bytes come at
the reachable bandwidth, divided evenly among those who ask for more than their part of it, and no faster than a multiprocessor
takes them. The planner, which runs once a step for all layers, is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvgen.cycles.device import Device

# Bytes that L2 gives a multiprocessor in a cycle.
_FROM_L2: Final = 64.0


@dataclass(frozen=True)
class Entry:
    """What a block does for one kv head of an entry: cycles of its multiprocessor, and bytes out of memory."""

    cycles: float
    nbytes: float


@dataclass(frozen=True)
class StepCycles:
    """Cycles of a step at the clock of tensor cores: in all; what multiprocessors work if they share it evenly; what the bytes
    take. `idle`: % of the multiprocessors' time in which they have no entry."""

    cycles: float
    work: float
    memory: float
    idle: float
    clock: float

    @property
    def total(self) -> float:
        """Microseconds."""
        return self.cycles / self.clock / 1e3


def step(entries: Sequence[Entry], blocks: int, device: Device) -> StepCycles:
    """`blocks` of a multiprocessor each take the entries in their order, whoever is free the next one."""
    clock = device.clock_tensor.value
    bandwidth = device.reachable.value / clock  # bytes a cycle
    cycles = np.array([max(1.0, e.cycles) for e in entries])
    nbytes = np.array([e.nbytes for e in entries])
    running = np.arange(min(blocks, len(entries)))
    left = np.ones(len(running))  # of each entry that runs
    begun, now, busy = len(running), 0.0, 0.0
    while len(running):
        asked = np.minimum(nbytes[running] / cycles[running], _FROM_L2)
        given = np.minimum(asked, _level(asked, bandwidth))
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = np.where(nbytes[running] > 0, given / nbytes[running], np.inf)
        rate = np.minimum(rate, 1 / cycles[running])
        time = float((left / rate).min())
        now += time
        busy += time * len(running)
        left -= rate * time
        done = np.flatnonzero(left <= 1e-9)
        more = np.arange(begun, min(begun + len(done), len(entries)))
        begun += len(more)
        running[done[: len(more)]], left[done[: len(more)]] = more, 1.0
        stays = np.ones(len(running), np.bool_)
        stays[done[len(more) :]] = False
        running, left = running[stays], left[stays]
    return StepCycles(
        cycles=now,
        work=float(cycles.sum()) / blocks,
        memory=float(nbytes.sum()) / bandwidth,
        idle=100 * (1 - busy / (now * blocks)) if now else 0.0,
        clock=clock,
    )


def _level(asked: NDArray[np.float64], bandwidth: float) -> float:
    """The most that one gets where together they get no more than the bandwidth."""
    if asked.sum() <= bandwidth:
        return float("inf")
    order = np.sort(asked)
    before = np.concatenate([[0.0], np.cumsum(order)[:-1]])
    level = (bandwidth - before) / np.arange(len(order), 0, -1)
    return float(level[np.argmax(level <= order)])
