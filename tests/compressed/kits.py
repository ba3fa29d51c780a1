"""The sets of a layer of compressed attention: its window with the attention, its entries, its indexer's keys."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from kvgen import Block, KernelSet, Keys, Latent, Layout, Paged, Quant, RmsNorm, Rope, YarnScaling, ops
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import Op
from tests.compressed.statement import Codes, Form
from tests.support.harness import package


@dataclass(frozen=True)
class Kit:
    """A layer's form and heads, and the set of each of its caches; `chunk` is the most new tokens of a request that are
    single tokens or drafts."""

    form: Form
    heads: int
    index_heads: int
    window: KernelSet
    entries: KernelSet | None
    keys: KernelSet | None

    def generated(self, part: str) -> ModuleType:
        """The generated package of "window", "entries" or "keys"."""
        kernels = getattr(self, part)
        assert isinstance(kernels, KernelSet)
        return package(kernels)


def kit(name: str, form: Form, heads: int, index_heads: int, *, page: int = 8, drafts: int = 0) -> Kit:
    """The sets of a layer, called after `name`: window pages of `page` tokens, pages of entries of twice as many or one entry."""
    rope = _rope(form)
    entries, keys = None, None
    if form.rate:
        cache = latent(form, form.entry, page_size=max(1, 2 * page // form.rate), rate=form.rate)
        picks: list[Op] = [ops.ListKeys() if form.topk is None else ops.RemapIndices(counts=True, unseen="drop")]
        if form.candidates is not None:
            size = form.candidates[1]
            picks.append(ops.RemapIndices(name="remap_candidates", candidates=size, counts=True, unseen="drop"))
        entries = _set(f"{name}_entries", 1, cache, _pool(form, rope, drafts), *picks)
    if form.index is not None:
        cache = indexer(form, page_size=max(4, 2 * page // form.rate), rate=form.rate)
        norm = RmsNorm(multiply="before", eps=form.eps)
        append = ops.Append(rope=rope, q_out="none", k_norm=norm)  # of keys that a projection makes of entries
        write = append if form.index == "latent" else _pool(form, rope, drafts, hadamard=form.hadamard)
        query = ops.IndexerQuery(rope=rope, hadamard=form.hadamard, factor=1.0)
        scores = [ops.IndexerScores()]
        if form.candidates is not None:
            size = form.candidates[1]
            scores = [
                ops.IndexerScores(block_max=size, pin_newest=True),
                ops.IndexerScores(name="candidate_scores", candidates=size),
            ]
        keys = _set(f"{name}_keys", index_heads, cache, write, query, *scores)
    append = ops.Append(
        rope=rope,
        q_dim=form.dim,
        q_norm=RmsNorm(weight=False, eps=form.eps) if form.q_norm else None,
        k_norm=RmsNorm(over="row", multiply="before", eps=form.eps),
    )
    decode = ops.MlaDecode(
        sparse=True,
        scale=form.dim**-0.5,
        sinks="out",
        sources=(Keys(name="entries", cache=entries.cache),) if entries is not None else (),
    )
    operations = (append, ops.ListKeys(window=form.window), decode, ops.AttentionOutput(rope=rope, dim=form.dim))
    window = _set(f"{name}_window", heads, latent(form, form.row, page_size=page), *operations)
    return Kit(form, heads, index_heads, window, entries, keys)


def _set(name: str, heads: int, cache: Cache, *operations: Op) -> KernelSet:
    return KernelSet(name=name, q_heads=heads, cache=cache, ops=operations, arch=("sm_90a",))


def latent(form: Form, codes: Codes, *, page_size: int, rate: int = 1) -> Latent:
    """The cache of rows that are stored as `codes` says."""
    return Latent(
        dtype="bf16",
        latent_dim=form.dim - form.turned,
        rope_dim=form.turned,
        values="row",
        page_size=page_size,
        rate=rate,
        layout=Layout(kv="page token head dim", layers="pointers"),
        lengths="after",
        quant=quant(codes, pad=8 if codes.plain else None),
        quant_rope=not codes.plain,
    )


def quant(codes: Codes, pad: int | None = None) -> Quant:
    """The quantization of `codes`, scales behind the rows of a page, `pad` bytes of them a row."""
    given = {"scale_pad": pad} if pad else {}
    floor = {"amax_min": codes.floor} if codes.scale == "pow2" else {"scale_min": 2.0**-9}
    return Quant(
        dtype=codes.codes,
        scale_dtype="e8m0" if codes.scale == "pow2" else "e4m3",
        recipe="pow2" if codes.scale == "pow2" else "amax",
        block=Block(dim=codes.group),
        place="page",
        **floor,
        **given,
    )


def indexer(form: Form, *, page_size: int, rate: int) -> Paged:
    """The cache of an indexer's keys: e4m3, an f32 power of two a key."""
    scales = Quant(
        dtype="e4m3", scale_dtype="f32", block=Block(dim=form.index_dim), recipe="pow2", place="page", amax_min=1e-4
    )
    return Paged(
        dtype="bf16",
        kv_heads=1,
        head_dim=form.index_dim,
        page_size=page_size,
        rate=rate,
        layout=Layout(kv="page token head dim", layers="pointers"),
        stores="k",
        lengths="after",
        quant=scales,
    )


def _rope(form: Form) -> Rope:
    y = form.yarn
    scaling = None
    if y is not None:
        scaling = YarnScaling(
            factor=y.factor, original_max_positions=y.original, beta_fast=y.fast, beta_slow=y.slow, attention_factor=1.0
        )
    return Rope(style="interleaved", theta=form.theta, dim=form.turned, part="last", scaling=scaling)


def _pool(form: Form, rope: Rope, drafts: int, *, hadamard: bool = False) -> ops.PoolTokens:
    """The operation that makes entries, or pools an indexer's keys, with the roundings of the official recipe."""
    gated = {"overlap": form.overlap, "ape": form.overlap or form.rate > 2, "drafts": drafts} if form.gated else {}
    return ops.PoolTokens(
        name="pool",
        rope=rope,
        norm=RmsNorm(multiply="before", eps=form.eps),
        pooled_dtype="same",
        normed_dtype="same",
        latent_out=form.index == "latent",
        hadamard="k" if hadamard else None,
        **gated,
    )
