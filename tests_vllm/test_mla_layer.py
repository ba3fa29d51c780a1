"""Two MLA layers of KVGEN_MLA without an engine: a step of decodes, windows and prompts, against float64 and the raw pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from kvgen.integrations.vllm import mla
from kvgen.integrations.vllm.faults import StepFaults
from kvgen.integrations.vllm.mla_shard import MlaShard
from kvgen.integrations.vllm.step import Batch
from kvgen.integrations.vllm.v0_32_mla import KvgenMLAImpl
from kvgen.runtime.faults import FaultError

HEADS, NOPE, VALUES, PAGE, PAGES, COLUMNS = 4, 32, 48, 16, 60, 9
SCALE: Final = 0.11
K_SCALE: Final = 0.37
# Tokens before the step, and rows of it: decodes and windows, then prompts.
BEFORE: Final = [37, 20, 50, 0, 70, 25]
NEW: Final = [1, 5, 13, 40, 60, 30]
FEW: Final = 3
# Chunks of the tokens before the prompts: of each prompt, as (prompt, first token, tokens).
CHUNKS: Final = [[(1, 0, 48)], [(1, 48, 22), (2, 0, 25)]]
# Largest error of an output about 1, and dims: 656-byte rows have one size.
KINDS: Final = {
    "auto": (64, 16, 0.004),
    "fp8": (64, 32, 0.02),
    "fp8_ds_mla": (512, 64, 0.004),
}


def i32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def offsets(counts: list[int]) -> torch.Tensor:
    return i32([sum(counts[:i]) for i in range(len(counts) + 1)])


class Layer:
    """A layer's weights, pool and implementation, as vLLM would have made them."""

    def __init__(self, kind: str, name: str) -> None:
        self.latent, self.rope, _ = KINDS[kind]
        shard = MlaShard(HEADS, self.latent, self.rope, NOPE, VALUES, "f16", SCALE, kind)
        self.kind, self.layer_name = kind, name
        self._k_scale, self._k_scale_float = torch.tensor(K_SCALE), K_SCALE
        row, dtype = (
            (656, torch.uint8)
            if kind == "fp8_ds_mla"
            else (shard.row_dim, torch.uint8 if kind == "fp8" else torch.float16)
        )
        self.memory = torch.full((PAGES, PAGE, row), 77, dtype=dtype)
        self.up = (torch.randn(self.latent, HEADS, NOPE + VALUES) * self.latent**-0.5).half()
        impl = object.__new__(KvgenMLAImpl)
        impl.shard, impl.layer_name, impl.num_heads, impl.kv_lora_rank = shard, name, HEADS, self.latent
        impl.qk_nope_head_dim, impl.v_head_dim, impl._use_flashinfer_concat_mla_k = NOPE, VALUES, False
        impl.kv_b_proj = lambda rows: (rows @ self.up.flatten(1), None)
        impl._theirs, impl._opened = False, None
        self.impl = impl

    @property
    def pool(self) -> mla.LatentPool:
        return mla.LatentPool(self.impl.shard, self.memory, self._k_scale.view(1, 1) if self.kind == "fp8" else None)

    def append(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        latent, rope = rows.split([self.latent, self.rope], dim=1)
        self.impl.do_kv_cache_update(latent, rope[:, None], self.memory, slots, self.kind, self._k_scale)

    def stored(self, slots: torch.Tensor) -> torch.Tensor:
        """What the raw pool holds, in float64: read without kvgen."""
        rows = self.memory.flatten(0, 1)[slots]
        if self.kind == "auto":
            return rows.double()
        if self.kind == "fp8":
            return rows.view(torch.float8_e4m3fn).double() * float(self._k_scale)
        codes = rows[:, :512].contiguous().view(torch.float8_e4m3fn).double().unflatten(1, (4, 128))
        scales = rows[:, 512:528].contiguous().view(torch.float32).double()
        rope = rows[:, 528:].contiguous().view(torch.float16).double()
        return torch.cat([(codes * scales[:, :, None]).flatten(1), rope], 1)


class Requests:
    """Pages of the requests, in no order; rows past their lengths are ids that no pool has."""

    def __init__(self) -> None:
        ids = torch.randperm(PAGES, dtype=torch.int32)
        self.table = torch.full((len(NEW), COLUMNS), 10_000, dtype=torch.int32)
        taken = 0
        for request, (before, new) in enumerate(zip(BEFORE, NEW, strict=True)):
            pages = -(-(before + new) // PAGE)
            self.table[request, :pages] = ids[taken : taken + pages]
            taken += pages
        self.free = ids[taken:]

    def slots(self, request: int, first: int, last: int) -> torch.Tensor:
        tokens = torch.arange(first, last)
        return self.table[request, tokens // PAGE].long() * PAGE + tokens % PAGE


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, before: int) -> torch.Tensor:
    """Rows q `[n, H, D]` behind `before` tokens of k and v `[before + n, H, ...]`, causal, in float64."""
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
    seen = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(before)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def step_of(requests: Requests, layers: list[Layer], faults: StepFaults, table: torch.Tensor) -> mla.MlaStep:
    """The step of BEFORE and NEW, as the builder describes it."""
    lengths = i32([a + b for a, b in zip(BEFORE, NEW, strict=True)])
    group = mla.MlaGroup(
        {layer.layer_name: layer.pool for layer in layers}, faults, max_rows=256, max_requests=8, arch=["sm_80"]
    )
    few = Batch(offsets(NEW[:FEW]), lengths[:FEW], table[:FEW], sum(NEW[:FEW]), max(NEW[:FEW]))
    starts = offsets(NEW[FEW:])
    chunks = []
    for chunk in CHUNKS:
        prompts = slice(chunk[0][0], chunk[-1][0] + 1)
        rows = starts[prompts.start : prompts.stop + 1]
        chunks.append(
            mla.ContextChunk(
                seq_lens=lengths[FEW:][prompts],
                block_table=table[FEW:][prompts],
                starts=i32([first for _, first, _ in chunk]),
                kv_offsets=offsets([count for _, _, count in chunk]),
                tokens=sum(count for _, _, count in chunk),
                row_offsets=rows - rows[0],
                first_row=int(rows[0]),
                rows=int(rows[-1] - rows[0]),
            )
        )
    prompts_of = mla.Prompts(starts, sum(NEW[FEW:]), tuple(chunks))
    return group.begin(mla.in_windows(few, NEW[:FEW], i32), prompts_of)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step(kind: str) -> None:
    torch.manual_seed(0)
    requests, faults = Requests(), StepFaults("cpu")
    layers = [Layer(kind, f"layers.{i}") for i in range(2)]
    row = layers[0].latent + layers[0].rope
    rows = [[torch.randn(a + b, row).half() for a, b in zip(BEFORE, NEW, strict=True)] for _ in layers]
    for layer, own in zip(layers, rows, strict=True):
        for first, last in ((0 * i32(BEFORE), i32(BEFORE)), (i32(BEFORE), i32(BEFORE) + i32(NEW))):
            spans = list(zip(first.tolist(), last.tolist(), strict=True))
            slots = [requests.slots(r, a, b) for r, (a, b) in enumerate(spans)]
            # A row of padding behind the others.
            layer.append(
                torch.cat([*(x[a:b] for x, (a, b) in zip(own, spans, strict=True)), torch.ones(1, row).half()]),
                torch.cat([*slots, torch.tensor([-1])]),
            )
        assert bool((layer.memory[requests.free.long()] == 77).all())  # nothing was written to other pages
    step = step_of(requests, layers, faults, requests.table)
    metadata: Any = SimpleNamespace(step=step)
    for layer, own in zip(layers, rows, strict=True):
        check_decodes(layer, requests, metadata)
        check_prompts(layer, requests, own, metadata)


def check_decodes(layer: Layer, requests: Requests, metadata: Any) -> None:
    q = torch.randn(sum(NEW[:FEW]), HEADS, layer.latent + layer.rope).half()
    got, lse = layer.impl.forward_mqa(q.split([layer.latent, layer.rope], -1), layer.memory, metadata, layer)
    assert got.shape == (len(q), HEADS, layer.latent)
    for request, (first, last) in enumerate(zip(offsets(NEW[:FEW]), offsets(NEW[:FEW])[1:], strict=False)):
        keys = layer.stored(requests.slots(request, 0, BEFORE[request] + NEW[request]))[:, None].expand(-1, HEADS, -1)
        expected = attention(q[first:last], keys, keys[..., : layer.latent], BEFORE[request])
        assert float((got[first:last] - expected).abs().max()) < KINDS[layer.kind][2]
    scores = torch.einsum("hd,khd->hk", q[0].double(), keys_of(layer, requests, 0)) * SCALE
    assert float((lse[0] - scores.logsumexp(-1)).abs().max()) < 0.02


def keys_of(layer: Layer, requests: Requests, request: int) -> torch.Tensor:
    return layer.stored(requests.slots(request, 0, BEFORE[request] + NEW[request]))[:, None].expand(-1, HEADS, -1)


def check_prompts(layer: Layer, requests: Requests, own: list[torch.Tensor], metadata: Any) -> None:
    new = [rows[before:] for rows, before in zip(own, BEFORE, strict=True)][FEW:]
    latent, rope = torch.cat(new).split([layer.latent, layer.rope], 1)
    q = torch.randn(len(latent), HEADS, NOPE + layer.rope).half()
    out = torch.full((len(q), HEADS * VALUES), torch.nan).half()
    layer.impl.forward_mha(q, latent, rope[:, None], layer.memory, metadata, layer._k_scale, out)
    got, starts = out.view(-1, HEADS, VALUES), offsets(NEW[FEW:])
    for i, rows in enumerate(new):
        before = layer.stored(requests.slots(FEW + i, 0, BEFORE[FEW + i]))
        tokens = torch.cat([before, rows.double()])  # a prompt's own rows are attended to as they came
        heads = torch.einsum("tl,lhd->thd", tokens[:, : layer.latent], layer.up.double())
        k_rope = tokens[:, None, layer.latent :].expand(-1, HEADS, -1)
        k, v = torch.cat([heads[..., :NOPE], k_rope], -1), heads[..., NOPE:]
        expected = attention(q[starts[i] : starts[i + 1]], k, v, BEFORE[FEW + i])
        assert float((got[starts[i] : starts[i + 1]] - expected).abs().max()) < KINDS[layer.kind][2]


def test_a_bad_page_is_found_a_step_later() -> None:
    """A page id that the pool does not have makes rows NaN, and the next step raises."""
    torch.manual_seed(0)
    requests, faults, layer = Requests(), StepFaults("cpu"), Layer("auto", "layers.0")
    layer.memory.zero_()
    table = requests.table.clone()
    table[0, 0] = PAGES
    step = step_of(requests, [layer], faults, table)
    q = torch.zeros(sum(NEW[:FEW]), HEADS, layer.latent + layer.rope).half()
    got, _ = layer.impl.forward_mqa(q, layer.memory, SimpleNamespace(step=step), layer)
    assert bool(got[0].isnan().all()) and not bool(got[1:].isnan().any())
    with pytest.raises(FaultError, match="PAGE_ID"):
        step_of(requests, [layer], faults, requests.table)
