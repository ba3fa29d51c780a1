"""The kernel sets that the operation tests build: every preset, table form, element type and awkward size."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import Any

from kvgen import CSR, Continuous, Dense, KernelSet, Layout, Mapped, Paged, PerKV, Ragged, Ring, ops, presets
from kvgen.architectures import Arch
from tests.support.cache_matrix import CHOSEN
from tests.support.drawn import drawn_sets
from tests.support.engine_sets import ENGINES, QUANTIZED
from tests.support.family import drawn_family, family_sets
from tests.support.family_rows import COVER, REST


def _set(
    name: str,
    cache: Any,
    group: int,
    *,
    index: Any = None,
    split: Any = "none",
    scale: float | None = None,
    decodes: bool = True,
) -> KernelSet:
    """All operations that the cache can have; `index` is the type of their own offsets and slots. `decodes`: False where
    tests/ops/test_decode_rows.py decodes such a cache."""
    found: list[Any] = [ops.Append(index_dtype=index), ops.Gather(index_dtype=index)]
    if not (cache.ragged or isinstance(cache.page_table, PerKV)):
        found.append(ops.Append(name="append_slots", rows="slots", index_dtype=index))
    if cache.stores == "kv" and decodes:
        found.append(ops.Decode(index_dtype=index, split=split, scale=scale))
    return KernelSet(name=name, q_heads=cache.kv_heads * group, cache=cache, ops=tuple(found))


_VARLEN = Layout(k="layer token head dim", v="layer token dim head")
# Named after the preset; sizes are the awkward ones.
PRESETS = (
    _set("max_paged", presets.max_paged(dtype="bf16", kv_heads=2, head_dim=128, page_size=16), 4),
    _set("max_continuous", presets.max_continuous(dtype="f32", kv_heads=2, head_dim=64), 3),
    _set("vllm", presets.vllm(dtype="f16", kv_heads=2, head_dim=32, page_size=16), 7, scale=0.3),
    _set("vllm_hnd", presets.vllm_hnd(dtype="f16", kv_heads=3, head_dim=16, page_size=3), 1),
    _set("vllm_interleaved", presets.vllm_interleaved(dtype="f32", kv_heads=2, head_dim=12, page_size=16), 3),
    _set("vllm_packed", presets.vllm_packed(dtype="bf16", kv_heads=2, head_dim=32, page_size=16), 4),
    _set("vllm_xpacked", presets.vllm_xpacked(dtype="bf16", kv_heads=2, head_dim=80, page_size=16), 1),
    _set("flashinfer_hnd", presets.flashinfer_hnd(dtype="bf16", kv_heads=2, head_dim=48, page_size=3), 8),
    _set("flashinfer_nhd", presets.flashinfer_nhd(dtype="f16", kv_heads=3, head_dim=32, page_size=16), 3),
    _set("tensorrt_llm", presets.tensorrt_llm(dtype="bf16", kv_heads=2, head_dim=32, page_size=16), 4),
    _set("sglang", presets.sglang(dtype="bf16", kv_heads=2, head_dim=64), 4, index="i32"),
    _set("flashmla", presets.flashmla(), 16),
    _set(
        "flash_attention", presets.flash_attention(dtype="f16", kv_heads=2, head_dim=48, v_head_dim=32, page_size=3), 3
    ),
    _set("flash_attention_varlen", presets.flash_attention_varlen(dtype="bf16", kv_heads=2, head_dim=64), 4),
)

OTHERS = (
    _set("max_f32", Paged(dtype="f32", kv_heads=2, head_dim=4, page_size=2), 1),
    _set(
        "csr_lengths",
        Paged(dtype="f16", kv_heads=1, head_dim=40, page_size=16, table=CSR(dtype="u32")),
        3,
        decodes=False,
    ),
    _set(
        "csr_multiplied",
        Paged(dtype="f32", kv_heads=2, head_dim=8, page_size=3, table=CSR(dtype="i64", id_multiplier=3)),
        1,
        index="i64",
    ),
    _set(
        "per_kv_tensors",
        Paged(
            dtype="f32",
            kv_heads=1,
            head_dim=3,
            page_size=1,
            layout=Layout(k="page token head dim", v="page head dim token", layers="pointers"),
            table=PerKV(dtype="u32", id_multiplier=2),
        ),
        3,
    ),
    # Block tables where they stay.
    _set(
        "mapped",
        presets.vllm(dtype="bf16", kv_heads=2, head_dim=32, page_size=16).model_copy(update={"table": Mapped()}),
        4,
    ),
    _set(
        "mapped_ids",
        Paged(
            dtype="f32",
            kv_heads=1,
            head_dim=8,
            page_size=3,
            table=Mapped(dtype="u32", request_dtype="i64", id_multiplier=2),
        ),
        3,
        decodes=False,
    ),
    # Windows.
    _set(
        "ring_f32",
        Paged(dtype="f32", kv_heads=1, head_dim=3, page_size=3, table=Ring(window=10), lengths_dtype="u32"),
        7,
    ),
    _set(
        "ring_after",
        Paged(
            dtype="bf16",
            kv_heads=2,
            head_dim=64,
            page_size=16,
            table=Ring(window=40, dtype="i64"),
            lengths="after",
            lengths_dtype="i32",
        ),
        4,
        decodes=False,
    ),
    # Sizes.
    _set(
        "falcon",
        Paged(dtype="bf16", kv_heads=1, head_dim=64, page_size=16, layout="page kv layer token dim"),
        71,
        index="u32",
    ),
    _set("wide_f16", Paged(dtype="f16", kv_heads=1, head_dim=256, page_size=3), 4, decodes=False),
    _set("dim_one", Paged(dtype="f32", kv_heads=3, head_dim=1, page_size=1), 3),
    _set("dim_three", Paged(dtype="bf16", kv_heads=2, head_dim=3, page_size=3), 4),
    _set("page_64", Paged(dtype="bf16", kv_heads=1, head_dim=64, page_size=64, lengths_dtype="i64"), 8, decodes=False),
    _set(
        "latent_kv",
        Paged(
            dtype="bf16",
            kv_heads=1,
            head_dim=96,
            v_head_dim=64,
            page_size=16,
            layout=Layout(k="page layer token head dim", v="layer page token dim"),
        ),
        7,
    ),
    _set(
        "continuous_hnd",
        Continuous(
            dtype="f16",
            kv_heads=2,
            head_dim=40,
            max_tokens=40,
            layout=Layout(kv="block layer kv head token dim"),
            table_dtype="i64",
            lengths="after",
            lengths_dtype="i64",
        ),
        1,
        decodes=False,
    ),
    # Heads outside of layers, and of pages.
    _set("heads_outside", CHOSEN["heads_outside"], 4),
    _set("heads_outermost", CHOSEN["heads_outermost"], 2, split="balanced"),
    # No pages.
    _set("ragged", Ragged(dtype="f16", kv_heads=3, head_dim=24, v_head_dim=40, layout=_VARLEN, lengths_dtype="i64"), 3),
    _set(
        "ragged_heads",
        Ragged(dtype="bf16", kv_heads=2, head_dim=64, total_tokens=180, layout="layer kv head token dim"),
        4,
        index="i32",
    ),
    _set(
        "ragged_splits",
        Ragged(dtype="f32", kv_heads=2, head_dim=5, layout="layer token kv head dim"),
        1,
        split="balanced",
    ),
    # Requests that several blocks share.
    _set("splits", Paged(dtype="f32", kv_heads=2, head_dim=4, page_size=16), 3, split="balanced"),
    _set(
        "splits_ring",
        Paged(
            dtype="bf16",
            kv_heads=1,
            head_dim=16,
            page_size=16,
            table=Ring(window=300),
            lengths="after",
            lengths_dtype="i32",
        ),
        8,
        split="balanced",
    ),
    _set("splits_csr", presets.flashinfer_hnd(dtype="f16", kv_heads=1, head_dim=8, page_size=7), 11, split="balanced"),
    # Orders of axes that no engine has yet.
    _set(
        "layers_first",
        Paged(
            dtype="bf16",
            kv_heads=2,
            head_dim=32,
            page_size=16,
            layout="layer kv page token head dim",
            table=Dense(dtype="i64", id_multiplier=2),
        ),
        1,
        decodes=False,
    ),
    _set(
        "split_token",
        Paged(
            dtype="f16",
            kv_heads=2,
            head_dim=24,
            page_size=16,
            layout="page layer token/4 head kv dim/8 token%4 dim%8",
        ),
        4,
    ),
    _set(
        "swizzled",
        Paged(
            dtype="bf16",
            kv_heads=2,
            head_dim=64,
            page_size=16,
            layout=Layout(kv="page kv layer head token dim", swizzle=(3, 3, 3)),
        ),
        4,
    ),
    _set(
        "transposed_v",
        Paged(
            dtype="f16",
            kv_heads=2,
            head_dim=24,
            v_head_dim=40,
            page_size=5,
            layout=Layout(k="page layer token head dim", v="layer page head dim token"),
            lengths="after",
        ),
        3,
        decodes=False,
    ),
)

# `make campaign` draws many more.
_SEED = int(os.environ.get("KVGEN_DRAWN_SEED", "1"))
DRAWN = drawn_sets(_SEED, int(os.environ.get("KVGEN_DRAWN", "4")))

SETS = {s.name: s for s in PRESETS + OTHERS + DRAWN}
# Their append, gather and decode are made of what those of other sets are (tests/forms), at other sizes or in another order of
# axes, which tests/accessor addresses in every run: a campaign compiles and runs them too.
_ALIKE = (
    "vllm_hnd", "flashinfer_nhd", "csr_lengths", "wide_f16", "dim_one", "page_64", "latent_kv",
    "heads_outside", "splits_ring", "splits_csr", "layers_first", "drawn_1_3", "vllm_interleaved", "vllm_packed", "tensorrt_llm",
    "flash_attention", "heads_outermost", "flash_attention_varlen", "continuous_hnd", "max_f32",
)  # fmt: skip
CAMPAIGN = "KVGEN_FAMILY" in os.environ or "KVGEN_DRAWN" in os.environ
RUN = {name: kernels for name, kernels in SETS.items() if CAMPAIGN or name not in _ALIKE}
# Quantized and latent caches; `make campaign` has all pairs, and draws as many more as KVGEN_FAMILY says.
_COUNT = int(os.environ.get("KVGEN_FAMILY", "0"))
FAMILY = {s.name: s for s in family_sets(COVER + REST + drawn_family(_SEED, _COUNT) if _COUNT else COVER)}
# Loads and stores of 16 bytes, chunks of requests, tensor cores: run for every architecture they are generated for.
BOTH = (
    *("max_paged", "splits", "mla_plain", "mla_rows"),
    *("families_balanced", "families_rows", "families_invariant", "families_narrow"),
)
ALL = SETS | FAMILY | ENGINES | QUANTIZED


def having(sets: Mapping[str, KernelSet], op: str) -> list[str]:
    """The names of the sets that have an operation of this name."""
    return [name for name, kernels in sets.items() if any(o.name == op for o in kernels.ops)]


def splits_of(kernels: KernelSet) -> int:
    """1, or 2 where several blocks may share a request in decode, which then takes a planned workspace."""
    return 1 + any(op.split != "none" for op in kernels.ops if isinstance(op, ops.Decode))


def archs_of(kernels: KernelSet) -> tuple[Arch, ...]:
    """The architectures that a set's tests build and run it for: one each, in turn, so that its kernels are compiled once.

    In a campaign, and of the sets whose kernels differ most from one to the other, all of them.
    """
    if len(kernels.arch) == 1 or CAMPAIGN or kernels.name in BOTH:
        return kernels.arch
    return (kernels.arch[zlib.crc32(kernels.name.encode()) % len(kernels.arch)],)
