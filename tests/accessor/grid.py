"""The caches whose memory is looked at: variant x layout x quantization x page table x dtype, as far as they go together.

The campaign has the whole grid (`FACTORS`). `make test` has a pairwise cover of `LEVELS`, whose members have the same code for
their addresses and take turns:

- layouts that differ in the order of page, layer and K/V alone: these strides are numbers of the call, the device text is the
  same (tests/accessor/test_grid.py). How far apart pages lie is no layout at all: each kernel runs over two kinds of padding;
- quantizations whose scales have the same shape and whose codes are as wide, or (four bits) fill bytes by twos; a scale a row
  is one a head of one head, and a zero point is a second scale;
- tables that differ in the type and alignment of ids, and in where the length comes from.

Every pair of levels meets, so each scale shape and each width of codes meets every layout, table, variant and dtype; every
member meets every dtype.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import Any, Final

from kvgen import CSR, Block, Continuous, Dense, Indirect, Latent, Layout, Mapped, Paged, PerKV, Quant, Ring
from kvgen.schema.cache import Cache
from tests.support.pairwise import cover, every

FACTORS: Final = {
    "layout": (
        "max", "hnd", "apart", "kv_inner", "x_packed", "padded", "padded_part", "page_layers", "pointers", "split",
        "swizzled", "in_page", "scale_tiles", "own_table",
    ),
    "quant": (
        "none", "cast_e4m3", "cast_e5m2", "given", "token_head", "token", "group", "zero", "i8", "i4", "i4_zero",
        "nvfp4_max", "nvfp4_global", "residual",
    ),
    # Where any variant will do, one with K alone: V takes as long to compile again.
    "variant": ("k_only", "latent", "paged", "latent_mixed", "latent_row", "latent_two", "continuous"),
    "table": ("dense", "dense8", "csr", "csr_last", "per_kv", "indirect", "mapped", "ring"),
    "dtype": ("bf16", "f32", "f16"),
}  # fmt: skip
# What has one code for its addresses. The order within a factor is one of which the greedy cover is small.
Levels = Mapping[str, Mapping[str, tuple[str, ...]]]
LEVELS: Final[Levels] = {
    "layout": {
        "swizzled": (), "split": (), "own_table": (), "hnd": (), "kv_inner": (), "pointers": (), "in_page": (),
        "scale_tiles": (), "max": ("max", "padded", "padded_part", "page_layers"), "x_packed": (), "apart": (),
    },
    "quant": {
        "given": (), "cast": ("cast_e4m3", "cast_e5m2"),
        "packed": ("i4", "nvfp4_max", "i4_zero", "nvfp4_global"), "group": ("group", "zero"), "none": (),
        "head": ("token_head", "i8", "token"),
    },
    "variant": dict.fromkeys(("paged", "latent_row", "continuous", "latent", "latent_mixed", "k_only", "latent_two"), ()),
    "table": {
        "ring": (), "per_kv": (), "csr": ("csr", "csr_last"), "indirect": ("indirect", "mapped"), "dense": ("dense", "dense8"),
    },
    "dtype": {"bf16": (), "f32": (), "f16": ()},
}  # fmt: skip
WIDTHS: Final = (1, 2, 4, 8, 16, 32)
PADS: Final = ("tight", "rows", "part")
LATENT: Final = ("latent", "latent_mixed", "latent_row", "latent_two")


@dataclass(frozen=True)
class Config:
    """A cache to look at; `pad` says how its pages lie in memory: "tight", "rows" further apart, or "part" of a row. `other_pad`:
    another way, for the same kernel.

    `choice`: its value of each factor. `widths`: those of the accesses to K and to V, a bit each; 0: it is not looked at.
    `gathers`: whether the gather operation is run beside the accessor.
    """

    name: str
    cache: Cache
    pad: str
    other_pad: str = "tight"
    choice: tuple[str, ...] = ()
    widths: tuple[int, int] = (1 | 4 | 16, 2 | 8 | 32)
    gathers: bool = True


def _table(name: str, page: int) -> Any:
    return {
        "dense": lambda: Dense(dtype="i64", id_multiplier=2),
        "dense8": lambda: Dense(align=8),
        "csr": lambda: CSR(),
        "csr_last": lambda: CSR(dtype="u32", last_page_len=True),
        "per_kv": lambda: PerKV(),
        "indirect": lambda: Indirect(),
        "mapped": lambda: Mapped(dtype="u32", request_dtype="i64", id_multiplier=3),
        "ring": lambda: Ring(window=2 * page + 3, dtype="i32"),
    }[name]()


def _quant(name: str, dims: int, layout: str) -> dict[str, Any]:
    """The quantization's fields of the cache; {} for none."""
    where: dict[str, Any] = {
        "in_page": {"place": "page"}, "scale_tiles": {"order": "swizzled"}, "own_table": {"own_table": True},
    }.get(layout, {})  # fmt: skip
    groups = Block(dim=24 if dims == 80 else 16)
    makers: dict[str, dict[str, Any]] = {
        "cast_e4m3": {"dtype": "e4m3"},
        "cast_e5m2": {"dtype": "e5m2"},
        "given": {"dtype": "i8", "scale_dtype": "f32", "scale": "given", "block": Block(token=None, head=1, dim=16)},
        "token_head": {"dtype": "e4m3", "scale_dtype": "f32"},
        "token": {"dtype": "e5m2", "scale_dtype": "f16", "block": Block(head=None)},
        "group": {"dtype": "e4m3", "scale_dtype": "f32", "block": groups, "recipe": "pow2"},
        "zero": {"dtype": "i8", "scale_dtype": "f16", "zero": True, "block": groups},
        "i8": {"dtype": "i8", "scale_dtype": "bf16"},
        "i4": {"dtype": "i4", "scale_dtype": "f16", "block": groups},
        "i4_zero": {"dtype": "i4", "scale_dtype": "f32", "zero": True},
        "nvfp4_max": {"dtype": "e2m1", "scale_dtype": "e4m3", "recipe": "max"},
        "nvfp4_global": {"dtype": "e2m1", "scale_dtype": "e4m3", "recipe": "global"},
    }
    if name == "none":
        if where:
            raise ValueError("no scales to place")
        return {}
    if name == "residual":
        keys = Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(token=8, dim=1), residual=8, **where)
        return {"k_quant": keys, "v_quant": Quant(dtype="i4", scale_dtype="f16", zero=True, **where)}
    return {"quant": Quant(**makers[name], **where)}


def _layout(name: str, variant: str, per_kv: bool, lanes: int) -> Layout:
    """`lanes`: elements of 16 bytes, as x-packed keys lie together."""
    texts: dict[str, dict[str, Any]] = {
        "max": {"kv": "page kv layer token head dim"},
        "hnd": {"kv": "page kv layer head token dim"},
        "apart": {"k": "page layer token head dim", "v": "layer page token head dim"},
        "kv_inner": {"kv": "page layer token head kv dim"},
        "x_packed": {
            "k": f"page head dim/{lanes} token dim%{lanes}", "v": "page head dim token", "layers": "pointers",
        },
        "padded": {"kv": "layer page kv token head dim"},
        "padded_part": {"kv": "page kv layer token head dim"},
        "page_layers": {"kv": "page layer kv token head dim"},
        "pointers": {"kv": "kv page token head dim", "layers": "pointers"},
        "split": {"kv": f"page kv layer token/4 head dim/{lanes} token%4 dim%{lanes}"},
        "swizzled": {"kv": "page kv layer head token dim", "swizzle": (3, 3, 3)},
        "in_page": {"kv": "page layer kv token head dim"},
        "scale_tiles": {"kv": "page kv layer token head dim"},
        "own_table": {"kv": "page kv layer token head dim"},
    }  # fmt: skip
    fields = dict(texts[name])
    if variant in (*LATENT, "k_only"):
        if name in ("apart", "kv_inner"):
            raise ValueError("no V")
        fields.pop("v", None)
        text = str(fields.pop("kv", "") or fields.pop("k", ""))
        fields["k"] = " ".join(w for w in text.split() if w != "kv")
        if variant == "latent_two":
            fields["rope"] = fields["k"] if name == "split" else _outermost_layers(fields["k"], name)
    elif per_kv and "kv" in fields:
        if name == "kv_inner":
            raise ValueError("K and V side by side have one page id")
        fields["kv"] = " ".join(w for w in fields["kv"].split() if w != "kv")
    return Layout(**fields)


def _outermost_layers(text: str, name: str) -> str:
    """The RoPE tensor has an order of its own in some layouts, so that its pages lie elsewhere."""
    words = text.split()
    return " ".join(["layer", *(w for w in words if w != "layer")]) if name in ("max", "hnd") else text


def config(choice: dict[str, str]) -> Config | None:
    """The configuration of a choice; None where the spec refuses it."""
    return _config(*(choice[n] for n in ("layout", "quant", "variant", "table", "dtype")))


@cache
def _config(layout: str, quant: str, variant: str, table: str, dtype: str) -> Config | None:
    if layout == "own_table" and not table.startswith("dense"):
        return None  # as the spec says too, later
    name = "_".join((variant, layout, quant, table, dtype))
    # Sizes change from one to the next, and are the same for the same choice.
    turn = zlib.crc32(name.encode())
    dims = 64 if layout in ("scale_tiles", "swizzled") else (64, 128, 80, 32)[turn % 4]
    page = 128 if layout == "scale_tiles" else 1 if table == "indirect" else (16, 8, 24)[turn // 4 % 3]
    if (quant == "residual" and table == "indirect") or (variant == "continuous" and not table.startswith("dense")):
        return None
    fields: dict[str, Any] = {"dtype": dtype}
    if turn // 12 % 2 or table == "csr_last":
        fields |= {"lengths": "after", "lengths_dtype": "i64"}
    try:
        lanes = {"none": {"f32": 4}.get(dtype, 8)}.get(quant, 16)
        if quant in ("i4", "i4_zero", "nvfp4_max", "nvfp4_global", "residual"):
            lanes = 32
        fields |= _quant(quant, dims, layout)
        fields["layout"] = _layout(layout, variant, table == "per_kv", lanes)
        fields |= {"table": _table(table, page), "page_size": page}
        choice = (layout, quant, variant, table, dtype)
        pad = {"padded": "rows", "padded_part": "part"}.get(layout, "tight")
        return Config(name, _cache(variant, dims, page, fields), pad, choice=choice)
    except ValueError:
        return None


def fitting(config: Config) -> list[int]:
    """The widths in which every part of a row can be stored and loaded, of K as of V."""
    parts = [part for role in config.cache.storage.roles.values() for part in role]
    least = 2 if any(p.quant is not None and p.quant.codes.packed for p in parts) else 1
    return [w for w in WIDTHS if w >= least and all(p.size % w == 0 for p in parts)]


class Members:
    """The configuration of a choice of levels: of their members those with the most pairs that no configuration had yet, a
    quantization and a dtype first of all."""

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self.met: set[tuple[str, str]] = set()

    def config(self, choice: dict[str, str]) -> Config | None:
        """None where the spec refuses the first members and the last: then it refuses all, and is not asked."""
        found = list(product(*(self.levels[n][level] or (level,) for n, level in choice.items())))
        return None if _config(*found[0]) is None and _config(*found[-1]) is None else self._best(found)

    def rest(self) -> list[Config]:
        """For each member of a quantization and dtype that have not met, one that has both; of K alone: it compiles soonest."""
        quants, dtypes = ([m for k, v in self.levels[n].items() for m in v or (k,)] for n in ("quant", "dtype"))
        missing = [pair for pair in product(quants, dtypes) if pair not in self.met]
        layouts, tables = self.levels["layout"], self.levels["table"]
        choices = ([(la, q, "k_only", t, d) for la, t in product(layouts, tables)] for q, d in missing)
        return [one for found in choices if (one := self._best(found)) is not None]

    def _best(self, found: list[tuple[str, ...]]) -> Config | None:
        for one in sorted(
            found, key=lambda c: ((c[1], c[-1]) in self.met, sum(p in self.met for p in combinations(c, 2)))
        ):
            if (config := _config(*one)) is not None:
                self.met.update(combinations(one, 2))
                return config
        return None


def narrowed(found: list[Config]) -> list[Config]:
    """The same, each with K or V, in turns, until every value of every factor has met both; with one width of accesses, that its
    values have met least, and with more where a value would not meet all of its; with two kinds of padding; and without the
    gather operation, which tests/ops has over pairs of its own."""
    met: Counter[tuple[str, int]] = Counter()
    by_role: Counter[tuple[str, int]] = Counter()
    padded: Counter[tuple[str, str]] = Counter()
    chosen = []
    for config in sorted(found, key=lambda c: len(fitting(c))):
        fits, roles = fitting(config), range(len(config.cache.storage.roles))
        asked = [r for r in roles if any(not by_role[v, r] for v in config.choice)]
        asked = asked or [min(roles, key=lambda r: sum(by_role[v, r] for v in config.choice))]
        widths = [0, 0]
        for role in asked:
            free = [w for w in fits if w not in widths] or fits
            widths[role] = min(free, key=lambda w: [sum(met[v, w] > n for v in config.choice) for n in range(9)])
            met.update((value, widths[role]) for value in config.choice)
            by_role.update((value, role) for value in config.choice)
        pad, other = sorted(PADS, key=lambda p: sum(padded[v, p] for v in config.choice))[:2]
        padded.update(product(config.choice, (pad, other)))
        chosen.append(replace(config, widths=(widths[0], widths[1]), pad=pad, other_pad=other, gathers=False))
    for i, config in enumerate(chosen):
        missing = [w for w in fitting(config) if not all(met[v, w] for v in config.choice)]
        met.update(product(config.choice, missing))
        k, v = config.widths
        chosen[i] = replace(config, widths=(k | sum(missing), v) if k else (0, v | sum(missing)))
    return chosen


def _cache(variant: str, dims: int, page: int, fields: dict[str, Any]) -> Cache:
    if variant == "paged":
        return Paged(kv_heads=2, head_dim=dims, **fields)
    if variant == "k_only":
        return Paged(kv_heads=1, head_dim=dims, stores="k", **fields)
    if variant == "continuous":
        del fields["table"], fields["page_size"]
        open_blocks = fields["layout"].kv is not None and "token head" in fields["layout"].kv
        closed = fields["quant"].place == "page" if fields.get("quant") else False
        return Continuous(
            kv_heads=2, head_dim=dims, max_tokens=None if open_blocks and not closed else 2 * page, **fields
        )
    sizes = {"latent_dim": dims, "rope_dim": 16}
    if variant == "latent":
        whole = bool(fields.get("quant"))
        return Latent(**(sizes | {"latent_dim": dims - 16 if whole else dims}), quant_rope=whole, **fields)
    if variant == "latent_row":
        if "quant" not in fields or fields["quant"].place != "pool":
            raise ValueError("scales in rows are in no page")
        fields["quant"] = fields["quant"].model_copy(update={"place": "row"})
    if variant != "latent_two" and "quant" not in fields and "k_quant" not in fields:
        raise ValueError("a mixed row is quantized")
    return Latent(**sizes, **fields)


def full_grid() -> bool:
    """Whether the campaign runs."""
    return bool(os.environ.get("KVGEN_GRID"))


def configs(levels: Levels = LEVELS, more: tuple[tuple[str, ...], ...] = ()) -> list[Config]:
    """A pairwise cover of these levels and `more` choices of values, narrowed; KVGEN_GRID=full for all, full:3/8 for the
    fourth of eight shares."""
    if not full_grid():
        members = Members(levels)
        found = cover({n: tuple(names) for n, names in levels.items()}, members.config) + members.rest()
        return narrowed(found + [one for choice in more if (one := _config(*choice)) is not None])
    _, _, share = os.environ["KVGEN_GRID"].partition(":")
    number, _, shares = share.partition("/")
    share_of = every(FACTORS, config)[int(number or 0) :: int(shares or 1)]
    return [replace(c, widths=(63, 63)) for c in share_of]
