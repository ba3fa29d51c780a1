"""A transformers Cache over pages: which rows of a step are stored where, and the plans and launches of its layers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final, cast

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvgen.architectures import ARCHS, DEFAULT_ARCHS, Arch
from kvgen.codegen.load import load
from kvgen.compile.arch import select_arch
from kvgen.errors import ArgumentError
from kvgen.integrations.transformers import versions
from kvgen.integrations.transformers.faults import Faults, stream_of
from kvgen.integrations.transformers.sets import Attention, DtypeName, KvDtype, attention_of, sets_of
from kvgen.integrations.transformers.tensor_parallel import gpus_that_share

DTYPES: Final[dict[torch.dtype, DtypeName]] = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
# Architectures that kernels are compiled for where there is no GPU to ask.


_UPDATED: ContextVar[weakref.ref[KvgenLayer] | None] = ContextVar("kvgen_layer_updated", default=None)


class KvgenLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a KvgenCache. `update` keeps a step's rows for the attention function, which stores them.

    `number` counts the layers of one set. `done` are the steps that the layer has seen; `pending`: this one's rows are not
    stored. A layer holds its cache weakly, so that pools are free with the cache.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, owner: KvgenCache, attention: Attention | None, number: int, *, index: int) -> None:
        super().__init__()
        self._owner = weakref.ref(owner)
        self.attention, self.index, self.number, self.done = attention, index, number, 0
        self.is_initialized, self.pending = True, False

    @property
    def owner(self) -> KvgenCache:
        """The cache that the layer belongs to."""
        found = self._owner()
        if found is None:
            raise ArgumentError(
                f"{versions.ARGUMENT}: the KvgenCache of these rows is gone; keep it while the model runs"
            )
        return found

    @staticmethod
    def last() -> KvgenLayer | None:
        """The layer that was updated last in this context."""
        found = _UPDATED.get()
        return None if found is None else found()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: pools are allocated with the first step's rows."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The step's own rows, marked as this layer's."""
        if self.attention is None:
            raise ArgumentError(
                f"{versions.ARGUMENT}: a layer without keys and values was updated; the config says it has none"
            )
        self.owner.hand_out(self)
        key_states._kvgen = self
        self.pending = True
        _UPDATED.set(weakref.ref(self))
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.owner.seen

    def get_max_length(self) -> int:
        return self.owner.max_tokens

    def get_max_cache_shape(self) -> int:
        return self.owner.max_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.seen + query_length, 0

    def reset(self) -> None:
        self.owner.reset()

    def crop(self, tokens_to_remove: int) -> None:
        self.owner.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Done once for all layers, by the cache."""


class KvgenCache(Cache):  # type: ignore[misc]
    """Keys and values of `model.generate(..., cache=KvgenCache(model.config, max_tokens=...))` in kvgen's pages; the argument of
    transformers 5.23 is `past_key_values`.

    - `config`: of the model, which runs with attn_implementation="kvgen". Kernels are generated and compiled here.
    - `max_tokens`: most tokens of a request, prompt and answer.
    - `kv_dtype`: "auto" stores the model's dtype; "e4m3" codes with a scale a token and head.
    - `page_size`: tokens of a page.
    - `dtype`: of q, k and v; None: the config's.
    - `tp`: GPUs that share the model's heads, of which this process has one; None: as transformers has written it to the
      config when it loaded the model's shard.
    - `arch`: architectures to compile for; None: that of the current GPU, or sm_80 and sm_90a without one.

    The pool has room for the batch of the first step, on its device; after `reset()` a batch of another size gets another pool.
    Prompts may be padded on the left. `copy.deepcopy` copies the pool. Raises ConfigError for a model that kvgen.models does not
    read, before anything is loaded; ArgumentError for steps that do not fit; FaultError where a kernel met wrong data, on a GPU
    in a later step: `raise_if_faulty()` waits for the last one.
    """

    def __init__(
        self,
        config: Any,
        max_tokens: int,
        *,
        kv_dtype: KvDtype = "auto",
        page_size: int = 16,
        dtype: torch.dtype | None = None,
        tp: int | None = None,
        arch: Sequence[Arch] | None = None,
    ) -> None:
        text = config.get_text_config(decoder=True)
        given = dtype or text.dtype or config.dtype or torch.bfloat16
        if given not in DTYPES:
            raise ArgumentError(f"dtype: got {given}; kernels compute in bfloat16, float16 or float32")
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise ArgumentError(
                f"max_tokens: got {max_tokens!r}; a request has at least 1 token; pass prompt and answer together"
            )
        self.dtype, self.max_tokens, self.page_size = given, max_tokens, page_size
        attention = attention_of(text.to_dict(), gpus_that_share(config) if tp is None else tp)
        sets = sets_of(
            attention, DTYPES[given], page_size=page_size, kv_dtype=kv_dtype, arch=tuple(arch or current_arch())
        )
        self._sets = [load(kernels) for kernels in sets]
        counts = [0] * len(sets)
        numbers = []
        for one in attention:
            numbers.append(0 if one is None else counts[one.kernels])
            if one is not None:
                counts[one.kernels] += 1
        self._counts = counts
        self._begin_anew(list(zip(attention, numbers, strict=True)))

    def _begin_anew(self, layers: Sequence[tuple[Attention | None, int]]) -> None:
        self.seen = 0  # columns of the batch, padding included
        self.launches = 0
        self._steps = 0
        self._handed_out: KvgenLayer | None = None
        self._caches: list[Any] = []
        self._workspaces: dict[tuple[int, str], Any] = {}
        self._planned: set[tuple[int, str]] = set()
        super().__init__(layers=[KvgenLayer(self, *layer, index=i) for i, layer in enumerate(layers)])

    def __deepcopy__(self, memo: dict[int, Any]) -> KvgenCache:
        """A cache with the same tokens in a pool of its own: the kernels are shared."""
        new = memo[id(self)] = object.__new__(type(self))
        new.__dict__.update(
            {name: getattr(self, name) for name in ("dtype", "max_tokens", "page_size", "_sets", "_counts")}
        )
        new._begin_anew([(layer.attention, layer.number) for layer in self.layers])
        if self._caches:
            self._finish()
            new._allocate(self.batch, self.device)
            for ours, theirs in zip(self._pools(), new._pools(), strict=True):
                theirs.copy_(ours)
            new.lengths.copy_(self.lengths)
            new._next, new._tokens, new.seen = self._next.clone(), self._tokens.clone(), self.seen
        return new

    # --- a step -------------------------------------------------------------------------------------------------------

    def _allocate(self, batch: int, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ArgumentError(
                f"{versions.ARGUMENT}: got rows on {device}; kernels run on cuda, and on the CPU machine"
            )
        pages = -(-self.max_tokens // self.page_size)
        where = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
        self._caches = [
            made.Cache.empty(layers=count, requests=batch, pages=batch * pages, pages_per_request=pages, device=where)
            for made, count in zip(self._sets, self._counts, strict=True)
        ]
        self.batch, self.device = batch, device
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)  # before the step
        self._next = torch.zeros(batch, dtype=torch.int32, device=device)
        self._tokens = torch.ones(
            batch, self.max_tokens, dtype=torch.bool, device=device
        )  # which columns are no padding
        table = torch.arange(batch * pages, dtype=torch.int32, device=device).reshape(batch, pages)
        self._caches = [cache.step(self.lengths, table) for cache in self._caches]
        self._faults = Faults(self.device, "KvgenCache")
        self.errors = self._faults.word

    def hand_out(self, layer: KvgenLayer) -> None:
        """Rows of `layer` go to the model. Raises ArgumentError where those of the layer before came to another attention."""
        before, self._handed_out = self._handed_out, layer
        if before is not None:
            self._handed_out = None
            raise ArgumentError(
                f"{versions.ARGUMENT}: got a KvgenCache, but layer {before.index} attended without it; call "
                "model.set_attn_implementation('kvgen'); a model that keeps its own attention needs another cache"
            )

    def taken(self) -> None:
        """The rows handed out last have come to the attention function."""
        self._handed_out = None

    def begin(self, layer: KvgenLayer, rows: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Say what the step's rows are, at its first layer: `rows` are `[B, S, ...]`, `mask` the 2-D one of padding."""
        layer.done += 1
        if layer.done <= self._steps:
            return
        batch, new = rows.shape[:2]
        if not self._caches or (self.seen == 0 and (batch, rows.device) != (self.batch, self.device)):
            self._allocate(batch, rows.device)
        if batch != self.batch:
            raise ArgumentError(
                f"{versions.ARGUMENT}: got a batch of {batch}; the cache has {self.batch} requests; reset() it first"
            )
        if rows.device != self.device:
            raise ArgumentError(f"{versions.ARGUMENT}: got rows on {rows.device}; the cache is on {self.device}")
        self._finish()
        if self.seen + new > self.max_tokens:
            raise ArgumentError(
                f"max_tokens: got {self.max_tokens}; this step makes {self.seen + new} tokens; a request needs room for its "
                "prompt and answer"
            )
        columns = self.seen + new
        if mask is not None and tuple(mask.shape) != (batch, columns):
            raise ArgumentError(
                f"attention_mask: got the shape {list(mask.shape)}; the cache has {self.seen} tokens of {batch} requests and the "
                f"step {new}; pass {[batch, columns]}"
            )
        self._planned.clear()
        self.keep: torch.Tensor | None = None  # rows that are tokens; None: all
        counts = torch.full((batch,), new, dtype=torch.int32, device=self.device)
        if mask is not None:
            own = mask[:, -new:].bool()
            if not torch.equal(mask[:, : self.seen].bool(), self._tokens[:, : self.seen]):
                raise ArgumentError(
                    "attention_mask: got other padding among cached tokens than the steps that cached them; pass the same mask, "
                    "made longer"
                )
            if bool((own[:, 1:] < own[:, :-1]).any()):
                raise ArgumentError(
                    "attention_mask: got padding behind tokens; pad on the left (tokenizer.padding_side = 'left')"
                )
            if not bool(own.all()):
                self.keep, counts = own.reshape(-1).nonzero()[:, 0], own.sum(1, dtype=torch.int32)
        self.total = batch * new if self.keep is None else self.keep.numel()
        self.row_offsets = torch.zeros(batch + 1, dtype=torch.int32, device=self.device)
        torch.cumsum(counts, 0, out=self.row_offsets[1:])
        self._next = self.lengths + counts
        self._tokens[:, self.seen : columns] = True if self.keep is None else own
        self._steps += 1
        self.seen += new
        self.new = new

    def _finish(self) -> None:
        """The step before is over: its rows count as cached."""
        self.lengths.copy_(self._next)
        self._faults.poll()

    def raise_if_faulty(self) -> None:
        """Wait for the steps so far; raises FaultError, the first fault in its text, if a kernel met wrong data in one.

        Steps ask without waiting, so that a fault shows in a later step on a GPU. Faults of the last step show here, in
        `reset()`, `crop()` and copies, or as a RuntimeWarning when the cache is gone.
        """
        if self._caches:
            self._faults.wait()

    def attend(
        self,
        layer: KvgenLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store a step's rows, once, and attend: q `[B, Hq, S, D]` -> `[B, S, Hq, Dv]`, zeros where rows are padding."""
        attention = layer.attention
        assert attention is not None
        made, stream = self._sets[attention.kernels], stream_of(q.device)
        if layer.pending:
            layer.pending = False
            self.begin(layer, k.transpose(1, 2), mask)
            rows_k, rows_v = (self._rows(x.transpose(1, 2)) for x in (k, v))
            cache = self._caches[attention.kernels][layer.number]
            made.append(cache, rows_k, rows_v, self.row_offsets, errors=self.errors, stream=stream)
            self.launches += 1
        cache = self._caches[attention.kernels][layer.number]
        rows = self._rows(q.transpose(1, 2))
        out = rows.new_empty(*rows.shape[:2], made.Cache.ROLES[1].dim)
        kind = ("decode" if self.new == 1 and self.keep is None else "extend") + attention.suffix
        launcher, workspace = getattr(made, kind), self._workspace(attention.kernels, kind, cache, stream)
        more = {} if sinks is None else {"sinks": sinks.float().contiguous()}
        launcher(cache, rows, out, workspace=workspace, errors=self.errors, stream=stream, **more)
        self.launches += 1
        if q.device.type == "cpu":  # whose launches are done
            self._faults.poll()
        whole = out
        if self.keep is not None:
            whole = out.new_zeros(self.batch * self.new, *out.shape[1:])
            whole[self.keep] = out
        return whole.reshape(self.batch, self.new, *out.shape[1:])

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, S, H, D]` -> the rows that are tokens, `[T, H, D]`."""
        rows = x.reshape(-1, *x.shape[2:])
        return rows.contiguous() if self.keep is None else rows[self.keep]

    def _workspace(self, number: int, kind: str, cache: Any, stream: object) -> Any:
        """The workspace of one kind of attention, planned for this step."""
        key, launcher = (number, kind), getattr(self._sets[number], kind)
        found = self._workspaces.get(key)
        most = max(self.total, self.batch)
        if found is None or found.max_rows < most:
            room = 1 << (most - 1).bit_length()
            found = self._workspaces[key] = launcher.workspace(max_rows=room, device=self.errors.device)
        if key not in self._planned:
            self._planned.add(key)
            more = {"row_offsets": self.row_offsets} if kind.startswith("extend") else {}
            launcher.plan(cache, found, rows=self.total, stream=stream, **more)
            self.launches += 1
        return found

    # --- what generate asks of caches ---------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """The step's own rows, marked as those of the layer. Raises ArgumentError for a layer that the cache does not have."""
        if not 0 <= layer_idx < len(self.layers):
            raise ArgumentError(
                f"{versions.ARGUMENT}: got rows of layer {layer_idx}; the cache was made for a config of {len(self.layers)} "
                "layers; pass KvgenCache(model.config, max_tokens=...) of this model"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of each request, padding counted; 0 forgets none.

        Raises ArgumentError for a number above 0, which transformers 5 refuses too, and for more tokens than there are.
        """
        if not -self.seen <= tokens_to_remove <= 0:
            raise ArgumentError(
                f"tokens_to_remove: got {tokens_to_remove}; the cache has {self.seen} tokens; pass minus the number of tokens to "
                f"forget, from {-self.seen} to 0"
            )
        self._keep_first(self.seen + tokens_to_remove)
        if self._caches:
            self._faults.poll()

    def reset(self) -> None:
        """Forget all tokens, and faults; waits for the steps so far, and raises FaultError for one that was not told."""
        self._keep_first(0)
        if self._caches:
            self._faults.end()

    def _keep_first(self, columns: int) -> None:
        self.seen = min(max(0, columns), self.seen)
        self._handed_out = None
        if self._caches:
            self._next = self._tokens[:, : self.seen].sum(1, dtype=torch.int32)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Request i goes on with the tokens of request beam_idx[i]."""
        self._finish()
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """As `reorder_cache`; the number of requests stays."""
        if self._caches and len(indices) != self.batch:
            raise ArgumentError(
                f"{versions.ARGUMENT}: got {len(indices)} requests to go on with; the cache keeps its {self.batch}"
            )
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raises ArgumentError: the number of requests stays."""
        raise ArgumentError(
            f"{versions.ARGUMENT}: got {repeats} copies of each request; the cache keeps its number of requests; repeat the "
            "prompts"
        )

    def _select(self, requests: torch.Tensor) -> None:
        for held in self._pools():
            pages = held.view(self.batch, -1, *held.shape[1:])  # a request's pages lie behind each other
            pages.copy_(pages[requests.to(held.device)])
        self._next, self._tokens = self._next[requests], self._tokens[requests]

    def _pools(self) -> list[torch.Tensor]:
        pools = [pool for cache in self._caches for pool in (*cache.blocks, *cache.scales)]
        return [p if isinstance(p, torch.Tensor) else torch.from_numpy(p.view(np.uint8)) for p in pools]


def current_arch() -> Sequence[Arch]:
    """Architectures to compile for: the current GPU's, or those of all that are tested without one.

    Raises DeviceError for a GPU that no kernel can be compiled for.
    """
    if not torch.cuda.is_available():
        return DEFAULT_ARCHS
    return (cast(Arch, select_arch(torch.cuda.get_device_capability(), ARCHS)),)
