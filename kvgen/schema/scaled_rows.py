"""Rows of bytes with their scales in them: a token's head has codes and then scales, K's and V's in a row each or in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvgen.errors import SpecError
from kvgen.layout.axes import Axis, parse_axes
from kvgen.layout.dtypes import DType, dtype
from kvgen.layout.regions import Region
from kvgen.layout.storage import Base, PoolTensor, Scales, Segment
from kvgen.schema.cache_fields import CacheFields
from kvgen.schema.quant import Quant

Extents = tuple[tuple[str, int | None], ...]
# (block extents, blocks along heads, blocks along dim) of a role's scales.
Blocks = tuple[tuple[int, int, int], int, int]


class RowMemory(NamedTuple):
    """The tensors of rows of bytes, the pointers into a page, and the segments of each role."""

    tensors: list[PoolTensor]
    bases: list[Base]
    roles: dict[str, tuple[Segment, ...]]


@dataclass(frozen=True)
class _Part:
    """K or V in a row: `dims` codes, then `scales` numbers of type `kind` and `pad` zeros."""

    role: str
    quant: Quant | None
    codes: DType
    dims: int
    kind: DType
    scales: int
    pad: int

    @property
    def code_bytes(self) -> int:
        return self.codes.size_of(self.dims)

    @property
    def nbytes(self) -> int:
        return self.code_bytes + (self.scales + self.pad) * self.kind.bytes


def scaled_rows(
    cache: CacheFields, blocks: Callable[[Quant, int], Blocks], field: Callable[[str, str], str | None]
) -> RowMemory:
    """The memory of a cache whose scales lie in its rows.

    `blocks` counts the scales of some dims, `field` names the spec's field behind an axis.
    """
    parts = {role: _part_of(cache, role, blocks) for role in cache.roles}
    found = RowMemory([], [], {})
    if cache.joint_rows:
        row = _aligned(sum(p.nbytes for p in parts.values()), cache.layout.row_align)
        words = " ".join(w for w in _text(cache, "k").split() if w != "kv")
        found.tensors.append(_tensor(cache, "pool", words, row, field))
        found.bases.append(Base("bytes", "pool", dtype("u8")))
        at = 0
        for role, part in parts.items():
            found.roles[role] = (_segment(cache, part, "bytes", words, at, row, blocks),)
            at += part.nbytes
        return found
    rows = {role: _aligned(part.nbytes, cache.layout.row_align) for role, part in parts.items()}
    if cache.layout.kv is not None and len(set(rows.values())) > 1:
        raise SpecError(
            f"layout: got {cache.layout.kv!r} with rows of {rows['k']} bytes for K and {rows['v']} for V, which have one step in "
            "one tensor; write kv before dim ('... kv dim'), where a row is K's and then V's, or give each a tensor with "
            "k='...', v='...'"
        )
    for role, part in parts.items():
        together = cache.layout.kv is not None
        name = "pool" if together else f"{role}_pool"
        words = _text(cache, role)
        if name not in [t.name for t in found.tensors]:
            found.tensors.append(_tensor(cache, name, words, rows[role], field))
        found.bases.append(Base(role, name, dtype("u8"), int(together and role == "v")))
        found.roles[role] = (_segment(cache, part, role, words, 0, rows[role], blocks),)
    return found


def byte_part(
    element: DType,
    axes: tuple[Axis, ...],
    extents: Extents,
    at: int,
    row: int,
    what: str,
    *,
    ragged: bool = False,
    strided: bool = False,
) -> Region:
    """Part of a row of `row` bytes."""
    if axes[-1] != Axis("dim"):
        raise SpecError(
            f"layout: got axes ending in {axes[-1]}; rows of bytes (codes, scales, RoPE part) end in a whole dim"
        )
    if row * 8 % element.place or at * 8 % element.place:
        raise SpecError(
            f"quant: the {what} would begin at byte {at} of rows of {row} bytes, no multiple of {element.name}; choose a "
            "block and dims that keep them aligned"
        )
    pitch = row * 8 // element.place
    return Region("k", element, axes, extents, byte_offset=at, pitch=pitch, ragged=ragged, strided=strided)


def _part_of(cache: CacheFields, role: str, blocks: Callable[[Quant, int], Blocks]) -> _Part:
    quant, dims = cache.quants[role], cache.v_dim if role == "v" else cache.head_dim
    codes = quant.codes if quant else dtype(cache.dtype)
    if dims * codes.bits % 8:
        raise SpecError(
            f"layout: got rows of {dims} {codes.name} codes, which are no whole bytes; use a head_dim that is a multiple of "
            f"{codes.together}"
        )
    scales = pad = 0
    if quant is not None and quant.computed:
        _, heads, groups = blocks(quant, dims)
        if heads != cache.kv_heads:
            raise SpecError(
                f"quant: got block.head={quant.block.head} with place='row'; scales of several heads are in no head's row; use "
                "block.head=1, or place='pool' or 'page'"
            )
        scales, pad = groups * (1 + quant.zero), quant.padding(groups)
    kind = dtype((quant.scale_dtype if quant else None) or "f32")
    return _Part(role, quant, codes, dims, kind, scales, pad)


def _segment(
    cache: CacheFields,
    part: _Part,
    base: str,
    words: str,
    at: int,
    row: int,
    blocks: Callable[[Quant, int], Blocks],
) -> Segment:
    axes, quant, what = parse_axes(words), part.quant, part.role.upper()
    values = byte_part(
        part.codes,
        axes,
        _extents(cache, part.dims),
        at,
        row,
        f"codes of {what}",
        ragged=cache.ragged,
        strided=quant is not None and quant.strided,
    )
    if quant is None or quant.scale_dtype is None:
        return Segment(0, part.dims, base, values, quant)
    block, heads, groups = blocks(quant, part.dims)
    if not quant.computed:
        scales = Scales(part.kind, quant.zero, block, heads, groups, array=f"{part.role}_scale")
        return Segment(0, part.dims, base, values, quant, scales)
    begin = at + part.code_bytes
    place = byte_part(
        part.kind, axes, _extents(cache, part.scales), begin, row, f"scales of {what}", ragged=cache.ragged
    )
    scales = Scales(part.kind, quant.zero, block, heads, groups, base, place, pad=part.pad)
    above = f"{part.role}_global_scale" if quant.recipe == "global" else ""
    return Segment(0, part.dims, base, values, quant, scales, above)


def _tensor(cache: CacheFields, name: str, words: str, row: int, field: Callable[[str, str], str | None]) -> PoolTensor:
    """A tensor of rows of `row` bytes; the widest access is what its segments ask for later."""
    region = byte_part(dtype("u8"), parse_axes(words), _extents(cache, row), 0, row, "row", ragged=cache.ragged)
    axes = tuple(a.name if a.name != "dim" else "byte" for a in region.axes)
    fields = tuple("quant" if a == "byte" else field(a, "quant") for a in axes)
    return PoolTensor(
        name, ("u8",), axes, region.shape, region.fixed_strides, 1, region.text.replace("dim", "byte"), fields
    )


def _extents(cache: CacheFields, dims: int) -> Extents:
    inner = (("token", cache.token_extent), ("head", cache.kv_heads), ("dim", dims))
    return (("kv", 1 if cache.stores == "k" else 2), *inner, *cache.outer_extents)


def _text(cache: CacheFields, role: str) -> str:
    text = cache.layout.kv or (cache.layout.v if role == "v" else cache.layout.k)
    assert text is not None
    return text


def _aligned(nbytes: int, align: int) -> int:
    return -(-nbytes // align) * align
