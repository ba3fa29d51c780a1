"""What the kernels of calibrate.cu measure: how each is launched, what it must leave, and the figures that its records give.

Names are those of the parameters of kvgen.cycles.device where it has them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.architectures import architecture
from kvgen.runtime.cuda import Launch
from kvgen.tensor_map import TensorMapPlan
from kvgen.verify.pipes import PIPES, UNROLL, affine, circle
from kvgen.verify.probe import RECORD, Held, Machine, Measured, Records, Sizes, Value, Wrong

_WORD: Final = 0x9E3779B1
_SEED: Final = 7
_FACTOR: Final = 0x9E3779B1 & ~3 | 1  # 4 k + 1
_ONE: Final = 0x3F800000
_WARPS: Final = 16  # that share a multiprocessor where rates are measured
_RING: Final = 1 << 16  # bytes of boxes in flight
_STREAM: Final = 1 << 32  # bytes of the stream at most
_NEAR: Final = 1 << 13  # lines (1 MB) that L2 holds once they have been read
_HOT: Final = 1 << 8  # lines that all multiprocessors read so often that streams do not drive them out of L2
_NEAR_RUN: Final = 1 << 12  # bytes of a run from L2
_QUEUED: Final = 24  # loads that one warp issues at most
_SLOWER: Final = 1.3  # what a warp takes beside another of its sub-core, at least


@dataclass
class Bench:
    """The machine with the memory of one calibration. `found` has the figures that later ones need."""

    machine: Machine
    sizes: Sizes
    found: dict[str, Measured] = field(default_factory=dict)
    _kept: dict[str, Held] = field(default_factory=dict)

    @property
    def hopper(self) -> bool:
        return architecture(self.machine.arch).tma

    def figure(self, name: str, values: Sequence[float], unit: str, what: str) -> Measured:
        """The median and the ends of what was measured."""
        found = [float(v) for v in values]
        self.found[name] = Measured(name, statistics.median(found), min(found), max(found), unit, what)
        return self.found[name]

    def records(
        self, entry: str, grid: int, block: int, count: int, *values: Value, shared: int = 0, warm: bool = True
    ) -> Records:
        """What a kernel leaves in its first argument; of a second launch, for the first one fetches the code."""
        out = self.machine.memory(count * RECORD.itemsize)
        launch = self.machine.bind(f"calibrate_{entry}", grid, block, out, *values, shared=shared)
        for _ in range(2 if warm else 1):
            out.write(bytes(out.nbytes))
            self.machine.run(launch)
        return out.read().view(RECORD)

    def stream(self) -> Held:
        """What streams and runs read: words with a closed sum."""
        if "stream" not in self._kept:
            size = self.sizes.stream_bytes
            if not size:
                most = min(32 * self.machine.l2_bytes, self.machine.free_bytes() // 4, _STREAM)
                size = 1 << max(most, 1 << 20).bit_length() - 1
            self._kept["stream"] = held = self.machine.memory(size)
            self.machine.run(
                self.machine.bind("calibrate_fill", self.machine.multiprocessors * 8, 512, held, size // 4, _SEED)
            )
        return self._kept["stream"]

    def lines(self, count: int) -> Held:
        """One circle through so many lines."""
        name = f"{count} lines"
        if name not in self._kept:
            held = self._kept[name] = self.machine.memory(count * 128)
            grid = self.machine.multiprocessors * 8
            self.machine.run(self.machine.bind("calibrate_link", grid, 512, held, count, _FACTOR))
        return self._kept[name]

    def runs(self, nbytes: int, within: int = 0, rounds: int = 1) -> tuple[Launch, Held]:
        """A launch that reads the stream, or its first `within` bytes, `rounds` times in runs of so many bytes; its records."""
        stream = self.stream()
        shift, runs = (nbytes // 16).bit_length() - 1, (within or stream.nbytes) // nbytes
        grid = self.machine.multiprocessors * 4
        out = self.machine.memory(grid * 16 * RECORD.itemsize)
        out.write(bytes(out.nbytes))
        odd = int(runs * 0.618) | 1
        vectors = rounds * (within or stream.nbytes) // 16
        return self.machine.bind("calibrate_runs", grid, 512, out, stream, vectors, shift, runs, odd), out

    def flush(self) -> None:
        """Let L2 hold the stream's last bytes only."""
        self.machine.run(self.runs(4096)[0])


def expect(what: str, found: Any, wanted: Any) -> None:
    """Raise Wrong unless all numbers are the same."""
    found, wanted = np.broadcast_arrays(np.asarray(found, np.uint64), np.asarray(wanted, np.uint64))
    bad = np.flatnonzero(found != wanted)
    if len(bad):
        at = bad[0]
        raise Wrong(f"{what}: got {found.flat[at]} ({len(bad)} of {found.size} wrong); it must be {wanted.flat[at]}")


def _sum_of_words(begin: NDArray[np.int64], words: int) -> NDArray[np.uint64]:
    """The sums of `words` words of the stream from each of `begin` on, modulo 2^32."""
    numbers = np.uint64(words) * begin.astype(np.uint64) + np.uint64(
        words * (words - 1) // 2
    )  # 2^64 is a multiple of 2^32
    found: NDArray[np.uint64] = (np.uint64(_WORD) * numbers + np.uint64(_SEED * words)) & np.uint64(0xFFFFFFFF)
    return found


def _line_after(first: NDArray[np.int64], steps: NDArray[Any], lines: int) -> NDArray[np.uint64]:
    """The lines where chains end."""
    pairs = [affine(int(n), _FACTOR, 1) for n in steps]
    return np.array(
        [(int(f) * factor + more) % lines for f, (factor, more) in zip(first, pairs, strict=True)], np.uint64
    )


def _cycles(records: Records) -> NDArray[np.float64]:
    found: NDArray[np.float64] = (records["end"] - records["begin"]).astype(np.float64)
    return found


# Instructions ---------------------------------------------------------------------------------------------------------


def _pipe(bench: Bench, name: str, warps: int, mask: int = 0xFFFF) -> tuple[Records, Records]:
    """The records of the dependent chains and of those side by side, of the warps in `mask`."""
    pipe, trips = PIPES[name], bench.sizes.trips
    records = bench.records(pipe.entry, 1, 32 * warps, 2 * warps, trips, mask, pipe.a, pipe.b).reshape(warps, 2)
    records = records[[w for w in range(warps) if mask >> w & 1]]
    lane, steps = np.arange(32)[:, None], trips * UNROLL
    for phase, chains in ((0, 1), (1, pipe.chains)):
        chain = np.arange(chains)[None]
        expect(f"calibrate_{name}: steps", records["steps"][:, phase], steps * chains)
        expect(
            f"calibrate_{name}: sum", records["sum"][:, phase], int(pipe.value(lane, chain, steps).sum()) & 0xFFFFFFFF
        )
    return records[:, 0], records[:, 1]


def _together(records: Records) -> float:
    """Cycles from the first begin to the last end."""
    return float(records["end"].max() - records["begin"].min())


def _latency(bench: Bench, name: str, warps: int = 1) -> list[float]:
    alone, _ = _pipe(bench, name, warps)
    return list(_cycles(alone) / (bench.sizes.trips * UNROLL * PIPES[name].each))


def _interval(bench: Bench, name: str, mask: int = 0xFFFF) -> float:
    """Cycles between two instructions of a multiprocessor, all warps of `mask` issuing them."""
    _, many = _pipe(bench, name, _WARPS, mask)
    return _together(many) / float(many["steps"].sum() * PIPES[name].each)


def instructions(bench: Bench) -> Iterator[Measured]:
    """Latency and interval of arithmetic, conversions and products; intervals are a sub-core's."""
    table = [
        ("fma", "fma_interval", "fma", "an f32 product and sum"),
        ("half", "half_interval", "half", "two f16 products and sums"),
        ("alu", "alu_interval", "permute", "a permutation of bytes"),
        ("imad", "imad_interval", "imad", "an integer product and sum"),
        ("mufu", "mufu_interval", "exp2", "a special function"),
        ("convert", "floor_interval", "floor", "a conversion that comes by scoreboard"),
        ("pack_f16", "pack_f16_interval", "to_half", "a conversion of two f32 to an f16 pair"),
        ("pack_fp8", "pack_fp8_interval", "fp8", "a conversion between e4m3 and f16 pairs"),
        ("hmma", "hmma_interval", "hmma", "a product of m16n8k16"),
    ]
    for latency_name, interval_name, kernel, what in table:
        if kernel == "fp8" and not architecture(bench.machine.arch).fp8_conversion:
            continue
        yield bench.figure(latency_name, _latency(bench, kernel), "clk", f"{what}: until its result can be used")
        each = 4 * _interval(bench, kernel)
        yield bench.figure(interval_name, [each], "clk", f"{what}: between two of a sub-core")
    # Those that widen and narrow caches; `convert` is of the others.
    pairs = "pack_fp8_interval" if "pack_fp8_interval" in bench.found else "pack_f16_interval"
    yield bench.figure("convert_interval", [bench.found[pairs].value], "clk", f"a conversion: {pairs}")
    yield bench.figure("constant", _latency(bench, "ldc"), "clk", "a load of a constant")
    yield bench.figure("barrier", _latency(bench, "barrier", 4), "clk", "a barrier of four warps")


def queue(bench: Bench) -> Iterator[Measured]:
    """How many loads wait in front of shared memory: where the time to issue them bends, less what leaves meanwhile. None where
    it does not bend."""
    trips, loads = bench.sizes.trips, np.arange(1, _QUEUED + 1)
    records = bench.records("queue", 1, 32, _QUEUED, trips)
    words = loads * 32
    expect("calibrate_queue: steps", records["steps"], trips)
    expect("calibrate_queue: sum", records["sum"], trips * words * (words - 1) // 2)
    took = _cycles(records) / trips
    issue, memory = float(took[2] - took[0]) / 2, float(took[-1] - took[-9]) / 8
    if memory <= max(_SLOWER * issue, 0.0):
        return
    bend = (float(took[0]) - issue - float(took[-1]) + _QUEUED * memory) / (memory - issue)
    yield bench.figure("mio_queue", [bend * (1 - issue / memory)], "instructions", "loads that wait before issue waits")


def shared_memory(bench: Bench) -> Iterator[Measured]:
    """Shared memory and shuffles, whose queue sub-cores share."""
    yield bench.figure("lds", _latency(bench, "lds"), "clk", "a load of 4 bytes from shared memory")
    yield bench.figure("ldsm", _latency(bench, "ldsm"), "clk", "ldmatrix of four matrices")
    yield bench.figure("shfl", _latency(bench, "shuffle"), "clk", "a shuffle")
    yield bench.figure(
        "shared_accept", [_interval(bench, "lds")], "clk", "between two loads of 128 bytes a warp, all sub-cores"
    )
    yield bench.figure(
        "shfl_interval",
        [4 * _interval(bench, "shuffle")],
        "clk",
        "between two shuffles of a sub-core",
    )
    yield bench.figure(
        "shared_bytes", [512 / _interval(bench, "ldsm")], "B/clk", "ldmatrix, all warps of a multiprocessor"
    )
    cores = [bench.found.get(f"sub_core_{w}") for w in range(bench.sizes.warps)]
    mates = [w for w, core in enumerate(cores) if core is not None and core.value == 0]
    if not mates:
        return
    took = f"between two loads of one sub-core, by its warps {', '.join(map(str, mates))}"
    yield bench.figure("mio_interval", [_interval(bench, "lds", sum(1 << w for w in mates))], "clk", took)


def sub_cores(bench: Bench) -> Iterator[Measured]:
    """Which warps share a scheduler: a pair that does takes longer than one."""
    warps, trips = bench.sizes.warps, bench.sizes.trips
    records = bench.records("pairs", 1, 32 * warps, 2 * warps * warps, trips, _ONE, _ONE).reshape(warps, warps, 2)
    pairs = [(i, j) for i in range(warps) for j in range(warps)]
    ran = np.array([[[True, i != j] for j in range(warps)] for i in range(warps)])
    steps, lane, chain = trips * UNROLL * 8, np.arange(32)[:, None], np.arange(8)[None]
    wanted = int((lane + chain + trips * UNROLL).sum())
    expect("calibrate_pairs: steps", records["steps"], np.where(ran, steps, 0))
    expect("calibrate_pairs: sum", records["sum"], np.where(ran, wanted, 0))
    alone = [_together(records[i, i, :1]) for i in range(warps)]
    shared = {(i, j): _together(records[i, j]) > _SLOWER * max(alone[i], alone[j]) for i, j in pairs if i != j}
    cores: list[int] = []
    for warp in range(warps):
        other = next((o for o in range(warp) if shared[o, warp] and shared[warp, o]), None)
        cores.append(len(set(cores)) if other is None else cores[other])
    yield bench.figure("sub_cores", [len(set(cores))], "", f"sub-cores of the warps 0 to {warps - 1} of a block")
    for warp, core in enumerate(cores):
        yield bench.figure(f"sub_core_{warp}", [core], "", f"the sub-core of warp {warp}")


def products(bench: Bench) -> Iterator[Measured]:
    """wgmma by N, one warpgroup with both operands in shared memory."""
    if not architecture(bench.machine.arch).wgmma:
        return
    trips, waits = bench.sizes.trips, dict[int, float]()
    for n in (8, 16, 32, 64, 128, 256):
        records = bench.records(f"wgmma_{n}", 1, 128, 8, trips).reshape(4, 2)
        # Of each product 16 times (1 + m % 2) (1 + n % 4), summed by warp over its 16 rows.
        expect(f"calibrate_wgmma_{n}: steps", records["steps"], trips * 8)
        expect(f"calibrate_wgmma_{n}: sum", records["sum"], trips * 8 * 16 * 24 * (n // 4 * 10) & 0xFFFFFFFF)
        alone, chained = (_cycles(records[:, i]) / (trips * 8) for i in (0, 1))
        waits[n] = float(np.median(alone))
        yield bench.figure(f"hgmma_{n}", list(chained), "clk", f"between two products of m64n{n}k16")
    rate = bench.found["hgmma_256"].value / 256
    yield bench.figure("hgmma_rate", [rate], "clk", "a column of a product, at N = 256")
    yield bench.figure(
        "hgmma", [max(waits[n] - rate * n, 0.0) for n in waits], "clk", "a product's result, beyond its columns"
    )


# Memory ---------------------------------------------------------------------------------------------------------------


def _chase(bench: Bench, entry: str, lines: int, blocks: int, streams: int, most: int) -> tuple[Records, float]:
    """The chases' records of every block, and the bytes a nanosecond that streams beside them read."""
    stream, warps, warm = bench.stream(), streams + 1, lines in (_NEAR, _HOT) or streams > 0
    pieces = stream.nbytes // 2048 // (blocks * streams) if streams else 0
    values = (bench.lines(lines), lines, most, stream, pieces)
    records = bench.records(entry, blocks, 32 * warps, blocks * warps, *values, warm=warm).reshape(blocks, warps)
    chased = records[:, 0]
    starts = np.arange(blocks) * (lines // blocks)
    expect(f"calibrate_{entry}: line", chased["sum"], _line_after(starts, chased["steps"], lines))
    rate = 0.0
    if streams:
        all_streams = blocks * streams
        pairs = np.arange(pieces)[:, None] * all_streams + np.arange(all_streams)[None]
        wanted = _sum_of_words(pairs * 512, 512).sum(axis=0) & np.uint64(0xFFFFFFFF)
        expect(f"calibrate_{entry}: sum", records["sum"][:, 1:], wanted.reshape(blocks, streams))
        rate = all_streams * pieces * 2048 / float(records["ns"][:, 1:].max())
    return chased, rate


def latency(bench: Bench) -> Iterator[Measured]:
    """Loads, cp.async and bulk copies, from L2 and DRAM, idle and beside streams."""
    sizes, blocks = bench.sizes, min(bench.sizes.blocks, bench.machine.multiprocessors)
    lds = bench.found["lds"].value if "lds" in bench.found else 0.0
    mbarrier = bench.found["mbarrier"].value if "mbarrier" in bench.found else 0.0
    kinds = [("ldg", "ldg", "a load", 0.0), ("ldgsts", "ldgsts", "cp.async", lds)]
    if bench.hopper:
        kinds.append(("tma", "bulk", "a bulk copy", lds + mbarrier))
    for name, entry, what, after in kinds:
        # What comes behind the copy, to read its first bytes, is left out.
        def over(chased: Records, after: float = after) -> list[float]:
            found: list[float] = [max(x - after, 1.0) for x in _cycles(chased) / chased["steps"]]
            return found

        bench.flush()
        cold, _ = _chase(bench, entry, sizes.lines, blocks, 0, sizes.chase)
        yield bench.figure(f"{name}_idle", over(cold), "clk", f"{what} from DRAM, nothing else running")
        near, _ = _chase(bench, entry, _NEAR, blocks, 0, sizes.chase)
        yield bench.figure(f"{name}_l2", over(near), "clk", f"{what} from L2, nothing else running")
        beside = list[tuple[float, int, list[float]]]()
        for streams in sizes.loads:
            chased, rate = _chase(bench, entry, sizes.lines, bench.machine.multiprocessors, streams, sizes.most)
            beside.append((rate, streams, over(chased)))
            took = f"{what} from DRAM beside {streams} warps with 2 KB each in flight, at {rate:.0f} GB/s"
            yield bench.figure(f"{name}_beside_{streams}", beside[-1][2], "clk", took)
        best = max(rate for rate, _, _ in beside)
        rate, streams, found = next(b for b in beside if b[0] >= 0.95 * best)
        took = f"{what} from DRAM beside the fewest streams that reach 95 % of their best: {streams} warps"
        yield bench.figure(name, found, "clk", took)
        hot, _ = _chase(bench, entry, _HOT, bench.machine.multiprocessors, streams, sizes.most)
        yield bench.figure(f"{name}_l2_loaded", over(hot), "clk", f"{what} from L2 beside these {streams} warps")


def bandwidth(bench: Bench) -> Iterator[Measured]:
    """Reading all of the stream in runs that lie apart, by their length."""
    best = 0.0
    for nbytes in bench.sizes.runs:
        launch, out = bench.runs(nbytes)
        bench.machine.run(launch)
        records, size = out.read().view(RECORD), bench.stream().nbytes
        total = int(records["sum"].sum()) & 0xFFFFFFFF
        expect(f"calibrate_runs of {nbytes}: sum", [total], _sum_of_words(np.zeros(1, np.int64), size // 4))
        rate = size / bench.machine.time([launch]) / 1e3
        best = max(best, rate)
        yield bench.figure(f"read_{nbytes}", [rate], "GB/s", f"reading runs of {nbytes} bytes that lie apart")
    yield bench.figure("reachable", [best], "GB/s", "the best of these")
    ran = records[(records["ns"] > 0) & (records["steps"] > 0)]
    if len(ran):
        yield bench.figure("clock_memory", list(_cycles(ran) / ran["ns"]), "GHz", "the clock while memory is read")
    yield bench.figure("multiprocessors", [bench.machine.multiprocessors], "", "multiprocessors")


def l2_total(bench: Bench) -> Iterator[Measured]:
    """The rate at which all multiprocessors read bytes that L2 holds; in each round others read a piece."""
    sizes, stream = bench.sizes, bench.stream()
    most = min(sizes.near_bytes, bench.machine.l2_bytes // 2, stream.nbytes)
    near = max(1 << max(most, 1).bit_length() - 1, _NEAR_RUN)
    launch, out = bench.runs(_NEAR_RUN, near, sizes.rounds)
    bench.machine.run(launch)
    records = out.read().view(RECORD)
    wanted = sizes.rounds * _sum_of_words(np.zeros(1, np.int64), near // 4) & np.uint64(0xFFFFFFFF)
    expect("calibrate_runs of L2: sum", [int(records["sum"].sum()) & 0xFFFFFFFF], wanted)
    rate = sizes.rounds * near / bench.machine.time([launch]) / 1e3
    yield bench.figure("l2_total", [rate], "GB/s", f"reading {near >> 10} KB from L2, all multiprocessors")
    ran = records[(records["ns"] > 0) & (records["steps"] > 0)]
    if len(ran):
        clocks = np.median(_cycles(ran) / ran["ns"]) * bench.machine.multiprocessors
        yield bench.figure("l2_bytes", [rate / float(clocks)], "B/clk", "of this, a multiprocessor's part")


def boxes(bench: Bench) -> Iterator[Measured]:
    """Bulk and tensor copies from L2 to one multiprocessor, 64 KB in flight, by their size."""
    if not bench.hopper:
        return
    stream, columns = bench.stream(), 64
    for name, entry, what in (("box", "boxes", "bulk"), ("tile", "tiles", "tensor")):
        for box in bench.sizes.boxes:
            window, stages = min(1 << 20, stream.nbytes), _RING // box
            copies = -(-bench.sizes.copies // stages) * stages
            values: list[Value] = [stream, window // box, box, stages, copies]
            if entry == "tiles":
                rows = box // 128
                values.append(
                    bench.machine.tensor_map(
                        TensorMapPlan(
                            "rows", "bf16", stream.pointer, (columns, window // 128), (128,), (columns, rows), ("column", "row"),
                            swizzle=128, gran=columns, issue_rows=rows, boxes=1,
                        )
                    )
                )  # fmt: skip
            (record,) = bench.records(entry, 1, 128, 1, *values, shared=_RING)
            last = np.arange(copies - stages, copies) % (window // box) * (box // 4)
            wanted = _sum_of_words(last, box // 4).sum() & np.uint64(0xFFFFFFFF)
            expect(f"calibrate_{entry} of {box}: sum", [record["sum"]], [wanted])
            rate = copies * box / float(record["end"] - record["begin"])
            took = f"{what} copies of {box} bytes from L2 to one multiprocessor"
            yield bench.figure(f"{name}_{box}", [rate], "B/clk", took)


# Barriers and fences --------------------------------------------------------------------------------------------------


def barriers(bench: Bench) -> Iterator[Measured]:
    """mbarriers, and what a cluster adds."""
    if not bench.hopper:
        return
    trips, rounds = bench.sizes.trips, bench.sizes.trips * UNROLL
    records = bench.records("mbarrier", 1, 64, 2, rounds)
    expect("calibrate_mbarrier: sum", records["sum"], [3 * rounds, rounds])
    yield bench.figure(
        "mbarrier", list(_cycles(records) / (2 * rounds)), "clk", "from an arrival to the warp that waits for it"
    )
    records = bench.records("cluster", 2, 128, 3, trips)
    expect("calibrate_cluster: word", records["sum"], [circle(rounds) // 4, trips, trips])
    took = _cycles(records) / rounds
    yield bench.figure("dsmem", took[:1].tolist(), "clk", "a load from the other block's shared memory, cluster of two")
    yield bench.figure(
        "cluster_barrier", took[1:].tolist(), "clk", "the barrier of a cluster of two, released and acquired"
    )


def fences(bench: Bench) -> Iterator[Measured]:
    """Fences: over the device with an atomic behind it, and of a block with copies in flight."""
    trips, words = bench.sizes.trips, bench.machine.memory(8)
    out = bench.machine.memory(2 * RECORD.itemsize)
    launch = bench.machine.bind("calibrate_atomic", 1, 1, out, words, trips)
    for _ in range(2):
        words.write(bytes(8))
        bench.machine.run(launch)
    records = out.read().view(RECORD)
    half, whole = trips * (trips - 1) // 2, trips * (2 * trips - 1)
    expect("calibrate_atomic: sum", records["sum"], [half, whole])
    expect("calibrate_atomic: count", words.read().view(np.uint32)[:1], [2 * trips])
    us = records["ns"].astype(np.float64) / trips / 1e3
    yield bench.figure("atomic", [us[0]], "us", "a store, a fence over the device and an atomic behind it")
    yield bench.figure("atomic_acq_rel", [us[1]], "us", "a store and an atomic that releases and acquires")
    copies, lines = 4, bench.lines(bench.sizes.lines)
    turns = min(trips, bench.sizes.lines // (copies * 128))
    bench.flush()
    records = bench.records("membar", 1, 128, 12, lines, turns, copies, warm=False).reshape(4, 3)
    numbers = np.arange(turns * copies)[:, None] * 128 + np.arange(128)[None]
    sums = numbers.reshape(-1, 4, 32).sum(axis=(0, 2)) & 0xFFFFFFFF
    expect("calibrate_membar: sum", records["sum"], np.stack([0 * sums, sums, sums], axis=1))
    took = _cycles(records) / turns
    yield bench.figure("membar_alone", took[:, 0].tolist(), "clk", "a fence of the block, nothing in flight")
    yield bench.figure("membar", took[:, 1].tolist(), "clk", "a fence of the block behind four cp.async a thread")
    yield bench.figure("membar_landed", took[:, 2].tolist(), "clk", "until these four have landed")


def nodes(bench: Bench) -> Iterator[Measured]:
    """What a kernel that does nothing takes in a graph, and with programmatic dependent launch."""
    for name, pdl in (("node", False), ("pdl", True)):
        if pdl and not bench.hopper:
            continue
        launch = bench.machine.bind("calibrate_node", bench.machine.multiprocessors, 128, pdl=pdl)
        us = bench.machine.time([launch] * bench.sizes.nodes)
        how = " that starts before the one in front of it ends" if pdl else ""
        yield bench.figure(name, [us], "us", f"a kernel that does nothing, as a node of a graph{how}")
    if {"ldg_idle", "ldg_l2", "clock_memory"} <= set(bench.found):
        clk = [bench.found[n].value for n in ("ldg_l2", "ldg_idle")]
        us_each = [c / bench.found["clock_memory"].value / 1e3 for c in clk]
        yield bench.figure("dependent", us_each, "us", "a load whose address comes from a load, from L2 to DRAM")


# In the order that figures are used in.
PROBES: Final[dict[str, Callable[[Bench], Iterator[Measured]]]] = {
    p.__name__: p
    for p in (
        instructions,
        sub_cores,
        shared_memory,
        queue,
        products,
        barriers,
        bandwidth,
        l2_total,
        latency,
        boxes,
        fences,
        nodes,
    )
}
