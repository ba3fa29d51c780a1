"""The chunks that an operation's planner makes of a batch, for a GPU of so many multiprocessors: it runs on the CPU machine."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvgen.bench.calls import call_of
from kvgen.bench.synthetic_batch import LAYER, Scene
from kvgen.plan.split_plan import HEADER, KV_CHUNK
from kvgen.runtime.cpu import machine
from kvgen.spec.kernel_set import Op

_STAMP: Final = 0x85EBCA6B  # what the list adds for every place (device/attention/split_kv.cuh)
_CHUNKS_AT, _STAMP_AT, _BEGIN, _END, _PIECES = 9, 12, 4, 5, 7  # words of the header, and of a chunk


@dataclass(frozen=True)
class PlannedChunks:
    """Tokens of the chunks of each SM part, the blocks that share them, and the most chunks that a request has."""

    parts: tuple[tuple[int, ...], ...]
    columns: int
    pieces: int


def planned_chunks(scene: Scene, op: Op, multiprocessors: int, arch: str | None = None) -> PlannedChunks | None:
    """What the planner makes of the scene's batch; None for an operation that plans nothing."""
    call = call_of(scene, op)
    launcher = call.launcher
    if not hasattr(launcher, "workspace"):
        return None
    cache = scene.package.Cache(**scene.pools, **scene.tables(call.counted_as, call.rows_each))
    layer = cache[LAYER]
    longest = layer.dims["max_cache_length"] if launcher.SPLIT_PLAN.chunk_tokens else None
    sizes: dict[str, Any] = {"max_tokens": longest, "multiprocessors": multiprocessors}
    workspace = launcher.workspace(call.rows, device=layer.device, **sizes)
    arguments = call.arguments()
    taken = {p.name: arguments[p.name] for p in launcher.PLAN.arguments if p.name in arguments}
    with machine(arch, "fast"):
        launcher.plan(layer, workspace, rows=call.rows, **taken)
    split = launcher.SPLIT_PLAN
    memory = np.asarray(workspace.view.owner)
    if split.slots_a_part:
        return _read_tiles(memory, workspace.sizes, split.columns)
    return _read(memory, workspace.sizes, split.columns)


def _read(memory: np.ndarray[Any, np.dtype[np.uint8]], sizes: dict[str, int], columns: int) -> PlannedChunks:
    parts = sizes["num_sm_parts"]
    stamp = int(memory[:HEADER].view(np.uint32)[_STAMP_AT])
    stamps = (np.arange(1, parts + 2, dtype=np.uint64) * _STAMP + stamp).astype(np.uint32)
    starts = memory[HEADER : HEADER + 4 * (parts + 1)].view(np.uint32) - stamps
    chunks = _chunks(memory, sizes, columns, int(starts[-1]))
    tokens = chunks[:, _END] - chunks[:, _BEGIN]
    found = [tuple(map(int, tokens[a:b])) for a, b in itertools.pairwise(starts)]
    return PlannedChunks(tuple(found), columns, int(chunks[:, _PIECES].max(initial=1)))


def _chunks(
    memory: np.ndarray[Any, np.dtype[np.uint8]], sizes: dict[str, int], columns: int, count: int
) -> np.ndarray[Any, np.dtype[np.uint32]]:
    at = HEADER + _up(4 * (sizes["num_sm_parts"] + 1)) + _up(sizes["max_rows"]) + _up(4 * sizes["max_slots"] * columns)
    return memory[at : at + KV_CHUNK * count].view(np.uint32).reshape(-1, KV_CHUNK // 4)


def _read_tiles(memory: np.ndarray[Any, np.dtype[np.uint8]], sizes: dict[str, int], columns: int) -> PlannedChunks:
    """Of tiles of rows, which blocks take in the order of the list as soon as they have ended the ones before."""
    chunks = _chunks(memory, sizes, columns, int(memory[:HEADER].view(np.uint32)[_CHUNKS_AT]))
    found: list[list[int]] = [[] for _ in range(sizes["num_sm_parts"])]
    free = [(0, part) for part in range(len(found))]
    for tokens in (chunks[:, _END] - chunks[:, _BEGIN]).tolist():
        busy, part = heapq.heappop(free)
        found[part].append(tokens)
        heapq.heappush(free, (busy + tokens, part))
    return PlannedChunks(tuple(map(tuple, found)), columns, int(chunks[:, _PIECES].max(initial=1)))


def _up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
