"""merge_states: one result of attention over parts of the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import FloatName, dtype
from kvgen.lowering.cache_struct import entry_name
from kvgen.lowering.partners import check_partners
from kvgen.ops.decode import Decode
from kvgen.ops.extend import Extend
from kvgen.ops.mla_decode import MlaDecode
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Access, Array, Param, Size
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet, Op

_ACCESS: Final = 16  # bytes of the widest access
_MANY: Final = 8  # states whose values a thread has in flight
_FEW_THREADS: Final = 256
_MOST_THREADS: Final = 512  # unless one head takes more
_LSES_A_SECTOR: Final = 8


@dataclass(frozen=True)
class MergeStatesContext:
    """Everything ops/merge_states.cu.j2 reads.

    `count` states are merged, `chunk` at once: `many` in one array, whose rows come first if `rows_first`, or two in arrays of
    their own. A state without keys has the log-sum-exp inf if `empty_inf`, or -inf.
    """

    entry: str
    params: tuple[str, ...]
    threads: int
    rows: int
    heads: int
    dim: int
    width: int
    chunk: int
    count: str
    many: bool
    rows_first: bool
    value: str
    base_two: bool
    empty_inf: bool


def values_dim(cache: Cache) -> tuple[int, str]:
    """Dims of a head of attention's output, and the spec's field behind them."""
    if cache.latent_part:
        return cache.latent_part, "latent_dim"
    return cache.v_dim, "v_head_dim" if cache.v_dim != cache.head_dim else "head_dim"


class MergeStates(Op):
    """Merge results of attention over disjoint sets of keys: out = sum of w_s * out_s, w_s = exp(lse_s) / sum of exp(lse_s).

    A state is attention's output over one of the sets, and its log-sum-exp, f32, to the base `lse_base`:

    - `states="two"`, the default: `out_a[T, q_heads, v_dim]` with `lse_a[T, q_heads]`, and `out_b` with `lse_b`.
    - `states="many"`: `outs[S, T, q_heads, v_dim]` with `lses[S, T, q_heads]`, for any S, 0 too. With `first="rows"` the first
      two axes are `[T, S, ...]`.

    out is `[T, q_heads, v_dim]`, lse (optional) f32 `[T, q_heads]`. Either may be the memory of one of the states, out where
    the dtypes are equal: that merges in place.

    A state that saw no key has a log-sum-exp of -inf, or with `lse_empty="inf"` one of either infinity. It counts nothing,
    whatever its values are. Where no state saw a key, out is 0 and lse is `lse_empty`. NaN in the values or in the
    log-sum-exp of a state that counts gives NaN, and so does an infinite log-sum-exp that does not stand for "no key". Sums
    are taken in f32 in the order of the states, so that every run gives the same bits, and are rounded once. The page table
    is not read, and nothing is reported. Source: FlashInfer, merge_state, merge_states, merge_state_in_place.
    """

    kind: ClassVar[str] = "merge_states"
    ragged: ClassVar[bool] = True
    at_rates: ClassVar[bool] = True
    states: Literal["two", "many"] = "two"
    """"two": `out_a`, `lse_a`, `out_b`, `lse_b`. "many": `outs` and `lses` with an axis of S states."""
    first: Literal["states", "rows"] = "states"
    """First axis of `outs` and `lses`: "states", `[S, T, ...]`; "rows", `[T, S, ...]` (FlashInfer)."""
    dtype: FloatName | None = None
    """Element type of the states. None: the cache's `dtype`."""
    out_dtype: FloatName | None = None
    """Element type of `out`. None: `dtype`."""
    lse_base: Literal["e", "2"] = "e"
    """Base of the logarithm in every `lse`: "e" or "2"."""
    lse_empty: Literal["-inf", "inf"] = "-inf"
    """What the `lse` of a state without keys is. With "inf" either infinity counts as empty."""

    def check(self, kernels: KernelSet) -> None:
        if self.states == "two" and self.first == "rows":
            raise ValueError(
                "first: got 'rows' with states='two', whose states are arrays of their own; use states='many', or leave it out"
            )
        # Other engines' states may be merged as well, but then none of the set's own.
        made = [op for op in kernels.ops if isinstance(op, Decode | Extend | MlaDecode)]
        rule = "log-sum-exps are merged as they were made"
        check_partners(self, "lse_base", self.lse_base, [(op, "lse_base", op.lse_base) for op in made], rule)
        if self.lse_empty == "-inf":  # "inf" takes either
            check_partners(self, "lse_empty", "-inf", [(op, "lse_empty", op.lse_empty) for op in made], rule)

    def _params(self, kernels: KernelSet, width: int) -> tuple[Param, ...]:
        value = dtype(self._dtype(kernels))
        result = dtype(self.out_dtype or value.name)
        (dim, named), heads, many = values_dim(kernels.kv), kernels.q_heads, self.states == "many"
        axes = ("T",) if not many else ("S", "T") if self.first == "states" else ("T", "S")

        def values(name: str, axes: tuple[str, ...], doc: str, access: Access = "in") -> Array:
            kind = value if access == "in" else result
            return Array(
                name,
                kind.name,
                (*axes, heads, dim),
                access=access,
                align=width * kind.bytes,
                strided=True,
                doc=doc,
                field="dtype" if access == "in" or not self.out_dtype else "out_dtype",
                fields=(*(None for _ in axes), "q_heads", named),
                in_place=() if access == "in" or value != result else ("outs",) if many else ("out_a", "out_b"),
            )

        def lses(name: str, axes: tuple[str, ...], doc: str, *, strided: bool = False, access: Access = "in") -> Array:
            shown = (*(None for _ in axes), "q_heads")
            return Array(
                name,
                "f32",
                (*axes, heads),
                access=access,
                strided=strided,
                optional=access == "out",
                doc=doc,
                fields=shown,
                in_place=() if access == "in" else ("lses",) if many else ("lse_a", "lse_b"),
            )

        doc = f"log-sum-exps, base {self.lse_base}"
        if many:
            arrays = [
                values("outs", axes, "attention's output of every state"),
                lses("lses", axes, doc, strided=True),
            ]
        else:
            arrays = []
            for name in "ab":
                arrays.append(values(f"out_{name}", axes, f"attention's output of state {name}"))
                arrays.append(lses(f"lse_{name}", axes, doc))
        arrays.append(values("out", ("T",), "the merged output", "out"))
        arrays.append(lses("lse", ("T",), "the merged log-sum-exps", access="out"))
        found: list[Param] = [*arrays]
        found += [Size(f"{p.name}_stride", "i64", f"{p.name}.stride") for p in arrays if p.strided]
        found.append(Size("num_rows", "u32", "T"))
        if many:
            found.append(Size("num_states", "u32", "S"))
        return tuple(found)

    def _dtype(self, kernels: KernelSet) -> FloatName:
        return self.dtype or kernels.kv.dtype

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        value = dtype(self._dtype(kernels))
        result = dtype(self.out_dtype or value.name)
        (dim, _), heads = values_dim(kernels.kv), kernels.q_heads
        width = _ACCESS // max(value.bytes, result.bytes)
        while dim % width:
            width //= 2
        threads, rows = _block(dim // width)
        params = self._params(kernels, width)
        many = self.states == "many"
        context = MergeStatesContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            threads=threads,
            rows=rows,
            heads=heads,
            dim=dim,
            width=width,
            chunk=_MANY if many else 2,
            count="num_states" if many else "2",
            many=many,
            rows_first=self.first == "rows",
            value=value.c,
            base_two=self.lse_base == "2",
            empty_inf=self.lse_empty == "inf",
        )
        grid = (ceil_div(var("T") * heads, rows), const(1), const(1))
        return (
            KernelPlan(
                self.name, context.entry, "ops/merge_states.cu.j2", context, params, grid, threads, reads_tables=False
            ),
        )


def _block(vectors: int) -> tuple[int, int]:
    """Threads of a block, and its heads of so many vectors: a thread has one, and blocks share no sector of LSEs if they can."""
    rows = _FEW_THREADS // vectors // _LSES_A_SECTOR * _LSES_A_SECTOR
    if not rows:
        fits = _LSES_A_SECTOR * vectors <= _MOST_THREADS
        rows = _LSES_A_SECTOR if fits else max(1, _MOST_THREADS // vectors)
    return -(-rows * vectors // 32) * 32, rows
