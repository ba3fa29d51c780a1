"""custom: CUDA of the user's over the set's cache, with a launcher as typed as those of kvgen's own operations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from pydantic import Field, PrivateAttr, SerializeAsAny, field_validator, model_validator

from kvgen.architectures import ARCHITECTURES
from kvgen.expr.nodes import Expr, const, substitute, variables
from kvgen.expr.rules import parse_rule
from kvgen.lowering.cache_struct import ERRORS
from kvgen.lowering.lowered import lower_pages
from kvgen.lowering.state_rows import state_bytes
from kvgen.plan import params
from kvgen.plan.entries import entries
from kvgen.plan.kernel import KernelPlan, Source
from kvgen.plan.params import Param
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.arguments import Argument, Array, Scalar, Size, one_line
from kvgen.schema.headers import with_headers
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.sources import checked_text, read_source

Rule = int | str | Expr
Oracle = Callable[..., Any]
LOGICAL: Final = ("keys", "values", "lengths")  # what an oracle may ask for besides params
MOST_SHARED: Final = max(a.block_shared for a in ARCHITECTURES.values())  # bytes a block can have on any GPU
_MOST_ENTRIES: Final = 4096  # along an axis of an array that kvgen verify draws


class Custom(Op):
    """Launch a kernel of your own over the cache, with a launcher as typed as those of kvgen's operations.

    `source` is a file of CUDA, relative to the spec's folder, or `text` the CUDA itself. It has `extern "C" __global__ void
    <name>(const __grid_constant__ Cache cache, ...)`, where `...` are `params` in their order and, with `errors=True`, last
    the sticky error word `uint64_t* errors` (kvgen.ErrorWord). It begins with `#include "cache.cuh"`, which is the set's;
    headers of your own come from `include_dirs`.

    `grid` has one to three rules for the number of blocks: whole numbers, expressions of kvgen.expr.nodes, or text such as
    "ceil_div(T, 4) * kv_heads" over the names of the arrays' and the cache's shapes. `threads` (128) is a block's size,
    `shared` (0) its dynamic shared memory in bytes. Set `writes=True` where it stores to the cache's memory.
    docs/custom_kernels.md has an example.
    """

    kind: ClassVar[str] = "custom"
    ragged: ClassVar[bool] = True
    moves_states: ClassVar[bool] = True
    at_rates: ClassVar[bool] = True
    source: str | None = None
    """File of CUDA, relative to the spec's folder and inside the project. None: give `text`."""
    text: str | None = None
    """CUDA as a string. None: give `source`."""
    include_dirs: tuple[str, ...] = Field(default=(), strict=False)
    """Folders of headers of your own, relative to the spec's folder and inside the project. What the kernel includes from them
    is copied below the set's `include/`, so a generated package needs none of them."""
    params: tuple[SerializeAsAny[Argument], ...] = Field(default=(), strict=False)
    """Parameters of the kernel behind the cache, in the kernel's order: Array, Scalar, Size and TensorMap."""
    grid: tuple[Rule, ...] = Field(min_length=1, max_length=3, strict=False)
    """Blocks of the launch along x, y and z: one to three rules, as in ("ceil_div(T, 4)", "kv_heads")."""
    threads: int = Field(default=128, ge=1, le=1024)
    """Threads of a block."""
    shared: int = Field(default=0, ge=0, le=MOST_SHARED)
    """Bytes of dynamic shared memory of a block."""
    writes: bool = False
    """True: the kernel stores to the cache's memory."""
    errors: bool = False
    """True: the kernel's last parameter is the error word, `uint64_t* errors`, which may be null."""
    doc: str = ""
    """First line of the launcher's docstring."""
    oracle: Oracle | None = Field(default=None, exclude=True, repr=False)
    """Function over NumPy arrays that says what the kernel must write; `kvgen verify` compares with it. Its parameters are names
    of `params`, and `keys`, `values` (of each request `[n, heads, dim]` in f64) and `lengths`. It returns a dict with each array
    that is written, or the only one. None: `kvgen verify` runs the kernel and compares nothing.
    """
    tolerance: float | None = Field(default=None, ge=0, lt=1)
    """How far a float may be from the oracle's, relative to numbers above 1, absolutely below. None: 2e-5 in f32, 2e-3 in f16,
    1.6e-2 in bf16, 0.07 in e4m3, 0.13 in e5m2. Integers are equal.
    """
    sizes: tuple[tuple[str, int], ...] = Field(default=(), strict=False)
    """Sizes of names in shapes that `kvgen verify` calls the kernel with, {"H": 8}. It chooses those of other names."""
    _source: Source = PrivateAttr()

    @field_validator("grid", mode="before")
    @classmethod
    def _one_rule(cls, value: Any) -> Any:
        return (value,) if isinstance(value, (int, str, Expr)) else value

    @field_validator("include_dirs", mode="before")
    @classmethod
    def _one_folder(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("sizes", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        return tuple(value.items()) if isinstance(value, Mapping) else value

    @field_validator("doc")
    @classmethod
    def _valid_doc(cls, value: str) -> str:
        for line in value.splitlines():
            one_line(line)
        return value

    @model_validator(mode="after")
    def _complete(self) -> Custom:
        if self.name == self.kind and "name" not in self.model_fields_set:
            raise ValueError("name: missing; a kernel of your own is called as its function is, name='dump'")
        if (self.source is None) == (self.text is None):
            got = "neither source nor text" if self.source is None else "text beside source"
            raise ValueError(
                f"source: got {got}; give the file, source='kernels/{self.name}.cu', or the CUDA itself, text=..."
            )
        if self.source is not None:
            self._source = read_source(self.source)
        else:
            shown = f"<{self.name}>"
            self._source = Source(shown, checked_text(self.text or "", "text", shown))
        _check_entry(self._source, "source" if self.source is not None else "text", self.name)
        if self.include_dirs:
            self._source = with_headers(self._source, self.include_dirs)
        names = [p.name for p in self.params]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"params: got {', '.join(twice)} twice; every parameter has a name of its own")
        for rule in self.grid:
            _rule(rule)
        self._check_oracle()
        return self

    def _check_oracle(self) -> None:
        """Raise ValueError where `kvgen verify` could not call the oracle, or has nothing to compare."""
        named = {
            axis.partition("+")[0]
            for p in self.params
            if isinstance(p, Array)
            for axis in p.shape
            if isinstance(axis, str)
        }
        for name, size in self.sizes:
            if name not in named:
                raise ValueError(f"sizes: got {name!r}; it must be a name in a shape of params; {_choices(named)}")
            if not 1 <= size <= _MOST_ENTRIES:
                raise ValueError(f"sizes: got {name}={size}; it must be 1 to {_MOST_ENTRIES}")
        if self.oracle is None:
            if self.tolerance is not None:
                raise ValueError(
                    f"tolerance: got {self.tolerance} without oracle, from which nothing differs; leave it out"
                )
            return
        if not any(isinstance(p, Array) and p.access != "in" for p in self.params):
            raise ValueError(
                "oracle: got a function for a kernel that writes no array of params; give one access='out'"
            )
        known = {p.name for p in self.params if isinstance(p, Array | Scalar)} | set(LOGICAL)
        for parameter in inspect.signature(self.oracle).parameters.values():
            if parameter.name not in known or parameter.kind not in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            ):
                raise ValueError(f"oracle: got the parameter {str(parameter)!r}; {_choices(known)}")

    def entry_names(self, set_name: str) -> tuple[str, ...]:
        """The function's own name: the user wrote it."""
        return (self.name,)

    @property
    def description(self) -> str:
        """The spec's `doc`."""
        return self.doc.strip() or f"The kernel {self.name} of {self._source.path}."

    def check(self, kernels: KernelSet) -> None:
        """Check what only the cache tells: the names in shapes, sizes and grid."""
        taken = {t.name for t in kernels.cache.storage.tensors} | {f.name for f in lower_pages(kernels.cache).fields}
        twice = sorted(p.name for p in self.params if p.name in taken)
        if twice:
            raise ValueError(
                f"ops: {self.name}: got a parameter called {twice[0]!r}, which is an array or a field of the cache; choose "
                "another name"
            )
        tables = {f.name for f in lower_pages(kernels.cache).fields if isinstance(f, params.Array)}
        for p in self.params:
            others = tables | {q.name for q in self.params if isinstance(q, Array) and q is not p}
            for name in p.in_place if isinstance(p, Array) else ():
                if name not in others:
                    raise ValueError(
                        f"ops: {self.name}: in_place: {p.name}: got {name!r}; it is an array of this call or a table of the "
                        f"cache; {_choices(others)}"
                    )
        try:
            self._params(kernels)
            self._grid(kernels)
        except ValueError as error:
            raise ValueError(f"ops: {self.name}: {error}") from None

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        """One kernel: the user's text."""
        x, y, z = (*self._grid(kernels), const(1), const(1))[:3]
        return (
            KernelPlan(
                name=self.name,
                entry=self.name,
                template="",
                context=None,
                params=self._params(kernels),
                grid=(x, y, z),
                threads=self.threads,
                shared=self.shared,
                writes_pool=self.writes,
                source=self._source,
            ),
        )

    def _params(self, kernels: KernelSet) -> tuple[Param, ...]:
        words = _words(kernels)
        known, strides = self._names(kernels)
        found: list[Param] = []
        for p in self.params:
            if isinstance(p, Array):
                axes = [_axis(axis, words) for axis in p.shape]
                found.append(
                    params.Array(
                        p.name,
                        p.dtype,
                        tuple((size for size, _ in axes)),
                        access=p.access,
                        align=p.align,
                        strided=p.strided,
                        optional=p.optional,
                        untrusted=p.untrusted,
                        doc=p.doc,
                        in_place=p.in_place,
                        fields=tuple((word for _, word in axes)) if any((word for _, word in axes)) else (),
                    )
                )
            elif isinstance(p, Size):
                if p.value not in known and p.value not in strides:
                    hint = "; only a strided array has a stride" if p.value.endswith(".stride") else ""
                    raise ValueError(f"params: {p.name}: got {p.value!r}; {_choices(known | strides)}{hint}")
                found.append(params.Size(p.name, p.dtype, p.value, doc=p.doc))
            elif isinstance(p, Scalar):
                found.append(params.Scalar(p.name, p.dtype, doc=p.doc))
            else:
                found.append(params.TensorMap(p.name, doc=p.doc))
        return (*found, ERRORS) if self.errors else tuple(found)

    def _grid(self, kernels: KernelSet) -> tuple[Expr, ...]:
        words, (known, _) = _words(kernels), self._names(kernels)
        found = []
        for given in self.grid:
            rule = _rule(given)
            unknown = sorted(variables(rule) - known - set(words))
            if unknown:
                raise ValueError(f"grid: got {given!r}; {unknown[0]!r} is no name here; {_choices(known | set(words))}")
            try:
                found.append(substitute(rule, {name: const(value) for name, value in words.items()}))
            except (ValueError, ZeroDivisionError):
                raise ValueError(f"grid: got {given!r}; it divides by zero or is negative for this set") from None
        return tuple(found)

    def _names(self, kernels: KernelSet) -> tuple[frozenset[str], frozenset[str]]:
        """(the names that every call fixes: of the cache's shapes and of required arrays, the strides there are)."""
        arrays, words = [p for p in self.params if isinstance(p, Array)], _words(kernels)
        shapes = [axis for p in arrays if not p.optional for axis in p.shape if isinstance(axis, str)]
        named = {axis.partition("+")[0] for axis in shapes} - set(words)
        return _cache_names(kernels.cache) | named, frozenset(f"{p.name}.stride" for p in arrays if p.strided)


def _check_entry(source: Source, field: str, name: str) -> None:
    """Raise ValueError unless the text has the extern "C" __global__ function."""
    found = entries(source.text)
    wanted = f'extern "C" __global__ void {name}(const __grid_constant__ Cache cache, ...)'
    if name not in found:
        others = f"it has {', '.join(found)}" if found else "it has none"
        raise ValueError(
            f"{field}: {source.path} has no __global__ function called {name!r} ({others}); write {wanted}"
        )
    if not found[name]:
        raise ValueError(
            f'{field}: {name!r} of {source.path} is not extern "C", so its name is mangled; write {wanted}'
        )


def _rule(given: Rule) -> Expr:
    if isinstance(given, Expr):
        return given
    if isinstance(given, int):
        if not 1 <= given < 2**31:
            raise ValueError(f"grid: got {given}; a grid has at least 1 block, below 2^31")
        return const(given)
    try:
        return parse_rule(given)
    except ValueError as error:
        raise ValueError(f"grid: {error}") from None


def _axis(axis: int | str, words: dict[str, int]) -> tuple[int | str, str | None]:
    """(size or name, the word of the spec that it was)."""
    if isinstance(axis, int):
        return axis, None
    name, _, more = axis.partition("+")
    return (words[name] + int(more or 0), name) if name in words else (axis, None)


def _words(kernels: KernelSet) -> dict[str, int]:
    if kernels.cache.states:
        return {"bytes": state_bytes(kernels.cache)}
    cache = kernels.kv
    page_size = lower_pages(cache).allocation.page_size
    found = {
        "kv_heads": cache.kv_heads,
        "q_heads": kernels.q_heads,
        "group": kernels.group,
        "head_dim": cache.head_dim,
        "v_head_dim": cache.v_dim,
    }
    return found | ({"page_size": page_size} if page_size else {})


def _cache_names(cache: AnyCache) -> frozenset[str]:
    """The names that a cache fixes for every call: its requests, layers, pages, the table's columns."""
    axes = [axis for p in lower_pages(cache).fields if isinstance(p, params.Array) for axis in p.shape]
    axes += [axis for tensor in cache.storage.tensors for axis in tensor.shape]
    return frozenset({"B", *(axis.partition("+")[0] for axis in axes if isinstance(axis, str))})


def _choices(names: frozenset[str] | set[str]) -> str:
    return f"there are {', '.join(sorted(names))}"
