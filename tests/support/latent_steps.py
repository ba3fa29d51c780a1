"""Parts that tests of mla_decode share: sets of latent caches, scenes with dominant tokens, and calls held to the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvgen import KernelSet, Latent, Ring, presets
from kvgen.layout.dtypes import dtype
from kvgen.lowering.attention.mla_mma import MlaMma
from kvgen.ops import MlaDecode
from kvgen.reference import Decoded, mla_decode, mla_decode_sparse
from kvgen.reference.mla_decode import Listed
from kvgen.schema.cache import Cache
from kvgen.schema.keys import class_of_keys
from tests.support.batches import Batch
from tests.support.harness import Run, hold_untouched, launcher, on_machine, package, surroundings
from tests.support.memory import CANARY, Raw, rows_array
from tests.support.scenes import Scene
from tests.support.sets import archs_of
from tests.support.tolerance import Numerics, hold

SCALE = 192**-0.5
TILES = (32, 64)  # tokens
DOMINANT = 3.9  # see tests.support.dominant_tokens


def latent_set(name: str, cache: Cache, heads: int, **fields: Any) -> KernelSet:
    """A set with mla_decode alone."""
    op = MlaDecode(**({"scale": SCALE} | fields))
    return KernelSet(name=f"mla_{name}", q_heads=heads, cache=cache, ops=(op,))


SETS = {
    kernels.name: kernels
    for kernels in (
        # The sizes of DeepSeek, in every form of its rows.
        latent_set("plain", presets.max_mla(page_size=64), 16),
        latent_set("rows", presets.flashmla_fp8(), 16, rows=2),
        latent_set("pool", presets.max_mla_fp8(page_size=16), 20, out_dtype="f32"),
        # Smaller ones: heads from 1 to 128, rows to 8, other tables, both element types.
        latent_set("one_head", presets.max_mla(latent_dim=64, rope_dim=16, page_size=16), 1, lse_base="2"),
        latent_set("eight", presets.max_mla(dtype="f16", latent_dim=64, rope_dim=32, page_size=3), 8, rows=4),
        latent_set(
            "two_pools", presets.flashinfer_mla(dtype="bf16", latent_dim=64, rope_dim=32, page_size=16), 64, rows=2
        ),
        latent_set("many", presets.max_mla(latent_dim=64, rope_dim=16, page_size=32), 128, lse_empty="inf"),
        latent_set("slots", presets.sglang_mla(latent_dim=128, rope_dim=64, fp8=True), 20, rows=3),
        latent_set(
            "small_pool", presets.max_mla_fp8(latent_dim=64, rope_dim=16, page_size=5), 6, rows=8, out_dtype="f16"
        ),
        latent_set(
            "ring",
            Latent(dtype="f16", latent_dim=64, rope_dim=32, page_size=8, table=Ring(window=50), lengths="after"),
            20,
            rows=2,
        ),
        latent_set("rate", Latent(dtype="bf16", latent_dim=64, rope_dim=16, page_size=3, rate=4, lengths="after"), 8),
    )
}
SPARSE = {
    kernels.name: kernels
    for kernels in (
        latent_set("sparse", presets.flashmla_fp8(), 16, sparse=True),
        latent_set(
            "sparse_plain", presets.max_mla(latent_dim=64, rope_dim=16, page_size=16), 40, sparse=True, lse_empty="inf"
        ),
        latent_set(
            "sparse_pool", presets.max_mla_fp8(latent_dim=64, rope_dim=16, page_size=8), 8, sparse=True, lse_base="2"
        ),
    )
}
SPLIT = {
    kernels.name: kernels
    for kernels in (
        latent_set("balanced", presets.max_mla(latent_dim=64, rope_dim=16, page_size=16), 16, rows=2, split="balanced"),
        latent_set("balanced_rows", presets.vllm_mla_fp8(), 8, split="balanced"),
        latent_set(
            "invariant",
            Latent(dtype="bf16", latent_dim=64, rope_dim=16, page_size=16, table=Ring(window=200)),
            8,
            split="invariant",
            chunk=64,
        ),
        latent_set(
            "invariant_rate",
            Latent(dtype="bf16", latent_dim=64, rope_dim=16, page_size=16, rate=2),
            8,
            split="invariant",
            chunk=64,
        ),
    )
}


def op_of(kernels: KernelSet) -> MlaDecode:
    """The operation of a set of these."""
    (op,) = (op for op in kernels.ops if isinstance(op, MlaDecode))
    return op


def kernels_of(kernels: KernelSet, archs: Sequence[str]) -> tuple[str, ...]:
    """The kernel of a set's mla_decode on each architecture: its template, and `rounded` where mla_mma rounds rows."""
    plans = [op_of(kernels).plan(kernels)[0].on(arch) for arch in archs]
    names = [plan.template.removeprefix("ops/").removesuffix(".cu.j2") for plan in plans]
    rounded = [isinstance(plan.context, MlaMma) and plan.context.row.rounded for plan in plans]
    return tuple(f"{name} rounded" if of else name for name, of in zip(names, rounded, strict=True))


def numerics(kernels: KernelSet, sinks: Raw | None = None) -> Numerics:
    """Numerics of mla_decode, as tests.support.tolerance takes them."""
    op = op_of(kernels)
    kind = kernels.cache.dtype
    return Numerics(
        op.scale or 0.0,
        kind,
        op.out_dtype or kind,
        op.rows,
        sinks=sinks,
        sinks_in_lse=op.sinks == "lse",
        lse_base=op.lse_base,
        lse_empty=op.lse_empty,
    )


@dataclass(frozen=True)
class Rows:
    """Rows [begin, end) of q are request b's."""

    b: int
    begin: int
    end: int


@st.composite
def steps(draw: Any, kernels: KernelSet) -> tuple[Batch, list[Rows], int, bool]:
    """A batch, whose rows of q are whose, how many there are, and whether offsets say so."""
    page, most, before = kernels.cache.page_tokens or 1, op_of(kernels).rows, kernels.cache.lengths == "before"
    edges = sorted({0, 1, 2, 5, 100} | {n * kernels.cache.entry_tokens + d for n in (page, *TILES) for d in (-1, 0, 1)})
    ragged = draw(st.booleans())
    counts = [draw(st.integers(0, most)) if ragged else most for _ in range(draw(st.integers(0, 3)))]
    totals = [max(draw(st.sampled_from(edges)), r if before else 0) for r in counts]
    leading = draw(st.sampled_from((0, 2))) if ragged else 0
    ends = np.cumsum([leading, *counts]).tolist()
    rows = [Rows(b, ends[b], ends[b + 1]) for b in range(len(counts))]
    batch = Batch(
        totals=tuple(totals),
        new=(0,) * len(totals),
        padding=draw(st.integers(0, 3)),
        shared=False,
        fill=draw(st.sampled_from(("nan", "inf"))),
        strided=draw(st.booleans()),
        errors=True,
        arch=draw(st.sampled_from(archs_of(kernels))),
        schedule=draw(st.sampled_from(("ascending", "descending", 7))),
        seed=draw(st.integers(0, 2**32 - 1)),
        leading=leading,
    )
    return batch, rows, ends[-1] + batch.padding, ragged


def latent_scene(kernels: KernelSet, batch: Batch, of: Sequence[Rows], total: int) -> tuple[Scene, Raw]:
    """A scene with every token stored, `total` rows of q, and dominant tokens: where pages and tiles begin and end, and those
    around the last one that a row sees."""
    counts = list(batch.totals)
    if kernels.cache.lengths == "before":
        for rows in of:
            counts[rows.b] -= rows.end - rows.begin
    scene = Scene(kernels, batch, counts)
    scene.fill(batch.totals)
    shape = (kernels.q_heads, kernels.cache.head_dim)
    q, _ = rows_array(total, shape, kernels.cache.dtype, strided=batch.strided)
    q[...] = scene.values(total, *shape)
    for rows in (r for r in of if r.end > r.begin):
        total, rate = batch.totals[rows.b], scene.cache.entry_tokens
        n, position = total // rate, total - (rows.end - rows.begin)
        first = scene.view.first_token(n)
        edges = {
            first,
            n - 1,
            *((position + i + 1) // rate - 1 + d for i in range(rows.end - rows.begin) for d in (0, 1)),
        }
        around = [p for p in range(first, n) if p % scene.tokens in (0, scene.tokens - 1) or p % 32 in (0, 31)]
        edges |= set(scene.rng.permutation(around)[:5].tolist())
        for token in sorted(e for e in edges if first <= e < n):
            row = int(scene.rng.integers(rows.begin, rows.end))
            scene.write(rows.b, token, [dominant_row(scene, q[row, scene.rng.integers(kernels.q_heads)])])
    return scene, q


def dominant_row(scene: Scene, towards: Raw) -> Raw:
    """A row `[1, head_dim]` with large values and a score of DOMINANT for this query."""
    along = towards.astype(np.float64)
    value = 3 * np.sign(scene.rng.standard_normal(len(along)))
    value += along * (DOMINANT / SCALE - value @ along) / (along @ along)
    kind: Raw = value.astype(towards.dtype)
    return kind[None]


def listed(scene: Scene, indices: Raw, counts: Raw | None) -> Listed:
    """The rows of a scene's cache and lists of them, as the oracle takes them."""
    (keys,) = scene.rows()
    return Listed(keys, scene.pages, scene.tokens, indices, counts)


def layer_of(kernels: KernelSet, name: str, other: Scene) -> Any:
    """The layer of another cache that a call brings, without tables."""
    made = getattr(package(kernels), class_of_keys(op_of(kernels).name, name))
    return made(**other.arrays())[other.layer]


def planned_for(scene: Scene, rows: int, **arguments: Any) -> Any:
    """A workspace of garbage, planned for the scene's step; few multiprocessors, so that requests are cut often."""
    generated = package(scene.kernels)
    cache = generated.Cache(**scene.arguments())
    longest = None if op_of(scene.kernels).split == "balanced" else max(1, cache.max_cache_length)
    with on_machine(scene.batch):
        workspace = generated.mla_decode.workspace(max_rows=rows + 1, max_tokens=longest, multiprocessors=5)
        workspace.view.owner[...] = 0xEE
        generated.mla_decode.plan(cache[scene.layer], workspace, rows=rows, **arguments)
    return workspace


def call(
    scene: Scene, q: Raw, *, lse: bool = True, others: Mapping[str, Scene] | None = None, **arguments: Any
) -> tuple[Raw, Raw | None, Decoded]:
    """Run mla_decode and hold every row, the error word and all memory around to the oracle; returns out, lse, the oracle's.

    `others` are the scenes of its other caches, by the names of its sources.
    """
    kernels, given = scene.kernels, numerics(scene.kernels, arguments.get("sinks"))
    op = op_of(kernels)
    assert isinstance(kernels.cache, Latent)
    width = (kernels.q_heads, kernels.cache.latent_part)
    out, around = rows_array(len(q), width, given.out, strided=scene.batch.strided)
    sums, sums_around = rows_array(len(q), width[:1], "f32", strided=False)
    (keys,) = scene.rows()
    how: dict[str, Any] = {"scale": op.scale, "lse_base": op.lse_base, "lse_empty": op.lse_empty}
    how |= {"sinks": given.sinks, "sinks_in_lse": given.sinks_in_lse}
    scenes = {"": scene} | {f"{name}_": other for name, other in (others or {}).items()}
    if op.sparse:
        lists = [listed(s, arguments[f"{n}indices"], arguments.get(f"{n}topk_lengths")) for n, s in scenes.items()]
        wanted = mla_decode_sparse(lists, q, v_dim=width[1], **how)
    else:
        wanted = mla_decode(scene.view, keys, q, rows=op.rows, row_offsets=arguments.get("row_offsets"), **how)
    before = {name: s.snapshot() for name, s in scenes.items()}
    arguments |= {f"{name}_cache": layer_of(kernels, name, other) for name, other in (others or {}).items()}
    if op.split != "none":
        planned = {n: a for n, a in arguments.items() if n.endswith("topk_lengths")}
        if not op.sparse:
            planned["row_offsets"] = arguments.pop("row_offsets", None)
        arguments["workspace"] = planned_for(scene, len(q), **planned)
    run = Run(scene, op.name, launcher(scene, op.name), q=q, out=out, lse=sums if lse else None, **arguments)
    hold(wanted, given, q, out, sums if lse else None)
    for array, memory in ((out, around), (sums, sums_around)):
        assert (surroundings(array, memory) == CANARY).all(), "written beside the rows"
    for name, s in scenes.items():
        hold_untouched(s, before[name])
    run.expect_word(wanted.errors)
    return out, sums if lse else None, wanted


WRONGS = ("page", "none", "minus_one", "length", "most", "minus")


def hold_hostile(kernels: KernelSet, batch: Batch, wrongs: Sequence[str] = WRONGS) -> None:
    """Whatever the middle one of three requests' pages and length are: it is NaN, the error word names it, the others keep
    their bits."""
    rows = op_of(kernels).rows
    kind = np.iinfo(dtype(kernels.cache.lengths_dtype).numpy())
    right: tuple[Raw, Raw | None] | None = None
    for wrong in wrongs:
        scene, q = latent_scene(
            kernels,
            replace(batch, totals=(70, 90, 40), new=(0,) * 3),
            [Rows(b, b * rows, (b + 1) * rows) for b in range(3)],
            3 * rows,
        )
        if right is None:  # what each of these scenes gives, which are alike
            right = call(scene, q)[:2]
        was, was_lse = right
        lengths = scene.tables["lengths"]
        table = next(t for n, t in scene.tables.items() if "page" in n or n == "indices")
        if wrong in ("length", "most", "minus"):
            most = table.shape[-1] * scene.tokens + 1
            value = {"length": most, "most": kind.max, "minus": np.array(-5, np.int64).astype(lengths.dtype)}[wrong]
            lengths[1] = value
        else:
            pages = {"page": scene.pages, "none": np.iinfo(table.dtype).max}
            id_ = pages.get(wrong, np.array(-1, np.int64).astype(table.dtype))
            if table.ndim == 1:
                table[-(-70 // scene.tokens)] = id_
            else:
                last = wrong == "none" and table.shape[1] == -(-90 // scene.tokens)
                table[1, -1 if last else 0] = id_
        out, lse, wanted = call(scene, q)
        assert wanted.errors and was_lse is not None and lse is not None, wrong
        others = [*range(rows), *range(2 * rows, 3 * rows)]
        assert np.isnan(out[rows : 2 * rows].astype(np.float32)).all(), wrong
        assert was[others].tobytes() == out[others].tobytes(), wrong
        assert was_lse[others].tobytes() == lse[others].tobytes(), wrong
