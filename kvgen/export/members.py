"""Members of the structs in an exported header: a kernel's parameters and the fields of a cache, in the order kernels have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvgen.export.docs import packed_step, stride_of
from kvgen.export.words import comment, identifier
from kvgen.layout.dtypes import dtype
from kvgen.plan.params import Array, Count, Field, OtherCache, PagePool, Param, Pool, Scalar, Size, TensorMap
from kvgen.runtime.packing import TENSOR_MAP, Bytes, ParamKind, layout


@dataclass(frozen=True)
class Member:
    """A member: a pointer to `element`, or an `element` by value.

    `initial` is the default of a number ("" for what is empty by default); `offset` in bytes; an address is a multiple of
    `align` bytes; `unit` is what a stride is a multiple of, in elements. `needed`: a null pointer is a mistake.
    """

    name: str
    element: str
    pointer: bool
    const: bool
    initial: str
    doc: tuple[str, ...]
    offset: int
    align: int
    unit: int
    needed: bool

    @property
    def type(self) -> str:
        """Its type in C++."""
        return f"{'const ' if self.const else ''}{self.element}{'*' if self.pointer else ''}"


@dataclass(frozen=True)
class Struct:
    """A struct: its members, and its size and alignment in bytes."""

    members: tuple[Member, ...]
    size: int
    align: int


def struct_of(
    params: Sequence[Param | Field],
    docs: Sequence[str],
    where: str,
    *,
    others: Mapping[str, Struct] | None = None,
    aligns: Mapping[str, int] | None = None,
) -> Struct:
    """The struct of these parameters; `where` names the kernel.

    `others` are the structs that some are made of, by type; `aligns` what addresses in the cache's memory are multiples of, in
    bytes. Raises ToolError for a name that C++ cannot have.
    """
    arrays = [p for p in params if isinstance(p, Array)]
    found = layout(tuple(_kind(p, others or {}) for p in params))
    members = []
    for p, doc, offset in zip(params, docs, found.offsets, strict=True):
        identifier(p.name, where)
        size = isinstance(p, Size)
        stride = stride_of(p, arrays) if isinstance(p, Size) else None
        members.append(
            Member(
                name=p.name,
                element=_element(p),
                pointer=isinstance(p, Array | Pool),
                const=isinstance(p, Array) and p.access == "in",
                initial=str(packed_step(*stride) if stride else 0) if size or isinstance(p, Scalar | Count) else "",
                doc=comment(doc, 2),
                offset=offset,
                align=max(p.align, dtype(p.dtype).bytes) if isinstance(p, Array) else (aligns or {}).get(p.name, 1),
                unit=max(1, stride[0].align // dtype(stride[0].dtype).bytes) if stride else 1,
                needed=isinstance(p, Pool) or (isinstance(p, Array) and not p.optional),
            )
        )
    return Struct(tuple(members), found.kind.size, found.kind.align)


def _element(p: Param | Field) -> str:
    """The type of a member, or of what it points to."""
    match p:
        case PagePool():
            return f"PageAddresses<{len(p.pointers)}, {p.layers}>"
        case OtherCache():
            return p.cache
        case TensorMap():
            return "TensorMap"
        case _:
            return dtype(p.dtype).c


def _kind(p: Param | Field, others: Mapping[str, Struct]) -> ParamKind:
    """How a member is laid out: as the launcher packs it."""
    match p:
        case PagePool():
            return Bytes(8 * len(p.pointers) * (p.layers + 1) + 16, 8)
        case OtherCache():
            return Bytes(others[p.cache].size, others[p.cache].align)
        case TensorMap():
            return TENSOR_MAP
        case Array() | Pool():
            return "ptr"
        case _:
            return p.dtype
