"""One kernel's machine code, examined: its facts, the trip of its main loop, and what its copies have under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from kvgen.architectures import BLOCK_CHARGE, REGISTERS, architecture
from kvgen.cycles.core import Mbarrier, Placement, Replay, Role, floating_operations, replay, tensor_cycles
from kvgen.cycles.device import DEVICES, REFERENCE, Device
from kvgen.cycles.facts import PRODUCTS, Facts, facts_of, work_loop
from kvgen.cycles.flow import Loop, blocks
from kvgen.cycles.roles import even_and_odd_tiles, ping_pong, producer_of, widening
from kvgen.cycles.words import Word

# Whose roles and mbarriers the text does not tell.
_ACROSS_WARPS: Final = ("SYNCS", "UTMALDG", "UBLKCP")
_LANES: Final = 32
# Cycles by which a warp begins later than the one before it, of several replays whose mean counts.
SKEWS: Final = (0, 61, 127, 251, 389, 523)


def blocks_per_multiprocessor(arch: str, registers: int, shared: int, threads: int) -> int:
    """How many blocks a multiprocessor of this architecture holds at once; `shared` in bytes, static and dynamic."""
    warps = -(-threads // 32)
    by_registers = REGISTERS // (-(-registers * 32 // 256) * 256) // 4 * 4 // warps
    by_shared = architecture(arch).shared // (shared + BLOCK_CHARGE)
    return min(by_registers, by_shared, architecture(arch).threads // (32 * warps))


@dataclass(frozen=True)
class Kernel:
    """A listing with encodings, and what else says how its warps lie on a multiprocessor. `shared` is static and dynamic."""

    name: str
    arch: str
    listing: str
    threads: int
    registers: int
    shared: int
    source: str = ""
    log: str = ""
    warpgroups: int = 0  # that run one loop; 0: all warps are alike
    prompts: bool = (
        False  # whether blocks have columns of many rows: products are the limit, and warpgroups share all tiles
    )
    widens: bool = False  # whether other warps widen rows for the warpgroups

    @cached_property
    def blocks(self) -> int:
        """Blocks of a multiprocessor."""
        return blocks_per_multiprocessor(self.arch, self.registers, self.shared, self.threads)

    @cached_property
    def warps(self) -> int:
        """Warps of a block."""
        return -(-self.threads // 32)

    @cached_property
    def loop(self) -> Loop | None:
        """The loop that does its work."""
        return work_loop(blocks(self.listing))

    @cached_property
    def facts(self) -> Facts:
        """Facts of the machine code, whatever a GPU's figures are."""
        return facts_of(self.listing, self.source, self.log)

    @cached_property
    def roles(self) -> tuple[tuple[Role, ...], Mapping[str, Mbarrier]]:
        """Its main loop as its warps run it, and the mbarriers at which they meet; none where it has no loop with products, nor
        an innermost one with loads, or one whose roles nobody told."""
        if self.loop is None:
            return (), {}
        if self.widens:
            return widening(blocks(self.listing))
        bases = {x.base for x in self.loop.text}
        if not bases & {*PRODUCTS, "LDG"} or (self.loop.holds_loops and not bases & set(PRODUCTS)):
            return (), {}
        if self.warpgroups == 2:
            if self.prompts:
                return ping_pong(self.loop.usual, producer_of(blocks(self.listing), self.source))
            return even_and_odd_tiles(self.loop.usual)
        if any(x.base in _ACROSS_WARPS for x in self.loop.text):
            return (), {}
        return (Role("all", self.loop.usual, self.warps),), {}

    @cached_property
    def trip(self) -> tuple[Word, ...]:
        """The words of a trip, which all roles have in common; none where there is no role."""
        roles, _ = self.roles
        return roles[0].trip if roles else ()

    def replay(self, device: Device, placement: Placement = "worst") -> Replay | None:
        """A trip of the main loop with all blocks that a multiprocessor holds; None without roles."""
        roles, mbarriers = self.roles
        if not roles:
            return None
        run = replay(roles, device, blocks=max(1, self.blocks), placement=placement, mbarriers=mbarriers, skews=SKEWS)
        # A producer that is the limit is what the others wait for.
        return replace(run, trips=tuple(trip for trip in run.trips if trip.role != "producer"))

    def product_cycles(self, device: Device) -> float:
        """Cycles of a multiprocessor's tensor pipes for the products of its trips, if nothing else took any."""
        roles, _ = self.roles
        return sum(tensor_cycles(role.trip, device) * role.warps / 4 for role in roles) * max(1, self.blocks)

    @cached_property
    def floating_operations(self) -> float:
        """Operations in the products of a multiprocessor's trips."""
        roles, _ = self.roles
        teams = 4 if self.warpgroups else 1  # warps that share a product
        return sum(floating_operations(role.trip) * role.warps / teams for role in roles) * max(1, self.blocks)

    @cached_property
    def in_flight(self) -> int:
        """The fewest bytes that a multiprocessor's copies are asked for and not waited for, over the points of a trip."""
        return least_in_flight(self.trip) * self.warps * self.blocks


def reference(arch: str) -> Device | None:
    """The device whose table counts an architecture's trips in resources.json; None where there is no table."""
    name = REFERENCE.get(arch)
    return DEVICES[name] if name else None


def least_in_flight(trip: Sequence[Word]) -> int:
    """Copies of one warp that it asked for and whose group it has not waited for, at the trip's poorest point."""
    groups: deque[int] = deque()
    waiting, least = 0, 0
    for _ in range(64):  # more trips than any ring has stages
        least = 1 << 62
        for word in trip:
            if word.base == "LDGSTS":
                waiting += _copied(word)
            elif word.base == "LDGDEPBAR":
                groups.append(waiting)
                waiting = 0
            elif word.base == "DEPBAR":
                left = int(word.operands[1], 0)
                while len(groups) > left:
                    groups.popleft()
            least = min(least, waiting + sum(groups))
    return least


def _copied(word: Word) -> int:
    if word.base != "LDGSTS" or word.guard == "!PT":
        return 0
    return _LANES * next((n for m, n in (("128", 16), ("64", 8)) if m in word.modifiers), 4)
