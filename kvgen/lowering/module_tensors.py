"""The tensors of a cache as a generated module declares them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from kvgen.layout.regions import Region
from kvgen.layout.storage import Base, PoolTensor, Segment
from kvgen.lowering.cache_header import row_of
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.cache import Cache

LINE: Final = 130  # columns of generated Python


@dataclass(frozen=True)
class ArgumentContext:
    """One argument of a launcher's signature."""

    name: str
    optional: bool
    doc: str
    type: str = "ArrayLike"

    @property
    def found(self) -> str:
        """Its type where a call may leave it out."""
        return f"{self.type} | None" if self.optional else self.type

    @property
    def typed(self) -> str:
        """The argument in a signature."""
        return f"{self.name}: {self.type}"

    @property
    def or_none(self) -> str:
        """The argument in a signature whose calls may leave it out."""
        return f"{self.name}: {self.type} | None = None"

    @property
    def pass_on(self) -> str:
        """The argument as a method hands it to another one."""
        return f"{self.name}={self.name}" if self.optional else self.name


def tuple_text(items: tuple[object, ...]) -> str:
    """A tuple of strings and numbers, as Python."""
    inner = ", ".join(f'"{i}"' if isinstance(i, str) else repr(i) for i in items)
    return f"({inner},)" if len(items) == 1 else f"({inner})"


def filled(items: Iterable[str], indent: int) -> tuple[str, ...]:
    """Items of a tuple or a signature in lines of at most 130 columns, `indent` counted; a longer item has a line of its own."""
    lines: list[str] = []
    for item in items:
        if lines and indent + len(lines[-1]) + len(item) + 2 <= LINE:
            lines[-1] += f" {item},"
        else:
            lines.append(f"{item},")
    return tuple(lines)


def values_first(cache: AnyCache) -> list[PoolTensor]:
    """The cache's tensors as calls bring them: those of values, then those of scales."""
    return sorted(cache.storage.tensors, key=lambda t: not t.holds_values)


def _behind(cache: Cache, tensor: PoolTensor) -> tuple[str, tuple[str | None, ...]]:
    """The spec fields behind a tensor's dtype and behind its axes, as the spec names them."""
    role: Literal["k", "v"] = "v" if tensor.name.startswith("v_") else "k"
    quant = cache.quants[role]
    name = "quant" if cache.quant is not None else f"{role}_quant"
    fields = tuple(
        name + f.removeprefix("quant") if f is not None and f.startswith("quant") else f for f in tensor.fields
    )
    if quant is None or tensor.name in ("rope_pool", "k_tail"):
        return "dtype", fields
    if tensor.holds_values:
        share = {4: "half of ", 3: "3/8 of ", 2: "a quarter of "}.get(quant.codes.bits, "")
        last = f"{share}{fields[-1]}" if fields[-1] is not None else fields[-1]
        return f"{name}.dtype", (*fields[:-1], last)
    return f"{name}.{'recipe' if tensor.name.endswith('global_scale') else 'scale_dtype'}", fields


def tensor_text(cache: Cache, tensor: PoolTensor) -> str:
    """A tensor of the pool, as Python."""
    bases = [b for b in cache.storage.bases if b.tensor == tensor.name]
    held = tuple(b.name for b in bases) or (tensor.name,)
    kinds = f'"{tensor.dtypes[0]}"' if len(tensor.dtypes) == 1 else tuple_text(tensor.dtypes)
    field, fields = _behind(cache, tensor)
    named = f', field="{field}"' if field != "dtype" else ""
    writes = ", writes=False" if tensor.given else ""
    own = ", own_table=True" if any(b.table == "scales" for b in bases) else ""
    swizzled = ", swizzled=True" if _is_swizzled(cache, held) else ""
    aligned = f", page_align={tensor.page_align}" if tensor.page_align > 1 else ""
    return (
        f'rt.Tensor("{tensor.name}", {kinds}, {tuple_text(held)}, axes={tuple_text(tensor.axes)}, '
        f"shape={tuple_text(tensor.shape)}, strides={tuple_text(tensor.strides)}, align={tensor.align}, "
        f"fields={tuple_text(fields)}{named}{writes}{own}{swizzled}{aligned})"
    )


def _is_swizzled(cache: Cache, bases: tuple[str, ...]) -> bool:
    """True where values behind one of these page pointers are swizzled."""
    segments = (s for parts in cache.storage.roles.values() for s in parts)
    return any(s.base in bases and s.region.swizzle is not None for s in segments)


def state_tensor_text(cache: AnyCache, tensor: PoolTensor) -> str:
    """A pool of states, as Python; u8 is what it is, no field of the spec."""
    held = tuple(b.name for b in cache.storage.bases if b.tensor == tensor.name)
    return (
        f'rt.Tensor("{tensor.name}", "{tensor.dtypes[0]}", {tuple_text(held)}, axes={tuple_text(tensor.axes)}, '
        f"shape={tuple_text(tensor.shape)}, strides={tuple_text(tensor.strides)}, align={tensor.align}, "
        f'fields={tuple_text(tensor.fields)}, field="")'
    )


def _places(region: Region, base: Base, heads: int, dims: int) -> str:
    """A region's places in a page, for tensor maps; packed elements as the bytes that hold them."""
    kind = region.dtype
    codes, units = (kind.together, kind.size_of(kind.together)) if kind.packed else (1, 1)
    strides: list[int | None] = []
    for name in ("token", "head", "dim"):
        found = [(a, s) for a, s in zip(region.axes, region.strides, strict=True) if a.name == name]
        whole = len(found) < 2 and region.swizzle is None
        step = found[0][1] if found else (region.element if name == "dim" else dims * region.element)
        if not whole or step is None:
            strides.append(None)
        elif kind.packed:
            strides.append(1 if name == "dim" else step * kind.place // 8)
        else:
            strides.append(step)
    row = strides[0] if row_of(region, base) else 0
    packing = (f", codes={codes}" if codes > 1 else "") + (f", units={units}" if units > 1 else "")
    packing += ", strided=True" if region.strided else ""
    return (
        f'rt.RoleStrides("{base.name}", "{kind.held_as}", heads={heads}, dim={dims * units // codes}, '
        f"offset={region.byte_offset}, token_stride={strides[0]}, head_stride={strides[1]}, dim_stride={strides[2]}, "
        f"row={row}{packing})"
    )


def role_text(cache: Cache, name: str, parts: tuple[Segment, ...]) -> str:
    """K or V, as Python."""
    storage, main = cache.storage, parts[0]
    words = [
        f'"{name}"',
        str(sum(s.size for s in parts)),
        _places(main.region, storage.base(main.base), cache.kv_heads, main.size),
    ]
    if len(parts) > 1:
        rope = parts[1]
        words.append(f"rope={_places(rope.region, storage.base(rope.base), cache.kv_heads, rope.size)}")
    scales = main.scales
    if scales is not None:
        if scales.region is not None:
            dims = scales.groups * (1 + scales.zero)
            words.append(f"scales={_places(scales.region, storage.base(scales.base), scales.heads, dims)}")
        words += [f"granularity={scales.block[2]}", f'scale_dtype="{scales.dtype.name}"']
    return f"rt.Role({', '.join(words)})"


def pool_argument(cache: AnyCache, tensor: PoolTensor) -> ArgumentContext:
    """The argument that brings a tensor of the pool."""
    shape = ", ".join(str(s) for s in tensor.shape)
    each = "one per layer, each " if cache.layers == "pointers" else ""
    kinds = " or ".join(tensor.dtypes)
    kind = "Sequence[ArrayLike]" if each else "ArrayLike"
    return ArgumentContext(tensor.name, False, f"{tensor.name}: {each}{kinds}[{shape}] ({tensor.text}).", kind)
