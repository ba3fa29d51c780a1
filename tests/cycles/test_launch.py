"""A launch worked out on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvgen.cycles.device import DEVICES, REFERENCE, Parameter
from kvgen.cycles.launch import BlockTrip, Work, launch

# 1000 cycles a microsecond; a first copy takes one.
DEVICE = DEVICES["H200"].at(clock_memory=1.0, ldgsts=1000, node=1.0, dependent=0.5, atomic=0.7, reachable=1000)
TRIP = BlockTrip(cycles=2000, tokens=64, nbytes=64 * 100, dependent_loads=4)


def test_a_chunk() -> None:
    # 4 loads of 0.5 and a copy of 1; 100 tokens are two trips of 2 us; nothing to merge. 100 tokens of 100 bytes: 0.01 us.
    found = launch(TRIP, Work(((100,),), 1, 1), DEVICE)
    assert (found.node, found.head, found.stream, found.merge) == (1.0, 3.0, 4.0, 0.0)
    assert found.bandwidth == pytest.approx(0.01) and found.total == 8.0 and found.idle == 0.0
    assert found.reached == pytest.approx(100 * 0.01 / 8)


def test_the_longest_part_ends_last() -> None:
    # A second chunk pays two loads and its first copy; the other part, with one of them, waits. Two pieces of a request are
    # merged: an atomic and two loads.
    found = launch(TRIP, Work(((64, 64), (64,)), 8, 2), DEVICE)
    assert found.head == pytest.approx(3.0) and found.stream == pytest.approx(2.0 + 4.0)
    assert found.merge == pytest.approx(1.7)
    assert found.idle == pytest.approx(9.0 - (9.0 + 5.0) / 2)
    # Eight blocks each: 192 x 8 x 100 bytes at 1000 GB/s.
    assert found.bandwidth == pytest.approx(0.1536)


def test_what_a_chunk_runs_outside_its_loop() -> None:
    # 1500 cycles, in which one of a chunk's two tiles is done: 1.5 + 2. The second chunk's two loads and its first copy, 2 us,
    # come while other warps end the first one, or after.
    same = replace(TRIP, ends=1500, done=1)
    assert launch(same, Work(((100,),), 1, 1), DEVICE).stream == pytest.approx(3.5)
    assert launch(same, Work(((100, 100),), 1, 1), DEVICE).stream == pytest.approx(3.5 + 2 + 3.5)
    assert launch(replace(same, has_producer=True), Work(((100, 100),), 1, 1), DEVICE).stream == pytest.approx(
        3.5 + 2 + 2
    )


def test_bytes_are_the_limit() -> None:
    fast = BlockTrip(cycles=1, tokens=64, nbytes=64 * 1e6, dependent_loads=1)
    found = launch(fast, Work(((640,),), 1, 1), DEVICE)
    # Nothing comes before the first copies have been asked for, 1.5 us.
    assert found.bandwidth == pytest.approx(640) and found.total == pytest.approx(642.5)


def test_nothing_to_do() -> None:
    assert launch(TRIP, Work(((), ()), 8, 1), DEVICE).total == 1.0


@pytest.mark.parametrize("name", DEVICES)
def test_the_ends_of_ranges(name: str) -> None:
    """Every figure lies in its range, names a source and a unit; the slow end of all of them is no faster than the fast one."""
    device = DEVICES[name]
    for figure, p in device.parameters():
        assert p.low <= p.value <= p.high and p.source and p.what, figure
        assert p.unit or figure == "multiprocessors"
    trip = BlockTrip(device.slow().ldg.value, 64, 6400, 4)
    work = Work(((640, 64), (320,)), 8, 2)
    assert (
        launch(trip, work, device.slow()).total
        >= launch(trip, work, device).total
        >= launch(trip, work, device.fast()).total
    )
    assert set(REFERENCE.values()) <= set(DEVICES) and all(DEVICES[n].arch == a for a, n in REFERENCE.items())


def test_what_a_multiprocessor_gets_in_a_cycle() -> None:
    # 4600 GB/s over 132 of them at 1.98 GHz.
    assert DEVICES["H200"].budget_rate == pytest.approx(17.6, abs=0.05)


def test_a_value_outside_its_range() -> None:
    with pytest.raises(ValueError, match=r"a load: got 5; it must lie in 1 to 4"):
        Parameter(5, 1, 4, "clk", "a load", "nobody")
