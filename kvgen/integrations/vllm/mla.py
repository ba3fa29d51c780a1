"""A step of MLA layers: latent rows to their slots, decodes over latent rows, prompts over heads projected up from them.

Arrays are torch's or NumPy's, as in `step`. Requests of few rows are attended in the absorbed form, planned once a step for all
layers. A longer prompt's own rows, and a chunk of the tokens before it at a time, are projected up to K and V of heads in every
layer; the log-sum-exps merge the parts. `absorbed_rows` says where the one costs as much as the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from kvgen.architectures import Arch
from kvgen.codegen.load import load
from kvgen.errors import ArgumentError
from kvgen.integrations.vllm.faults import StepFaults
from kvgen.integrations.vllm.mla_shard import WINDOW_ROWS, MlaShard, attended_set, heads_set, stored_set
from kvgen.integrations.vllm.step import LAUNCHES, Allocate, Batch
from kvgen.runtime.workspace import Workspace

# Latent rows `[T, latent_dim + rope_dim]` -> K `[T, heads, nope_dim + rope_dim]` and V `[T, heads, v_dim]` of this rank's heads.
Project = Callable[[Any], tuple[Any, Any]]
# A shape, and whether elements are f32 (True) or the model's dtype -> an uninitialised array beside the layer's others.
Empty = Callable[[tuple[int, ...], bool], Any]
# Numbers of the host -> i32 array beside the layers' others.
Upload = Callable[[Sequence[int]], Any]


@dataclass(frozen=True)
class LatentPool:
    """A layer's latent cache as vLLM hands it out.

    - `shard`: what the layer attends with.
    - `memory`: `[pages, tokens of a page, elements of a row]`, or u8 `[pages, tokens of a page, 656]`.
    - `k_scale`: of codes with one scale a layer, f32 `[1, 1]`.
    """

    shard: MlaShard
    memory: Any
    k_scale: Any = None


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """Cached tokens of neighbouring prompts that are projected up together: the next ones of each.

    - `seq_lens`, `block_table`: of these prompts, as in `Batch`.
    - `starts`: i32 `[P]`, the first of the tokens of each; `kv_offsets`: i32 `[P + 1]`, where they lie in the chunk.
    - `tokens`: of the chunk.
    - `row_offsets`: i32 `[P + 1]`, the prompts' rows, counted from `first_row` of the step's prompt rows on; `rows` in all.
    """

    seq_lens: Any
    block_table: Any
    starts: Any
    kv_offsets: Any
    tokens: int
    row_offsets: Any
    first_row: int
    rows: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """The step's prompts, behind its decodes: `row_offsets` i32 `[P + 1]` from 0 on, `rows` in all, the chunks before them."""

    row_offsets: Any
    rows: int
    context: tuple[ContextChunk, ...] = ()


def in_windows(batch: Batch, counts: Sequence[int], upload: Upload) -> Batch:
    """The rows of `batch` as requests of at most 8 rows, over the same pages: what `mla_window` takes.

    `counts`: rows of each request, from the host. A window ends where the next one's rows begin, so each sees the tokens up to
    there. A batch without longer requests is itself.
    """
    if batch.most_rows <= WINDOW_ROWS:
        return batch
    requests, behind, offsets = [], [], [0]
    for request, count in enumerate(counts):
        for first in range(0, count, WINDOW_ROWS):
            last = min(first + WINDOW_ROWS, count)
            requests.append(request)
            behind.append(count - last)
            offsets.append(offsets[-1] + last - first)
    chosen = upload(requests)
    return Batch(
        query_start_loc=upload(offsets),
        seq_lens=batch.seq_lens[chosen] - upload(behind),
        block_table=batch.block_table[chosen],
        rows=batch.rows,
        most_rows=WINDOW_ROWS,
    )


@dataclass(frozen=True)
class MlaModules:
    """The kernels of a shard: of the cache as it is written and gathered, as it is attended to, and of prompts' heads."""

    stored: ModuleType
    attended: ModuleType
    heads: ModuleType

    @staticmethod
    def of(shard: MlaShard, page_size: int, arch: Sequence[Arch]) -> MlaModules:
        """Those for pages of so many tokens; the same for all layers that are alike."""
        return _modules(shard, page_size, tuple(arch))

    @property
    def all(self) -> tuple[ModuleType, ...]:
        """Each once."""
        return tuple(dict.fromkeys((self.stored, self.attended, self.heads)))

    def open_stored(self, pools: Sequence[LatentPool]) -> Any:
        """Layers as they are written and gathered, without tables."""
        scales = {"k_scale": [pool.k_scale for pool in pools]} if pools[0].shard.scaled else {}
        return self.stored.Cache([_rows_of(pool) for pool in pools], **scales)

    def open_attended(self, pools: Sequence[LatentPool]) -> Any:
        """Layers as they are attended to, without tables."""
        return self.attended.Cache([_rows_of(pool) for pool in pools])


@functools.cache
def _modules(shard: MlaShard, page_size: int, arch: tuple[Arch, ...]) -> MlaModules:
    stored, attended, heads = (load(make(shard, page_size, arch)) for make in (stored_set, attended_set, heads_set))
    return MlaModules(stored, attended, heads)


def _rows_of(pool: LatentPool) -> Any:
    """The pool with the axis of its one head."""
    row = pool.memory.shape[2]
    if pool.shard.codes != "fp8_ds_mla" and row != pool.shard.row_dim:
        raise ArgumentError(f"kv_cache: got rows of {row} elements; the layer's have {pool.shard.row_dim}")
    return pool.memory[:, :, None]


def append_latent(
    modules: MlaModules, layer: Any, latent: Any, rope: Any, slots: Any, errors: Any, stream: object = None
) -> None:
    """Store latent `[>= T, latent_dim]` and rope `[>= T, rope_dim]` in the slots of a layer, i64 `[T]`; -1 skips a row."""
    rows = slots.shape[0]
    modules.stored.append(layer, latent[:rows, None], rope[:rows, None], slots, errors=errors, stream=stream)
    LAUNCHES["append"] += 1


class MlaLayers:
    """MLA layers of the same shard: kernels, pools, workspaces, and the plan of the current step."""

    def __init__(
        self,
        pools: Sequence[LatentPool],
        faults: StepFaults,
        *,
        max_rows: int,
        max_requests: int,
        arch: Sequence[Arch],
        allocate: Allocate | None,
    ) -> None:
        self.shard, self.faults = pools[0].shard, faults
        self.modules = MlaModules.of(self.shard, pools[0].memory.shape[1], arch)
        self.stored, self.attended = self.modules.open_stored(pools), self.modules.open_attended(pools)
        self.scales = [pool.k_scale for pool in pools]
        self._max_rows, self._allocate = max(max_rows, max_requests), allocate
        self._workspaces: dict[tuple[str, int], Workspace] = {}

    def begin(self, decodes: Batch | None, prompts: Prompts | None, stream: object = None) -> MlaLayersStep:
        """Plan a step's decodes on the device; prompts are planned by the first layer that brings their K and V."""
        step = MlaLayersStep(self, prompts)
        if decodes is None:
            return step
        one_each = decodes.most_rows == 1 and decodes.rows == decodes.seq_lens.shape[0]
        step.operation = "mla_decode" if one_each else "mla_window"
        step.cache = self.attended.step(lengths=decodes.seq_lens, page_table=decodes.block_table)
        step.workspace = self.workspace(self.modules.attended, step.operation)
        offsets = {} if one_each else {"row_offsets": decodes.query_start_loc}
        launcher = getattr(self.modules.attended, step.operation)
        launcher.plan(step.cache, step.workspace, rows=decodes.rows, stream=stream, **offsets)
        LAUNCHES["plan"] += 1
        return step

    def workspace(self, module: ModuleType, operation: str, number: int = 0) -> Workspace:
        """Number `number` of those of an operation, allocated when it is first asked for."""
        found = self._workspaces.get((operation, number))
        if found is None:
            launcher, device, memory = getattr(module, operation), self.stored.device, None
            if self._allocate is not None:
                memory = self._allocate(launcher.workspace_bytes(self._max_rows, device=device))
            found = self._workspaces[operation, number] = launcher.workspace(
                self._max_rows, device=device, memory=memory
            )
        return found


@dataclass
class MlaLayersStep:
    """A step of MLA layers of one shard. `cache` are their pages under the decodes' tables; None without decodes."""

    layers: MlaLayers
    prompts: Prompts | None
    operation: str = ""
    cache: Any = None
    workspace: Workspace | None = None
    _planned: set[int] = field(default_factory=set)
    _chunks: dict[int, Any] = field(default_factory=dict)

    def decode(self, number: int, q: Any, out: Any, lse: Any = None, stream: object = None) -> None:
        """Attention of absorbed q `[T, heads, latent_dim + rope_dim]` over layer `number`: out `[T, heads, latent_dim]`."""
        layers = self.layers
        launcher = getattr(layers.modules.attended, self.operation)
        launcher(
            self.cache[number],
            q,
            out,
            workspace=self.workspace,
            lse=lse,
            errors=layers.faults.word,
            stream=stream,
        )
        LAUNCHES[self.operation] += 1

    def attend_prompts(
        self,
        number: int,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        *,
        project: Project,
        empty: Empty,
        stream: object = None,
    ) -> None:
        """Attention of the prompts' rows q `[T, heads, nope_dim + rope_dim]`, of which k and v are the K and V: out `[T, heads,
        v_dim]`. `project` and `empty` are called for chunks of the tokens before them, in layer `number`.
        """
        assert self.prompts is not None
        heads, context = self.layers.modules.heads, self.prompts.context
        lse: Any = empty(tuple(q.shape[:2]), True) if context else None
        own = heads.Cache([k], [v], kv_offsets=self.prompts.row_offsets)
        self._attend("extend", -1, own[0], q, out, lse, self.prompts.row_offsets, stream)
        for place, chunk in enumerate(context):
            rows = slice(chunk.first_row, chunk.first_row + chunk.rows)
            latent = self._gathered(number, place, chunk, empty, stream)
            keys, values = project(latent)
            cache = heads.Cache([keys], [values], kv_offsets=chunk.kv_offsets)[0]
            other, other_lse = empty((chunk.rows, *out.shape[1:]), False), empty((chunk.rows, q.shape[1]), True)
            self._attend("extend_context", place, cache, q[rows], other, other_lse, chunk.row_offsets, stream)
            heads.merge_states(cache, out[rows], lse[rows], other, other_lse, out[rows], lse=lse[rows], stream=stream)
            LAUNCHES["merge_states"] += 1

    def _gathered(self, number: int, place: int, chunk: ContextChunk, empty: Empty, stream: object) -> Any:
        """The chunk's latent rows of a layer, in the model's dtype: `[tokens, latent_dim + rope_dim]`."""
        layers = self.layers
        if place not in self._chunks:
            self._chunks[place] = layers.stored.step(lengths=chunk.seq_lens, page_table=chunk.block_table)
        latent = empty((chunk.tokens, layers.shard.row_dim), False)
        layers.modules.stored.gather(
            self._chunks[place][number],
            chunk.kv_offsets,
            latent[:, None],
            starts=chunk.starts,
            errors=layers.faults.word,
            stream=stream,
        )
        LAUNCHES["gather"] += 1
        return latent

    def _attend(
        self, operation: str, place: int, cache: Any, q: Any, out: Any, lse: Any, row_offsets: Any, stream: object
    ) -> None:
        """Attention over K and V of heads; planned where `place` (a chunk, -1: a prompt's own rows) has no plan yet."""
        layers = self.layers
        launcher = getattr(layers.modules.heads, operation)
        workspace = layers.workspace(layers.modules.heads, operation, max(place, 0))
        if place not in self._planned:
            self._planned.add(place)
            launcher.plan(cache, workspace, rows=q.shape[0], row_offsets=row_offsets, stream=stream)
            LAUNCHES["plan"] += 1
        launcher(cache, q, out, workspace=workspace, lse=lse, errors=layers.faults.word, stream=stream)
        LAUNCHES[operation] += 1


class MlaGroup:
    """The MLA layers whose rows lie in the same pages: what one metadata builder of vLLM is for.

    - `pools`: by layer name, in vLLM's order.
    - `max_rows`, `max_requests`: the most of a step, padding included.
    - `allocate`: gives memory for workspaces; None: kvgen allocates it.
    """

    def __init__(
        self,
        pools: Mapping[str, LatentPool],
        faults: StepFaults,
        *,
        max_rows: int,
        max_requests: int,
        arch: Sequence[Arch],
        allocate: Allocate | None = None,
    ) -> None:
        self.faults = faults
        kinds: dict[MlaShard, list[str]] = {}
        for name, pool in pools.items():
            kinds.setdefault(pool.shard, []).append(name)
        self.kinds = tuple(
            MlaLayers(
                [pools[name] for name in names],
                faults,
                max_rows=max_rows,
                max_requests=max_requests,
                arch=arch,
                allocate=allocate,
            )
            for names in kinds.values()
        )
        # A layer's name -> its kind, and its place among the layers of that.
        self.places = {name: (i, n) for i, names in enumerate(kinds.values()) for n, name in enumerate(names)}

    def begin(self, decodes: Batch | None, prompts: Prompts | None, stream: object = None) -> MlaStep:
        """Plan a step for every kind of layer. Raises FaultError where a step before met wrong data."""
        self.faults.look(stream)
        return MlaStep(self.places, tuple(layers.begin(decodes, prompts, stream) for layers in self.kinds))


@dataclass(frozen=True, slots=True)
class MlaStep:
    """A step of a group of MLA layers."""

    places: Mapping[str, tuple[int, int]]
    steps: tuple[MlaLayersStep, ...]

    def of(self, layer: str) -> tuple[MlaLayersStep, int]:
        """The step of the layer called `layer`, and its number there."""
        kind, number = self.places[layer]
        return self.steps[kind], number
