"""The chunks that an operation's planner makes of a batch, for a GPU of so many multiprocessors: it runs on the CPU machine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.architectures import on_cpu
from kvgen.bench.measure import arguments_of
from kvgen.cases.operation import cases_of
from kvgen.cases.scene import LAYER, Scene
from kvgen.ops import Extend
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.split_plan import HEADER, KV_CHUNK
from kvgen.runtime.cpu import machine
from kvgen.schema.kernel_set import KernelSet, Op

Bytes = NDArray[np.uint8]
_STAMP: Final = 0x85EBCA6B  # what the list adds for every place (device/attention/plan/split_kv.cuh)
_CHUNKS_AT, _STAMP_AT, _TOGETHER_AT = 9, 12, 15  # words of the header
_BEGIN, _END, _PIECES, _FIRST = 4, 5, 7, 11  # of a chunk


@dataclass(frozen=True)
class PlannedChunks:
    """Tokens of the chunks of each SM part, the blocks that share them, and the most chunks that a request has."""

    parts: tuple[tuple[int, ...], ...]
    columns: int
    pieces: int


@dataclass(frozen=True)
class PlannedTile:
    """An entry of extend's plan: `cols` columns of request `b` from column `first` on, and the keys [begin, end), one of
    `pieces` parts of what these columns see."""

    b: int
    first: int
    cols: int
    begin: int
    end: int
    pieces: int


@dataclass(frozen=True)
class PlannedTiles:
    """The entries in the order of the list. Each is for all kv heads, of which `heads_together` go side by side."""

    entries: tuple[PlannedTile, ...]
    heads: int
    heads_together: int

    @property
    def works(self) -> tuple[tuple[PlannedTile, int], ...]:
        """(entry, kv head) in the order in which blocks take them."""
        groups = range(0, self.heads, self.heads_together)
        return tuple((e, h) for g in groups for e in self.entries for h in range(g, g + self.heads_together))


def planned_chunks(scene: Scene, op: Op, multiprocessors: int, arch: str | None = None) -> PlannedChunks | None:
    """The chunks that the planner makes of the scene's batch, or the blocks that have the rows' lists; None where nothing is
    planned, or tiles of rows."""
    launcher = getattr(scene.package, op.name)
    if not hasattr(launcher, "workspace"):
        return _listed(scene, op, multiprocessors) if cases_of(op).sparse else None
    if launcher.SPLIT_PLAN.slots_a_part:
        return None
    memory, sizes = _planned(scene, op, multiprocessors, arch)
    split = _on(scene.kernels, op, arch).split
    assert split is not None
    return _read(memory, sizes, split.columns)


def _listed(scene: Scene, op: Op, multiprocessors: int) -> PlannedChunks:
    """A row of q a request, whose lists in all caches together name as many keys as the request has tokens. A block has a row's
    columns, and multiprocessors take the rows in turn."""
    division = _on(scene.kernels, op, None).division
    assert division is not None
    columns = division.tiles
    totals, blocks = scene.workload.totals, max(1, multiprocessors // columns)
    return PlannedChunks(tuple(totals[i::blocks] for i in range(blocks)), columns, 1)


def planned_tiles(scene: Scene, op: Extend, multiprocessors: int, arch: str | None = None) -> PlannedTiles:
    """The tiles of rows of extend's plan of the scene's batch."""
    memory, sizes = _planned(scene, op, multiprocessors, arch)
    return tiles_in(memory, sizes, scene.kernels, columns_of(scene.kernels, op, arch))


def columns_of(kernels: KernelSet, op: Extend, arch: str | None) -> int:
    """Columns of a block of extend on an architecture; None: the one that the CPU machine runs."""
    division = _on(kernels, op, arch).division
    assert division is not None
    return division.columns


def _on(kernels: KernelSet, op: Op, arch: str | None) -> KernelPlan:
    """The operation's kernel on an architecture; None: the one that the CPU machine runs."""
    return op.plan(kernels)[0].on(arch or on_cpu(kernels.arch)[-1])


def tiles_in(memory: Bytes, sizes: Mapping[str, int], kernels: KernelSet, columns: int) -> PlannedTiles:
    """The tiles of a planned workspace, whose blocks have so many columns."""
    heads = kernels.kv.kv_heads
    header = memory[:HEADER].view(np.uint32)
    chunks = _chunks(memory, sizes, heads, int(header[_CHUNKS_AT]))
    entries = tuple(
        PlannedTile(
            b=int(c[0]),
            first=int(c[_FIRST]),
            cols=min(columns, int(c[2]) * kernels.group - int(c[_FIRST])),
            begin=int(c[_BEGIN]),
            end=int(c[_END]),
            pieces=int(c[_PIECES]),
        )
        for c in chunks
    )
    return PlannedTiles(entries, heads, int(header[_TOGETHER_AT]))


def _planned(scene: Scene, op: Op, multiprocessors: int, arch: str | None) -> tuple[Bytes, dict[str, int]]:
    """The workspace, after the planner ran, and its sizes."""
    call = cases_of(op).call(scene)
    launcher = call.launcher
    cache = scene.package.Cache(**scene.pools, **call.tables)
    layer = cache[LAYER]
    longest = layer.dims["max_cache_length"] if launcher.SPLIT_PLAN.chunk_tokens else None
    sizes: dict[str, Any] = {"max_tokens": longest, "multiprocessors": multiprocessors}
    arguments = arguments_of(call)
    taken = {p.name: arguments[p.name] for p in launcher.PLAN.arguments if p.name in arguments}
    if cases_of(op).sparse:
        totals = np.array(scene.workload.totals, np.int32)
        taken = {name: totals if name == "topk_lengths" else np.zeros_like(totals) for name in taken}
    with machine(
        arch, "fast"
    ):  # tests/ops holds planners to their oracle in check mode; here only the chunks are wanted
        workspace = launcher.workspace(call.rows, device=layer.device, **sizes)
        launcher.plan(layer, workspace, rows=call.rows, **taken)
    return np.asarray(workspace.view.owner), workspace.sizes


def _read(memory: Bytes, sizes: Mapping[str, int], columns: int) -> PlannedChunks:
    parts = sizes["num_sm_parts"]
    stamp = int(memory[:HEADER].view(np.uint32)[_STAMP_AT])
    stamps = (np.arange(1, parts + 2, dtype=np.uint64) * _STAMP + stamp).astype(np.uint32)
    starts = memory[HEADER : HEADER + 4 * (parts + 1)].view(np.uint32) - stamps
    chunks = _chunks(memory, sizes, columns, int(starts[-1]))
    tokens = chunks[:, _END] - chunks[:, _BEGIN]
    found = [tuple(map(int, tokens[a:b])) for a, b in itertools.pairwise(starts)]
    return PlannedChunks(tuple(found), columns, int(chunks[:, _PIECES].max(initial=1)))


def _chunks(memory: Bytes, sizes: Mapping[str, int], columns: int, count: int) -> NDArray[np.uint32]:
    at = HEADER + _up(4 * (sizes["num_sm_parts"] + 1)) + _up(sizes["max_rows"]) + _up(4 * sizes["max_slots"] * columns)
    return memory[at : at + KV_CHUNK * count].view(np.uint32).reshape(-1, KV_CHUNK // 4)


def _up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
