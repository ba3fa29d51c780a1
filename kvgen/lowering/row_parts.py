"""New rows, part by part: where the caller has them, what is done to them, where they go."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvgen.layout.dtypes import DType, dtype
from kvgen.lowering.lowered import lower
from kvgen.lowering.new_rows import NewRows
from kvgen.lowering.rope_norm import (
    HeadContext,
    InputContext,
    NormContext,
    PadContext,
    PartContext,
    TileContext,
    decimal,
    lanes_of,
    norm_context,
    width_of,
)
from kvgen.lowering.row_runs import row_params
from kvgen.lowering.row_tiling import Blocks, WriteContext, divide, divide_q, values_by_token, write
from kvgen.lowering.segments import SegmentContext
from kvgen.plan.params import Array, Param, Scalar, Size
from kvgen.schema.kernel_set import KernelSet


@dataclass(frozen=True)
class _Slice:
    """Dims of a role that have a norm and a RoPE of their own."""

    name: str
    title: str
    begin: int
    dim: int
    rotary_dim: int
    rotary_begin: int
    rotary_pairs: int = 0


class RowParts:
    """Inputs and steps of the kernel of new rows, as parameters and template contexts."""

    def __init__(self, new: NewRows, kernels: KernelSet, threads: int) -> None:
        self.new, self.kernels, self.cache, self.rope = new, kernels, kernels.kv, new.rope
        self.lowered = lower(kernels.kv)
        self.norms = {"q": new.q_norm, "k": new.k_norm, "v": new.v_norm}
        self.stored = new.stored
        self.roles = () if new.q_alone else new.stored or kernels.kv.roles
        self.brings_count = bool(new.stored) and not new.takes_q and new.positions == "lengths"
        self.count = "num_rows" if self.brings_count else "T"
        cache = self.cache
        self.latent = cache.head_dim - cache.rope_part if cache.rope_part else 0
        self.rotary_dim = new.rotary_dim(cache)
        self.table_dim = cache.head_dim if new.rope is not None and new.rope.proportional else self.rotary_dim
        self.q_dim = new.q_dim or cache.rope_part or cache.head_dim
        self.takes_state = new.takes_q or new.rope is not None
        self.table: DType | None = None
        if new.rope is not None and new.angles != "computed":
            self.table = dtype(cache.dtype if new.angles_dtype == "same" else "f32")
        width = width_of(cache.dtype, self.q_dim)
        q_vectors = kernels.q_heads * self.q_dim // width if new.takes_q else 0
        whole = any(norm is not None and norm.whole_row for norm in self.norms.values())
        tiles: dict[str, int] = {role: 4 for role in cache.roles if self._may_wait(role)}
        self.threads = threads
        if new.tiled:
            self.blocks = Blocks(new.tiled, cache.kv_heads, 1)
        elif new.q_alone:
            self.blocks = divide_q(cache.kv_heads, threads, q_vectors=q_vectors, row_bytes=4 * self.rotary_dim)
        else:
            self.blocks = divide(
                self.lowered, threads, q_vectors=q_vectors, whole=whole, tiles=tiles, row_bytes=4 * self.rotary_dim + 8
            )
        self.q_heads = kernels.q_heads // self.blocks.split
        self._rotary_width = self._common_width()
        self.parts = _named(self._parts())
        self.q_out_heads = new.q_out_heads or kernels.q_heads
        self.pads = self._pads()
        self.writes, self.tiles = self._writes()
        self.params, self.sizes = self._params()
        self.inputs = self._inputs()

    # Parts -------------------------------------------------------------------------------------------------------

    def _slices(self, role: str) -> tuple[_Slice, ...]:
        """The parts of a head: one, or a latent row's two."""
        first = self.rope is not None and self.rope.part != "last" and not self.latent
        if role == "k" and self.latent:
            rotary_dim = self.rotary_dim
            return (
                _Slice("k", "The latent part", 0, self.latent, 0, 0),
                _Slice("k_rope", "K's RoPE part", self.latent, self.cache.rope_part, rotary_dim, 0),
            )
        dim = {"q": self.q_dim, "k": self.cache.head_dim, "v": self.cache.v_dim}[role]
        rotary_dim = 0 if role == "v" else self.rotary_dim
        if rotary_dim and self.rope is not None and self.rope.proportional and self.rope.style == "neox":
            return (_Slice(role, role.upper(), 0, dim, dim, 0, rotary_dim // 2),)
        return (_Slice(role, role.upper(), 0, dim, rotary_dim, 0 if first else dim - rotary_dim if rotary_dim else 0),)

    def _row(self, role: str) -> int:
        """Elements of a role's head in the caller's rows."""
        return {"q": self.q_dim, "k": self.cache.head_dim, "v": self.cache.v_dim}[role]

    def _width(self, role: str, part: _Slice) -> int:
        split = self.new.inputs == "parts" and role == "k"
        sizes = [part.dim, part.begin, *(() if split else (self._row(role),))]
        sizes += [self._offset(role), self._flat] if self.new.inputs == "qkv" else []
        sizes += [part.rotary_dim // 2, part.rotary_begin, part.rotary_pairs] if part.rotary_dim else []
        return width_of(self.cache.dtype, *sizes)

    def _common_width(self) -> int:
        """One width for all that RoPE rotates: angles are stored for it."""
        roles = ("q",) if self.new.q_alone else ("q", "k") if self.new.takes_q else ("k",)
        found = [self._width(r, p) for r in roles for p in self._slices(r) if p.rotary_dim]
        return min(found, default=0)

    def _segment(self, role: str, part: _Slice) -> SegmentContext:
        found = [s for s in self.lowered.segments if s.role == role and s.begin <= part.begin]
        return found[-1]

    def _norm(self, role: str, part: _Slice) -> NormContext | None:
        norm = self.norms[role]
        latent = role == "k" and self.latent > 0
        if norm is None or (part.name == "k_rope" and not norm.whole_row):
            return None
        heads = self.kernels.q_heads if role == "q" else self.cache.kv_heads
        dim = self.cache.head_dim if latent and norm.whole_row else part.dim
        return norm_context(norm, self.cache.dtype, dim, heads)

    def _parts(self) -> tuple[PartContext, ...]:
        new = self.new
        found = []
        for role in (*(("q",) if new.takes_q else ()), *self.roles):
            if new.tiled:
                found += self._tiled_parts()
                continue
            if role in self.stored:
                found += [p for p in (self._part(role, part) for part in self._slices(role)) if self._changes(p)]
                continue
            changed = self._is_changed(role)
            staged = role != "q" and any(
                values_by_token(self.lowered, s) or self._misfits(s) for s in self.lowered.segments if s.role == role
            )
            if changed or staged:
                found += [self._part(role, part) for part in self._slices(role)]
        return tuple(found)

    def _tiled_parts(self) -> list[PartContext]:
        """Parts of rows that wait in k_tile: those that change, and those that are stored from registers with one that does."""
        parts = [self._part("k", part) for part in self._slices("k")]
        direct = {p.struct for p in parts if self._is_transformed(p) and not p.tile}
        return [p for p in parts if self._is_transformed(p) or p.struct in direct]

    def _is_transformed(self, part: PartContext) -> bool:
        """True: RoPE or a transform makes other values of a part."""
        return part.rotary_dim > 0 or part.head.hadamard != ""

    def _is_changed(self, role: str) -> bool:
        """True: a role's rows are stored otherwise than the caller brings them."""
        new = self.new
        if role == "k" and (self.rope is not None or new.inputs == "parts"):
            return True
        return role == "q" or new.bias or self.norms[role] is not None or role in new.hadamard

    def _may_wait(self, role: str) -> bool:
        """True: a role's rows wait in shared memory."""
        mine = self.lowered.segments_of(role)
        if any(values_by_token(self.lowered, s) or self._misfits(s) for s in mine):
            return True
        changed = self._is_changed(role) or role in self.stored
        return changed and any(not s.by_vectors or s.element.endswith("x2") for s in mine)

    def _misfits(self, segment: SegmentContext) -> bool:
        """True: the cache's vectors are wider than those that a flat row's alignment allows."""
        places = (self._offset(segment.role), self._flat)
        return self.new.inputs == "qkv" and any(n % segment.width for n in places)

    def _changes(self, part: PartContext) -> bool:
        """True: dims that are stored become others, or share a block with some that do."""
        return part.norm is not None or part.rotary_dim > 0 or part.tile

    def _part(self, role: str, part: _Slice) -> PartContext:
        heads = self.q_heads if role == "q" else self.blocks.heads
        width = self._rotary_width if part.rotary_dim else self._width(role, part)
        norm = self._norm(role, part)
        flat = self.new.inputs == "qkv"
        scaled = role == "q" and self.new.position_scale is not None
        steps = [("norm" if norm is None else norm.word, norm is not None), ("RoPE", part.rotary_dim > 0)]
        after = self.new.norm_order == "after" and role != "v"
        steps = [("bias", self.new.bias), *(reversed(steps) if after else steps), ("factor of its position", scaled)]
        transformed = role in self.new.hadamard
        steps += [("Hadamard", transformed)]
        done = [word for word, is_done in steps if is_done]
        in_parts = self.new.inputs == "parts" and role == "k"
        context = PartContext(
            title=part.title + (f": {', '.join(done)}" if done else ""),
            role=role,
            head=HeadContext(
                name="KRope" if part.name == "k_rope" else role.upper(),
                roles="K's RoPE part"
                if part.name == "k_rope"
                else part.title.lower()
                if part.name == "k" and self.latent
                else role.upper(),
                dim=part.dim,
                rotary_dim=part.rotary_dim,
                rotary_begin=part.rotary_begin,
                neox=part.rotary_dim > 0 and self.rope is not None and self.rope.style == "neox",
                width=width,
                lanes=lanes_of(part.dim, width),
                rotary_pairs=part.rotary_pairs,
                hadamard=decimal(part.dim**-0.5) if transformed else "",
                bits=transformed,
            ),
            given="k_tile" if self.new.tiled else f"{part.name}_in" if in_parts else f"{role}_in",
            row=part.dim if in_parts else self._row(role),
            count="kQHeads" if role == "q" else "kHeads",
            heads=heads,
            begin=0 if in_parts else part.begin,
            bias=("bias" if flat else f"{role}_bias") if self.new.bias else "",
            bias_begin=self._offset(role) if flat else 0,
            norm=norm,
            out=role == "q",
            tile=False,
            struct="",
            divided=self.new.q_out == "e4m3",
            norm_after=after,
            scaled=scaled,
        )
        if role == "q":
            return context
        segment = self._segment(role, part)
        widths = [self._width(role, p) for p in self._slices(role) if self._segment(role, p).struct == segment.struct]
        halves = min(width, *widths) == 1 and segment.element in ("i4x2", "u4x2", "e2m1x2")
        return replace(
            context,
            tile=not segment.by_vectors or values_by_token(self.lowered, segment) or halves,
            struct=segment.struct,
            at=part.begin - segment.begin,
            tile_row=self._row(role),
            tile_at=part.begin,
            divided=False,
            stored=role in self.stored,
        )

    def _writes(self) -> tuple[tuple[WriteContext, ...], tuple[TileContext, ...]]:
        """Segments that are copied from the caller's rows or from shared memory, and that memory."""
        written: list[WriteContext] = []
        tiled = {"k"} if self.new.tiled else {p.role for p in self.parts if p.tile}
        direct = {p.struct for p in self.parts if not p.out and not p.tile}
        for segment in self.lowered.segments:
            if segment.role not in self.roles or (self.stored and not self._is_tiled(segment)):
                continue
            if segment.struct not in direct:
                waits, role = segment.role in tiled, segment.role
                given, rows = ("float", f"{role}_tile") if waits else (segment.value, f"{role}_in")
                written.append(
                    write(self.lowered, segment, self.blocks, self.threads, tiled=waits, given=given, rows=rows)
                )
        tiles = [TileContext(r, self.blocks.heads * self._row(r) + 4) for r in self.cache.roles if r in tiled]
        # First those whose scales are not computed: they wait for nothing.
        written.sort(key=lambda w: w.blocks)
        return tuple(written), tuple(replace(t, stride=-(-t.stride // 4) * 4) for t in tiles)

    def _pads(self) -> tuple[PadContext, ...]:
        """The zeros behind q in a row of q_out."""
        heads = self.kernels.q_heads
        if not self.new.takes_q or self.q_out_heads == heads:
            return ()
        width = next(p.width for p in self.parts if p.role == "q")
        return (PadContext(heads * self.q_dim, (self.q_out_heads - heads) * self.q_dim, width),)

    def _is_tiled(self, segment: SegmentContext) -> bool:
        """True: a part of the segment waits in shared memory."""
        return any(p.struct == segment.struct and p.tile for p in self.parts)

    # Parameters --------------------------------------------------------------------------------------------------

    def _offset(self, role: str) -> int:
        """Where a role begins in a row q | k | v."""
        q = self.kernels.q_heads * self.q_dim
        k = self.cache.kv_heads * self.cache.head_dim
        return {"q": 0, "k": q, "v": q + k}[role]

    @property
    def _flat(self) -> int:
        """Elements of a row q | k | v."""
        return self._offset("v") + self.cache.kv_heads * self.cache.v_dim

    def _shape(self, *inner: int) -> tuple[int | str, ...]:
        return ("B", "S", *inner) if self.new.rows == "padded" else ("T", *inner)

    def _param(self, name: str, doc: str, inner: tuple[int, ...], fields: tuple[str | None, ...], align: int) -> Array:
        shape = self._shape(*inner)
        return Array(
            name,
            self.cache.dtype,
            shape,
            align=align,
            strided=True,
            doc=doc,
            field="dtype",
            fields=(*(None,) * (len(shape) - len(inner)), *fields),
        )

    def _rows(self) -> list[Array]:
        """The arrays of rows."""
        new, size = self.new, dtype(self.cache.dtype).bytes
        widest = {r: max((p.width for p in self.parts if p.role == r), default=1) * size for r in ("q", "k", "v")}
        if new.inputs == "qkv":
            inner: tuple[int, ...] = (self._flat,)
            copied = [s.width * size for s in self.lowered.segments if all(p.role != s.role for p in self.parts)]
            align = max(*widest.values(), *copied)
            doc = "new rows q | k | v"
            return [self._param("qkv", doc, inner, (None,), math.gcd(16, align))]
        found = []
        if new.takes_q:
            shape = (self.kernels.q_heads, self.q_dim)
            field = "head_dim" if new.q_dim is None else f"ops.{new.name}.q_dim"
            found.append(self._param("q", "new q rows", shape, ("q_heads", field), widest["q"]))
        for row in () if self.stored or new.tiled or new.q_alone else row_params(self.lowered, "", "new {} rows"):
            if row.name == "k" and new.inputs == "parts":
                for part in self._slices("k"):
                    name = "k_latent" if part.name == "k" else part.name
                    align = (
                        next(p.width for p in self.parts if p.begin == 0 and p.dim == part.dim and p.role == "k") * size
                    )
                    found.append(
                        self._param(name, f"new {part.title} rows", (1, part.dim), ("kv_heads", "head_dim"), align)
                    )
                continue
            inner = tuple(n for n in row.shape if isinstance(n, int))
            fields = row.fields[1:]
            found.append(self._param(row.name, row.doc, inner, fields, max(row.align, widest[row.name])))
        return found

    def _params(self) -> tuple[tuple[Param, ...], tuple[Param, ...]]:
        """(what the call brings in order, strides and counts behind it)."""
        new, cache = self.new, self.cache
        arrays: list[Param] = [*self._rows()]
        sizes = [Size(f"{r.name}_stride", "i64", f"{r.name}.stride") for r in arrays]
        if new.takes_q:
            shape = (self.q_out_heads, self.q_dim)
            kind = dtype("e4m3" if new.q_out == "e4m3" else cache.dtype)
            width = next(p.width for p in self.parts if p.role == "q")
            heads = "q_heads" if new.q_out_heads is None else f"ops.{new.name}.q_out_heads"
            out = self._param("q_out", "q rows as changed", shape, (heads, "head_dim"), width * kind.bytes)
            # q, or qkv, which begins with it
            same = () if new.q_out == "e4m3" or self.pads else (arrays[0].name,)
            field = "q_out" if new.q_out == "e4m3" else "dtype"
            arrays.append(replace(out, access="out", dtype=kind.name, field=field, in_place=same))
            sizes.append(Size("q_out_stride", "i64", "q_out.stride"))
        arrays += self._weights()
        if self.table is not None:
            arrays.append(
                Array(
                    "cos_sin",
                    self.table.name,
                    ("P", self.table_dim),
                    strided=True,
                    doc="cosines and sines of each position",
                    field="angles_dtype",
                    fields=(None, "head_dim" if self.table_dim != self.rotary_dim else "rope.dim"),
                )
            )
            sizes += [Size("cos_sin_stride", "i64", "cos_sin.stride"), Size("cos_sin_rows", "u32", "P")]
        if new.positions == "given":
            index = dtype(new.index_dtype or "i64")
            sections = (len(new.sections),) if len(new.sections) > 1 else ()
            doc = "position of each row" + (", for every section" if sections else "")
            arrays.append(
                Array(
                    "positions", index.name, (*sections, *self._shape()), untrusted=True, doc=doc, field="index_dtype"
                )
            )
        if new.q_out == "e4m3":
            arrays.append(Array("q_scale", "f32", (1,), optional=True, doc="what q is divided by; None: 1"))
        if new.rows == "padded":
            sizes += [Size("padded_rows", "u32", "S"), Size("num_rows", "u32", "B*S")]
        elif self.brings_count:
            arrays.append(Scalar("num_rows", "u32", doc="rows of this step, padding included"))
        else:
            sizes.append(Size("num_rows", "u32", "T"))
        return tuple(arrays), tuple(sizes)

    def _weights(self) -> list[Array]:
        """Weights of norms, and biases."""
        found, size = [], dtype(self.cache.dtype).bytes
        heads = {"q": self.kernels.q_heads, "k": self.cache.kv_heads, "v": self.cache.kv_heads}
        for role, norm in self.norms.items():
            if norm is None:
                continue
            part = next(p for p in self.parts if p.role == role and p.norm is not None)
            assert part.norm is not None
            kind = dtype("f32" if norm.weight_dtype == "f32" else self.cache.dtype)
            align = min(16, kind.bytes * math.gcd(part.width, part.norm.count, part.dim))
            shape = (heads[role], part.norm.count) if part.norm.per_head else (part.norm.count,)
            field = f"{role}_norm.weight_dtype"
            if part.norm.given:
                doc = f"mean of the squares of {role}'s row, over the heads of all GPUs"
                found.append(Array(f"{role}_mean_square", "f32", self._shape(), doc=doc))
            if not part.norm.plain:
                doc = f"weights of {role}'s norm"
                found.append(Array(f"{role}_weight", kind.name, shape, align=align, doc=doc, field=field))
            if part.norm.bias:
                doc = f"bias of {role}'s norm"
                found.append(Array(f"{role}_norm_bias", kind.name, shape, align=align, doc=doc, field=field))
        if not self.new.bias:
            return found
        kind = dtype(self.cache.dtype)
        if self.new.inputs == "qkv":
            width = max(p.width for p in self.parts)
            return [
                *found,
                Array("bias", kind.name, (self._flat,), align=width * size, doc="bias of q | k | v", field="dtype"),
            ]
        for role in dict.fromkeys(p.role for p in self.parts):
            width = max(p.width for p in self.parts if p.role == role)
            found.append(
                Array(
                    f"{role}_bias",
                    kind.name,
                    (heads[role], self._row(role)),
                    align=width * size,
                    doc=f"bias of {role}",
                    field="dtype",
                )
            )
        return found

    # Rows in the caller's memory ---------------------------------------------------------------------------------

    def _inputs(self) -> tuple[InputContext, ...]:
        """The caller's rows, those of parts first."""
        if self.new.tiled:
            return ()
        found = {}
        tiled = {t.role for t in self.tiles}
        in_parts = self.new.inputs == "parts"
        for part in self.parts:
            if not part.stored:
                array = {"k_in": "k_latent"}.get(part.given, part.given.removesuffix("_in")) if in_parts else part.role
                found[part.given] = self._input(part.given, array, part.role, part.row)
        for role in dict.fromkeys(w.segment.role for w in self.writes):
            if role not in tiled:
                found[f"{role}_in"] = self._input(f"{role}_in", role, role, self._row(role))
        if self.new.takes_q:
            kind = "e4m3" if self.new.q_out == "e4m3" else dtype(self.cache.dtype).c
            elements = self.q_out_heads * self.q_dim
            found["q_to"] = InputContext("q_to", "q_out", kind, 0, elements, self._share("q", self.q_dim))
        return tuple(found.values())

    def _input(self, name: str, array: str, role: str, row: int) -> InputContext:
        """The rows of a role, with `row` elements a head."""
        kind, share = f"const {dtype(self.cache.dtype).c}", self._share(role, row)
        if self.new.inputs == "qkv":
            return InputContext(name, "qkv", kind, self._offset(role), self._flat, share)
        heads = self.kernels.q_heads if role == "q" else self.cache.kv_heads
        return InputContext(name, array, kind, 0, heads * row, share)

    def _share(self, role: str, row: int) -> int:
        """Elements of a row that a kv head has."""
        return row * (self.q_heads // self.blocks.heads if role == "q" else 1)


def _named(parts: tuple[PartContext, ...]) -> tuple[PartContext, ...]:
    """Parts whose heads and norms have names: those that are alike have one, after all their roles."""
    heads: dict[HeadContext, list[HeadContext]] = {}
    norms: dict[NormContext, list[HeadContext]] = {}
    for part in parts:
        heads.setdefault(replace(part.head, name="", roles=""), []).append(part.head)
        if part.norm is not None:
            norms.setdefault(replace(part.norm, type=""), []).append(part.head)
    found = []
    for part in parts:
        alike = heads[replace(part.head, name="", roles="")]
        norm = part.norm
        if norm is not None:
            mine = norms[replace(norm, type="")]
            norm = replace(norm, name="".join(h.name for h in mine) + "Norm", roles=" and ".join(h.roles for h in mine))
        head = replace(
            part.head, name="".join(h.name for h in alike) + "Head", roles=" and ".join(h.roles for h in alike)
        )
        found.append(replace(part, head=head, norm=norm))
    return tuple(found)
