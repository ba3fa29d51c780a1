"""What the layers of a step share: kernels, pools, tables, and a plan for each kind of layer.

Everything that changes from step to step is an array on the device, which planners and kernels read there; the host reads
counts that vLLM has on the host anyway. Arrays are torch's or NumPy's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvgen.architectures import Arch
from kvgen.integrations.vllm.faults import StepFaults, faults_of
from kvgen.integrations.vllm.pools import LayerPool, layer_numbers, module_of, open_cache
from kvgen.integrations.vllm.shard import Shard
from kvgen.runtime.workspace import Workspace
from kvgen.schema.presets.vllm import PackedOrder

# Launches of this process by operation: append, decode, verify, extend and plan. Replayed CUDA graphs are not counted.
LAUNCHES: Final[Counter[str]] = Counter()

# The operations that attend.
ATTENDING: Final = ("decode", "verify", "extend")
# Bytes -> u8 memory on the layers' device.
Allocate = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as vLLM's attention metadata has it; padding at the end of rows and requests is allowed.

    - `query_start_loc`: i32 `[B + 1]`, first row of each request, and their end.
    - `seq_lens`: i32 `[B]`, tokens of each request, those of this step included; 0 for padding.
    - `block_table`: i32 `[B, M]`, page ids of each request.
    - `rows`: of q, padding included.
    - `most_rows`: no request has more of them; vLLM's max_query_len.
    """

    query_start_loc: Any
    seq_lens: Any
    block_table: Any
    rows: int
    most_rows: int


class Layers:
    """Layers of one group that have the same shard: their kernels, their pools, and the plan of the current step."""

    def __init__(
        self,
        shard: Shard,
        pools: Sequence[LayerPool],
        order: PackedOrder,
        faults: StepFaults,
        *,
        max_rows: int,
        arch: Sequence[Arch],
        allocate: Allocate | None,
    ) -> None:
        self.shard, self.faults = shard, faults
        self.module = module_of(shard, pools[0].memory, order, arch)
        self.cache = open_cache(self.module, shard, pools, order)
        self.numbers = layer_numbers(pools, order)
        self._allocate = allocate
        self._workspaces = {name: self._workspace(name, max_rows) for name in ATTENDING if hasattr(self.module, name)}

    def _workspace(self, name: str, max_rows: int) -> Workspace:
        launcher, device = getattr(self.module, name), self.cache.device
        memory = None
        if self._allocate is not None:
            memory = self._allocate(launcher.workspace_bytes(max_rows, device=device))
        found: Workspace = launcher.workspace(max_rows, device=device, memory=memory)
        return found

    def begin(self, batch: Batch, stream: object = None) -> Step:
        """Plan the attention of a step on the device, for all of these layers."""
        name = self._operation(batch)
        launcher, workspace = getattr(self.module, name), self._workspaces[name]
        cache = self.cache.step(lengths=batch.seq_lens, page_table=batch.block_table)
        step = Step(self, name, launcher, workspace, cache, batch.rows, batch.query_start_loc)
        step.plan(stream)
        return step

    def _operation(self, batch: Batch) -> str:
        """Which operation attends: the choice follows from counts that a captured CUDA graph has fixed."""
        if batch.most_rows == 1:
            return "decode"
        if batch.most_rows <= self.shard.window_rows and "verify" in self._workspaces:
            return "verify"
        return "extend"


@dataclass(frozen=True, slots=True)
class Step:
    """A step of `layers`: the operation that attends, planned, and the pools under the step's tables."""

    layers: Layers
    operation: str
    launcher: Any
    workspace: Workspace
    cache: Any
    rows: int
    row_offsets: Any

    def plan(self, stream: object = None) -> None:
        """Divide the work among blocks, for the lengths that the device has at this point of `stream`."""
        self.launcher.plan(self.cache, self.workspace, rows=self.rows, row_offsets=self.row_offsets, stream=stream)
        LAUNCHES["plan"] += 1


class Group:
    """The layers whose tokens lie in the same pages: what one metadata builder of vLLM is for.

    - `pools`: by layer name, in vLLM's order.
    - `order`: vLLM's KVCacheLayout.
    - `max_rows`: the most rows of a step, and of requests, padding included.
    - `allocate`: gives memory for workspaces; None: kvgen allocates it.
    """

    def __init__(
        self,
        pools: Mapping[str, LayerPool],
        order: PackedOrder,
        *,
        max_rows: int,
        arch: Sequence[Arch],
        allocate: Allocate | None = None,
        device: str = "cpu",
    ) -> None:
        self.faults = faults_of(device)
        kinds: dict[Shard, list[str]] = {}
        for name, pool in pools.items():
            kinds.setdefault(pool.shard, []).append(name)
        self.kinds = tuple(
            Layers(
                shard,
                [pools[name] for name in names],
                order,
                self.faults,
                max_rows=max_rows,
                arch=arch,
                allocate=allocate,
            )
            for shard, names in kinds.items()
        )
        # A layer's name -> its kind, and its number in the cache of that.
        self.places = {
            name: (i, n)
            for i, names in enumerate(kinds.values())
            for name, n in zip(names, self.kinds[i].numbers, strict=True)
        }

    def begin(self, batch: Batch, stream: object = None) -> GroupStep:
        """Plan a step for every kind of layer. Raises FaultError where a step before met wrong data."""
        self.faults.look(stream)
        return GroupStep(self.places, tuple(layers.begin(batch, stream) for layers in self.kinds))


@dataclass
class GroupStep:
    """A step of a group, planned: the attention metadata of its layers.

    Not frozen: builders that vLLM derives from the adapter's, for chunked local attention among others, set more attributes.
    """

    places: Mapping[str, tuple[int, int]]
    steps: tuple[Step, ...]

    def plan_again(self, stream: object = None) -> None:
        """Plan for lengths, tables and row offsets that have changed where they are; a CUDA graph may hold it."""
        for step in self.steps:
            step.plan(stream)

    def of(self, layer: str) -> tuple[Step, Any]:
        """The step of the layer called `layer`, and its pages under the step's tables."""
        kind, number = self.places[layer]
        step = self.steps[kind]
        return step, step.cache[number]
