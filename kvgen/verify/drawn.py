"""Kernel sets that are drawn from what specs can say, of features that few sets of a project have.

A name says all: `drawn_rates_3` and a seed give the same set everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final, Literal

from kvgen.architectures import ARCHS
from kvgen.errors import SpecError
from kvgen.ops import Append, Decode, Extend, Gather, GatherRows, IndexerScores, MlaDecode, Scatter
from kvgen.schema import presets
from kvgen.schema.cache import Cache, Latent, Paged
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.keys import Keys
from kvgen.schema.mask import Mask
from kvgen.schema.quant import Block, Quant
from kvgen.schema.tables import CSR, Dense, Indirect, Ring

Draw = random.Random
_TRIES: Final = 100
_FLOATS: Final = ("bf16", "bf16", "f16")
_SCALES: Final = ("f32", "f16", "bf16")


def _quant(draw: Draw, *, zero: bool = False) -> Quant:
    """How K and V become codes, under scales that the kernels compute."""
    block = Block(dim=draw.choice((None, 16, 32)))
    if zero:
        return Quant(dtype=draw.choice(("i8", "i4")), scale_dtype=draw.choice(_SCALES), zero=True, block=block)
    match draw.choice(("fp8", "integers", "mx", "nvfp4")):
        case "fp8":
            return Quant(dtype=draw.choice(("e4m3", "e5m2")), scale_dtype=draw.choice(_SCALES), block=block)
        case "integers":
            fields: dict[str, Any] = {"dtype": draw.choice(("i8", "i4")), "scale_dtype": draw.choice(_SCALES)}
            return Quant(**fields, zero=draw.random() < 0.5, block=block)
        case "mx":
            return Quant(dtype=draw.choice(("e4m3", "e2m1")), scale_dtype="e8m0", recipe="pow2", block=Block(dim=32))
        case _:
            return Quant(dtype="e2m1", scale_dtype="e4m3", recipe="amax", block=Block(dim=16))


def _paged(draw: Draw, *, tables: tuple[Any, ...] = (Dense(), CSR()), **fields: Any) -> Paged:
    page = {"page_size": draw.choice((4, 8, 16, 5)), "table": draw.choice(tables)}
    if page["table"].token_slots:
        page["page_size"] = 1
    given = {"dtype": draw.choice(_FLOATS), "kv_heads": draw.choice((1, 2)), "head_dim": draw.choice((32, 64))}
    return Paged(**({"lengths": draw.choice(("before", "after"))} | given | page | fields))


def _kernels(draw: Draw, cache: Cache, *ops: Op, heads: int | None = None) -> KernelSet:
    group = draw.choice((1, 2, 4, 8))
    return KernelSet(q_heads=heads or cache.kv_heads * group, cache=cache, ops=ops, arch=ARCHS)


def _split(draw: Draw) -> Literal["none", "balanced"]:
    return "balanced" if draw.random() < 0.4 else "none"


def _drafts(draw: Draw, number: int) -> KernelSet:
    """Codes under computed scales, which drafts that are taken back leave behind."""
    cache = _paged(draw, quant=_quant(draw), tables=(Dense(), CSR(), Ring(window=20)))
    return _kernels(draw, cache, Append(), Gather(), Decode(rows=draw.choice((1, 2, 3))))


def _rates(draw: Draw, number: int) -> KernelSet:
    """Entries that stand for several tokens."""
    cache = _paged(draw, rate=draw.choice((2, 3, 4, 8)), quant=draw.choice((None, _quant(draw))))
    decode = Decode(rows=draw.choice((1, 2, 5)), split=_split(draw))
    return _kernels(draw, cache, Append(), Gather(), GatherRows(), Scatter(), decode)


def _ahead(draw: Draw, number: int) -> KernelSet:
    """Rows that see some tokens after their own: fewer than the step has, so that not all of it is visible."""
    window = draw.choice((None, 20, 33))
    cache = _paged(draw, lengths="before", tables=(Dense(), CSR(), Indirect()))
    decode = Decode(rows=draw.choice((4, 5)), mask=Mask(causal=False, window=window, ahead=draw.choice((1, 2))))
    extend = Extend(mask=Mask(causal=False, window=window, ahead=draw.choice((1, 2, 7))))
    return _kernels(draw, cache, decode, extend)


def _zero_points(draw: Draw, number: int) -> KernelSet:
    """Codes with zero points under prompts, where products of codes take the zero points' part away."""
    cache = _paged(draw, lengths="before", head_dim=64, page_size=16, quant=_quant(draw, zero=True))
    return _kernels(draw, cache, Append(), Extend(), Decode())


def _block_max(draw: Draw, number: int) -> KernelSet:
    """Largest scores of blocks of index keys; the first one of 16 keys, which no model has yet."""
    fields: dict[str, Any] = {name: draw.random() < 0.5 for name in ("pin_newest", "logits", "fill")}
    fields |= {"block_max": 16 if number == 0 else draw.choice((2, 4, 8, 16)), "rows": draw.choice((1, 2))}
    cache = presets.vllm_indexer(page_size=64, rate=draw.choice((1, 1, 2, 4)))
    return _kernels(draw, cache, IndexerScores(**fields), heads=64)


def _lists(draw: Draw, number: int) -> KernelSet:
    """Lists of latent rows in one cache or in two, by every kernel that reads them."""
    caches: tuple[Callable[[], Latent], ...] = (
        lambda: presets.flashmla(page_size=4),
        lambda: presets.flashmla_fp8(page_size=4),
        lambda: presets.flashmla_v4(page_size=4),
    )
    cache = draw.choice(caches[:2])()
    if number % 2:  # 448 dims with scales beside 64 without, in two caches as DeepSeek V4 has them
        cache = caches[2]()
    keys = (Keys(name="window", cache=presets.flashmla_v4(page_size=2)),) if number % 2 else ()
    decode = MlaDecode(scale=0.07, sparse=True, sources=keys, split=_split(draw))
    return _kernels(draw, cache, decode, heads=draw.choice((16, 64, 128)))


SUBJECTS: Final[dict[str, Callable[[Draw, int], KernelSet]]] = {
    "drafts": _drafts,
    "rates": _rates,
    "ahead": _ahead,
    "zero_points": _zero_points,
    "block_max": _block_max,
    "lists": _lists,
}


def names(count: int) -> list[str]:
    """The names of `count` sets of each subject."""
    return [f"drawn_{subject}_{number}" for subject in SUBJECTS for number in range(count)]


def drawn_set(name: str, seed: int) -> KernelSet:
    """The set of a name of `names`, valid for every architecture of kvgen; other sets under another seed."""
    subject, _, number = name.removeprefix("drawn_").rpartition("_")
    draw = random.Random(f"{seed}/{name}")
    for _ in range(_TRIES - 1):
        try:
            return SUBJECTS[subject](draw, int(number)).named(name)
        except SpecError:
            continue
    return SUBJECTS[subject](draw, int(number)).named(name)
