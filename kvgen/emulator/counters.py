"""What launches did: instructions by class and line, global memory in sectors, shared memory in wavefronts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

from kvgen.emulator.classes import CLASSES

Blocks = tuple[tuple[tuple[int, int, int], ...], ...]  # of each basic block: line, class, instructions
SHARED = 2**32 - 1  # in place of a buffer's number
_KINDS = ("load", "store", "atomic")


@dataclass(frozen=True, slots=True)
class BufferCounters:
    """Traffic of one buffer.

    A request is one instruction of one warp; a sector is 32 bytes, counted once a request. Ideal sectors are the fewest
    that could hold the different bytes of a request. A bulk copy is one request.
    """

    load_requests: int = 0
    load_bytes: int = 0
    load_sectors: int = 0
    load_ideal_sectors: int = 0
    store_requests: int = 0
    store_bytes: int = 0
    store_sectors: int = 0
    store_ideal_sectors: int = 0
    atomic_requests: int = 0
    atomic_bytes: int = 0
    atomic_sectors: int = 0
    atomic_ideal_sectors: int = 0

    def __add__(self, other: BufferCounters) -> BufferCounters:
        return BufferCounters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def requests(self) -> int:
        """Of loads, stores and atomics."""
        return self.load_requests + self.store_requests + self.atomic_requests

    @property
    def bytes(self) -> int:
        """Of loads, stores and atomics: of every thread, so that a byte may count often."""
        return self.load_bytes + self.store_bytes + self.atomic_bytes

    @property
    def sectors(self) -> int:
        """Of loads, stores and atomics."""
        return self.load_sectors + self.store_sectors + self.atomic_sectors

    @property
    def ideal_sectors(self) -> int:
        """Of loads, stores and atomics."""
        return self.load_ideal_sectors + self.store_ideal_sectors + self.atomic_ideal_sectors

    @property
    def coalescing(self) -> float:
        """Sectors / ideal sectors: 1 where each request moves no more than it needs. 1 without requests."""
        return self.sectors / self.ideal_sectors if self.ideal_sectors else 1.0


@dataclass(frozen=True, slots=True)
class SharedCounters:
    """Traffic of shared memory, cp.async's writes included.

    A request is one instruction of one warp. It is served in phases - one, two for 8-byte accesses, four for 16-byte
    ones - and a phase takes as many wavefronts as the most words that one of the 32 banks must give: `ideal_wavefronts`
    counts the phases. `worst_ways` is the most wavefronts of any phase.
    """

    requests: int = 0
    bytes: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0
    worst_ways: int = 0

    def __add__(self, other: SharedCounters) -> SharedCounters:
        return SharedCounters(
            self.requests + other.requests,
            self.bytes + other.bytes,
            self.wavefronts + other.wavefronts,
            self.ideal_wavefronts + other.ideal_wavefronts,
            max(self.worst_ways, other.worst_ways),
        )

    @property
    def ways(self) -> float:
        """Wavefronts / phases: 1 without bank conflicts, and without requests."""
        return self.wavefronts / self.ideal_wavefronts if self.ideal_wavefronts else 1.0


@dataclass(frozen=True, slots=True)
class LineCounters:
    """What one line of CUDA did; `source` is its "file:line", of inlined code the innermost one.

    `classes` and `thread_classes` are executed instructions of warps and of threads by class, `per_buffer` and `shared`
    the line's part of the memory traffic.
    """

    source: str
    warp_instructions: int
    thread_instructions: int
    classes: Mapping[str, int]
    thread_classes: Mapping[str, int]
    per_buffer: Mapping[str, BufferCounters]
    shared: SharedCounters

    @property
    def traffic(self) -> BufferCounters:
        """Of all buffers together."""
        return sum(self.per_buffer.values(), BufferCounters())


class Site(NamedTuple):
    """What one instruction asked of one buffer (its number, or SHARED); `kind` is 0 load, 1 store, 2 atomic."""

    source: str
    buffer: int
    kind: int
    requests: int
    bytes: int
    units: int
    ideal: int
    worst: int


@dataclass(frozen=True, slots=True)
class Tally:
    """One launch, as the runtime counted it.

    `lines` and `blocks` say what the kernel's basic blocks are made of, `executed` how often threads ran each of them,
    then how often warps did.
    """

    lines: tuple[str, ...]
    blocks: Blocks
    executed: tuple[int, ...]
    buffers: tuple[str, ...]
    sites: tuple[Site, ...]
    warp_operations: int
    barriers: int
    peak_in_flight: int

    def instructions(self) -> Iterator[tuple[str, int, int, int]]:
        """(line, class, by threads, by warps) of every part of a basic block that ran."""
        count = len(self.blocks)
        for block, threads, warps in zip(self.blocks, self.executed[:count], self.executed[count:], strict=True):
            if threads:
                for line, kind, n in block:
                    yield self.lines[line], kind, n * threads, n * warps


@dataclass(frozen=True)
class Counters:
    """What one launch did, or several (`Counters.sum`).

    Exact, and the same for any number of workers and, for a kernel without races, any schedule. Instructions are those of
    PTX. A warp runs a basic block as often as its busiest lane; guarded instructions count whether or not their guard
    holds. `per_buffer`, `shared` and `peak_in_flight` are counted in check mode; in fast mode they are 0.
    """

    tallies: tuple[Tally, ...] = field(repr=False)

    @staticmethod
    def sum(several: Iterable[Counters]) -> Counters:
        """All of them together: counts add up, of peaks the largest."""
        return Counters(tuple(t for counters in several for t in counters.tallies))

    @cached_property
    def classes(self) -> Mapping[str, int]:
        """Executed warp instructions by class; a class that did not occur is 0."""
        return self._by_class[1]

    @cached_property
    def thread_classes(self) -> Mapping[str, int]:
        """Executed thread instructions by class; a class that did not occur is 0."""
        return self._by_class[0]

    @cached_property
    def _by_class(self) -> tuple[dict[str, int], dict[str, int]]:
        threads, warps = dict.fromkeys(CLASSES, 0), dict.fromkeys(CLASSES, 0)
        for tally in self.tallies:
            for _, kind, by_threads, by_warps in tally.instructions():
                threads[CLASSES[kind]] += by_threads
                warps[CLASSES[kind]] += by_warps
        return threads, warps

    @property
    def warp_instructions(self) -> int:
        """Executed instructions of warps."""
        return sum(self.classes.values())

    @property
    def thread_instructions(self) -> int:
        """Executed instructions of threads."""
        return sum(self.thread_classes.values())

    @property
    def warp_operations(self) -> int:
        """Shuffles, votes, matrix operations and other meetings of a warp."""
        return sum(t.warp_operations for t in self.tallies)

    @property
    def barriers(self) -> int:
        """Completed barriers."""
        return sum(t.barriers for t in self.tallies)

    @property
    def peak_in_flight(self) -> int:
        """Bytes of asynchronous copies that a block has started and not waited for, at most.

        The sum of what each thread itself has in flight at most, which does not depend on who runs first.
        """
        return max((t.peak_in_flight for t in self.tallies), default=0)

    @cached_property
    def per_buffer(self) -> Mapping[str, BufferCounters]:
        """Global memory by buffer, in the order of the launch's buffers."""
        found = {name: BufferCounters() for tally in self.tallies for name in tally.buffers}
        for tally in self.tallies:
            for site in tally.sites:
                if site.buffer != SHARED:
                    found[tally.buffers[site.buffer]] += _traffic(site)
        return found

    @cached_property
    def shared(self) -> SharedCounters:
        """Shared memory of all blocks."""
        found = (_shared(site) for tally in self.tallies for site in tally.sites if site.buffer == SHARED)
        return sum(found, SharedCounters())

    @cached_property
    def lines(self) -> Sequence[LineCounters]:
        """The lines of CUDA that ran, in order of file and line."""
        found: dict[str, _Line] = {}
        for tally in self.tallies:
            for source, kind, threads, warps in tally.instructions():
                found.setdefault(source, _Line()).add(CLASSES[kind], threads, warps)
            for site in tally.sites:
                line = found.setdefault(site.source, _Line())
                if site.buffer == SHARED:
                    line.shared += _shared(site)
                else:
                    name = tally.buffers[site.buffer]
                    line.per_buffer[name] = line.per_buffer.get(name, BufferCounters()) + _traffic(site)
        return tuple(found[source].counters(source) for source in sorted(found, key=_order))


@dataclass(slots=True)
class _Line:
    threads: dict[str, int] = field(default_factory=dict)
    warps: dict[str, int] = field(default_factory=dict)
    per_buffer: dict[str, BufferCounters] = field(default_factory=dict)
    shared: SharedCounters = SharedCounters()

    def add(self, kind: str, threads: int, warps: int) -> None:
        self.threads[kind] = self.threads.get(kind, 0) + threads
        self.warps[kind] = self.warps.get(kind, 0) + warps

    def counters(self, source: str) -> LineCounters:
        total = (sum(self.warps.values()), sum(self.threads.values()))
        return LineCounters(source, *total, self.warps, self.threads, self.per_buffer, self.shared)


def _order(source: str) -> tuple[str, int]:
    file, _, line = source.rpartition(":")
    return file, int(line)


def _traffic(site: Site) -> BufferCounters:
    kind = _KINDS[site.kind]
    counted = {"requests": site.requests, "bytes": site.bytes, "sectors": site.units, "ideal_sectors": site.ideal}
    return BufferCounters(**{f"{kind}_{name}": n for name, n in counted.items()})


def _shared(site: Site) -> SharedCounters:
    return SharedCounters(site.requests, site.bytes, site.units, site.ideal, site.worst)
