"""The kernel that writes a step's rows: ops/append.cu.j2, for append and for what changes rows that are already stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvgen.dtypes import dtype
from kvgen.expr import ceil_div, const, var
from kvgen.ops.append_parts import Rows
from kvgen.ops.cache import ERRORS, entry_name
from kvgen.ops.heads import InputContext, PartContext, RopeContext, TileContext, rope_context
from kvgen.ops.writes import WriteContext
from kvgen.plan import KernelPlan, Param
from kvgen.spec.kernel_set import KernelSet
from kvgen.spec.norm import RmsNorm

if TYPE_CHECKING:
    from kvgen.ops.append import Append

THREADS: Final = 256


@dataclass(frozen=True)
class FindContext:
    """How a row's place is found: `form` is a file of templates/find/; `state`, whether q or RoPE ask what became of a row;
    `unfit`, where RoPE cannot turn it, as C; `before`, whether lengths leave this step's rows out."""

    form: str
    state: bool
    unfit: str
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
    `finders` lanes that find out where a row goes."""

    entry: str
    title: str
    params: tuple[str, ...]
    value: str
    threads: int
    rows: int
    heads: int
    split: int
    finders: int
    finder_mask: str
    headers: tuple[str, ...]
    page: str
    nowhere: str
    ragged: bool
    residual: int
    state: bool
    find: FindContext
    inputs: tuple[InputContext, ...]
    tiles: tuple[TileContext, ...]
    rope: tuple[RopeContext, ...]
    turned: str
    parts: tuple[PartContext, ...]
    row_norms: tuple[PartContext, ...]
    stored_norm: bool
    writes: tuple[WriteContext, ...]


def plan_rows(
    op: Append, kernels: KernelSet, title: str, *, v_norm: RmsNorm | None = None, stored: tuple[str, ...] = ()
) -> KernelPlan:
    """The kernel of an append; of one that takes the roles `stored` from the cache, and leaves the other one alone."""
    cache, rope = kernels.cache, op.turns(kernels)
    rows = Rows(op, kernels, rope, THREADS, v_norm=v_norm, stored=stored)
    angles: tuple[RopeContext, ...] = ()
    if rope is not None:
        angles = (
            rope_context(
                rope,
                rows.turning,
                local=op.rope == "local",
                table=rows.table.c if rows.table else "",
                form=op.angles,
                given=op.positions == "given",
                sections=op.sections,
            ),
        )
    params = (*rows.params, *_places(op, kernels), *rows.sizes, ERRORS)
    residual = cache.storage.residual
    finders = 1 if op.rows != "ragged" else 32
    while finders * rows.blocks.rows > THREADS:
        finders //= 2
    nowhere = "no_values(Fault::none), 0, kU32Max" if residual else "no_page(Fault::none), 0"
    row_norms = tuple(p for p in rows.parts if p.norm is not None and p.norm.whole_row)
    context = AppendContext(
        entry=entry_name(kernels, op.name),
        title=title,
        params=tuple(p.declaration for p in params),
        value=dtype(cache.dtype).c,
        threads=THREADS,
        rows=rows.blocks.rows,
        heads=rows.blocks.heads,
        split=rows.blocks.split,
        finders=finders,
        finder_mask=f"{(1 << finders) - 1:#x}u",
        headers=(*(("angles.cuh",) if rope else ()), *(("heads.cuh",) if rows.parts else ())),
        page="PageValues" if residual else "PageRef",
        nowhere=nowhere + (", row, position" if rows.takes_state else ""),
        ragged=op.rows == "ragged",
        residual=residual,
        state=rows.takes_state,
        find=FindContext(
            op.rows, rows.takes_state, angles[0].unfit if angles else "", cache.lengths == "before", residual
        ),
        inputs=rows.inputs,
        tiles=rows.tiles,
        rope=angles,
        turned=next((p.walk for p in rows.parts if p.turning), ""),
        parts=rows.parts,
        row_norms=row_norms,
        stored_norm=any(p.stored for p in row_norms),
        writes=rows.writes,
    )
    count = var("B") * var("S") if op.rows == "padded" else var(rows.count)
    grid = (ceil_div(count, rows.blocks.rows), const(rows.blocks.split), const(1))
    return KernelPlan(op.name, context.entry, "ops/append.cu.j2", context, params, grid, THREADS, writes_pool=True)


def _places(op: Append, kernels: KernelSet) -> tuple[Param, ...]:
    """What says where rows go."""
    index = op.index_dtype or kernels.cache.lengths_dtype
    if op.rows == "slots":
        index, name, shape, doc = op.index_dtype or "i64", "slots", "T", "place of each row, or -1 to skip it"
    elif op.rows == "padded":
        name, shape, doc = "valid_lengths", "B", "new rows of each request"
    else:
        name, shape, doc = "row_offsets", "B+1", "first row of each request"
    return (Param(name, dtype(index), (shape,), untrusted=True, doc=doc, field="index_dtype"),)
