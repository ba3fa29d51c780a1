"""Masks and scores as an attention kernel has them: parameters, struct Inputs, and what attention/masks.j2 writes them from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvgen.expr.score_c import Elements, Names, float_literal, floors
from kvgen.layout.dtypes import DType, dtype
from kvgen.lowering.lowered import lower
from kvgen.plan.params import Array, Param, Scalar, Size
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.mask import Mask
from kvgen.schema.score import Score, Tensor

LOG2E: Final = 1.4426950408889634


@dataclass(frozen=True)
class AttentionContext:
    """Everything attention/masks.j2 reads, and what a kernel asks about it.

    `params` are the call's, in order, sizes and strides behind the arrays; `padding` is a parameter among them that the
    kernel applies itself. `fields` of struct Inputs get `values` of the kernel. `plain`: scores stay as they are, so
    that a kernel may fold the scale; `floors`: score() divides whole numbers that may be negative. A row sees all
    tokens in [first_visible, end_visible) unless `masked`: then visible() says which. `later`: rows may see tokens
    after their position, `ahead` of them at most; `packed`: bits stand in for the causal order, `listed`: a mask says
    what is seen. Window, chunk, block, `ahead` and `relative` are 0 where there is none, `cap` is empty. Keys are entries of
    `rate` tokens, and rows stand at tokens. `lines` are the statements of a score function of the user's. Functions are asked
    only about rows of the call (row < T, q_head < q_heads) and tokens of their request; a score of -inf hides a token too.
    """

    params: tuple[Array | Size | Scalar, ...]
    fields: tuple[str, ...]
    values: tuple[str, ...]
    q_heads: int
    cap: str
    cap_twice: str
    cap_rate: str
    alibi: bool
    relative: int
    bias: bool
    lines: tuple[str, ...]
    floors: bool
    plain: bool
    masked: bool
    causal: bool
    later: bool
    packed: bool
    listed: bool
    window: int
    chunk: int
    ahead: int
    padding: bool
    traced: bool
    rate: int = 1
    block: int = 0

    @property
    def mask_differs_by_row(self) -> bool:
        """One query head or row may see a token that another at its position does not."""
        return self.masked or self.traced

    @property
    def spelled_mask(self) -> bool:
        """The kernel spells its mask out: the device library has causal order, a causal window or chunk, and no mask."""
        if self.chunk:
            return bool(self.window or self.later)
        return self.later and (bool(self.window) or not self.early_rows_see)

    @property
    def early_rows_see(self) -> bool:
        """Rows before the first token see the tokens that a row at the first one sees: of requests with more rows than tokens."""
        return not (self.causal or self.chunk or self.ahead or self.block)

    @property
    def elementwise_score(self) -> bool:
        """Every score is looked at: by visible(), by score(), or both."""
        return self.masked or not self.plain


def c_name(name: str) -> str:
    """The name in C of a tensor, scalar or extent of a score function."""
    return f"score_{name}"


@dataclass(frozen=True)
class _Input:
    """A parameter that struct Inputs has too."""

    param: Array | Size | Scalar
    inside: bool = True

    @property
    def name(self) -> str:
        """Its name in C."""
        return self.param.c_name or self.param.name


def attention_context(mask: Mask, score: Score | None, kernels: KernelSet, index: DType) -> AttentionContext:
    """The context of a mask and a score over a set's cache; `index` is the dtype of index arrays."""
    inputs = [*_mask_inputs(mask, index), *(_score_inputs(score, kernels) if score else ())]
    # What the call brings, then what follows from that.
    ordered = sorted(inputs, key=lambda i: isinstance(i.param, Size))
    inside = [i for i in ordered if i.inside]
    lines = _traced(score, kernels) if score else ()
    cap = score.softcap if score else None
    alibi, relative, bias = (score.alibi, score.relative or 0, score.bias) if score else (False, 0, False)
    return AttentionContext(
        params=tuple(i.param for i in ordered),
        fields=tuple(i.param.declaration for i in inside),
        values=tuple(i.name for i in inside),
        q_heads=kernels.q_heads,
        cap="" if cap is None else float_literal(cap),
        cap_twice="" if cap is None else float_literal(2 * cap),
        cap_rate="" if cap is None else float_literal(2 * LOG2E / cap),
        alibi=alibi,
        relative=relative,
        bias=bias,
        lines=lines,
        floors=floors(lines),
        plain=cap is None and not (alibi or relative or bias or lines),
        masked=mask.tree is not None or bias,
        causal=mask.causal,
        later=mask.later,
        packed=mask.tree == "packed",
        listed=mask.tree == "mask",
        window=mask.window or 0,
        chunk=mask.chunk or 0,
        ahead=mask.ahead or 0,
        padding=mask.padding,
        block=mask.block or 0,
        traced=score is not None and score.function is not None,
        rate=kernels.kv.entry_tokens,
    )


def check_rate(name: str, kernels: KernelSet, mask: Mask, score: Score | None, *, cross: bool = False) -> None:
    """Raise ValueError where an attention asks more of entries that stand for several tokens than whether they are past."""
    rate = kernels.kv.entry_tokens
    if rate == 1:
        return
    scored = score is not None and (score.alibi or score.relative or score.bias or score.function is not None)
    given = {"cross": cross, "mask": mask != Mask(), "score": scored}
    field = next((field for field, is_given in given.items() if is_given), None)
    if field is not None:
        raise ValueError(
            f"{field}: got one for {name} with rate={rate}; a row at position p sees the entries j < (p + 1) // {rate}, which "
            f"stand for {rate} tokens each and have no position of one; leave {field} out"
        )


def check_arguments(name: str, params: Sequence[Param], kernels: KernelSet) -> None:
    """Raise ValueError where an argument of a score function is called as another of operation `name` or of the cache."""
    cache = kernels.kv
    taken = [t.name for t in cache.storage.tensors] + [f.name for f in lower(cache).fields] + [p.name for p in params]
    for p in params:
        if isinstance(p, Array | Size | Scalar) and p.c_name and taken.count(p.name) > 1:
            raise ValueError(
                f"ops: {name}: got a tensor or scalar of its score called {p.name!r}, which is another argument of the launcher "
                "or the cache; choose another name"
            )


# Masks -----------------------------------------------------------------------------------------------------------------


def _mask_inputs(mask: Mask, index: DType) -> Iterator[_Input]:
    if mask.padding:
        doc = "tokens of each request that count"
        yield _Input(
            Array("valid_tokens", index.name, ("B",), untrusted=True, doc=doc, field="index_dtype"), inside=False
        )
    if mask.tree == "packed":
        doc = "bit j of row t: it sees the token of its request's j-th row"
        yield _Input(Array("tree_mask", "u32", ("T",), doc=doc))
    if mask.tree == "mask":
        doc = "not 0 where row t sees token k; tokens past the last column are hidden"
        yield _Input(Array("mask", "u8", ("T", "K"), strided=True, doc=doc))
        yield _Input(Size("mask_stride", "i64", "mask.stride"))
        yield _Input(Size("mask_columns", "u32", "K"))


# Scores ----------------------------------------------------------------------------------------------------------------


def _score_inputs(score: Score, kernels: KernelSet) -> Iterator[_Input]:
    heads = kernels.q_heads
    if score.alibi:
        doc, fields = "slope of each query head", ("q_heads",)
        yield _Input(Array("alibi_slopes", "f32", (heads,), doc=doc, fields=fields))
    if score.relative:
        kind = dtype("f32" if score.relative_dtype == "f32" else kernels.kv.dtype)
        yield _Input(
            Array(
                "relative_bias",
                kind.name,
                ("T", heads, score.relative),
                doc="added to the score of a token so many before its row's",
                field="relative_dtype",
                fields=(None, "q_heads", "relative"),
            )
        )
    if score.bias:
        doc = "added to the score of row t and token k; tokens past the last column are hidden"
        yield _Input(Array("bias", "f32", ("T", "K"), strided=True, doc=doc))
        yield _Input(Size("bias_stride", "i64", "bias.stride"))
        yield _Input(Size("bias_columns", "u32", "K"))
    for name, tensor in score.tensors.items():
        words = tuple(str(axis) if axis in _heads(kernels) else None for axis in tensor.shape)
        at, doc = f"score.tensors.{name}.dtype", "read by the score function"
        yield _Input(
            Array(name, tensor.dtype, _shape(tensor, kernels), doc=doc, field=at, fields=words, c_name=c_name(name))
        )
    for name, given in score.scalars.items():
        yield _Input(Scalar(name, given, doc="read by the score function", c_name=c_name(name)))
    text = " ".join(_traced(score, kernels))
    for axis in dict.fromkeys(a for t in score.tensors.values() for a in t.shape if isinstance(a, str)):
        extent = c_name(_extent(axis))
        if re.search(rf"\bin\.{extent}\b", text):
            yield _Input(Size(_extent(axis), "u32", axis, c_name=extent))


def _heads(kernels: KernelSet) -> dict[int | str, int]:
    """The words of shapes that are numbers of the set."""
    return {"q_heads": kernels.q_heads, "kv_heads": kernels.kv.kv_heads}


def _shape(tensor: Tensor, kernels: KernelSet) -> tuple[int | str, ...]:
    return tuple(_heads(kernels).get(axis, axis) for axis in tensor.shape)


def _extent(axis: str) -> str:
    return f"extent_{axis}"


def _names(score: Score, kernels: KernelSet) -> Names:
    """The names of a score function's arguments in a kernel."""
    tensors = {}
    for name, tensor in score.tensors.items():
        extents = tuple(c_name(_extent(a)) if isinstance(a, str) else a for a in _shape(tensor, kernels))
        convert = "to_f32" if tensor.dtype in ("f16", "bf16") else ""
        tensors[name] = Elements(c_name(name), convert, tensor.shape, extents)
    return Names(tensors, {n: c_name(n) for n in score.scalars}, kernels.q_heads, kernels.group)


def _traced(score: Score, kernels: KernelSet) -> tuple[str, ...]:
    """The statements on `s` of the user's score function, as the tracer writes them."""
    return tuple(score.traced.statements(_names(score, kernels))) if score.traced is not None else ()
