"""Forms: what device code and templates can tell of a kernel, its sizes left out.

A kernel is its template's context and that of its cache. Their dataclasses are its *subjects*: K, V, the mask and the score,
pages, the kernel itself, rows and what is done to them. A subject has *features*: flags that are set, names, numbers by which
code branches. A **form** is a template, a subject of it and one feature, or two features of a subject together:

    extend_sm90 | K: nvfp4_max
    extend_sm90 | K: groups & zero
    decode_mma | mask: ahead & tree
    CUDA cores | elements: e2m1x2 & short group

Two features meet in the code that both are in. Where templates share that code, the pair is a form of all of them together
(`CUDA cores`), and each feature alone one of each template. What two subjects do to each other is a form where one of them says
so: the kernel's own flags are worked out from all of them. Numbers by which code branches (bytes of an access, tokens of a tile)
are features by themselves, and in no pair.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import combinations
from pathlib import PurePath
from typing import Any, Final

from kvgen.lowering.attention import decode_mma, decode_simt
from kvgen.lowering.attention.decode_mma import DecodeMma
from kvgen.lowering.attention.extend_sm90 import Widening
from kvgen.lowering.attention.masks_scores import AttentionContext
from kvgen.lowering.attention.mla_mma import MlaMma
from kvgen.lowering.attention.operand import Operand
from kvgen.lowering.cache_header import CacheContext
from kvgen.lowering.offsets import OffsetContext
from kvgen.lowering.segments import ScaleContext, SegmentContext

# Fields of contexts that are numbers or text, by what they are here.
# Present where they are not 0, or not empty.
PRESENT: Final = frozenset(
    [
        "bias",
        "chunk_tokens",
        "hadamard",
        "list_tile",
        "narrow_cols",
        "pad",
        "pads",
        "rate",
        "residual",
        "rotary_begin",
        "rotary_dim",
        "rotary_pairs",
        "k_head_chunks",
        "k_head_groups",
        "v_head_chunks",
        "v_head_groups",
        "plain_panel",
        "scale_rows",
        "limit",
        "most_registers",
        "cap",
    ]
)
# Where there are several.
SEVERAL: Final = frozenset(
    [
        "blocks_per_sm",
        "block",
        "group",
        "groups",
        "head_structs",
        "heads",
        "inputs",
        "kv_heads",
        "lists",
        "copies",
        "blocks",
        "n_teams",
        "norm_structs",
        "parts",
        "runs",
        "sections",
        "split",
        "teams",
        "tiles",
        "writes",
        "rows",
        "records",
    ]
)
# Numbers by which code branches.
STEPS: Final = frozenset(
    [
        "batch",
        "issue",
        "k_width",
        "lanes",
        "m_tiles",
        "n_tiles",
        "own_query",
        "row_width",
        "run",
        "search_lanes",
        "stages",
        "team_warps",
        "together",
        "tokens",
        "units",
        "v_width",
        "vec",
        "warps_k",
        "warps_m",
        "warps_n",
        "width",
        "scale_access",
        "access",
    ]
)
# Types and policies.
NAMES: Final = frozenset(
    [
        "cast",
        "elem",
        "element",
        "given",
        "operand",
        "out_elem",
        "policy",
        "role",
        "stored",
        "struct",
        "type",
        "value",
        "rope_struct",
    ]
)
# Sizes, places, numbers of the user's, and words that follow from the rest.
LEFT_OUT: Final = frozenset(
    [
        "addresses",
        "args",
        "array",
        "arrays",
        "at",
        "attends",
        "axes",
        "begin",
        "bias_begin",
        "bytes",
        "c_name",
        "cols",
        "columns",
        "consumer_registers",
        "count",
        "counters",
        "digest",
        "dim",
        "dims",
        "doc",
        "elements",
        "entry",
        "ends",
        "eps",
        "factor",
        "fields",
        "frequencies",
        "group_dims",
        "head",
        "head_dim",
        "head_dims",
        "header",
        "headers",
        "held",
        "indices",
        "k_pitch",
        "largest",
        "latent",
        "latent_bytes",
        "lengths",
        "lines",
        "least_tiles",
        "least_tokens",
        "math_registers",
        "merged",
        "memory",
        "most",
        "most_rows",
        "name",
        "number",
        "offset",
        "offsets",
        "overhead",
        "pairs",
        "params",
        "part_dims",
        "period",
        "pitch",
        "places",
        "plan_digest",
        "plain_at",
        "pointer",
        "producer_registers",
        "q_heads",
        "q_out_heads",
        "qk_scale",
        "query",
        "ranges",
        "resident",
        "ring_bytes",
        "rope_at",
        "rope_bytes",
        "rounds",
        "row",
        "row_bytes",
        "rows_of",
        "scale",
        "scale_at",
        "scale_bytes",
        "scale_pitch",
        "scale_step",
        "scales_bytes",
        "scores",
        "shared",
        "shared_bytes",
        "share",
        "sines",
        "size",
        "slack",
        "space",
        "start",
        "stride",
        "theta",
        "threads",
        "tile",
        "tile_at",
        "tile_row",
        "title",
        "token_bytes",
        "together_bytes",
        "union_bytes",
        "v_elem",
        "v_pitch",
        "v_size",
        "values",
        "vector",
        "vectors",
        "warps",
        "weights",
        "widen_registers",
        "width_of",
        "at_once",
        "k_chunks",
        "v_chunks",
        "chunks",
        "cache",
        "roles",
        "index",
        "lines",
        "map",
        "merged_bytes",
        "tile_bytes",
        "code_bytes",
        "record",
        "scales",
        "usual_scale",
        "choices",
        "fixed_bytes",
        "flight_bytes",
        "value_groups",
        "merged_bytes",
    ]
)
# Fields of a cache's context that `_of_pages` and `_of_segment` read, and where its tensors lie.
_ENTRIES: Final = (
    "* page_table",
    "* page_indices",
    "* req_to_token",
    "* kv_offsets",
)  # how the page table's field ends
_OF_CACHES: Final = frozenset(
    [
        "base",
        "granularity",
        "id",
        "id_sizes",
        "id_type",
        "ids",
        "middles",
        "multiplier",
        "norm",
        "page_size",
        "page_tokens",
        "pages_are",
        "rope",
        "scale_base",
        "scale_id",
        "scale_row",
        "summary",
        "ids_type",
        "table",
        "table_header",
        "table_vector",
    ]
)

# Dataclasses whose features are those of the subject around them.
_WITHIN: Final = frozenset(
    [
        "HeadContext",
        "NormContext",
        "View",
        "Shape",
        "LatentRow",
        "SharedBytes",
        "Widening",
        "LayersContext",
        "Stages",
    ]
)
# Templates whose kernels read no elements; that read and write those of K and of V by the same functions; where scales of tokens
# or groups have ways of their own by their types.
_NO_ELEMENTS: Final = ("append_q", "decode_plan", "extend_plan", "mla_decode_plan")
_ALIKE: Final = ("append", "gather", "scatter", "convert")
_BY_SCALES: Final = ("decode_mma", "extend_mma", "extend_sm90", "mla_mma", "mla_sm90")
# Templates that choose scales, and recipes that are all the same to those that read.
_WRITERS: Final = ("append", "scatter", "convert")
_READ_ALIKE: Final = ("amax", "pow2", "amax_raised", "pow2_raised", "norm", "unit")
# Subjects that say again what others say, and such that are another one's.
_SAME: Final = ("norm_structs", "head_structs", "tiles")
_RENAMED: Final = {"row_norms": "parts", "d": "attention"}
# Fields that follow from others; numbers that the call around a kernel's shape has too.
_FOLLOW: Final = ("maps",)
_SAME_NUMBERS: Final = (("tiles", decode_mma.Shape), ("tiles", decode_simt.Shape))
# What a template asks of an operand: flags, and "several" groups; scales' path, access and copied run are asked by all.
_OPERAND_FLAGS: Final = ("given", "global_scale", "powers", "tables")
_DECODE_FLAGS: Final = (*_OPERAND_FLAGS, "biased", "direct")
_KEY_FLAGS: Final = (*_DECODE_FLAGS, "bf16", "sums", "zero")
# Subjects of a kind of their own.
_ELSEWHERE: Final = (AttentionContext, SegmentContext, ScaleContext, OffsetContext, CacheContext)
_LOW: Final = ("e4m3", "e5m2", "e2m1", "e8m0")
# Templates that share the device code of a subject; that of pages, and of queries and outputs, is every template's.
_CUDA_CORES: Final = ("decode_simt", "extend_simt")
_TENSOR_CORES: Final = ("decode_mma", "extend_mma")
_EVERY: Final = ("pages", "attention")
# Conversions that an architecture lacks are made one by one, whatever else a kernel does.
_UNPAIRED: Final = ("before sm_89", "from sm_89 on")


@dataclass(frozen=True)
class Subject:
    """A subject of a kernel's with its features; those that are steps have a number behind `=`."""

    template: str
    name: str
    features: frozenset[str]

    @property
    def line(self) -> str:
        """As text."""
        return f"{self.template} | {self.name}: {', '.join(sorted(self.features))}"

    def forms(self) -> Iterator[str]:
        """Each feature, and each two."""
        yield from (f"{self.template} | {self.name}: {f}" for f in self.features)
        paired = sorted(f for f in self.features if "=" not in f and f not in _UNPAIRED)
        yield from (f"{self._shared}: {a} & {b}" for a, b in combinations(paired, 2))

    @property
    def _shared(self) -> str:
        """The code where two features meet: the template's subject, or that of several."""
        name = self.name.removeprefix("other ").removeprefix("listed ")
        if name in _EVERY:
            return f"every template | {name}"
        if name == "elements":
            reads = self.template == "gather" or name != self.name
            return f"{'readers' if reads else 'writers'} | elements"
        if name in ("K", "V"):
            if self.template in _CUDA_CORES:
                return "CUDA cores | elements"
            if self.template in _TENSOR_CORES:
                return f"tensor cores | {name}"
            return f"{self.template} | {name}"
        return f"{self.template} | {self.name}"


def parse(line: str) -> Subject:
    """The subject of a line."""
    head, _, features = line.partition(": ")
    template, _, name = head.partition(" | ")
    return Subject(template, name, frozenset(features.split(", ")))


def all_forms(subjects: Iterable[Subject]) -> set[str]:
    """The forms of several subjects."""
    return {form for subject in subjects for form in subject.forms()}


def subjects(
    template: str, context: object, cache: CacheContext, others: Mapping[str, CacheContext], arch: str
) -> set[Subject]:
    """The subjects of a kernel on an architecture: of its template's context, its cache's, and those of `others` by namespace."""
    name = PurePath(template).name.removesuffix(".cu.j2")
    if isinstance(context, MlaMma) and context.row.rounded:
        name = f"{name} rounded"  # other device code brings rows to shared memory than where they are copied
    found: dict[tuple[str, frozenset[str]], None] = {}

    def add(subject: str, features: Iterable[str]) -> None:
        some = frozenset(features)
        if some:
            found[subject, some] = None

    attend = next(_instances(context, AttentionContext), None)
    for subject, features in _own(context):
        if subject not in _SAME:
            add(
                _RENAMED.get(subject, subject),
                features | _asked(attend) if subject == "kernel" and attend else features,
            )
    if attend:
        add("mask", _of_mask(attend, one_row=getattr(getattr(context, "d", context), "rows", 0) == 1))
    for space, header in {"": cache, **others}.items():
        of = "" if not space else "other " if not space.endswith("_keys") else "listed "
        if not space or name not in _NO_ELEMENTS:
            add(f"{of}pages", _of_pages(header))
        if name not in _NO_ELEMENTS:
            for segment in header.segments:
                role = "elements" if name in _ALIKE else segment.role.upper()
                reads = bool(space) or name not in _WRITERS
                add(f"{of}{role}", _of_segment(segment, arch, reads=reads, by_scales=name in _BY_SCALES))
            add(f"{of}K and V", _beside(header.segments))
    return {Subject(name, subject, features) for subject, features in found}


def _instances(node: object, kind: type[Any]) -> Iterator[Any]:
    """Every dataclass of a kind in a context."""
    if isinstance(node, kind):
        yield node
    elif is_dataclass(node):
        for f in fields(node):
            yield from _instances(getattr(node, f.name), kind)
    elif isinstance(node, tuple):
        for item in node:
            yield from _instances(item, kind)


def _own(context: Any) -> Iterator[tuple[str, set[str]]]:
    """Subjects of a template's own dataclasses, and their features."""
    pending: list[tuple[str, Any]] = [("kernel", context)]
    while pending:
        subject, node = pending.pop()
        features: set[str] = set()
        inside: list[tuple[str, Any]] = [("", node)]
        while inside:
            prefix, each = inside.pop()
            for f in fields(each):
                value = getattr(each, f.name)
                name = prefix + f.name
                if isinstance(value, _ELSEWHERE) or f.name in _FOLLOW or (f.name, type(each)) in _SAME_NUMBERS:
                    continue
                if isinstance(value, Operand):
                    features.update(_operand(value, each))
                elif is_dataclass(value):
                    if type(value).__name__ in _WITHIN:
                        features.update([] if f.name in ("shape", "memory") else [name])
                        inside.append((f"{f.name}." if subject != "kernel" else "", value))
                    else:
                        pending.append((f.name, value))
                elif isinstance(value, tuple) and value and is_dataclass(value[0]):
                    pending += [(f.name, item) for item in value if not isinstance(item, _ELSEWHERE)]
                    features.update(_feature(prefix, f.name, len(value)))
                else:
                    features.update(_feature(prefix, f.name, value))
        yield subject, features


def _operand(operand: Operand, around: object) -> Iterator[str]:
    """Features of K or V as an operand that the template of a context `around` asks for."""
    of, decode = operand.role[0], isinstance(around, DecodeMma)
    flags = _OPERAND_FLAGS if not decode else _KEY_FLAGS if of == "k" else _DECODE_FLAGS
    yield f"{of}_use {operand.use}"
    yield from (f"{of}_{flag}" for flag in flags if getattr(operand, flag))
    if isinstance(around, Widening):
        return
    yield from ["tables"] * operand.tables
    yield from ["scales_unaligned"] * (decode and not operand.scales_aligned)
    yield from (f"{of}_access={operand.access}", f"{of}_scale_run={operand.scale_run}")
    if isinstance(around, DecodeMma) and (operand.groups if of == "k" else around.value_groups) > 1:
        yield f"several {of}_groups"


def _feature(prefix: str, field: str, value: Any) -> Iterator[str]:
    """The feature of a field, or none."""
    name = prefix + field
    if isinstance(value, bool):
        yield from [name] * value
    elif field in LEFT_OUT or value is None:
        return
    elif field in PRESENT:
        yield from [name] * bool(value)
    elif field in NAMES and isinstance(value, str):
        yield from [f"{name} {value.replace(', ', ',')}"] * bool(value)
    elif field in SEVERAL:
        count = value if isinstance(value, int) else len(value)
        yield from [f"several {name}"] * (count > 1)
    elif field in STEPS and isinstance(value, int):
        yield f"{name}={value}"


def unknown(node: Any) -> set[str]:
    """Fields of a context that no table here knows: numbers, texts and tuples of them."""
    found: set[str] = set()
    of_cache = type(node).__name__ in ("CacheContext", "BaseContext", "BookContext", "RoleContext")
    known = PRESENT | SEVERAL | STEPS | NAMES | LEFT_OUT | (_OF_CACHES if of_cache else frozenset())
    for f in fields(node):
        value = getattr(node, f.name)
        if isinstance(value, (*_ELSEWHERE, Operand, bool)) or value is None:
            continue
        if is_dataclass(value):
            found |= unknown(value)
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            found = found.union(*(unknown(item) for item in value if not isinstance(item, _ELSEWHERE)))
        elif f.name not in known and value != ():
            found.add(f"{type(node).__name__}.{f.name}")
    return found


# Subjects of a kind of their own --------------------------------------------------------------------------------------


def _of_segment(segment: SegmentContext, arch: str, *, reads: bool, by_scales: bool) -> Iterator[str]:
    """How K, V or a part of them is stored. Conversions of fp8 and fp4 have code of their own on architectures that lack theirs;
    `reads`: nobody asks how scales were chosen; `by_scales`: types of scales have more than a conversion."""
    words = re.findall(r"\w+", segment.element)
    yield next(word for word in words if word not in ("Coded", "Strided"))
    yield from (word.lower() for word in words[:-1] if word in ("Coded", "Strided"))
    if segment.cast:
        yield "bytes"
    if segment.begin:
        yield "RoPE part"
    for scales in segment.scales:
        yield "scaled" if reads and scales.recipe in _READ_ALIKE else scales.recipe
        yield f"{scales.type} scales" if by_scales or scales.type in _LOW else f"scales={scales.type}"
        kinds = {
            "zero": scales.zero,
            "groups": scales.groups > 1,
            "short group": scales.groups > 1 and segment.size % scales.dims > 0,
            "shared by heads": scales.heads > 1,
            "a scale an element": scales.dims == 1 and segment.size > 1 and not scales.residual,
            "residual": scales.residual > 0,
            "padded scales": scales.pad > 0,
        }
        yield from (kind for kind, has in kinds.items() if has)
    if any(word in kind for word in _LOW for kind in (segment.element, *(s.type for s in segment.scales))):
        yield "before sm_89" if arch == "sm_80" else "from sm_89 on"


def _beside(segments: Sequence[SegmentContext]) -> Iterator[str]:
    """Kinds of K's elements and of V's."""
    for segment in segments:
        if not segment.begin:
            packed = segment.element not in ("float", "f16", "bf16", "e4m3", "e5m2", "int8_t", "uint8_t")
            kind = (
                "packed codes"
                if packed
                else f"{segment.element}"
                if segment.element in ("float", "f16", "bf16")
                else "codes"
            )
            yield f"{segment.role.upper()} of {kind}"


def _of_mask(attend: AttentionContext, *, one_row: bool) -> Iterator[str]:
    """Masks and scores; where requests have `one_row`, no token is after it."""
    kinds = {
        "not causal": not attend.causal and not attend.block,
        "window": attend.window,
        "ahead of one row" if one_row else "ahead": attend.ahead,
        "chunk": attend.chunk,
        "block": attend.block,
        "padding": attend.padding,
        "tree": attend.packed,
        "mask array": attend.listed,
        "softcap": attend.cap,
        "alibi": attend.alibi,
        "relative": attend.relative,
        "bias array": attend.bias,
        "function": attend.traced,
        "rate": attend.rate > 1,
    }
    yield from (kind for kind, has in kinds.items() if has)


def _asked(attend: AttentionContext) -> set[str]:
    """Features of a kernel's work on scores one by one."""
    kinds = {
        "scores": not attend.plain,
        "masks": attend.masked,
        "function": attend.traced,
        "spelled mask": attend.spelled_mask,
        "mask_differs_by_row": attend.mask_differs_by_row,
    }
    return {kind for kind, has in kinds.items() if has}


def _of_pages(cache: CacheContext) -> Iterator[str]:
    """How a token's page is found."""
    yield PurePath(cache.table_header).stem
    (entries,) = (f for f in cache.fields if f.endswith(_ENTRIES))
    kinds = {
        "id multiplier": "uint64_t" in cache.ids_type,
        "table of scales": "scale_id" in cache.ids,
        "lengths after": cache.lengths == "after",
        "pages of 1": cache.page_tokens == 1,
        "pages of any size": cache.page_tokens == 0,
        "pages of no power of two": cache.page_tokens > 0 and cache.page_tokens & (cache.page_tokens - 1) > 0,
        "rate": cache.rate > 1,
        "residual": cache.residual > 0,
        "several heads": cache.heads > 1,
        f"{entries.split()[1].rstrip('*')} entries": not entries.startswith("const int32_t*"),
    }
    yield from (kind for kind, has in kinds.items() if has)
