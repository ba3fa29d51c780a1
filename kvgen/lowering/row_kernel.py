"""The kernel that writes a step's rows, new ones or those that are stored: its context, and its plan."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.lowered import lower
from kvgen.lowering.new_rows import NewRows
from kvgen.lowering.rope_norm import (
    HeadContext,
    InputContext,
    NormContext,
    PadContext,
    PartContext,
    PositionScaleContext,
    PositionsContext,
    RopeContext,
    TileContext,
    position_scale_context,
    rope_context,
)
from kvgen.lowering.row_parts import RowParts
from kvgen.lowering.row_tiling import WriteContext
from kvgen.plan.kernel import KernelPlan
from kvgen.schema.kernel_set import KernelSet

THREADS: Final = 256
_LINE: Final = 120  # characters of a line of parameters
_FULL: Final = 8  # blocks of THREADS that fill an SM of sm_80 and sm_90
_REGISTERS: Final = 65_536  # of an SM; a thread gets them eight at a time


@dataclass(frozen=True)
class RowsContext:
    """Context that kernels of a step's rows share: `rows` tokens a block and `heads` kv heads of each; `split` blocks share
    a token; `params` are lines of declarations. `search_lanes` look together for a row's request, whose length counts these
    rows (`after`) or not. A `ring` has no slot for some rows.

    `parts` go through registers, as heads of the structs `head_structs`; some of them wait in `tiles`, and `writes` store what is
    left.
    """

    entry: str
    title: str
    params: tuple[str, ...]
    headers: tuple[str, ...]
    threads: int
    rows: int
    heads: int
    split: int
    search_lanes: int
    after: bool
    ring: bool
    tiles: tuple[TileContext, ...]
    head_structs: tuple[HeadContext, ...]
    parts: tuple[PartContext, ...]
    writes: tuple[WriteContext, ...]


@dataclass(frozen=True)
class NormCacheContext(RowsContext):
    """Everything ops/norm_cache.cu.j2 reads; `row_norms` are parts whose norm sums over a row."""

    norm_structs: tuple[NormContext, ...]
    row_norms: tuple[PartContext, ...]


@dataclass(frozen=True)
class RotateCacheContext(RowsContext):
    """Everything ops/rotate_cache.cu.j2 reads; `q_heads` of q a block, of the caller's `inputs`. A row's slot is found by
    `ragged` row_offsets or `padded` lengths."""

    q_heads: int
    inputs: tuple[InputContext, ...]
    ragged: bool
    padded: bool
    rope: tuple[RopeContext, ...]


@dataclass(frozen=True)
class AppendContext(RotateCacheContext):
    """Everything ops/append.cu.j2 reads; also by `named` slots. Where q or RoPE ask what became of a row, slots have its `state`;
    in a cache with a `residual`, its tail. Where entries stand for `rate` tokens, the rows of their last tokens are stored.
    `checked` positions leave a row unknown where they are too large; q has a factor by `position_scale`. `resident` blocks an SM,
    which leave a thread `most_registers`; 0: as they come."""

    norm_structs: tuple[NormContext, ...]
    row_norms: tuple[PartContext, ...]
    checked: tuple[PositionsContext, ...]
    position_scale: tuple[PositionScaleContext, ...]
    pads: tuple[PadContext, ...]
    named: bool
    rate: int
    residual: int
    state: bool
    resident: int | str
    most_registers: int | str


@dataclass(frozen=True)
class AppendQContext:
    """Everything ops/append_q.cu.j2 reads: as AppendContext, of q alone, of which nothing is stored."""

    entry: str
    title: str
    params: tuple[str, ...]
    headers: tuple[str, ...]
    threads: int
    rows: int
    search_lanes: int
    after: bool
    q_heads: int
    inputs: tuple[InputContext, ...]
    ragged: bool
    padded: bool
    rope: tuple[RopeContext, ...]
    head_structs: tuple[HeadContext, ...]
    parts: tuple[PartContext, ...]
    norm_structs: tuple[NormContext, ...]
    row_norms: tuple[PartContext, ...]
    checked: tuple[PositionsContext, ...]
    position_scale: tuple[PositionScaleContext, ...]
    pads: tuple[PadContext, ...]
    resident: int | str
    most_registers: int | str


_CONTEXTS: Final[dict[str, type[RowsContext] | type[AppendQContext]]] = {
    "ops/append.cu.j2": AppendContext,
    "ops/append_q.cu.j2": AppendQContext,
    "ops/norm_cache.cu.j2": NormCacheContext,
    "ops/rotate_cache.cu.j2": RotateCacheContext,
}


def parameter_lines(params: tuple[str, ...]) -> tuple[str, ...]:
    """Declarations, as many a line as fit; a comma ends all but the last."""
    found = [""]
    for i, text in enumerate(params):
        text += "" if i == len(params) - 1 else ","
        if found[-1] and len(found[-1]) + len(text) > _LINE:
            found.append("")
        found[-1] += f"{' ' if found[-1] else ''}{text}"
    return tuple(found)


def _resident(parts: RowParts) -> tuple[int | str, int | str]:
    """Blocks an SM that the compiler is asked for, as many as it can give registers to without a spill (0: as they come), and the
    registers that a thread has then. Where 8 blocks have enough, some architectures hold fewer: the device library's number."""
    blocks = _blocks(parts)
    if blocks == _FULL:
        return "kFullBlocks", "32 (with 6 blocks 40)"
    return blocks, _REGISTERS // (THREADS * max(1, blocks)) // 8 * 8


def _blocks(parts: RowParts) -> int:
    """Blocks an SM, by what the rows need registers for; 0: as they come."""
    blocks = [scales for w in parts.writes if w.blocks for scales in w.segment.scales]
    # Blocks of several heads, or of many accesses a lane, take more than 6 would leave.
    many = any(q.heads > 1 or q.chunks > 2 for q in blocks)
    if not parts.parts:
        if not blocks or many:
            return 0
        # Beside other rows of the same array only blocks that a lane has in one access leave enough.
        alone = len(parts.writes) == 1 or (len(parts.inputs) == 1 and blocks[0].chunks == 1)
        return _FULL if len(blocks) == 1 and alone else 6
    # To divide by a number of heads that is no power of two takes registers, too.
    if many or parts.q_heads & (parts.q_heads - 1):
        return 0
    # So does a LayerNorm, whose mean comes before its variance; a Hadamard transform, which holds a head beside the elements
    # of another lane; a norm of V beside blocks with scales; and q alone, of which a block has several rows.
    layer = any((p.norm is not None and p.norm.layer) or p.head.hadamard for p in parts.parts)
    v_blocks = parts.new.v_norm is not None and any(w.blocks for w in parts.writes)
    return 5 if layer or v_blocks or parts.new.q_alone else 6


def rope_contexts(new: NewRows, parts: RowParts) -> tuple[RopeContext, ...]:
    """The angles of these rows, if they rotate."""
    if new.rope is None:
        return ()
    return (
        rope_context(
            new.rope,
            parts.rotary_dim,
            head_dim=parts.cache.head_dim,
            local=new.local,
            table=parts.table is not None,
            form=new.angles,
            given=new.positions == "given",
            sections=new.sections,
            order=new.sections_order,
            head=next(p.head for p in parts.parts if p.rotary_dim),
            rate=1 if new.q_alone else parts.cache.entry_tokens,
        ),
    )


def row_kernel(new: NewRows, kernels: KernelSet, template: str, title: str) -> KernelPlan:
    """The kernel of `template` that stores these rows; `title` says what it does, after its name."""
    cache, rope = kernels.kv, new.rope
    parts = RowParts(new, kernels, THREADS)
    angles = rope_contexts(new, parts)
    scale, given = new.position_scale, new.positions == "given"
    scales = () if scale is None else (position_scale_context(scale, given=given, checked=rope is not None),)
    checked = (
        *(PositionsContext(r.given, r.sections, r.table, r.limit) for r in angles),
        *(PositionsContext(True, 1, False, s.limit) for s in scales if s.limit),
    )
    norms = [p.norm for p in parts.parts if p.norm is not None]
    params = (*parts.params, new.places_param(cache), *parts.sizes, ERRORS)
    # One a role: a latent row's two parts have one factor.
    row_norms = tuple({p.role: p for p in reversed(parts.parts) if p.norm is not None and p.norm.whole_row}.values())[
        ::-1
    ]
    resident, most_registers = _resident(parts)
    headers = {
        "full_blocks": isinstance(resident, str),
        "entries": cache.entry_tokens > 1 and new.rows != "slots" and not new.q_alone,
        "angles": rope is not None,
        "row_norm": any(p.norm is not None and not p.norm.given for p in row_norms),
        "head_norms": any(norm.plain or norm.layer for norm in norms),
        "first_pairs": any(p.head.rotary_pairs for p in parts.parts),
        "position_scale": bool(scales),
        "hadamard": any(p.head.hadamard for p in parts.parts),
        "store_heads": bool(parts.parts),
        "pad_heads": bool(parts.pads),
        "write_rows": bool(parts.inputs) or bool(parts.writes),
    }
    known: dict[str, Any] = dict(
        entry=entry_name(kernels, new.name),
        title=title,
        params=parameter_lines(tuple(p.declaration for p in params)),
        headers=tuple(name for name, used in headers.items() if used),
        threads=THREADS,
        rows=parts.blocks.rows,
        heads=parts.blocks.heads,
        q_heads=parts.q_heads if new.takes_q else 0,
        split=parts.blocks.split,
        search_lanes=new.search_lanes(parts.blocks.rows, THREADS),
        after=new.after(cache),
        ring=lower(cache).table.window > 0,
        inputs=parts.inputs,
        tiles=parts.tiles,
        head_structs=tuple({p.head.name: p.head for p in parts.parts}.values()),
        norm_structs=tuple({norm.name: norm for norm in norms}.values()),
        parts=parts.parts,
        writes=parts.writes,
        ragged=new.rows == "ragged",
        padded=new.rows == "padded",
        named=new.rows == "slots",
        rate=cache.entry_tokens,
        residual=cache.storage.residual,
        state=parts.takes_state,
        rope=angles,
        row_norms=row_norms,
        checked=checked,
        position_scale=scales,
        pads=parts.pads,
        resident=resident,
        most_registers=most_registers,
    )
    kind = _CONTEXTS[template]
    context = kind(**{f.name: known[f.name] for f in fields(kind)})
    count = var("B") * var("S") if new.rows == "padded" else var(parts.count)
    grid = (ceil_div(count, parts.blocks.rows), const(parts.blocks.split), const(1))
    tables = new.rows != "slots" or (new.positions == "lengths" and new.rope is not None)
    stores = not new.q_alone
    return KernelPlan(
        new.name, known["entry"], template, context, params, grid, THREADS, writes_pool=stores, reads_tables=tables
    )
