"""The kernel that writes a step's rows, new ones or those that are stored: its context, and its plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.new_rows import NewRows
from kvgen.lowering.rope_norm import InputContext, PartContext, RopeContext, TileContext, rope_context
from kvgen.lowering.row_parts import RowParts
from kvgen.lowering.row_tiling import WriteContext
from kvgen.plan.kernel import KernelPlan
from kvgen.spec.kernel_set import KernelSet

THREADS: Final = 256


@dataclass(frozen=True)
class LocateContext:
    """How a row's slot is found: `form` is a file of templates/locate/; `state`, whether q or RoPE ask what became of a row;
    `position_out_of_range`, where RoPE has no angle for it, as C; `before`, whether lengths leave this step's rows out."""

    form: str
    state: bool
    position_out_of_range: str
    before: bool
    residual: int

    @property
    def padding(self) -> str:
        """What nowhere() takes for a row that is nobody's."""
        return "Row::padding, 0" if self.state else ""

    @property
    def unknown(self) -> str:
        """For a row of no known position."""
        return "Row::unknown, 0" if self.state else ""

    def known(self, position: str) -> str:
        """For a row at `position`."""
        return f"Row::known, {position}" if self.state else ""


@dataclass(frozen=True)
class AppendContext:
    """Everything ops/append.cu.j2 reads: `rows` tokens and `heads` kv heads of them a block, `split` blocks a token;
    `search_lanes` lanes that find out where a row goes."""

    entry: str
    title: str
    params: tuple[str, ...]
    value: str
    threads: int
    rows: int
    heads: int
    split: int
    search_lanes: int
    search_mask: str
    headers: tuple[str, ...]
    page: str
    nowhere: str
    ragged: bool
    residual: int
    state: bool
    locate: LocateContext
    inputs: tuple[InputContext, ...]
    tiles: tuple[TileContext, ...]
    rope: tuple[RopeContext, ...]
    rotary_walk: str
    parts: tuple[PartContext, ...]
    row_norms: tuple[PartContext, ...]
    stored_norm: bool
    writes: tuple[WriteContext, ...]


def row_kernel(new: NewRows, kernels: KernelSet, template: str, title: str) -> KernelPlan:
    """The kernel of `template` that stores these rows; `title` says what it does, after its name."""
    cache, rope = kernels.cache, new.rope
    parts = RowParts(new, kernels, THREADS)
    angles: tuple[RopeContext, ...] = ()
    if rope is not None:
        angles = (
            rope_context(
                rope,
                parts.rotary_dim,
                local=new.local,
                table=parts.table.c if parts.table else "",
                form=new.angles,
                given=new.positions == "given",
                sections=new.sections,
            ),
        )
    params = (*parts.params, new.places_param(cache), *parts.sizes, ERRORS)
    residual = cache.storage.residual
    search_lanes = new.search_lanes(parts.blocks.rows, THREADS)
    nowhere = "no_values(Fault::none), 0, kU32Max" if residual else "no_page(Fault::none), 0"
    row_norms = tuple(p for p in parts.parts if p.norm is not None and p.norm.whole_row)
    context = AppendContext(
        entry=entry_name(kernels, new.name),
        title=title,
        params=tuple(p.declaration for p in params),
        value=dtype(cache.dtype).c,
        threads=THREADS,
        rows=parts.blocks.rows,
        heads=parts.blocks.heads,
        split=parts.blocks.split,
        search_lanes=search_lanes,
        search_mask=f"{(1 << search_lanes) - 1:#x}u",
        headers=(*(("rows/angles.cuh",) if rope else ()), *(("rows/heads.cuh",) if parts.parts else ())),
        page="PageValues" if residual else "PageRef",
        nowhere=nowhere + (", row, position" if parts.takes_state else ""),
        ragged=new.rows == "ragged",
        residual=residual,
        state=parts.takes_state,
        locate=LocateContext(
            new.rows,
            parts.takes_state,
            angles[0].position_out_of_range if angles else "",
            cache.lengths == "before",
            residual,
        ),
        inputs=parts.inputs,
        tiles=parts.tiles,
        rope=angles,
        rotary_walk=next((p.walk for p in parts.parts if p.rotary_dim), ""),
        parts=parts.parts,
        row_norms=row_norms,
        stored_norm=any(p.stored for p in row_norms),
        writes=parts.writes,
    )
    count = var("B") * var("S") if new.rows == "padded" else var(parts.count)
    grid = (ceil_div(count, parts.blocks.rows), const(parts.blocks.split), const(1))
    return KernelPlan(new.name, context.entry, template, context, params, grid, THREADS, writes_pool=True)
