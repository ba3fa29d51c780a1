"""Lists of latent rows, one a cache: what a call of mla_decode brings of them, and what templates and planners read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvgen.plan.params import Array, OtherCache, Param, Size


@dataclass(frozen=True)
class ListContext:
    """A list as the template has it: the cache's variable in C, the namespace and header of one that is not the set's own
    ("": it is), and the arguments of the list.
    """

    cache: str
    space: str
    header: str
    indices: str
    lengths: str
    width: str
    record: int = 0


def list_params(
    names: Sequence[str], spaces: Sequence[str], classes: Sequence[str], *, planned: bool = False
) -> tuple[Param, ...]:
    """The arguments of each list: of the set's own cache, then of the others, each with its cache before it. Plans are
    made of lengths, which are then no option."""
    found: list[Param] = []
    for name, space, cache in zip(names, spaces, classes, strict=True):
        prefix = f"{name}_" if name else ""
        place = f" in `{prefix}cache`" if name else ""
        if name:
            doc = "whose pages are read: its tables have no part in it"
            found.append(OtherCache(f"{prefix}cache", cache, doc=doc, space=space, tables=False))
        doc = "physical rows of each row of q" + place + ", page id * page_size + offset; -1 is skipped"
        found.append(Array(f"{prefix}indices", "i32", ("T", f"{prefix}K"), strided=True, untrusted=True, doc=doc))
        doc = f"entries of each list{' in `' + prefix + 'indices`' if name else ''} that count"
        found.append(Array(f"{prefix}topk_lengths", "i32", ("T",), optional=not planned, untrusted=True, doc=doc))
    return tuple(found)


def list_lengths(names: Sequence[str]) -> tuple[Param, ...]:
    """The lengths of lists as a planner takes them."""
    prefixes = [f"{name}_" if name else "" for name in names]
    return tuple(
        Array(
            f"{prefix}topk_lengths",
            "i32",
            ("planned_rows",),
            untrusted=True,
            doc=f"entries of each list{' in `' + prefix + 'indices`' if prefix else ''} that count",
        )
        for prefix in prefixes
    )


def list_sizes(names: Sequence[str]) -> tuple[Size, ...]:
    """The sizes of the lists, behind all that the call brings."""
    found = []
    for name in names:
        prefix = f"{name}_" if name else ""
        found.append(Size(f"{prefix}indices_stride", "i64", f"{prefix}indices.stride"))
        found.append(Size(f"num_{prefix}indices_each", "u32", f"{prefix}K"))
    return tuple(found)


def list_contexts(op: str, names: Sequence[str], spaces: Sequence[str]) -> tuple[ListContext, ...]:
    """The lists as the template has them."""
    found = []
    for name, space in zip(names, spaces, strict=True):
        prefix = f"{name}_" if name else ""
        found.append(
            ListContext(
                cache=f"{prefix}cache",
                space=space,
                header=f"{op}_{space}.cuh" if name else "",
                indices=f"{prefix}indices",
                lengths=f"{prefix}topk_lengths",
                width=f"num_{prefix}indices_each",
            )
        )
    return tuple(found)
