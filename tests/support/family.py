"""Quantized and latent caches: the factors of the family, every valid combination, and a few that cover all pairs.

A combination is valid if the spec takes it; nothing here knows the rules.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations, product, zip_longest
from typing import Any, Final

from kvgen import CSR, Block, Continuous, Dense, Indirect, KernelSet, Latent, Layout, Paged, PerKV, Quant, Ring, ops
from kvgen.errors import SpecError

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
    "scale_dtype": ("none", "f32", "f16", "bf16", "e4m3", "e8m0"),
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
# Factors whose pairs with one another every run covers, other such pairs, and one that is none: a recipe is a quantization's
# own, which does not know whether K or V has it.
OWN: Final = frozenset({"code", "recipe", "scale", "zero", "residual", "roles", "place", "order"})
OWN_PAIRS: Final = tuple({"scale_dtype", other} for other in ("code", "recipe", "zero"))
NO_PAIR: Final = {"recipe", "roles"}
# Bytes like e4m3's, of the same text but for their conversion: its values are met, its pairs are e4m3's.
LIKE_E4M3: Final = ("code", "e5m2")
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


EVERY: Final = ("gather", "decode", "append_slots")


def with_operations(name: str, cache: Any, has: Collection[str] = EVERY) -> KernelSet:
    """A set of the cache with append, seal where keys wait for it, and those of these operations that it can have.

    In a campaign with every operation that it can have. Raises ValueError or SpecError if it is none.
    """
    has = EVERY if "KVGEN_FAMILY" in os.environ else has
    found: list[Any] = [ops.Append()]
    if "gather" in has:
        found.append(ops.Gather())
    if cache.storage.residual:
        found.insert(0, ops.Seal())
    if cache.stores == "kv" and "decode" in has:
        found.append(ops.Decode())
    fields: dict[str, Any] = {"name": name, "q_heads": cache.kv_heads * 2, "cache": cache}
    if "append_slots" in has:
        try:
            return KernelSet(ops=(*found, ops.Append(name="append_slots", rows="slots")), **fields)
        except SpecError:
            pass
    return KernelSet(ops=tuple(found), **fields)


def family_set(name: str, f: Factors, has: Collection[str] = EVERY) -> KernelSet:
    """The set of a combination; raises ValueError or SpecError if it is none."""
    return with_operations(name, _cache(f), has)


def is_valid(f: Factors) -> bool:
    """Whether the spec takes a combination."""
    try:
        family_set("any", f)
    except ValueError:
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
        except SpecError:
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
    names = {pair[0], pair[2]}
    if names == NO_PAIR or LIKE_E4M3 in (pair[:2], pair[2:]):
        return False
    return names <= OWN or names in OWN_PAIRS


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


VALUE_TIMES: Final = 2  # that each value of each factor is in the cover of every run, where it can be
# How often each value has an operation besides append, where it can. What gather and decode read does not depend on how a scale
# was chosen, and append by slots only finds its rows' places in another way: each of the ways, each way to store.
TIMES: Final = {op: 1 for op in EVERY}
PLACES: Final = frozenset({"scale", "place", "order", "variant", "table"})


def counts(op: str, value: Value) -> bool:
    """Whether an operation has to meet a value."""
    return op != "append_slots" or value[0] in PLACES


def can_have(f: Factors, op: str) -> bool:
    """Whether a combination can have an operation."""
    return any(o.name == op for o in family_set("any", f, (op,)).ops)


def operations_of(combinations_: Sequence[Factors]) -> list[list[str]]:
    """The operations of each combination besides append, greedily few.

    Gather where groups of tokens are sealed too, whose tests read every token after every step.
    """
    having = {}
    for op, times in TIMES.items():
        able = [{n: x for n, x in f.items() if counts(op, (n, x))} for f in combinations_ if can_have(f, op)]
        having[op] = covering(able, lambda _: False, times)
    return [
        [
            op
            for op, chosen in having.items()
            if (op == "gather" and f["residual"] == "yes")
            or (can_have(f, op) and any(c.items() <= f.items() for c in chosen))
        ]
        for f in combinations_
    ]


def _lines(combinations_: Iterable[Factors], has: Iterable[Sequence[str]] = ()) -> str:
    return "\n".join(" ".join((*f.values(), *more)) for f, more in zip_longest(combinations_, has, fillvalue=()))


def parse(text: str) -> list[tuple[Factors, list[str]]]:
    """Combinations that are written one a line, as running this module prints them, and the operations that follow each."""
    names = (*QUANT_FACTORS, *CACHE_FACTORS)
    lines = [line.split() for line in text.strip().splitlines()]
    return [(dict(zip(names, words, strict=False)), words[len(names) :]) for words in lines]


def family_sets(text: str) -> tuple[KernelSet, ...]:
    """The sets of combinations as `parse` takes them. All append; in a campaign they have every operation."""
    return tuple(
        family_set(f"q{i}_{title(factors)}"[:40].rstrip("_"), factors, has)
        for i, (factors, has) in enumerate(parse(text))
    )


def drawn_family(seed: int, count: int) -> str:
    """`count` combinations at random, a line each."""
    rng = random.Random(seed)
    return _lines(draw(rng) for _ in range(count))


if __name__ == "__main__":
    generator = random.Random(1)
    every_pair = covering([draw(generator) for _ in range(4000)], lambda _: True, 0)
    first = covering(every_pair, own, VALUE_TIMES)
    print(_lines(first, operations_of(first)), _lines(f for f in every_pair if f not in first), sep="\n\n")
