"""Captured steps among other nodes: behind a fill, behind another stream's event, behind kernels that rewrite what they read,
beside a kernel that waits for nobody. Bit for bit what the same launches leave uncaptured; once here, many times on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.runtime.test_graphs import PACKAGE as PAGED
from tests.runtime.test_graphs import REQUESTS, STEPS, Step, arrays, fill
from tests.support.graph_machines import Machine, graph_machine
from tests.support.launching import Raw

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
OUTPUTS = ("out", "lse", "pool")


@pytest.fixture(params=DEVICES)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with graph_machine(request.param) as found:
        yield found


class Placed:
    """A step on the machine's device: its arrays, and what it leaves of each of them."""

    def __init__(self, machine: Machine, step: int) -> None:
        self.machine, rng = machine, np.random.default_rng(0)
        host = arrays(rng)
        fill(host, rng, step)
        self.before = {name: np.array(a) for name, a in host.items()}
        self.there = {name: machine.place(a) for name, a in host.items()}
        self.workspace = PAGED.decode.workspace(REQUESTS, device="cuda:0")
        self.step = Step(**self.there, workspace=self.workspace, errors=None)

    def again(self) -> None:
        """All arrays as they were."""
        for name, array in self.there.items():
            self.machine.write(array, self.before[name])

    def left(self) -> dict[str, bytes]:
        return {name: self.machine.read(self.there[name]).tobytes() for name in OUTPUTS}


def eager(placed: Placed) -> dict[str, bytes]:
    """What the step leaves, uncaptured; its kernels are loaded afterwards."""
    placed.step.plan(placed.machine.stream)
    placed.step.attend(placed.machine.stream)
    found = placed.left()
    placed.again()
    return found


@pytest.mark.parametrize("order", ["memset first", "memset between", "event first", "event between"])
def test_launches_behind_other_nodes(machine: Machine, order: str) -> None:
    """A programmatic launch as a graph's first node, behind a fill, behind an event of another stream."""
    placed = Placed(machine, 1)
    wanted = eager(placed)
    stream, out = machine.stream, placed.there["out"]

    def fill_out() -> None:
        if order.startswith("memset"):
            machine.poison(out, stream)
        else:
            machine.beside(lambda other: machine.poison(out, other))

    with machine.capture() as graph:
        if order.endswith("first"):
            fill_out()
        placed.step.plan(stream)
        if order.endswith("between"):
            fill_out()
        placed.step.attend(stream)
    for _ in range(max(2, machine.replays // 100)):
        placed.again()
        graph[0]()
        assert placed.left() == wanted


def test_tables_and_lengths_that_a_kernel_rewrites(machine: Machine) -> None:
    """A node of each replay writes the next step's lengths and page table; plan, append and decode find them, however long the
    multiprocessors have had the old ones."""
    placed, steps = Placed(machine, 0), STEPS[:3]
    lengths, tables = (np.stack(x) for x in zip(*(tables_of(n) for n in range(len(steps))), strict=True))
    pairs = [
        (placed.there["lengths"], machine.place(lengths)),
        (placed.there["page_table"], machine.place(tables)),
    ]
    count = machine.place(np.zeros(1, np.int32))
    write = machine.next_step(count, len(steps), pairs)

    def run() -> None:
        write(machine.stream)
        placed.step.plan(machine.stream)
        placed.step.attend(machine.stream)

    wanted = list[dict[str, bytes]]()
    for _ in range(2 * len(steps)):  # once around, and the pool has what it has before each step from then on
        run()
        wanted.append(placed.left())
    with machine.capture() as graph:
        run()
    for n in range(machine.replays):
        graph[0]()
        assert placed.left() == wanted[len(steps) + n % len(steps)], n


def tables_of(step: int) -> tuple[Raw, Raw]:
    """Lengths and page table of a step of tests/runtime/test_graphs.py."""
    rng = np.random.default_rng(0)
    into: dict[str, Any] = arrays(rng)
    fill(into, rng, step)
    return into["lengths"], into["page_table"]


def test_beside_a_kernel_that_waits_for_nobody(machine: Machine) -> None:
    """Between a decode and the next step's plan, which rewrites the workspace that the decode reads. It may end before the
    decode; the plan waits for its end alone."""
    placed = Placed(machine, 1)
    wanted = eager(placed)
    heedless = machine.heedless(machine.place(np.zeros(32, np.int32)))
    placed.step.plan(machine.stream)
    heedless(machine.stream)
    with machine.capture() as graph:
        placed.step.attend(machine.stream)
        heedless(machine.stream)
        placed.step.plan(machine.stream)
    for n in range(machine.replays):
        graph[0]()
        assert placed.left() == wanted, n
