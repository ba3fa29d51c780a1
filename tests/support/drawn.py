"""Kernel sets drawn at random from all that a spec can say: what nobody would think of writing down."""

from __future__ import annotations

import random
from typing import Any

from kvgen import CSR, Continuous, Dense, Indirect, KernelSet, Layout, Paged, PerKV, Ring, ops
from kvgen.errors import SpecError

INDEX = ("u32", "i32", "i64")


def _table(draw: random.Random) -> tuple[Any, bool]:
    """A page table, and whether lengths must count this step's tokens."""
    kind = draw.choice((Dense, CSR, CSR, PerKV, Indirect, Ring))
    fields: dict[str, Any] = {"dtype": draw.choice(INDEX), "id_multiplier": draw.choice((1, 1, 2, 3))}
    if kind is Ring:
        return Ring(window=draw.randint(1, 70), **fields), False
    if kind is CSR:
        last = draw.random() < 0.5
        return CSR(last_page_len=last, **fields), last
    if kind is Indirect:
        return Indirect(request_dtype=draw.choice(INDEX), **fields), False
    return kind(**fields), False


def _axes(draw: random.Random, head_dim: int, *, kv: bool, layer: bool) -> str:
    outer = ["page", *(["kv"] if kv else []), *(["layer"] if layer else [])]
    inner = ["token", "head", "dim"]
    draw.shuffle(outer)
    draw.shuffle(inner)
    divisors = [d for d in (2, 4, 8, 16) if head_dim % d == 0 and head_dim > d]
    if divisors and draw.random() < 0.4:
        by = draw.choice(divisors)
        inner[inner.index("dim")] = f"dim/{by}"
        inner.insert(draw.randint(inner.index(f"dim/{by}") + 1, len(inner)), f"dim%{by}")
    return " ".join(outer + inner)


def _layout(draw: random.Random, head_dim: int, v_dim: int, *, per_kv: bool) -> Layout:
    layers: Any = draw.choice(("axis", "pointers"))
    layer = layers == "axis"
    if v_dim == head_dim and draw.random() < 0.6:
        return Layout(kv=_axes(draw, head_dim, kv=not per_kv, layer=layer), layers=layers)
    k, v = (_axes(draw, d, kv=False, layer=layer) for d in (head_dim, v_dim))
    return Layout(k=k, v=v, layers=layers)


def _one(draw: random.Random, name: str) -> KernelSet:
    head_dim = draw.choice((1, 3, 8, 20, 40, 64, 80, 96, 128, 200, 256))
    v_dim = head_dim if draw.random() < 0.8 else draw.choice((8, 24, 64))
    fields: dict[str, Any] = {
        "dtype": draw.choice(("f32", "f16", "bf16")),
        "kv_heads": draw.randint(1, 4),
        "head_dim": head_dim,
        "lengths": draw.choice(("before", "after")),
        "lengths_dtype": draw.choice(INDEX),
    }
    if v_dim != head_dim:
        fields["v_head_dim"] = v_dim
    cache: Paged | Continuous
    if draw.random() < 0.2:
        layout = _layout(draw, head_dim, v_dim, per_kv=False)
        cache = Continuous(layout=layout, max_tokens=draw.randint(1, 50), table_dtype=draw.choice(INDEX), **fields)
    else:
        table, after = _table(draw)
        fields["lengths"] = "after" if after else fields["lengths"]
        page = 1 if isinstance(table, Indirect) else draw.choice((1, 2, 3, 5, 16, 32, 64))
        layout = _layout(draw, head_dim, v_dim, per_kv=isinstance(table, PerKV))
        cache = Paged(layout=layout, table=table, page_size=page, **fields)
    index: Any = draw.choice((None, *INDEX))
    found: list[Any] = [ops.Append(index_dtype=index), ops.Gather(index_dtype=index)]
    found.append(
        ops.Decode(
            index_dtype=index, split=draw.choice(("none", "none", "none", "balanced")), scale=draw.choice((None, 0.2))
        )
    )
    if not isinstance(cache.page_table, PerKV):
        found.append(ops.Append(name="append_slots", rows="slots", index_dtype=index))
    return KernelSet(name=name, q_heads=cache.kv_heads * draw.randint(1, 9), cache=cache, ops=tuple(found))


def drawn_sets(seed: int, count: int) -> tuple[KernelSet, ...]:
    """`count` sets; the same for the same seed. What the spec's own rules refuse is drawn again."""
    draw = random.Random(seed)
    found: list[KernelSet] = []
    while len(found) < count:
        try:
            found.append(_one(draw, f"drawn_{seed}_{len(found)}"))
        except SpecError:
            continue
    return tuple(found)
