"""Continuous batching: attention over the memory of transformers' own PagedAttentionCache, where nothing is gathered."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch
from transformers.generation.continuous_batching import PagedAttentionCache

from kvgen.codegen.load import load
from kvgen.errors import ArgumentError, ConfigError
from kvgen.integrations.transformers.cache import DTYPES, current_arch
from kvgen.integrations.transformers.faults import Faults, stream_of
from kvgen.integrations.transformers.paged_sets import full_set, ring_set, rows_set, store_set
from kvgen.integrations.transformers.sets import Attention, DtypeName, attention_of

_KERNELS: Final[weakref.WeakKeyDictionary[PagedAttentionCache, PagedKernels]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Step:
    """What transformers says of a step, for layers of one kind. Tensors are on the device, and stay there.

    `offsets` i32 `[B + 1]`: where each request's rows begin; `ends` i32 `[B + 1]`: where its tokens begin in `read`, i64, the
    places of tokens that a row can see, empty where no request has any before the step; `write` i64 `[T]`: places of the
    rows. A place counts tokens from the layer's first. `longest` and `longest_ends` are the most rows and tokens of a request.
    """

    rows: int
    offsets: torch.Tensor
    longest: int
    write: torch.Tensor
    read: torch.Tensor
    ends: torch.Tensor
    longest_ends: int

    @property
    def decodes(self) -> bool:
        """Every request has one row."""
        return self.longest == 1 and self.rows == self.offsets.numel() - 1


class Group:
    """Layers that share a cache allocator and kernels: their views of its memory, and what is planned once a step for all.

    A block of the allocator has a page of keys and one of values for each of its layers.
    """

    def __init__(
        self, allocator: Any, layers: Sequence[int], store: ModuleType, faults: Faults, most_rows: int
    ) -> None:
        self.numbers = {layer: number for number, layer in enumerate(layers)}
        self.launches = 0
        self._page_size, self._block = allocator.tokens_per_page, allocator.block_physical_stride
        self._trash = allocator.write_trash_index
        self._faults, self._most_rows = faults, most_rows
        self._workspaces: dict[str, Any] = {}
        heads = allocator.cache_tensor.shape[-2:]
        blocks = allocator.cache_tensor.view(-1, self._block // self._page_size, self._page_size, *heads)
        pages = [2 * allocator.layer_indices.index(layer) for layer in layers]
        self.k, self.v = [blocks[:, page] for page in pages], [blocks[:, page + 1] for page in pages]
        self._store, self._stored = store, store.Cache(k_pool=self.k, v_pool=self.v)

    def begin(self, step: Step) -> None:
        """Derive the step's tables, lengths and slots, and plan its attention."""
        slots = step.write // self._block * self._page_size + step.write % self._block
        self._slots = slots.masked_fill_(step.write == self._trash, -1)
        self._step = step

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Store the rows k and v `[T, H, D]` and attend with q `[T, Hq, D]`: `[T, Hq, D]`. `sinks` is an argument, or none."""
        raise NotImplementedError

    def _append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._launch(self._store.append, self._stored[self.numbers[layer]], k, v, self._slots)

    def _plan(self, made: ModuleType, kind: str, cache: Any, **more: Any) -> None:
        launcher = getattr(made, kind)
        if kind not in self._workspaces:  # of the largest step: graphs that are captured keep its address
            self._workspaces[kind] = launcher.workspace(max_rows=self._most_rows, device=self._faults.word.device)
        launcher.plan(cache, self._workspaces[kind], rows=self._step.rows, stream=self._stream, **more)
        self.launches += 1

    def _launch(self, launcher: Any, *given: Any, **more: Any) -> None:
        launcher(*given, errors=self._faults.word, stream=self._stream, **more)
        self.launches += 1

    @property
    def _stream(self) -> object:
        return stream_of(self._faults.device)


class FullGroup(Group):
    """Layers whose requests keep all their tokens, in pages."""

    def __init__(
        self, allocator: Any, layers: Sequence[int], store: ModuleType, made: ModuleType, faults: Faults, most_rows: int
    ) -> None:
        super().__init__(allocator, layers, store, faults, most_rows)
        self._made, self._pools = made, made.Cache(k_pool=self.k, v_pool=self.v)

    def begin(self, step: Step) -> None:
        super().begin(step)
        read = step.read if step.read.numel() else step.write  # without tokens before, the rows are all there is
        first = torch.arange(0, step.longest_ends, self._page_size, device=read.device) + step.ends[:-1, None]
        table = (read[first.clamp_(max=read.numel() - 1)] // self._block).to(torch.int32)
        self._cache = self._pools.step(step.ends.diff(), table)
        self._kind = "decode" if step.decodes else "extend"
        more = {} if step.decodes else {"row_offsets": step.offsets}
        self._plan(self._made, self._kind, self._cache, **more)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        cache, out = self._cache[self.numbers[layer]], torch.empty_like(q)
        self._append(layer, k, v)
        self._launch(getattr(self._made, self._kind), cache, q, out, workspace=self._workspaces[self._kind], **sinks)
        return out


class RingGroup(Group):
    """Layers whose requests keep the last tokens of a window, in a ring.

    Rows of a step may take the places of tokens that earlier rows of the step still see. A step with several rows of a request
    therefore attends to cached tokens first, then stores, and attends to its own rows as they came.
    """

    def __init__(
        self,
        allocator: Any,
        layers: Sequence[int],
        store: ModuleType,
        made: tuple[ModuleType, ModuleType],
        faults: Faults,
        most_rows: int,
    ) -> None:
        super().__init__(allocator, layers, store, faults, most_rows)
        self._ring, self._own = made
        self._sentinel = allocator.sentinel_index
        # Read token by token, values a page behind their keys: views that lie in each other, which only readers may have.
        tokens = allocator.cache_tensor.view(-1, 1, *allocator.cache_tensor.shape[-2:])
        first = [k.storage_offset() // tokens.stride(0) for k in self.k]
        self._pools = self._ring.Cache(
            k_pool=[tokens[i : len(tokens) - self._page_size] for i in first],
            v_pool=[tokens[i + self._page_size :] for i in first],
        )

    def begin(self, step: Step) -> None:
        super().begin(step)
        self._planned_own = False
        self._reads = step.decodes or step.read.numel() > 0
        if not self._reads:  # prompts that begin in this step see their own rows only
            return
        read = step.read.masked_scatter(step.read == self._sentinel, step.write) if step.read.numel() else step.write
        lengths = step.ends.diff()
        self._cache = self._pools.step(lengths, read, step.ends.long())
        if step.decodes:
            self._plan(self._ring, "decode", self._cache)
            return
        cached = lengths - step.offsets.diff()
        self._plan(self._ring, "extend_cached", self._cache, valid_tokens=cached, row_offsets=step.offsets)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        if self._step.decodes:
            out, cache = torch.empty_like(q), self._cache[self.numbers[layer]]
            self._append(layer, k, v)
            self._launch(self._ring.decode, cache, q, out, workspace=self._workspaces["decode"], **sinks)
            return out
        own, own_lse, rows = self._attend_own(q, k, v, sinks)
        if not self._reads:
            self._append(layer, k, v)
            return own.to(q.dtype)
        seen, seen_lse, out = torch.empty_like(own), torch.empty_like(own_lse), torch.empty_like(q)
        cache, workspace = self._cache[self.numbers[layer]], self._workspaces["extend_cached"]
        self._launch(self._ring.extend_cached, cache, q, seen, workspace=workspace, lse=seen_lse)
        self._append(layer, k, v)
        self._own.merge_states(rows, seen, seen_lse, own, own_lse, out, stream=self._stream)
        self.launches += 1
        return out

    def _attend_own(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Attention to the step's own rows, f32, its log-sum-exp, and the rows as a cache."""
        rows = self._own.Cache(k_pool=[k], v_pool=[v], kv_offsets=self._step.offsets)
        if not self._planned_own:
            self._planned_own = True
            self._plan(self._own, "extend_rows", rows, row_offsets=self._step.offsets)
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        workspace = self._workspaces["extend_rows"]
        self._launch(self._own.extend_rows, rows[0], q, out, workspace=workspace, lse=lse, **sinks)
        return out, lse, rows[0]


class PagedKernels:
    """Kernels over one PagedAttentionCache of transformers, and the step that is under way.

    A layer that comes again, or another `cu_seq_lens_q`, begins a step. `launches` are those so far. Raises ConfigError for
    attention that such a cache cannot serve.
    """

    def __init__(self, cache: PagedAttentionCache, config: Any, q: torch.Tensor) -> None:
        whole = next(one for one in attention_of(config.to_dict()) if one is not None)
        tp = max(1, whole.q_heads // q.shape[1])
        self.layers: Final = attention_of(config.to_dict(), tp)
        self.faults: Final = Faults(q.device, "PagedAttentionCache")
        self._dtype: Final[DtypeName] = DTYPES[q.dtype]
        self._groups: dict[tuple[int, Attention], Group] = {}
        self._begun: set[int] = set()
        self._seen: set[int] = set()
        self._offsets: torch.Tensor | None = None

    @property
    def launches(self) -> int:
        return sum(group.launches for group in self._groups.values())

    def attention(self, layer: int) -> Attention:
        """What layer number `layer` attends with."""
        found = self.layers[layer]
        if found is None or found.latent or found.head_dim != found.v_head_dim:
            what = (
                "reads the keys of another layer"
                if found is None
                else f"has keys of {found.head_dim} dims and values of {found.v_head_dim}"
            )
            raise ConfigError(
                f"config: layer {layer} {what}; transformers' PagedAttentionCache holds keys and values of one size for "
                "each; use generate() with a KvgenCache"
            )
        return found

    def attend(
        self,
        cache: PagedAttentionCache,
        layer: int,
        rows: Sequence[torch.Tensor],
        sinks: torch.Tensor | None,
        given: Mapping[str, Any],
    ) -> torch.Tensor:
        """Store k and v of `rows`, each `[1, H, T, D]`, and attend with q: `[1, T, Hq, D]`; `given` are the step's tensors."""
        if layer in self._seen or self._offsets is not given["cu_seq_lens_q"]:
            self._seen.clear()
            self._begun.clear()
            self._offsets = given["cu_seq_lens_q"]
            self.faults.poll()
        self._seen.add(layer)
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in rows)
        allocator = cache.layer_to_allocator[layer]
        group = self._group(cache, allocator, self.attention(layer))
        if id(group) not in self._begun:
            self._begun.add(id(group))
            group.begin(_step(allocator, len(q), given))
        out = group.attend(layer, q, k, v, {} if sinks is None else {"sinks": sinks.float().contiguous()})
        if q.device.type == "cpu":  # whose launches are done
            self.faults.poll()
        return out.unsqueeze(0)

    def _group(self, cache: PagedAttentionCache, allocator: Any, attention: Attention) -> Group:
        key = (allocator.index, attention)
        found = self._groups.get(key)
        if found is not None:
            return found
        layers = [i for i in allocator.layer_indices if self.layers[i] == attention]
        arch, size = current_arch(), allocator.tokens_per_page
        store = load(store_set(attention, self._dtype, size, arch))
        common = (self.faults, cache.max_batch_tokens)
        window = getattr(allocator, "sliding_window", None)
        if window is None:
            made = load(full_set(attention, self._dtype, size, arch))
            found = self._groups[key] = FullGroup(allocator, layers, store, made, *common)
            return found
        if window != attention.window:
            raise ConfigError(
                f"sliding_window: layer {layers[0]} attends with a window of {attention.window}, where transformers keeps "
                f"{window} tokens of it; use generate() with a KvgenCache"
            )
        both = load(ring_set(attention, self._dtype, arch)), load(rows_set(attention, self._dtype, arch))
        found = self._groups[key] = RingGroup(allocator, layers, store, both, *common)
        return found


def kernels_of(cache: PagedAttentionCache, module: torch.nn.Module, q: torch.Tensor) -> PagedKernels:
    """The kernels over `cache`, made at its first layer, of the config of the model that `module` is a layer of."""
    found = _KERNELS.get(cache)
    if found is None:
        config: Any = module.config
        found = _KERNELS[cache] = PagedKernels(cache, config.get_text_config(decoder=True), q)
    return found


def update_by_attention(theirs: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A `PagedAttentionCache.update` that leaves the rows of models with attn_implementation=`name` to the attention function.

    It marks such rows as the cache's and returns them; the attention function stores them, and reads all tokens where they lie.
    Rows of other models go to `theirs`, which stores and gathers.
    """

    @torch.compiler.disable(recursive=True)  # type: ignore[untyped-decorator]
    @functools.wraps(theirs)
    def update(
        cache: PagedAttentionCache, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **more: Any
    ) -> Any:
        if cache.config._attn_implementation != name:
            return theirs(cache, key_states, value_states, *args, **more)
        key_states._kvgen_paged = weakref.ref(cache)
        return key_states, value_states

    update.kvgen = True  # theirs may be a wrapper too
    return update  # type: ignore[no-any-return]


def paged_cache_of(key: torch.Tensor) -> PagedAttentionCache | None:
    """The cache that `key` was marked by; None for rows of no PagedAttentionCache."""
    found = getattr(key, "_kvgen_paged", None)
    return None if found is None else found()


def _step(allocator: Any, rows: int, given: Mapping[str, Any]) -> Step:
    if given.get("block_table") is not None:
        raise ArgumentError(
            "block_table: got one; kernels read the places of tokens, which steps with block tables leave out; pass "
            "ContinuousBatchingConfig(max_blocks_per_request=0)"
        )
    kind, index = allocator.layer_type, allocator.index
    return Step(
        rows,
        given["cu_seq_lens_q"],
        given["max_length_q"],
        given["write_index"][index],
        given["read_index"][index],
        given["cu_seq_lens_k"][kind],
        given["max_length_k"][kind],
    )
