"""The header of a set in C++: the context of templates/export/set.h.j2."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kvgen.errors import ToolError
from kvgen.export.docs import LAYER, LAYER_0, described
from kvgen.export.members import Member, Struct, struct_of
from kvgen.export.pools import CacheContext, cache_context
from kvgen.export.words import comment, identifier, title
from kvgen.expr.nodes import variables
from kvgen.expr.to_cpp import cpp
from kvgen.lowering.page_runs import STEPS
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Count, OtherCache, PagePool, Scalar, Size
from kvgen.plan.split_plan import HEADER, KV_CHUNK, SplitPlan
from kvgen.schema.kernel_set import KernelSet, Op


@dataclass(frozen=True)
class SizeContext:
    """A name in a rule for a grid, and the member of the arguments, or of their struct `owner`, that has its value."""

    name: str
    member: str
    owner: str = ""


@dataclass(frozen=True)
class ArchShared:
    """Dynamic shared memory of a block on one architecture, in bytes."""

    arch: str
    bytes: int


@dataclass(frozen=True)
class ArchThreads:
    """Threads of a block on an architecture."""

    arch: str
    threads: int


@dataclass(frozen=True)
class ArchGrid:
    """The rules of a launch's grid on an architecture."""

    arch: str
    grid: tuple[str, ...]


@dataclass(frozen=True)
class ArchSplit:
    """How a workspace is divided on an architecture."""

    arch: str
    columns: int
    blocks_per_sm: int
    partial_bytes: int
    tiles_a_row: int


@dataclass(frozen=True)
class ArchFile:
    """The file that has a kernel for one architecture."""

    arch: str
    name: str


@dataclass(frozen=True)
class KernelContext:
    """A kernel: `name` is its launch function and its file, but for the architectures of `file_by_arch`; `title` begins the names
    of its types.

    `grid` has three rules over `sizes`, `shared` are bytes of dynamic shared memory; `..._by_arch` have those of architectures
    that differ. `checked` are the members that problem() looks at; `workspace`: it takes one.
    """

    name: str
    title: str
    entry: str
    doc: tuple[str, ...]
    struct: Struct
    grid: tuple[str, str, str]
    sizes: tuple[SizeContext, ...]
    threads: int
    shared: int
    shared_by_arch: tuple[ArchShared, ...]
    threads_by_arch: tuple[ArchThreads, ...]
    grid_by_arch: tuple[ArchGrid, ...]
    file_by_arch: tuple[ArchFile, ...]
    checked: tuple[Member, ...]
    workspace: bool


@dataclass(frozen=True)
class WorkspaceContext:
    """The workspace of a planned operation, in bytes: as kvgen.plan.split_plan.SplitPlan divides it."""

    name: str
    title: str
    kernels: tuple[str, ...]
    columns: int
    blocks_per_sm: int
    partial_bytes: int
    chunk_tokens: int
    max_seen: int
    slots_a_part: int
    tiles_a_row: int
    header: int
    chunk: int
    by_arch: tuple[ArchSplit, ...]


@dataclass(frozen=True)
class HeaderContext:
    """Everything export/set.h.j2 reads."""

    set: str
    doc: tuple[str, ...]
    archs: tuple[str, ...]
    caches: tuple[CacheContext, ...]
    kernels: tuple[KernelContext, ...]
    workspaces: tuple[WorkspaceContext, ...]


def header_context(
    kernels: KernelSet, doc: str, plans: dict[str, tuple[KernelPlan, ...]], ops: tuple[str, ...]
) -> HeaderContext:
    """The header of the operations `ops` of a set; raises ToolError for what C++ cannot name."""
    chosen = [op for op in kernels.ops if op.name in ops]
    pointers = tuple(
        dict.fromkeys(
            p.pointers for op in chosen for plan in plans[op.name] for p in plan.params if isinstance(p, PagePool)
        )
    )
    summary = "What every kernel takes first: one layer of the cache."
    caches = [cache_context("Cache", kernels.cache, summary, pointers, kernels.name)]
    for op in chosen:
        for name, cache in op.other_caches().items():
            caches.append(
                cache_context(
                    name, cache, f"One layer of the cache that {op.name} reads.", (), f"{kernels.name}/{op.name}"
                )
            )
    structs = {c.name: c.struct for c in caches}
    found = [_kernel(kernels, op, plan, structs) for op in chosen for plan in plans[op.name]]
    titles = [k.title for k in found]
    twice = next((k for k in found if titles.count(k.title) > 1), None)
    if twice is not None:
        both = " and ".join(k.name for k in found if k.title == twice.title)
        raise ToolError(
            f"{kernels.name}: got {both}, whose structs are both called {twice.title}Arguments; rename one of them"
        )
    return HeaderContext(
        set=identifier(kernels.name, "name", "function"),
        doc=comment(doc.strip() or f"The kernels of {kernels.name}."),
        archs=tuple(kernels.arch),
        caches=tuple(caches),
        kernels=tuple(found),
        workspaces=tuple(
            _workspace(op, split, plans[op.name]) for op in chosen if (split := plans[op.name][0].split) is not None
        ),
    )


def _kernel(kernels: KernelSet, op: Op, plan: KernelPlan, structs: dict[str, Struct]) -> KernelContext:
    where, planned = f"{kernels.name}/{plan.name}", any(p.name == "workspace" for p in plan.params)
    params = (OtherCache("cache", "Cache"), *plan.params)
    docs = [LAYER_0 if plan.all_layers else LAYER, *(described(p, plan.params) for p in plan.params)]
    struct = struct_of(params, docs, where, others=structs)
    grids = [plan.grid, *plan.differing("grid").values()]
    names = sorted({name for grid in grids for rule in grid for name in variables(rule)})
    sizes = tuple(SizeContext(identifier(n, where, "size"), *_member(n, plan, structs["Cache"], where)) for n in names)
    x, y, z = (cpp(rule) for rule in plan.grid)
    doc = op.description
    if plan.name != op.name and planned:
        doc = f"Plans a step in the workspace of {op.name}(): launched before it on the same stream, once a step for all layers."
    elif plan.name != op.name:
        doc, asked = STEPS[plan.name.removeprefix(f"{op.name}_")]
        doc += f"\nLaunched before `{op.name}()` on the same stream{', where wanted' if asked else ''}."
    return KernelContext(
        name=identifier(plan.name, where, "function"),
        title=title(plan.name),
        entry=plan.entry,
        doc=comment(doc.replace("`", "")),
        struct=struct,
        grid=(x, y, z),
        sizes=sizes,
        threads=plan.threads,
        shared=plan.shared,
        shared_by_arch=tuple(ArchShared(a, n) for a, n in plan.differing("shared").items()),
        threads_by_arch=tuple(ArchThreads(a, n) for a, n in plan.differing("threads").items()),
        grid_by_arch=tuple(
            ArchGrid(a, tuple(cpp(rule) for rule in grid)) for a, grid in plan.differing("grid").items()
        ),
        file_by_arch=tuple(ArchFile(a, name) for a, name in plan.differing("name").items()),
        checked=tuple(m for m in struct.members if m.pointer or m.unit > 1),
        workspace=planned,
    )


def _member(name: str, plan: KernelPlan, cache: Struct, where: str) -> tuple[str, str]:
    """The member of the arguments that has the value of a name in a grid's rule, and the struct inside them that it is of ("" for
    their own); raises ToolError where none has."""
    for p in plan.params:
        if (isinstance(p, Size) and p.value == name) or (isinstance(p, Scalar | Count) and p.name == name):
            return p.name, ""
        if isinstance(p, PagePool) and name == "all_layers":
            return "num_layers", p.name
    by_value = {"B": "batch", "M": "table_pages", "pages": "num_pages", "tokens": "page_tokens"}
    member = by_value.get(name, name)
    if any(m.name == member for m in cache.members):
        return member, "cache"
    raise ToolError(
        f"{where}: its grid is worked out from {name!r}, which the kernel does not take, so a launch function in C++ does not "
        f"know it; add Size(..., {name!r}) to params and to the kernel, or export the set's other operations: "
        f"`kvgen export {where.partition('/')[0]}/OPERATION`"
    )


def _workspace(op: Op, split: SplitPlan, plans: tuple[KernelPlan, ...]) -> WorkspaceContext:
    return WorkspaceContext(
        name=op.name,
        title=title(op.name),
        kernels=tuple(title(p.name) for p in plans),
        **asdict(split),
        header=HEADER,
        chunk=KV_CHUNK,
        by_arch=tuple(
            ArchSplit(a, s.columns, s.blocks_per_sm, s.partial_bytes, s.tiles_a_row)
            for a, s in plans[0].differing("split").items()
        ),
    )
