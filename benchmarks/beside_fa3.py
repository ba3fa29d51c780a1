"""Tiles of prompts in cycles: FlashAttention-3's kernels and extend's in the same replay, a model and no measurement.

    python benchmarks/beside_fa3.py CUBINS SET/extend ...          CUBINS as docs/cycles.md has it made, in one call with the sets
    python benchmarks/beside_fa3.py CUBINS SET/extend ... --boxes  and extend's trips by what a box of a tensor copy takes

A tile is 128 columns by 128 tokens; kernels with other tiles are counted by columns times tokens. All run long enough to fall
into step, their copying warps included; the slowest of their warps counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.strangers import FA3_CAUSAL, FA3_FULL, FA3_PAGED, Structure
from kvgen.compile import compile_many, default_cache
from kvgen.compile.sass import sass
from kvgen.cycles.core import Mbarrier, Role, replay
from kvgen.cycles.device import DEVICES, Device
from kvgen.cycles.flow import Block, blocks
from kvgen.cycles.kernel import SKEWS, Kernel
from kvgen.cycles.roles import Part, told

ARCH: Final = "sm_90a"
TRIPS: Final = 32
TILE: Final = 128 * 128  # columns by tokens
BOXES: Final = (8, 32, 64, 96, 112, 128, 144, 160, 192, 256)


@dataclass(frozen=True)
class Peer:
    """A kernel of FA3: what its source says of its loops, its dims, columns of a block."""

    name: str
    structure: Structure
    dims: int
    columns: int = 128


def _three(cubin: str, tile: int, loop: int) -> Structure:
    """64 dims: three warpgroups of 64 rows that begin in turns, each waiting for copies itself."""
    free = ("K free", "V free")
    consumers = tuple(
        Part(
            name=f"consumer {n}",
            warps=4,
            loop=("HGMMA", loop),
            meets=("K", f"turn {n}", "V", f"turn {(n + 1) % 3}", *free),
            before={"K free": 1, **({"turn 0": 1} if n == 2 else {})},
            first={"K": 1},
        )
        for n in range(3)
    )
    return _with_copies(cubin, tile, consumers, boxes=1, dims=64, turns=3)


def _apart(cubin: str, loop: int) -> Structure:
    """256 dims: two warpgroups that do not wait for each other, tiles of 80 tokens."""
    free = ("K free", "V free")
    names = ("consumer 0", "consumer 1")
    meets = ("K", "V", *free)
    consumers = tuple(
        Part(name, 4, ("HGMMA", loop), meets=meets, before={"K free": 1}, first={"K": 1}) for name in names
    )
    return _with_copies(cubin, 80, consumers, boxes=4, dims=256, turns=0)


def _with_copies(cubin: str, tile: int, consumers: tuple[Part, ...], boxes: int, dims: int, turns: int) -> Structure:
    nbytes = 2 * tile * dims
    producer = Part(
        name="producer",
        warps=1,
        loop=("UTMALDG", 0),
        meets=("K free", "K", *("K",) * boxes, "V free", "V", *("V",) * boxes) * 2,
        nbytes=(nbytes // boxes,) * (4 * boxes),
        without=("LDG.E",),
        tiles=2,
        before={"K": 1},
        first={"K free": 1},
    )
    full, free = Mbarrier(1, nbytes), Mbarrier(4 * len(consumers), ahead=2)
    met = {"K": full, "V": full, "K free": free, "V free": free} | {f"turn {n}": Mbarrier(8) for n in range(turns)}
    return Structure(cubin, (*consumers, producer), tile, 1, met, has_producer=True)


PEERS: Final = (
    Peer("FA3 full", _three("fa3_d64_full", 192, 0), 64, 192),
    Peer("FA3 causal", _three("fa3_d64_causal", 128, 1), 64, 192),
    Peer("FA3 full", FA3_FULL, 128),
    Peer("FA3 causal", FA3_CAUSAL, 128),
    Peer("FA3 paged, tiles that pages do not divide", FA3_PAGED, 128),
    Peer("FA3 full", _apart("fa3_d256_full", 0), 256),
    Peer("FA3 causal", _apart("fa3_d256_causal", 1), 256),
)


def settled(roles: Sequence[Role], mbarriers: dict[str, Mbarrier], device: Device, tiles: dict[str, int]) -> float:
    """Cycles of a tile of the slowest role, which has so many tiles a trip."""
    long = [replace(role, trips=TRIPS) for role in roles]
    run = replay(long, device, mbarriers=mbarriers, skews=SKEWS[::2])
    return max(trip.cycles / tiles.get(trip.role, 1) for trip in run.trips)


def of_peer(peer: Peer, graph: Sequence[Block], device: Device) -> float:
    """Cycles of a peer's tile of 128 x 128."""
    structure = peer.structure
    tiles = {part.name: part.tiles for part in structure.parts}
    cycles = settled(told(graph, structure.parts), dict(structure.mbarriers), device, tiles)
    return cycles * TILE / (peer.columns * structure.tile)


def of_extend(kernel: Kernel, columns: int, tokens: int, device: Device) -> float:
    """Cycles of extend's tile of 128 x 128."""
    roles, mbarriers = kernel.roles
    return settled(roles, dict(mbarriers), device, {}) * TILE / (columns * tokens)


def kernels(selectors: Sequence[str]) -> list[tuple[Kernel, int, int, int]]:
    """The sets' kernels by warpgroups: with columns, tokens and dims."""
    from kvgen.cli.attention_cycles import attends, kernel_of
    from kvgen.cli.project import open_project
    from kvgen.codegen.emit import set_plans

    project, found = open_project(selectors=list(selectors)), []
    for item in project.chosen:
        plans = {
            f"{item.name}/{kernel.name}": kernel
            for op in item.loaded.kernels.ops
            if op.name in item.ops
            for plan in set_plans(item.loaded)[op.name]
            if attends(plan)
            for kernel, archs in plan.files(item.loaded.kernels.arch)
            if ARCH in archs and kernel.division is not None and kernel.division.warpgroups
        }
        jobs = [(unit, ARCH, "cubin") for unit in project.units[item.name] if unit.name in plans]
        texts = {unit.name: unit.text for unit, *_ in jobs}
        for image in compile_many(jobs, cache=default_cache(), origin=project.origin):
            plan = plans[image.unit_name]
            kernel, division = kernel_of(image, plan, texts[image.unit_name]), plan.division
            assert division is not None
            found.append((kernel, division.columns, division.tokens, item.loaded.kernels.kv.head_dim))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cubins", type=Path, help="a folder with NAME.cubin of FA3")
    parser.add_argument("sets", nargs="*", help="SET/extend")
    parser.add_argument("--boxes", action="store_true", help="trips by the cycles of a box")
    given = parser.parse_args(arguments)
    device = DEVICES["H100 SXM"]
    print("| kernel | dims | columns x tokens | cycles of 128 x 128 | products' | TFLOP/s at 1.6 and 1.755 GHz |")
    print("|---|---|---|---|---|---|")
    for peer in PEERS:
        path = given.cubins / f"{peer.structure.cubin}.cubin"
        if not path.is_file():
            print(f"| {peer.name} | {peer.dims} | no {path.name} | | | |")
            continue
        graph = blocks(sass(path.read_bytes(), cache=default_cache(), encodings=True))
        _row(peer.name, peer.dims, peer.columns, peer.structure.tile, of_peer(peer, graph, device))
    ours = kernels(given.sets) if given.sets else []  # no selectors are all sets
    for kernel, columns, tokens, dims in ours:
        _row(kernel.name, dims, columns, tokens, of_extend(kernel, columns, tokens, device))
    if given.boxes and ours:
        print(f"\n| kernel, of 128 x 128 at a box of | {' | '.join(map(str, BOXES))} |\n|---|{'---|' * len(BOXES)}")
        for kernel, columns, tokens, _ in ours:
            trips = [of_extend(kernel, columns, tokens, device.at(tma_box=clk)) for clk in BOXES]
            print(f"| {kernel.name} | {' | '.join(f'{n:.0f}' for n in trips)} |")
    return 0


def _row(name: str, dims: int, columns: int, tokens: int, cycles: float) -> None:
    done = 4 * TILE * dims * DEVICES["H100 SXM"].multiprocessors.value / cycles / 1e3
    rates = " and ".join(f"{done * clock:.0f}" for clock in (1.6, 1.755))
    print(f"| {name} | {dims} | {columns} x {tokens} | {cycles:.0f} | {16 * dims} | {rates} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
