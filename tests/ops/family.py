"""Quantized and latent caches: the factors of the family, every valid combination, and a few that cover all pairs.

A combination is valid if the spec takes it; nothing here knows the rules.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any, Final

from pydantic import ValidationError

from kvgen import CSR, Block, Continuous, Dense, Indirect, KernelSet, Latent, Layout, Paged, PerKV, Quant, Ring, ops
from kvgen.errors import KvgenError

Factors = dict[str, str]
Value = tuple[str, str]
Pair = tuple[str, str, str, str]

# (heads, dims) that share a scale.
BLOCKS: Final[dict[str, tuple[int | None, int | None]]] = {
    "row": (1, None),
    "group": (1, 8),
    "between": (1, 12),  # no power of two
    "short": (1, 16),  # the last one of a row is shorter
    "element": (1, 1),
    "heads": (None, None),
    "head_pair": (2, None),
}
QUANT_FACTORS: Final[dict[str, tuple[str, ...]]] = {
    "code": ("e4m3", "e5m2", "i8", "i4", "e2m1"),
    "scale_dtype": ("none", "f32", "f16", "bf16", "e4m3"),
    "scale": ("computed", "given"),
    "block": tuple(BLOCKS),
    "zero": ("no", "yes"),
    "recipe": ("amax", "pow2", "max", "global"),
    "place": ("pool", "page", "row"),
    "order": ("linear", "swizzled"),
    "own_table": ("no", "yes"),
    "residual": ("no", "yes"),
}
CACHE_FACTORS: Final[dict[str, tuple[str, ...]]] = {
    "variant": ("paged", "continuous", "k_only", "latent", "latent_whole"),
    "dtype": ("f32", "f16", "bf16"),
    "roles": ("both", "k", "v", "differ"),
    "layout": ("nhd", "hnd", "apart", "pointers", "split", "kv_inside", "swizzle", "scales_apart", "rope"),
    "table": ("dense", "dense_i64", "csr", "csr_last", "per_kv", "indirect", "ring"),
}
# Factors whose pairs with one another every run covers, and other such pairs.
OWN: Final = frozenset({"code", "recipe", "scale", "zero", "residual", "roles", "place", "order"})
OWN_PAIRS: Final = tuple({"scale_dtype", other} for other in ("code", "recipe", "zero"))
# Reshapes of a page's own axes, of token and of dim.
SPLIT: Final = "page {kv}layer token/2 head dim/8 token%2 dim%8"
LAYOUTS: Final = {
    "nhd": Layout(kv="page kv layer token head dim"),
    "hnd": Layout(kv="layer page kv head token dim"),
    "apart": Layout(k="page layer token head dim", v="layer page head token dim"),
    "pointers": Layout(kv="page kv token head dim", layers="pointers"),
    "split": Layout(kv=SPLIT.format(kv="kv ")),
    "kv_inside": Layout(kv="page layer token head kv dim"),
    "swizzle": Layout(kv="page kv layer token head dim", swizzle=(1, 2, 2)),
    "scales_apart": Layout(
        kv="page kv layer token head dim", scales="page layer head token dim", v_scales="layer page token head dim"
    ),
}


def _quant(f: Factors) -> Quant:
    fields: dict[str, Any] = {"dtype": f["code"]}
    for name in ("scale_dtype", "scale", "recipe", "place", "order"):
        if f[name] != QUANT_FACTORS[name][0]:
            fields[name] = f[name]
    for name in ("zero", "own_table"):
        if f[name] == "yes":
            fields[name] = True
    if f["residual"] == "yes":
        fields["residual"] = 4
    heads, dims = BLOCKS[f["block"]]
    token = None if f["scale"] == "given" else 4 if f["residual"] == "yes" else 1
    if f["scale_dtype"] != "none" or f["block"] != "row":
        fields["block"] = Block(token=token, head=heads, dim=dims)
    return Quant(**fields)


def _other(f: Factors) -> Quant:
    """How V is quantized where it is not as K."""
    if f["place"] == "page":
        return Quant(dtype=f["code"], scale_dtype="f16", place="page")  # type: ignore[arg-type]
    if f["code"] in ("i4", "e2m1") or f["layout"] == "apart":
        return Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(dim=4))
    return Quant(dtype="e4m3")


def _layout(f: Factors) -> Layout:
    if f["layout"] == "rope" and not f["variant"].startswith("latent"):
        raise ValueError("only latent rows have a RoPE part")
    if not f["variant"].startswith("latent") and f["variant"] != "k_only" and f["table"] != "per_kv":
        return LAYOUTS[f["layout"]]
    changed = LAYOUTS["nhd"] if f["layout"] == "rope" else LAYOUTS[f["layout"]]
    # No kv axis: one row a token, or page ids of their own.
    fields = changed.model_dump(exclude_unset=True)
    if fields.get("kv"):
        fields["kv"] = fields["kv"].replace("kv ", "")
    if f["variant"] in ("latent", "latent_whole"):
        fields = {n: t.replace(" head", "") if isinstance(t, str) and n != "layers" else t for n, t in fields.items()}
        if f["layout"] == "rope":
            fields["rope"] = "layer page token dim"
    if f["table"] != "per_kv":
        fields.pop("v", None)
        fields.pop("v_scales", None)
    return Layout(**fields)


def _table(f: Factors) -> tuple[Any, bool]:
    """The page table, and whether lengths count this step's tokens."""
    match f["table"]:
        case "dense_i64":
            return Dense(dtype="i64", id_multiplier=2), True
        case "csr":
            return CSR(), False
        case "csr_last":
            return CSR(last_page_len=True), True
        case "per_kv":
            return PerKV(), True
        case "indirect":
            return Indirect(), False
        case "ring":
            return Ring(window=20), False
    return Dense(align=2), False


def _cache(f: Factors) -> Any:
    quant, roles = _quant(f), f["roles"]
    table, after = _table(f)
    fields: dict[str, Any] = {"dtype": f["dtype"], "layout": _layout(f), "lengths": "after" if after else "before"}
    match roles:
        case "both":
            fields["quant"] = quant
        case "k" | "v":
            fields[f"{roles}_quant"] = quant
        case "differ":
            fields |= {"k_quant": quant, "v_quant": _other(f)}
    tiles = f["order"] == "swizzled"
    page = 128 if tiles else 1 if f["table"] == "indirect" else 8
    if f["variant"].startswith("latent"):
        return Latent(
            latent_dim={"between": 48, "short": 64}.get(f["block"], 32) if tiles else 32,
            rope_dim=8,
            quant_rope=f["variant"] == "latent_whole",
            page_size=page,
            table=table,
            **fields,
        )
    four = {"group": 32, "between": 48, "short": 56}.get(f["block"], 24)
    fields["head_dim"] = four if tiles else 40 if f["block"] == "short" else 24
    fields["kv_heads"] = 4 if f["block"] == "head_pair" else 2
    if f["variant"] == "continuous":
        if f["table"] != "dense":
            raise ValueError("continuous caches have one form of table")
        return Continuous(max_tokens=128 if tiles else None if f["layout"] == "nhd" else 24, **fields)
    return Paged(page_size=page, table=table, stores="k" if f["variant"] == "k_only" else "kv", **fields)


def with_operations(name: str, cache: Any, *, decodes: bool = True, slots: bool = True) -> KernelSet:
    """A set of the cache with every operation that it can have, decode and append by slots if asked.

    Raises ValueError or SpecError if it is none.
    """
    found: list[Any] = [ops.Append(), ops.Gather()]
    if cache.storage.residual:
        found.insert(0, ops.Seal())
    if cache.stores == "kv" and decodes:
        found.append(ops.Decode())
    fields: dict[str, Any] = {"name": name, "q_heads": cache.kv_heads * 2, "cache": cache}
    if slots:
        try:
            return KernelSet(ops=(*found, ops.Append(name="append_slots", rows="slots")), **fields)
        except ValidationError:
            pass
    return KernelSet(ops=tuple(found), **fields)


def family_set(name: str, f: Factors, **some: bool) -> KernelSet:
    """The set of a combination; raises ValueError or SpecError if it is none."""
    return with_operations(name, _cache(f), **some)


def is_valid(f: Factors) -> bool:
    """Whether the spec takes a combination."""
    try:
        family_set("any", f)
    except (ValueError, KvgenError):  # pydantic's is a ValueError
        return False
    return True


@cache
def quants() -> tuple[Factors, ...]:
    """Every valid combination of the factors of a Quant."""
    found = []
    for values in product(*QUANT_FACTORS.values()):
        factors = dict(zip(QUANT_FACTORS, values, strict=True))
        try:
            _quant(factors)
        except ValidationError:
            continue
        found.append(factors)
    return tuple(found)


def draw(rng: random.Random) -> Factors:
    """A valid combination at random."""
    while True:
        cache_factors = {name: rng.choice(values) for name, values in CACHE_FACTORS.items()}
        wanted = rng.choice(list(QUANT_FACTORS))
        value = rng.choice(QUANT_FACTORS[wanted])  # rare values as often as others
        found = rng.choice([q for q in quants() if q[wanted] == value]) | cache_factors
        if is_valid(found):
            return found


def pairs(f: Factors) -> Iterator[Pair]:
    """Every two factors of a combination with their values."""
    for (a, x), (b, y) in combinations(f.items(), 2):
        yield a, x, b, y


def own(pair: Pair) -> bool:
    """Whether a pair is for these tests to cover in every run: two of what rows are made codes by.

    Pairs of layout x quantization x variant x page table x dtype are in the accessor's cover (tests/accessor/grid.py).
    """
    return {pair[0], pair[2]} <= OWN or {pair[0], pair[2]} in OWN_PAIRS


def covering(candidates: Sequence[Factors], wanted: Callable[[Pair], bool], times: int) -> list[Factors]:
    """Few of the candidates that have all their wanted pairs between them, and each value so many times, greedily."""
    having = [(f, set(pairs(f))) for f in candidates]
    all_missing = set[Pair]().union(*(p for _, p in having))
    missing = {p for p in all_missing if wanted(p)}
    met, possible, chosen = Counter[Value](), Counter(v for f in candidates for v in f.items()), list[Factors]()

    def gain(one: tuple[Factors, set[Pair]]) -> tuple[int, int]:
        few = sum(met[value] < min(times, possible[value]) for value in one[0].items())
        return 5 * len(one[1] & missing) + few, len(one[1] & all_missing)

    while having and gain(best := max(having, key=gain))[0]:
        chosen.append(best[0])
        having.remove(best)
        missing -= best[1]
        all_missing -= best[1]
        met.update(best[0].items())
    return chosen


def title(f: Factors) -> str:
    """What a combination is, in short: what differs from the first value of every factor."""
    first = {name: values[0] for name, values in (QUANT_FACTORS | CACHE_FACTORS).items()}
    words = [f"{v}" if v != "yes" else n for n, v in f.items() if n in ("code", "variant") or v != first[n]]
    return "_".join(words)


def _lines(combinations_: Iterable[Factors]) -> str:
    return "\n".join(" ".join(f.values()) for f in combinations_)


VALUE_TIMES: Final = 3  # that each value of each factor is in the cover of every run, where it can be
TIMES: Final = {"decode": 2, "append_slots": 2}  # that each value of each factor has an operation, where it can


def family_sets(text: str) -> tuple[KernelSet, ...]:
    """The sets of combinations that are written one a line, as running this module prints them.

    All append and gather. Decode and append by slots, which take as long to compile as both, are there where one of the
    values has not met them often enough; in a campaign everywhere.
    """
    found: list[KernelSet] = []
    met = {name: Counter[Value]() for name in TIMES}
    for i, line in enumerate(text.strip().splitlines()):
        factors = dict(zip((*QUANT_FACTORS, *CACHE_FACTORS), line.split(), strict=True))
        wanted = {n: any(met[n][v] < times for v in factors.items()) for n, times in TIMES.items()}
        campaign = "KVGEN_FAMILY" in os.environ
        name = f"q{i}_{title(factors)}"[:40].rstrip("_")
        decodes, slots = (campaign or wanted[n] for n in TIMES)
        found.append(family_set(name, factors, decodes=decodes, slots=slots))
        for op in found[-1].ops:
            if op.name in met:
                met[op.name].update(factors.items())
    return tuple(found)


def drawn_family(seed: int, count: int) -> str:
    """`count` combinations at random, a line each."""
    rng = random.Random(seed)
    return _lines(draw(rng) for _ in range(count))


if __name__ == "__main__":
    generator = random.Random(1)
    every_pair = covering([draw(generator) for _ in range(4000)], lambda _: True, 0)
    first = covering(every_pair, own, VALUE_TIMES)
    print(_lines(first), _lines(f for f in every_pair if f not in first), sep="\n\n")
