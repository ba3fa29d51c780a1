"""A step of extend under its plan: what blocks take when they share memory's bandwidth."""

from __future__ import annotations

import pytest

from kvgen.cycles.device import DEVICES
from kvgen.cycles.step import Entry, step

DEVICE = DEVICES["H100 SXM"]
BANDWIDTH = DEVICE.reachable.value / DEVICE.clock_tensor.value  # bytes a cycle


def test_without_bytes_blocks_share_the_cycles() -> None:
    found = step([Entry(1000, 0)] * 10, 4, DEVICE)
    assert (found.cycles, found.work, found.memory) == (3000, 2500, 0)
    assert found.idle == pytest.approx(100 / 6)
    assert found.total == pytest.approx(3000 / 1600)


def test_bytes_alone_take_what_the_bandwidth_gives() -> None:
    """Of many blocks together; one alone gets no more than L2 gives a multiprocessor."""
    each = 1e6
    many = step([Entry(1, each)] * 132, 132, DEVICE)
    assert many.cycles == pytest.approx(132 * each / BANDWIDTH) == pytest.approx(many.memory)
    assert step([Entry(1, each)], 132, DEVICE).cycles == pytest.approx(each / 64)


def test_who_asks_for_little_gets_it() -> None:
    """Blocks that work take no longer beside others that wait for memory, which share what is left."""
    works, waits = Entry(100_000, 100_000 * 0.5), Entry(1, 1e6)
    found = step([works] * 66 + [waits] * 66, 132, DEVICE)
    left = BANDWIDTH - 66 * 0.5
    first = min(100_000, 66 * 1e6 / left)
    assert found.cycles == pytest.approx(max(100_000, first), rel=0.01)


def test_kinds_in_turns_end_before_kinds_one_after_the_other() -> None:
    works, waits = [Entry(20_000, 0)] * 264, [Entry(2_000, 800_000)] * 132
    apart = step([*works, *waits], 132, DEVICE)
    mixed = step([e for n in range(132) for e in (works[2 * n], works[2 * n + 1], waits[n])], 132, DEVICE)
    assert mixed.cycles < 0.8 * apart.cycles
    assert step([], 132, DEVICE).cycles == 0
