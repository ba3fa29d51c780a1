"""Other people's attention kernels through kvgen/cycles, beside what was measured of them: docs/cycles.md, "Strangers".

    python benchmarks/strangers.py CUBINS           the table; CUBINS holds the files that docs/cycles.md says how to make
    python benchmarks/strangers.py CUBINS --waits   and what a trip of each role waits for
    python benchmarks/strangers.py FILE.cubin       a kernel's innermost loops and the words that meet, to tell of another one

No parameter is anybody's: the device tables are as they were committed before. What a row adds is what its kernel's source and
its benchmark say: who meets whom at which mbarrier, the tile, the chunks that its scheduler makes, the shape that was timed.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from kvgen.compile import default_cache
from kvgen.compile.sass import sass
from kvgen.cycles.core import Mbarrier, Placement, Replay, ReplayError, Role, replay, tensor_cycles
from kvgen.cycles.device import DEVICES, Device
from kvgen.cycles.facts import COPIES, PRODUCTS, dependent_loads
from kvgen.cycles.flow import Block, blocks, loops
from kvgen.cycles.kernel import SKEWS
from kvgen.cycles.launch import BlockTrip, Work, launch
from kvgen.cycles.roles import Part, ends, meeting, told

SMS: Final = 132
SHOWN: Final = (*PRODUCTS, *COPIES, "LDG", "MUFU")
TENSOR_BOUND: Final = 0.5  # of the time that tensor cores are busy: above it the clock is theirs
Unit = Literal["TFLOP/s", "GB/s", "us"]
_SCALE: Final[Mapping[Unit, float]] = {"TFLOP/s": 1e6, "GB/s": 1e3, "us": 1.0}  # of what is done in a microsecond


@dataclass(frozen=True)
class Structure:
    """A kernel's main loops, as its source has them. `tile`: tokens of one; `done`: tiles of a chunk that the code outside the
    loop does; `rare`: instructions of one trip in so many."""

    cubin: str
    parts: tuple[Part, ...]
    tile: int
    done: int = 0
    mbarriers: Mapping[str, Mbarrier] = field(default_factory=dict)
    rare: tuple[str, int] | None = None
    has_producer: bool = False  # other warps copy than compute


@dataclass(frozen=True)
class Row:
    """A published figure, and the launch that it is of. `chunks`: tokens of each chunk, by slot for a block; `nbytes`: from DRAM,
    of a tile; `blocks` a multiprocessor holds at once. `done`: floating-point operations or bytes by the benchmark's own count.
    """

    name: str
    structure: Structure
    device: str
    published: float
    unit: Unit
    source: str
    chunks: tuple[tuple[int, ...], ...]
    nbytes: float
    done: float = 0
    blocks: int = 1
    pieces: int = 1
    nodes: int = 1
    clock: float | None = None  # GHz, where the benchmark locked it
    at_least: bool = False  # the figure is a bound

    def value(self, microseconds: float) -> float:
        """The time in the figure's unit."""
        return microseconds if self.unit == "us" else self.done / microseconds / _SCALE[self.unit]


def flashmla_chunks(requests: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """The SM parts of FlashMLA's get_mla_metadata_kernel: requests in blocks of 64 tokens, five more for each beginning."""
    overhead = 5
    payload = -(-sum(n + overhead for n in requests) // parts) + overhead
    made: list[tuple[int, ...]] = []
    request, block = 0, 0
    for _ in range(parts):
        left, own = payload, []
        while request < len(requests):
            rest = requests[request] - block
            if left >= rest + overhead:
                own.append(rest)
                left -= rest + overhead
                request, block = request + 1, 0
            else:
                if left > overhead:
                    own.append(left - overhead)
                    block += left - overhead
                break
        made.append(tuple(64 * n for n in own))
    return tuple(made)


def as_they_come(chunks: Sequence[int], slots: int) -> tuple[tuple[int, ...], ...]:
    """Each chunk to the slot that is free first: a persistent kernel with a counter."""
    free = [(0, slot) for slot in range(slots)]
    made: list[list[int]] = [[] for _ in range(slots)]
    for tokens in chunks:
        busy, slot = heapq.heappop(free)
        made[slot].append(tokens)
        heapq.heappush(free, (busy + tokens, slot))
    return tuple(map(tuple, made))


def _kv(block: int, *tiles: int) -> tuple[str, ...]:
    return tuple(f"K{block}.{n}" for n in tiles)


def _asked(block: int, *tiles: int) -> tuple[str, ...]:
    return tuple(name for name in _kv(block, *tiles) for _ in ("says what comes", "asks"))


# FlashMLA, dense: two warpgroups, a block of 64 tokens each; nine boxes of 64 dims a block, with an mbarrier each.
FLASHMLA_DENSE: Final = Structure(
    cubin="flashmla_dense_bf16",
    parts=(
        Part(
            name="warpgroup 0",
            warps=4,
            loop=("HGMMA.64x64", 1),
            meets=(*_kv(0, 0, 1, 2, 3), *_asked(0, 0, 1, 2, 3), *_kv(1, 0, 1, 2, 3), *_asked(0, 4, 5, 6, 7, 8)),
            nbytes=(8192,) * 8,
            leads=True,
            tiles=2,
            before=dict.fromkeys(_kv(0, *range(9)), 1),
            first=dict.fromkeys(_kv(0, *range(9)), 1),
        ),
        Part(
            name="warpgroup 1",
            warps=4,
            loop=("HGMMA.64x64", 0),
            meets=(*_kv(1, 4, 5, 6, 7, 8), *_kv(0, 4, 5, 6, 7, 8), *_asked(1, 4, 5, 6, 7, 8, 0, 1, 2, 3)),
            nbytes=(8192,) * 10,
            leads=True,
            tiles=2,
            before=dict.fromkeys(_kv(1, *range(9)), 1),
            first=dict.fromkeys(_kv(1, *range(9)), 1),
        ),
    ),
    tile=64,
    done=2,
    mbarriers=dict.fromkeys((*_kv(0, *range(9)), *_kv(1, *range(9))), Mbarrier(1, 8192)),
)

# FlashMLA, sparse: one warpgroup weighs and adds the left half of V, one the right, one widens 32 of the 64 rows and the other
# block of the cluster the other 32. That block is taken to keep pace: its rows come when one's own do, its warps are done when
# one's own are.
FLASHMLA_SPARSE: Final = Structure(
    cubin="flashmla_sparse_fp8_h128",
    parts=(
        Part("warpgroup 0", 4, ("HGMMA", 1), meets=("rows", "", "free", "")),
        Part("warpgroup 1", 4, ("HGMMA", 0), meets=("free", ""), before={"BAR 0x9": 1}),
        Part("producer", 4, ("LDG.E.EL", 0), meets=("free", "", "rows")),
    ),
    tile=64,
    mbarriers={"rows": Mbarrier(4), "free": Mbarrier(8, ahead=2)},
    has_producer=True,
)


def _fa3(cubin: str, tile: int, loop: int, producer: Part, full: Mbarrier) -> Structure:
    """FA3: two warpgroups of 64 rows that take turns at the tensor cores, of which the first waits for copies; rings of two."""
    ends = ("K free", "V free")
    return Structure(
        cubin=cubin,
        parts=(
            Part(
                name="consumer 0",
                warps=4,
                loop=("HGMMA", loop),
                meets=("K", "turn 0", "V", "turn 1", *ends),
                before={"K free": 1},
                first={"K": 1},
            ),
            Part(
                name="consumer 1",
                warps=4,
                loop=("HGMMA", loop),
                meets=("turn 1", "turn 0", *ends),
                without=("SYNCS.PHASECHK",),
                before={"K free": 1, "turn 0": 1},
            ),
            producer,
        ),
        tile=tile,
        done=1,
        has_producer=True,
        mbarriers={
            "K": full,
            "V": full,
            **dict.fromkeys(ends, Mbarrier(8, ahead=2)),
            **dict.fromkeys(("turn 0", "turn 1"), Mbarrier(8)),
        },
    )


def _bulk(tile: int) -> tuple[Part, Mbarrier]:
    """One warp that copies K and V by TMA, a trip of its loop two tiles each, in two boxes of 64 dims."""
    nbytes = tile * 128 * 2
    producer = Part(
        name="producer",
        warps=1,
        loop=("UTMALDG", 0),
        meets=("K free", "K", "K", "K", "V free", "V", "V", "V") * 2,
        nbytes=(nbytes // 2,) * 8,
        without=("LDG.E",),  # of page tables, of which there are none
        tiles=2,
        before={"K": 1},
        first={"K free": 1},
    )
    return producer, Mbarrier(1, nbytes)


_COPIES: Final = Part(
    name="producer",
    warps=4,
    loop=("LDGSTS", 0),
    meets=("K free", "", "K", "", "V free", "", "V", ""),
    before={"K": 1},
    first={"K free": 1},
)
FA3_FULL: Final = _fa3("fa3_full", 176, 0, *_bulk(176))
FA3_CAUSAL: Final = _fa3("fa3_causal", 128, 1, *_bulk(128))  # the second loop, without masks
FA3_PAGED: Final = _fa3("fa3_paged", 128, 0, _COPIES, Mbarrier(4))
FA3_PAGED_SPLIT: Final = _fa3("fa3_paged_split", 128, 0, _COPIES, Mbarrier(4))

# FlashInfer: all warps alike, 8 tokens a step, two steps a trip; offsets of the next 128 tokens are looked up every 16 steps.
FLASHINFER: Final = Structure(
    cubin="flashinfer_batch_decode",
    parts=(Part("all", 4, ("LDGSTS", 0), without=("LDG.E",), tiles=2),),
    tile=8,
    rare=("LDG.E", 8),
)

_FLASHMLA: Final = "FlashMLA README"
_FA3_PAPER: Final = "arXiv 2407.08608, fig. 5: 16,384 tokens in all, 16 heads, f16"
_FA3_PAGED: Final = "Dao-AILab/flash-attention#1572: batch 16, 32 heads, page 8, in a CUDA graph"


def _mla(heads: int, queries: int, tokens: int, batch: int = 128) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Chunks of a dense MLA decode, and the tiles of 64 rows that read the same tokens."""
    rows = -(-heads * queries // 64)
    return flashmla_chunks([tokens // 64] * batch, SMS // rows), rows


def _prefill(causal: bool) -> tuple[tuple[int, ...], ...]:
    """Two requests of 8192, 16 heads, 128 rows a block: the longest first where lengths differ."""
    return as_they_come([128 * (n if causal else 64) for n in range(64, 0, -1) for _ in range(32)], SMS)


def _paged(tokens: int, published: float) -> Row:
    split = (
        tokens > 4 * 128
    )  # as its heuristic has it; the splits are then counted on the device, which makes one of each request
    return Row(
        name=f"FA3 paged, {tokens} tokens",
        structure=FA3_PAGED_SPLIT if split else FA3_PAGED,
        device="H100 SXM",
        published=published,
        unit="GB/s",
        source=_FA3_PAGED,
        chunks=as_they_come([tokens] * 512, SMS),
        nbytes=128 * 512,
        done=16 * 32 * (tokens * 512 + 2 * 256),
        nodes=3 if split else 2,  # of the schedule, the kernel, the merge
    )


def rows() -> tuple[Row, ...]:
    """All of them, in the order of docs/cycles.md."""
    many, shared = _mla(128, 2, 32768)
    few, alone = _mla(16, 1, 32768)
    sparse = flashmla_chunks([2048 // 64] * 128, SMS // 4)
    macs = 64 * (576 + 512)  # of 64 rows and a token
    tokens = 128 * 32768
    return (
        Row(
            name="FlashMLA dense, 128 heads",
            structure=FLASHMLA_DENSE,
            device="H800",
            published=660,
            unit="TFLOP/s",
            source=f"{_FLASHMLA}; shape of its tests: batch 128, 2 queries, 32,768 tokens",
            chunks=tuple(x for x in many for _ in range(shared)),
            nbytes=64 * 1152 / shared,
            done=2 * macs * shared * tokens,
        ),
        Row(
            name="FlashMLA dense, 16 heads",
            structure=FLASHMLA_DENSE,
            device="H800",
            published=3000,
            unit="GB/s",
            source=f"{_FLASHMLA}; batch 128, 1 query, 32,768 tokens",
            chunks=few,
            nbytes=64 * 1152 / alone,
            done=1152 * tokens,
        ),
        Row(
            name="FlashMLA sparse fp8, 128 heads",
            structure=FLASHMLA_SPARSE,
            device="H800",
            published=410,
            unit="TFLOP/s",
            source="FlashMLA docs/20250929: batch 128, 2 queries, 2048 of the tokens",
            chunks=tuple(x for x in sparse for _ in range(4)),
            nbytes=32 * 656,
            done=2 * macs * 4 * 128 * 2048,
        ),
        Row(
            name="FA3, 8K",
            structure=FA3_FULL,
            device="H100 SXM",
            published=646,
            unit="TFLOP/s",
            source=_FA3_PAPER,
            chunks=_prefill(causal=False),
            nbytes=176 * 512 / 64,
            done=4 * 8192 * 8192 * 128 * 32,
        ),
        Row(
            name="FA3, 8K, causal",
            structure=FA3_CAUSAL,
            device="H100 SXM",
            published=602,
            unit="TFLOP/s",
            source=_FA3_PAPER,
            chunks=_prefill(causal=True),
            nbytes=128 * 512 / 64,
            done=2 * 8192 * 8192 * 128 * 32,
        ),
        _paged(128, 1226),
        _paged(2000, 1796),
        _paged(4000, 1849),
        Row(
            name="FlashInfer, 32 x 4K",
            structure=FLASHINFER,
            device="H200",
            published=139,
            unit="us",
            source="tile-ai/TileOPs#2136: 32 heads, 8 kv heads, pages of 256, device time",
            chunks=((1024,),) * 1024,  # the least whole pages of which its occupancy holds all chunks at once
            nbytes=8 * 512,
            blocks=8,
            pieces=4,
            nodes=0,
            clock=1.5,
            at_least=True,
        ),
        Row(
            name="FlashInfer, 1 x 4K",
            structure=FLASHINFER,
            device="H200",
            published=26.4,
            unit="us",
            source="tile-ai/TileOPs#1783: paged; heads and pages taken as above",
            chunks=((256,),) * 128,
            nbytes=8 * 512,
            pieces=16,
            nodes=0,
            clock=1.5,
        ),
    )


@dataclass(frozen=True)
class Predicted:
    """A row's figure with the table's values, and from the worst to the best that its ranges allow; or why there is none."""

    row: Row
    values: tuple[float, float, float] = (0.0, 0.0, 0.0)
    runs: tuple[Replay, ...] = ()
    tile: float = 0.0
    tensor: float = 0.0
    ends: float = 0.0
    why_not: str = ""

    @property
    def error(self) -> float:
        """Signed, of the published figure."""
        return self.values[1] / self.row.published - 1

    @property
    def keeps_bound(self) -> bool:
        """True: the figure is a bound, and tells no more than that."""
        return self.row.at_least and self.error >= 0


@dataclass(frozen=True)
class Code:
    """A kernel's machine code as its blocks on a multiprocessor run it: a tile, and the ends of a chunk, in cycles."""

    runs: tuple[Replay, ...]
    tile: float
    ends: float
    tensor: float


Known = dict[tuple[str, Device, Placement, int], Code]


def predict(row: Row, graph: Sequence[Block], known: Known | None = None) -> Predicted:
    """The launch, by its machine code; `known` keeps what other rows of the same kernel need again."""
    known = {} if known is None else known
    device = DEVICES[row.device]
    sides: tuple[tuple[Device, Placement], ...] = (
        (device.fast(), "spread"),
        (device, "worst"),
        (device.slow(), "worst"),
    )
    try:
        found = []
        for at, placement in sides:
            key = row.structure.cubin, at, placement, row.blocks
            if key not in known:
                known[key] = _code(row, graph, at, placement)
            found.append((at, known[key]))
    except ReplayError as error:
        return Predicted(row, why_not=str(error))
    fast, value, slow = (row.value(_microseconds(row, graph, at, code)) for at, code in found)
    code = found[1][1]
    return Predicted(row, (min(fast, slow), value, max(fast, slow)), code.runs, code.tile, code.tensor, code.ends)


def _code(row: Row, graph: Sequence[Block], device: Device, placement: Placement) -> Code:
    structure = row.structure
    usual = _replayed(structure, structure.parts, graph, row.blocks, device, placement)
    runs, tile = [usual], _tile(usual, structure)
    if structure.rare is not None:
        _, every = structure.rare
        parts = [replace(part, without=()) for part in structure.parts]
        runs.append(_replayed(structure, parts, graph, row.blocks, device, placement))
        tile += (_tile(runs[1], structure) - tile) / every
    # Loads outside of loops are counted one by one, as dependent ones.
    alone = device.at(ldg=0, ldgsts=0)
    once = replay(ends(graph, structure.parts), alone, blocks=row.blocks, placement=placement).trip().cycles
    tensor = sum(tensor_cycles(role.trip, device) * role.warps / 4 / tiles for role, tiles in _roles(structure, graph))
    return Code(tuple(runs), tile, once, tensor * row.blocks / tile)


def _microseconds(row: Row, graph: Sequence[Block], device: Device, code: Code) -> float:
    structure = row.structure
    clock = row.clock or (device.clock_tensor if code.tensor > TENSOR_BOUND else device.clock_memory).value
    trip = BlockTrip(
        cycles=code.tile,
        tokens=structure.tile,
        nbytes=row.nbytes,
        dependent_loads=dependent_loads([word for block in graph for word in block.code]),
        ends=code.ends,
        done=structure.done,
        has_producer=structure.has_producer,
    )
    whole = launch(trip, Work(row.chunks, 1, row.pieces), device.at(clock_memory=clock))
    return whole.total + (row.nodes - 1) * whole.node


def _roles(structure: Structure, graph: Sequence[Block]) -> list[tuple[Role, int]]:
    return [(role, part.tiles) for part in structure.parts for role in told(graph, (part,))]


def _replayed(
    structure: Structure,
    parts: Sequence[Part],
    graph: Sequence[Block],
    count: int,
    device: Device,
    placement: Placement,
) -> Replay:
    roles = told(graph, parts)
    return replay(roles, device, blocks=count, placement=placement, mbarriers=structure.mbarriers, skews=SKEWS)


def _tile(run: Replay, structure: Structure) -> float:
    """Cycles of a tile: of the role that is slowest."""
    tiles = {part.name: part.tiles for part in structure.parts}
    return max(trip.cycles / tiles[trip.role] for trip in run.trips if trip.role in tiles)


def _graph(path: Path) -> tuple[Block, ...]:
    return blocks(sass(path.read_bytes(), cache=default_cache(), encodings=True))


def table(found: Sequence[Predicted]) -> str:
    """As docs/cycles.md has it."""
    lines = [
        "| kernel | GPU | published | predicted | from | to | error | tile, clk | ends, clk | tensor cores |",
        "|---|" + "---|" * 9,
    ]
    for p in found:
        published = f"{'>= ' if p.row.at_least else ''}{p.row.published:g} {p.row.unit}"
        if p.why_not:
            lines.append(f"| {p.row.name} | {p.row.device} | {published} | no prediction: {p.why_not} | | | | | | |")
            continue
        low, value, high = (f"{x:.4g}" for x in p.values)
        error = f"{100 * p.error:+.0f} %" + ", bound kept" * p.keeps_bound
        lines.append(
            f"| {p.row.name} | {p.row.device} | {published} | {value} | {low} | {high} | {error} | {p.tile:.0f} | "
            f"{p.ends:.0f} | {100 * p.tensor:.0f} % |"
        )
    for unit, names in (("throughput", ("TFLOP/s", "GB/s")), ("latency", ("us",))):
        rows = [p for p in found if not p.why_not and p.row.unit in names]
        exact = [p for p in rows if not p.keeps_bound]
        if not rows:
            continue
        line = f"\nmedian error of {unit}: {_median_error(rows):.0f} % of {len(rows)} rows"
        if exact and len(exact) < len(rows):
            line += f"; {_median_error(exact):.0f} % without bounds that are kept"
        lines.append(line)
    return "\n".join(lines)


def _median_error(rows: Sequence[Predicted]) -> float:
    """In percent."""
    return 100 * statistics.median(abs(p.error) for p in rows)


def loops_of(graph: Sequence[Block]) -> str:
    """Each innermost loop that computes, copies or loads: how long its usual trip is, its kinds of words, and the words at which
    it meets others."""
    lines = []
    found = loops(graph)
    for loop in found:
        counts = Counter(word.base for word in loop.usual if word.base in SHOWN)
        if not counts or any(x.members < loop.members and any(w.base in SHOWN for w in x.text) for x in found):
            continue
        which = ", ".join(f"{n} {base}" for base, n in counts.most_common())
        lines.append(f"loop at {graph[loop.head].code[0].address:#06x}: {len(loop.usual)} instructions, {which}")
        lines += [f"    {word.address:#06x} {word.text}" for word in meeting(loop.usual)]
    return "\n".join(lines) or "no loop that computes, copies or loads"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cubins", type=Path, help="a folder with NAME.cubin for each kernel; or one cubin")
    parser.add_argument("--waits", action="store_true", help="what a trip of each role waits for")
    given = parser.parse_args(arguments)
    if given.cubins.is_file():
        print(loops_of(_graph(given.cubins)))
        return 0
    graphs: dict[str, tuple[Block, ...]] = {}
    known: Known = {}
    found = []
    for row in rows():
        path = given.cubins / f"{row.structure.cubin}.cubin"
        if not path.is_file():
            found.append(Predicted(row, why_not=f"no {path.name}"))
            continue
        if row.structure.cubin not in graphs:
            graphs[row.structure.cubin] = _graph(path)
        found.append(predict(row, graphs[row.structure.cubin], known))
    print(table(found))
    if given.waits:
        for p in found:
            for run in p.runs:
                for trip in run.trips:
                    waits = ", ".join(f"{why} {n:.0f}" for why, n in list(trip.waits.items())[:5])
                    print(
                        f"{p.row.name}: {trip.role}: {trip.cycles:.0f} clk, {trip.instructions} instructions; {waits}"
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
