"""The warps of a multiprocessor, replayed: who issues when, and what a trip of each role's loop takes.

A sub-core issues an instruction a cycle: of the warp that issued last while it can and does not yield, else of the youngest that
can. A warp can when its stall count has passed, the scoreboards that the instruction waits for are released, and the pipe that
it needs takes it. What a scoreboard is released by is known at issue: a fixed latency behind the pipes that all warps share.
Copies of cp.async complete in order, group by group; named barriers, mbarriers and products of a warpgroup by what other warps
do. Memory answers after the device table's latency, however much is asked for: bandwidth is a budget beside the trip, not part
of it. Branches follow the given trip; caches of instructions and registers' banks are not modelled.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from kvgen.cycles.device import Device
from kvgen.cycles.words import Word
from kvgen.errors import ToolError

Placement = Literal["spread", "aligned", "worst"]
SUB_CORES: Final = 4
_BEGUN: Final = 2  # trips, by which a warp is known to go round
_AHEAD: Final = 64  # a role that is so far ahead of another one does not wait for it, and that one for nobody

_SHARED: Final = frozenset(("LDS", "LDSM", "STS", "STSM", "ATOMS", "SHFL", "LDGSTS", "MOVM", "STAS"))
_GLOBAL: Final = frozenset(("LDG", "LD", "STG", "ST", "LDL", "STL", "ATOM", "ATOMG", "RED", "REDG"))
_PIPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("HMMA", "IMMA", "QMMA", "OMMA", "BMMA"), "hmma"),
    **dict.fromkeys(("MUFU",), "mufu"),
    **dict.fromkeys(("FFMA", "FADD", "FMUL", "FFMA2", "FADD2", "FMUL2"), "fma"),
    **dict.fromkeys(("HFMA2", "HADD2", "HMUL2"), "half"),
    **dict.fromkeys(("IMAD", "IMUL"), "imad"),
    **dict.fromkeys(("F2F", "F2I", "I2F", "I2FP", "F2FP", "F2IP", "I2I", "FRND"), "convert"),
    **dict.fromkeys(("LDC", "LDCU", "ULDC", "S2R", "S2UR", "CS2R", "R2UR", "VOTEU"), ""),
    **dict.fromkeys(("BRA", "BSSY", "BSYNC", "BREAK", "BAR", "WARPSYNC", "NOP", "EXIT", "RET", "CALL", "SYNCS", "B2R"), ""),
    **dict.fromkeys(("LDGDEPBAR", "DEPBAR", "ARRIVES", "WARPGROUP", "MEMBAR", "FENCE", "ERRBAR", "CCTL", "ELECT"), ""),
    **dict.fromkeys(("UTMALDG", "UBLKCP", "UTMACCTL", "USETMAXREG", "YIELD", "NANOSLEEP", "ACQBULK", "PREEXIT"), ""),
}  # fmt: skip
# The figure of the device table that says when a result is there; of others, conversions'.
_LATENCIES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("LDG", "LD", "LDL", "ATOM", "ATOMG"), "ldg"),
    **dict.fromkeys(("LDC", "LDCU", "ULDC"), "constant"),
    **dict.fromkeys(("LDS", "ATOMS"), "lds"),
    **dict.fromkeys(("SHFL", "MOVM"), "shfl"),
    **{"LDSM": "ldsm", "MUFU": "mufu", "HMMA": "hmma", "MEMBAR": "membar", "SYNCS": "mbarrier"},
}
_HMMA: Final = {"16816": 4096, "1688": 2048}
_WARPGROUP_PRODUCTS: Final = frozenset(("HGMMA", "QGMMA", "IGMMA", "BGMMA"))
_MEETING: Final = frozenset(("BAR", "SYNCS", "ARRIVES", "UTMALDG", "UBLKCP"))
_KINDS: Final[Mapping[str, Literal["copy", "group"]]] = {"LDGSTS": "copy", "LDGDEPBAR": "group"}


class ReplayError(ToolError):
    """Warps that wait for what nobody does, or an instruction whose meaning the replay was not given."""


@dataclass(frozen=True)
class Mbarrier:
    """An mbarrier, or a ring of them as one: its n-th phase is complete after n times the arrivals and the bytes of one phase, of
    which no warp's arrivals count more than n times.

    `ahead` phases count as complete at the start: a ring's stages that begin empty.
    """

    arrivals: int
    nbytes: int = 0
    ahead: int = 0


@dataclass(frozen=True)
class Role:
    """Warps of a block that run one loop: the trip's words, and how many trips a run has.

    `mbarriers` names, by the address of the word, which mbarrier it asks, arrives at or copies for ("" for none), and which named
    barrier where a register holds its number; `nbytes` what a bulk copy brings. Before the loop a warp has arrived `before` times
    at an mbarrier, whose bytes have come as often, or at a named barrier ("BAR 0x9"); what it asks for at an mbarrier are the
    phases from `first` on, every `step`th (0, and each, unless it is told).
    """

    name: str
    trip: tuple[Word, ...]
    warps: int
    trips: int = 8
    mbarriers: Mapping[int, str] = field(default_factory=dict)
    nbytes: Mapping[int, int] = field(default_factory=dict)
    before: Mapping[str, int] = field(default_factory=dict)
    first: Mapping[str, int] = field(default_factory=dict)
    step: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Trip:
    """A role's trip: cycles, on average over its warps and the later half of the trips; and what a warp waited for meanwhile."""

    role: str
    cycles: float
    instructions: int
    waits: Mapping[str, float]


@dataclass(frozen=True)
class Replay:
    """What a run gave: a trip for each role, and the part of all cycles in which the busiest sub-core issued."""

    trips: tuple[Trip, ...]
    issue: float
    slots: float

    def trip(self, role: str | None = None) -> Trip:
        """Of the role; without one, the slowest."""
        if role is None:
            return max(self.trips, key=lambda t: t.cycles)
        return next(t for t in self.trips if t.role == role)


def placed(roles: Sequence[Role], blocks: int, how: Placement) -> list[tuple[int, int, int, int]]:
    """The warps of a multiprocessor: block, role, number in the block, sub-core.

    Nobody documents who lies where. "spread" goes round the sub-cores from block to block; "aligned" begins each block at the
    first; "worst" puts what is left of a block after the last four warps on one sub-core, for all blocks the same.
    """
    found, count = [], 0
    for block in range(blocks):
        numbers = [(r, n) for r, role in enumerate(roles) for n in range(role.warps)]
        for number, (r, _) in enumerate(numbers):
            even = len(numbers) // SUB_CORES * SUB_CORES
            core = {
                "spread": count % SUB_CORES,
                "aligned": number % SUB_CORES,
                "worst": number % SUB_CORES if number < even else 0,
            }[how]
            found.append((block, r, number, core))
            count += 1
    return found


class _Named:
    """A named barrier or an mbarrier: arrivals and bytes so far, and when each phase was complete."""

    def __init__(self, needs: int, nbytes: int = 0, ahead: int = 0) -> None:
        self.needs, self.nbytes = needs, nbytes
        self.arrived: dict[int, list[float]] = {}  # by warp
        self.landed: list[tuple[float, int]] = []
        self.done: list[float] = [0.0] * ahead
        self.ahead = ahead
        self.waiting: list[_Warp] = []

    def arrive(self, warp: _Warp, time: float) -> int:
        """How often the warp has arrived by now."""
        own = self.arrived.setdefault(id(warp), [])
        own.append(time)
        return len(own)

    def complete(self) -> None:
        """Note the phases that are complete by now."""
        while True:
            phase = len(self.done) - self.ahead + 1
            counted = sorted(time for times in self.arrived.values() for time in times[:phase])
            if len(counted) < phase * self.needs:
                return
            at = counted[phase * self.needs - 1]
            if self.nbytes:
                total = 0
                for time, size in sorted(self.landed):
                    total += size
                    if total >= phase * self.nbytes:
                        at = max(at, time)
                        break
                else:
                    return
            self.done.append(max(at, self.done[-1] if self.done else 0.0))


@dataclass(frozen=True, slots=True)
class _Step:
    """A word of a trip, and what the device table says of it: worked out once, for a run issues each thousands of times."""

    word: Word
    pipe: str  # "" for none
    interval: float  # that the pipe is taken for
    memory: bool
    shared: float  # cycles of shared memory
    latency: float  # until its result is there
    stall: int
    branch: float  # the least it takes the warp
    asks: bool  # whether it waits for a scoreboard or a group
    meets: bool  # whether it is a barrier's or a bulk copy's
    kind: Literal["product", "copy", "group", ""]


@dataclass(slots=True, eq=False)
class _Warp:
    role: Role
    block: int
    number: int
    core: int
    steps: Sequence[_Step]
    ready: float = 0.0  # by its own stall counts
    at: int = 0
    trip: int = 0
    boards: list[list[tuple[float, str]]] = field(default_factory=lambda: [[] for _ in range(6)])
    copies: float = 0.0  # when the last copy of the open group lands
    group: float = 0.0
    product: int = 0
    chains: list[float] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    blocked: _Named | None = None
    phase: int = 0
    since: float = 0.0  # when it was blocked
    own: tuple[float, Sequence[tuple[str, float]]] | None = None  # _own, since its last instruction
    span: _Span = field(init=False)

    @property
    def word(self) -> Word:
        return self.role.trip[self.at]

    @property
    def progress(self) -> float:
        """Trips so far."""
        return self.trip + self.at / len(self.role.trip)


class _Span:
    """The later half of a role's trips, counted over all its warps: those of one role need not keep pace."""

    def __init__(self, role: Role, warps: Sequence[_Warp]) -> None:
        self.role, self.warps = role, warps
        self.begin: float | None = None
        self.end: float | None = None
        for warp in warps:
            warp.span = self
        self.trips = 0.0
        self.waits: defaultdict[str, float] = defaultdict(float)

    def head(self, now: float) -> None:
        """A warp begins a trip."""
        made = sum(w.progress for w in self.warps)
        if self.begin is None and made >= self.role.trips // 2 * len(self.warps):
            self.begin, self.trips = now, -made
        if self.end is None and made >= self.role.trips * len(self.warps):
            self.end, self.trips = now, self.trips + made

    def waited(self, why: str, cycles: float) -> None:
        if self.begin is not None and self.end is None:
            self.waits[why] += cycles

    def result(self) -> Trip:
        assert self.begin is not None and self.end is not None
        cycles = (self.end - self.begin) * len(self.warps) / self.trips
        waits = {why: n / self.trips for why, n in sorted(self.waits.items(), key=lambda item: -item[1])}
        return Trip(self.role.name, cycles, len(self.role.trip), waits)


class _Core:
    """A sub-core: when it issued last, whom, and when each of its pipes is free."""

    def __init__(self) -> None:
        self.free = 0.0
        self.last: _Warp | None = None
        self.pipes: dict[str, float] = {}
        self.mio = 0.0
        self.queue: deque[float] = deque()
        self.issued = 0
        self.warps: list[_Warp] = []


class _Multiprocessor:
    def __init__(
        self,
        roles: Sequence[Role],
        device: Device,
        blocks: int,
        how: Placement,
        mbarriers: Mapping[str, Mbarrier],
        skew: float,
    ) -> None:
        self.device = device
        self.value = {name: p.value for name, p in device.parameters()}
        self.depth = int(device.mio_queue.value)
        self.cores = [_Core() for _ in range(SUB_CORES)]
        self.warps: list[_Warp] = []
        steps = [_steps(role.trip, self.value) for role in roles]
        for block, r, number, core in placed(roles, blocks, how):
            warp = _Warp(roles[r], block, number, core, steps[r], ready=skew * len(self.warps))
            self.warps.append(warp)
            self.cores[core].warps.append(warp)
        self.block_warps = sum(role.warps for role in roles)
        self.shared = 0.0
        self.boxes = 0.0  # when the next bulk copy may begin
        self.accesses = 0.0  # cycles of shared memory since the last product of a warpgroup
        self.groups: dict[tuple[int, int], list[float]] = {}  # when their products were done
        self.spans = [_Span(role, [w for w in self.warps if w.role is role]) for role in roles]
        self.named: dict[tuple[int, str], _Named] = {}
        self.mbarriers = mbarriers
        self.heap: list[tuple[float, int]] = []
        self.now = 0.0

    # ------------------------------------------------------------------------------------------------------------- the clock

    def run(self) -> Replay:
        self.heap = [(0.0, c) for c, core in enumerate(self.cores) if core.warps]
        most = [_AHEAD * core.warps[-1].role.trips if core.warps else 0 for core in self.cores]
        left = list(self.spans)
        while self.heap:
            now, c = heapq.heappop(self.heap)
            core = self.cores[c]
            if now < core.free:
                continue  # somebody woke it while it had a time of its own
            again = self._step(core, now)
            self.now = now
            if again is not None:
                heapq.heappush(self.heap, (again, c))
            if core.warps[-1].trip > most[c]:
                break
            if left[0].end is not None:
                left = [span for span in left if span.end is None]
                if not left:
                    break
        # A block that others leave no issue slot waits for its own warps, which get none.
        starved = {w.block for w in self.warps if not w.blocked and w.trip < _BEGUN}
        late = [
            w
            for span in self.spans
            for w in span.warps
            if span.end is None or (w.blocked and w.trip < _BEGUN and w.block not in starved)
        ]
        if late:
            warp = min(late, key=lambda w: w.progress)
            raise ReplayError(
                f"replay: warp {warp.number} of role {warp.role.name} waits at {warp.word.address:04x} "
                f"{warp.word.text!r} for what no warp does"
            )
        busiest = max(self.cores, key=lambda core: core.issued)
        slots = sum(len(w.role.trip) for w in busiest.warps)
        return Replay(tuple(span.result() for span in self.spans), busiest.issued / self.now, slots)

    def _step(self, core: _Core, now: float) -> float | None:
        """Issue an instruction if a warp can: of the one that issued last, else of the youngest; when to look again, None where
        only another warp's doing can help."""
        soonest: float | None = None
        chosen: _Warp | None = None
        pipes, last, full = core.pipes, core.last, len(core.queue) >= self.depth
        for warp in core.warps:
            if warp.blocked is not None:
                continue
            own = warp.own
            if own is None:
                own = warp.own = _own(warp)
            at, step = own[0], warp.steps[warp.at]
            if step.memory and full:
                at = max(at, self._queued(core, at))
            elif step.pipe:
                free = pipes.get(step.pipe, 0.0)
                if free > at:
                    at = free
            if at > now:
                if soonest is None or at < soonest:
                    soonest = at
            elif chosen is not last or chosen is None:
                chosen = warp
        if chosen is None:
            return soonest
        since, span = chosen.ready, chosen.span
        if now > since and span.begin is not None and span.end is None:
            for why, until in self._whys(core, chosen, now):
                if until > since:
                    span.waits[why] += until - since
                    since = until
        self._issue(core, chosen, now)
        core.free = now + 1
        core.issued += 1
        return core.free

    def _queued(self, core: _Core, at: float) -> float:
        """When the full queue of memory instructions has room for one that could issue at `at`."""
        busy = [t for t in core.queue if t > at]
        over = len(busy) - self.depth
        return busy[over] if over >= 0 else 0.0

    def _whys(self, core: _Core, warp: _Warp, now: float) -> Iterator[tuple[str, float]]:
        """The causes for which a warp that issues now has waited, each with the time at which it ended."""
        assert warp.own is not None
        at, whys = warp.own
        yield from whys
        step = warp.steps[warp.at]
        if step.memory and len(core.queue) >= self.depth:
            pipe, free = "memory queue", self._queued(core, at)
        else:
            pipe, free = step.pipe, core.pipes.get(step.pipe, 0.0) if step.pipe else 0.0
        if free > at:
            yield f"pipe: {pipe}", free
        yield "issue: other warps", now

    # ----------------------------------------------------------------------------------------------------------- an instruction

    def _issue(self, core: _Core, warp: _Warp, now: float) -> None:
        step, value = warp.steps[warp.at], self.value
        word = step.word
        if warp.at == 0:
            warp.span.head(now)
        start = now
        if step.pipe:
            core.pipes[step.pipe] = now + step.interval
        if step.memory:
            while core.queue and core.queue[0] <= now:
                core.queue.popleft()
            start = max(now, core.mio)
            core.mio = start + value["mio_interval"]
            start = max(start, self.shared)
            self.shared = start + step.shared
            self.accesses += step.shared
            core.queue.append(start)
            start = self.shared - value["shared_accept"]
        if step.kind == "product":
            self._product(warp, now)
        elif step.kind == "copy":
            warp.copies = max(warp.copies, start + value["ldgsts"])
        elif step.kind == "group":
            warp.group = max(warp.group, warp.copies, now)
            self._set(warp, word.sets or 0, warp.group, "copies: their group", now)
        if step.kind != "group":
            if word.sets is not None:
                self._set(warp, word.sets, start + step.latency, word.base, now)
            if word.reads is not None:
                self._set(warp, word.reads, start + value["operands"], f"{word.base}: its operands", now)
        warp.ready = now + max(step.stall, step.branch)
        core.last = None if word.yields else warp
        if step.meets:
            self._meets(warp, now)
        warp.own = None
        warp.at += 1
        if warp.at == len(warp.steps):
            warp.at, warp.trip = 0, warp.trip + 1

    def _set(self, warp: _Warp, number: int, time: float, who: str, now: float) -> None:
        board = warp.boards[number]
        board[:] = [entry for entry in board if entry[0] > now]
        board.append((time, who))

    def _product(self, warp: _Warp, now: float) -> None:
        """An asynchronous product: of the four warps together, on the tensor pipes of all their sub-cores.

        It begins where the first of them issues it. Its operands in shared memory stand behind what other accesses took of that
        since the product before.
        """
        word, value = warp.word, self.value
        group = self.groups.setdefault((warp.block, warp.number // 4), [])
        if warp.product == len(group):
            columns, nbytes = _product_size(word)
            cores = {w.core for w in self.warps if (w.block, w.number // 4) == (warp.block, warp.number // 4)}
            free = max(self.cores[c].pipes.get("hgmma", 0.0) for c in cores)
            if free < now:
                self.accesses = 0.0
            begin = max(now, free)
            end = begin + max(columns * value["hgmma_rate"], nbytes / value["shared_bytes"] + self.accesses)
            self.accesses = 0.0
            for c in cores:
                self.cores[c].pipes["hgmma"] = end
            group.append(end + value["hgmma"])
        if "gsb0" in word.operands:
            warp.chains.append(group[warp.product])
        warp.product += 1

    def _meets(self, warp: _Warp, now: float) -> None:
        """Arrive, wait, or ask for a bulk copy."""
        word = warp.word
        name = warp.role.mbarriers.get(word.address)
        if word.base == "BAR":
            barrier = self._named(warp) if name is None else self._mbarrier(warp, name)
            count = barrier.arrive(warp, now)
            if word.modifiers[0] in ("SYNC", "RED"):
                warp.blocked, warp.phase = barrier, count - 1
                warp.since = max(now, warp.ready)
                barrier.waiting.append(warp)
            self._release(barrier, "barrier", self.value["barrier"])
            return
        if name is None:
            if word.base == "SYNCS" and "EXCH" in word.modifiers:
                return
            raise ReplayError(f"replay: {word.address:04x} {word.text!r} names no mbarrier that was given")
        if not name:
            return
        barrier = self._mbarrier(warp, name)
        if word.base in ("UTMALDG", "UBLKCP"):
            begin = max(now, self.boxes)
            self.boxes = begin + self.value["tma_box"]
            barrier.landed.append((begin + self.value["tma"], warp.role.nbytes[word.address]))
        elif word.base == "ARRIVES":
            barrier.arrive(warp, max(now, warp.copies))
        elif word.opcode.startswith("SYNCS.ARRIVE"):
            barrier.arrive(warp, now)
        elif word.opcode.startswith("SYNCS.PHASECHK"):
            warp.blocked = barrier
            warp.phase = warp.role.first.get(name, 0) + warp.asked[name] * warp.role.step.get(name, 1)
            warp.since = max(now, warp.ready)
            warp.asked[name] += 1
            barrier.waiting.append(warp)
        self._release(barrier, f"mbarrier {name}", self.value["mbarrier"])

    def _mbarrier(self, warp: _Warp, name: str) -> _Named:
        if name not in self.mbarriers:
            raise ReplayError(f"replay: {warp.role.name} meets at {name!r}, of which nothing is told")
        return self._met(warp.block, name, self.mbarriers[name])

    def _met(self, block: int, name: str, mbarrier: Mbarrier) -> _Named:
        """The block's of that name, with what came before the loops."""
        key = (block, name)
        if key not in self.named:
            barrier = self.named[key] = _Named(mbarrier.arrivals, mbarrier.nbytes, mbarrier.ahead)
            before = [(warp, warp.role.before.get(name, 0)) for warp in self.warps if warp.block == block]
            for warp, count in before:
                barrier.arrived[id(warp)] = [0.0] * count
            barrier.landed = [(0.0, mbarrier.nbytes)] * max(count for _, count in before)
        return self.named[key]

    def _named(self, warp: _Warp) -> _Named:
        """The barrier of a BAR: by its number, or where a register holds that, by the team of so many warps in a row."""
        word = warp.word
        operands = [x for x in word.operands if not re.match(r"U?P\w+$", x)]
        count = operands[1] if len(operands) > 1 else None
        if count is not None and not _is_number(count):
            raise ReplayError(
                f"replay: {word.address:04x} {word.text!r} waits for a number of warps that a register holds"
            )
        warps = int(count, 0) // 32 if count else self.block_warps
        team = "" if _is_number(operands[0]) else f" of team {warp.number // warps}"
        name = f"BAR {operands[0]}{team}"
        return self._met(warp.block, name, Mbarrier(warps))

    def _release(self, barrier: _Named, why: str, latency: float) -> None:
        """Wake those whose phase is complete."""
        barrier.complete()
        left = []
        for warp in barrier.waiting:
            if warp.phase < len(barrier.done):
                at = max(warp.ready, barrier.done[warp.phase] + latency)
                warp.span.waited(why, max(0.0, at - warp.since))
                warp.ready, warp.blocked, warp.own = at, None, None
                heapq.heappush(self.heap, (max(at, self.cores[warp.core].free), warp.core))
            else:
                left.append(warp)
        barrier.waiting = left


def _own(warp: _Warp) -> tuple[float, Sequence[tuple[str, float]]]:
    """The time at which the warp's next instruction can issue, and the causes that it waits for, each with the time at which it
    ends, as far as the warp's own earlier instructions tell."""
    at = warp.ready
    step = warp.steps[warp.at]
    if not step.asks:
        return at, ()
    word = step.word
    known = [entry for number in word.waits for entry in warp.boards[number]]
    if word.base == "DEPBAR":
        number, left = _depbar(word)
        times = sorted(warp.boards[number])
        known += times[: max(0, len(times) - left)]
    elif word.opcode.startswith("WARPGROUP.DEPBAR"):
        left = int(word.operands[1], 0)
        known += [(t, "products of the warpgroup") for t in warp.chains[: max(0, len(warp.chains) - left)]]
    if not known:
        return at, ()
    whys: list[tuple[str, float]] = []
    for time, why in sorted(known):
        if time > at:
            at = time
            whys.append((why, time))
    return at, whys


def _steps(trip: Sequence[Word], value: Mapping[str, float]) -> list[_Step]:
    """The trip's words with the figures of a device."""
    found = []
    for word, following in zip(trip, [*trip[1:], *trip[:1]], strict=True):
        pipe, memory, waves = _cost(word)
        jumps = word.base == "BRA" and following.address != word.address + 16
        group = word.base == "DEPBAR" or word.opcode.startswith("WARPGROUP.DEPBAR")
        product = word.base in _WARPGROUP_PRODUCTS
        found.append(
            _Step(
                word=word,
                pipe=pipe,
                interval=value[f"{pipe}_interval"] if pipe else 0.0,
                memory=memory,
                shared=max(waves * 128 / value["shared_bytes"], value["shared_accept"]),
                latency=value[_LATENCIES.get(word.base, "convert")],
                stall=max(word.stall, 1),
                branch=value["branch"] if jumps else 0.0,
                asks=bool(word.waits) or group,
                meets=word.base in _MEETING and word.guard != "!PT",
                kind="product" if product else _KINDS.get(word.base, ""),
            )
        )
    return found


def _cost(word: Word) -> tuple[str, bool, float]:
    """The pipe that it takes, whether it goes to memory, and for how many reads of shared memory of all lanes."""
    base = word.base
    if word.guard in ("!PT", "!UPT"):
        return "", False, 0
    if base in _SHARED or base in _GLOBAL:
        return "", True, _waves(word)
    if base in _WARPGROUP_PRODUCTS:
        return "", False, 0
    if base in _PIPES:
        return ("convert" if "UNPACK_B" in word.modifiers else _PIPES[base]), False, 0
    return ("uniform" if base.startswith("U") else "alu"), False, 0


def _waves(word: Word) -> float:
    """Without bank conflicts, which the CPU machine counts: 128 bytes each."""
    if word.base in ("LDSM", "STSM"):
        return float(word.modifiers[-1]) if word.modifiers[-1].isdigit() else 1
    return max((n for m, n in (("128", 4), ("64", 2)) if m in word.modifiers), default=1)


def _product_size(word: Word) -> tuple[int, int]:
    """Columns of a product of a warpgroup, and bytes of its operands in shared memory: B, and A where no register holds it."""
    shape = next(re.fullmatch(r"64x(\d+)x(\d+)", m) for m in word.modifiers if m.startswith("64x"))
    assert shape is not None
    columns, depth = int(shape[1]), int(shape[2])
    element = 32 // depth  # a step has 32 bytes of each row
    in_registers = re.match(r"U?R\d+", word.operands[1]) is not None
    return columns, (columns + (0 if in_registers else 64)) * depth * element


def tensor_cycles(trip: Sequence[Word], device: Device) -> float:
    """What the products of a trip take of the tensor pipes: of a warpgroup, or of one warp."""
    columns = sum(_product_size(word)[0] for word in trip if word.base in _WARPGROUP_PRODUCTS)
    return columns * device.hgmma_rate.value + sum(word.base == "HMMA" for word in trip) * device.hmma_interval.value


def floating_operations(trip: Sequence[Word]) -> int:
    """Of the products of a warp's trip, or of a warpgroup's, of 16-bit operands: twice rows by columns by depth."""
    groups = [_product_size(word)[0] for word in trip if word.base == "HGMMA"]
    return sum(2 * 64 * 16 * columns for columns in groups) + sum(
        _HMMA[m] for w in trip for m in w.modifiers if m in _HMMA
    )


def _depbar(word: Word) -> tuple[int, int]:
    found = re.search(r"SB(\d), (0x[0-9a-f]+|\d+)", word.text)
    if found is None:
        raise ReplayError(f"replay: {word.text!r} waits for no scoreboard that is known")
    return int(found[1]), int(found[2], 0)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"0x[0-9a-f]+|\d+", text) is not None


def replay(
    roles: Sequence[Role],
    device: Device,
    *,
    blocks: int = 1,
    placement: Placement = "worst",
    mbarriers: Mapping[str, Mbarrier] | None = None,
    skews: Sequence[float] = (0.0,),
) -> Replay:
    """Run the roles of so many blocks on one multiprocessor; on average over the skews, by which each warp begins later than the
    one before: a replay falls into step with itself, and a cycle more or less of one instruction makes it another step."""
    runs = [_Multiprocessor(roles, device, blocks, placement, mbarriers or {}, skew).run() for skew in skews]
    count = len(runs)
    trips = []
    for same in zip(*(run.trips for run in runs), strict=True):
        whys = dict.fromkeys(why for trip in same for why in trip.waits)
        waits = {why: sum(trip.waits.get(why, 0.0) for trip in same) / count for why in whys}
        ordered = dict(sorted(waits.items(), key=lambda item: -item[1]))
        trips.append(Trip(same[0].role, sum(t.cycles for t in same) / count, same[0].instructions, ordered))
    return Replay(tuple(trips), sum(run.issue for run in runs) / count, runs[0].slots)


def latencies(device: Device, cycles: float) -> Device:
    """The device with loads and copies from DRAM that take so long."""
    return device.at(ldg=cycles, ldgsts=cycles)


def placements() -> Iterator[Placement]:
    """From the kindest to the worst."""
    yield from ("spread", "aligned", "worst")
