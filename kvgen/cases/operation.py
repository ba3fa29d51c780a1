"""The protocol of an operation's cases, which one module of this room fills in for each operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Call, Case, Contents, Other
from kvgen.cases.scene import LAYER, Lengths, Scene, aligned
from kvgen.cases.separate_passes import Pass
from kvgen.cases.touched_bytes import SECTOR
from kvgen.cases.workload import Launch, Workload
from kvgen.errors import ToolError
from kvgen.layout.dtypes import dtype
from kvgen.lowering.lowered import lower
from kvgen.plan.params import Array, Param, Scalar
from kvgen.schema.kernel_set import KernelSet, Op

Raw = NDArray[Any]
Totals = Callable[..., tuple[int, ...]]
O = TypeVar("O", bound=Op)  # noqa: E741
OPEN_TOKENS: Final = 16  # a page of a cache that has none
READS: Final = (32, 2048)  # requests, tokens of each: a batch that is read


def cases_of(op: Op) -> Cases[Any]:
    """The cases of an operation."""
    return cases_type(op.kind)(op)


def cases_type(kind: str) -> type[Cases[Any]]:
    """The class of a kind's cases: `CopyPagesCases` of module `kvgen.cases.copy_pages` for "copy_pages"."""
    name = "".join(word.capitalize() for word in kind.split("_"))
    found: type[Cases[Any]] = getattr(import_module(f"kvgen.cases.{kind}"), f"{name}Cases")
    return found


class Cases(ABC, Generic[O]):
    """The cases of operation `op`: the arguments of its call over a batch, and its comparison with the oracle.

    A subclass says which lengths the call expects, the sizes of its arrays and the values of its index arrays; all other arrays
    are filled with random numbers by `kvgen verify`.
    """

    lengths: Lengths = "all"
    rows_each: int = 1
    """Query rows of a request."""
    sparse: bool = False
    """Every row of q has a list of tokens."""
    counted: ClassVar[bool] = False
    """`minimum` knows the fewest bytes."""
    reads_all: bool = False
    """It reads every token of a request, and leaves the cache as it is."""
    pairs: ClassVar[bool] = False
    """It takes pairs of pages."""
    fused: ClassVar[bool] = False
    """A GPU may round its numbers to a neighbour, since the compiler may fuse a product and a sum."""
    served: str = ""
    """The batches of `benchmarks/gpu` that it is timed in, as `benchmarks/gpu/timings.py` calls them; "": no such."""

    def __init__(self, op: O) -> None:
        self.op = op

    # The call --------------------------------------------------------------------------------------------------------

    def call(self, scene: Scene) -> Call:
        """The call over a scene; arrays that are no indices are zero, outputs too.

        Raises ToolError where there is no batch for the operation.
        """
        launcher, begins = getattr(scene.package, self.op.name), self.begins(scene)
        tables = scene.tables(self.lengths, self.rows_each)
        sizes = {"B": len(begins) - 1, "B+1": len(begins), "T": int(begins[-1])} | self.sizes(scene)
        arrays, numbers = dict[str, Raw](), dict[str, int]()
        for spec in self.parameters(launcher):
            if spec.name in arrays or spec.name in ("workspace", "errors") or not self.takes(scene, spec):
                continue
            if isinstance(spec, Array):
                if any(n not in sizes for n in spec.shape if isinstance(n, str)):
                    raise self.no_batch()
                shape = tuple(n if isinstance(n, int) else sizes[n] for n in spec.shape)
                arrays[spec.name] = aligned(shape, dtype(spec.dtype).numpy())
            elif (number := self.number(scene, spec)) is not None:
                numbers[spec.name] = number
        self.fill(scene, arrays, tables)
        others, rows = self.others(scene), self.rows(scene)
        return Call(
            self.op,
            scene,
            launcher,
            tables,
            arrays,
            rows,
            int(begins[-1]),
            tuple(begins[:-1].tolist()),
            numbers,
            others,
        )

    def counts(self, scene: Scene) -> Sequence[int]:
        """Rows that the call has of each request: by default its new tokens."""
        return scene.workload.new

    def begins(self, scene: Scene) -> NDArray[np.int64]:
        """The rows at which each request begins, and the end of all; int64 `[B + 1]`."""
        return np.cumsum([0, *self.counts(scene)])

    def rows(self, scene: Scene) -> int:
        """Rows of the call, padding left out."""
        return sum(self.counts(scene))

    def sizes(self, scene: Scene) -> dict[str, int]:
        """Dimensions of the call's arrays besides T (rows) and B (requests)."""
        return {}

    def parameters(self, launcher: Any) -> Sequence[Param]:
        """Parameters of the kernel, and of a planner, that the call brings; of two of one name the last one has the access."""
        found: Sequence[Param] = launcher.KERNEL.arguments
        return found

    def takes(self, scene: Scene, spec: Param) -> bool:
        """True for an argument that the call brings: row offsets only where lengths leave the new tokens out."""
        return not (spec.name == "row_offsets" and getattr(spec, "optional", False) and scene.kv.lengths == "after")

    def number(self, scene: Scene, spec: Param) -> int | None:
        """An argument that is a number; None leaves it out."""
        return 0 if isinstance(spec, Scalar) else None

    def fill(self, scene: Scene, arrays: dict[str, Raw], tables: Mapping[str, Raw]) -> None:
        """Write the index arrays of a call."""
        for name, array in arrays.items():
            value = self.value(scene, name, array)
            if value is not None:
                array[...] = value

    def value(self, scene: Scene, name: str, like: Raw) -> Any:
        """The values of an index array; None leaves zeros."""
        return self.begins(scene) if name == "row_offsets" else None

    def others(self, scene: Scene) -> dict[str, Other]:
        """Further caches that the call takes, by argument."""
        return {}

    def no_batch(self) -> ToolError:
        """The error of an operation whose arguments nothing lays yet."""
        return ToolError(f"kvgen verify has no batches for {self.op.kind} over such a page table")

    # Its launch ------------------------------------------------------------------------------------------------------

    def cache(self, call: Call, name: str, memory: Contents) -> Any:
        """The generated cache, or pages, of argument `name`, over arrays on any device."""
        return call.others[name].scene.package.Cache(**memory.pools, **memory.tables)[LAYER]

    def planned(self, call: Call, cache: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run the planner of an operation that has one; returns the launcher's arguments behind `cache`: a workspace in place of
        arrays that the planner alone takes."""
        launcher = call.launcher
        if not hasattr(launcher, "workspace"):
            return dict(arguments)
        layer = cache[LAYER]
        longest = layer.dims["max_cache_length"] if launcher.SPLIT_PLAN.chunk_tokens else None
        workspace = launcher.workspace(max_rows=call.rows, device=layer.device, max_tokens=longest)
        taken = {p.name for p in launcher.PLAN.arguments} & arguments.keys()
        launcher.plan(layer, workspace, rows=call.rows, **{name: arguments[name] for name in taken})
        gone = taken - {p.name for p in launcher.KERNEL.arguments}
        return {n: a for n, a in arguments.items() if n not in gone} | {"workspace": workspace}

    # Bytes moved -----------------------------------------------------------------------------------------------------

    def minimum(self, call: Call) -> dict[str, int]:
        """By the name of a launch's buffer, the 32-byte sectors that a call must touch; a buffer that it need not touch is left
        out. Raises ToolError where nobody knows them (`counted`)."""
        raise ToolError(
            f"{call.scene.kernels.name}/{self.op.name}: got {self.op.kind}, whose fewest bytes nobody knows; kvgen bench counts "
            "operations that read or write tokens, pages or states of the cache, and none of a project's own"
        )

    def planning(self, call: Call) -> dict[str, int]:
        """The sectors that a planner must read to divide the work."""
        return {}

    def replaced(self, call: Call, least: Mapping[str, int]) -> tuple[Pass, ...]:
        """The kernels that a fused one replaces, whose own minimum is `least`; () where it replaces none."""
        return ()

    def timed(self, kernels: KernelSet) -> list[Workload]:
        """The workloads that `kvgen verify` times it in on a GPU, by default none."""
        return []

    # Its cases -------------------------------------------------------------------------------------------------------

    def batches(self, kernels: KernelSet, totals: Totals) -> list[Workload]:
        """Further batches than those of every operation, where requests may have any length; `totals` makes the lengths of a
        batch."""
        return []

    def steps(self, kernels: KernelSet) -> tuple[Launch, ...]:
        """The launches of a case of several over one memory, the first one of this operation; () without one."""
        return ()

    def stored(self, scene: Scene) -> Sequence[int]:
        """Tokens of each request that the cache holds before the launch."""
        return scene.workload.totals

    def stored_layers(self, call: Call) -> Sequence[int]:
        """Layers that hold them; all bytes of others are NaN."""
        return (LAYER,)

    def memory(self, scene: Scene, rng: np.random.Generator) -> dict[str, Contents]:
        """Memory besides that of caches, by argument."""
        return {}

    def settle(self, case: Case) -> None:
        """Change the memory of a case before anything in it is wrong: what an earlier operation of the step would have done."""

    def draw(self, spec: Param, array: Raw, rng: np.random.Generator) -> None:
        """Change the random numbers of an argument."""

    def damaged(self, case: Case) -> tuple[dict[str, Raw], Scene]:
        """The tables that hostile data is written to, and the scene that they are of."""
        return case.before.tables, case.scene

    def follow(self, case: Case) -> None:
        """Make the arguments fit tables that have become wrong."""

    @property
    def unheld(self) -> str:
        """Parts that are not compared though its cases run; "" where everything is."""
        return ""

    @abstractmethod
    def compare(self, j: Comparison) -> int:
        """Change `j.wanted`, a copy of the memory before the launch, into what the launch must have left, by the float64 oracle
        of kvgen.reference; returns the error word.

        Where a kernel computes in f32, what it left must be near enough, and is then taken over into `j.wanted`: so that in the
        end all memory is compared byte for byte.
        """


class CountedCases(Cases[O]):
    """The cases of an operation whose fewest bytes are known; its rows are by default all tokens that are alive."""

    counted = True

    def counts(self, scene: Scene) -> Sequence[int]:
        return [scene.alive(b) for b in range(len(scene.workload.totals))]

    def minimum(self, call: Call) -> dict[str, int]:
        found = self.touched(call)
        found |= {n: -(-a.nbytes // SECTOR) for n, a in call.arrays.items() if n not in found and n != "errors"}
        return {name: n for name, n in found.items() if n}

    @abstractmethod
    def touched(self, call: Call) -> dict[str, int]:
        """The sectors of caches and tables, and those of arrays of which a part is enough; all others are needed whole."""

    def timed(self, kernels: KernelSet) -> list[Workload]:
        """A batch that is read, or one of states."""
        if kernels.cache.states:
            ones = (1,) * READS[0]
            return [Workload(f"{len(ones)} states", ones, ones)]
        batch, tokens = READS
        fits = one_page(kernels, tokens)
        return [Workload(f"{batch} x {fits}", (fits,) * batch, (1,) * batch)]


def one_page(kernels: KernelSet, tokens: int) -> int:
    """A length that a request of the set may have: `tokens`, or as many as its only page holds."""
    most = kernels.kv.page_tokens if lower(kernels.kv).allocation.one_page else None
    return tokens if most is None else min(tokens, most)
