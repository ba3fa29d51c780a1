"""Steps of pool_tokens: their arguments, states in memory of their own, and the oracle beside the launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from kvgen import Block, Dense, KernelSet, Latent, Layout, Paged, Quant, RmsNorm, Rope, ops, presets
from kvgen.cases.pool_tokens import pooled_step, state_of
from kvgen.layout.dtypes import dtype
from kvgen.reference.pool_tokens import PooledStep, PoolState, latent_error
from kvgen.runtime import describe
from kvgen.schema.kernel_set import Op
from tests.ops.test_fused import check_row
from tests.support.batches import PLAIN, Batch
from tests.support.harness import offsets_of, on_machine, package
from tests.support.memory import Raw, aligned, rows_array
from tests.support.scenes import Scene

ROPE = Rope(style="interleaved", theta=1e4)
POSITIONS = 96  # rows of a table of angles
PAGE = 4  # entries


def _latent(rate: int, quant: Quant | None = None, **more: Any) -> Latent:
    return Latent(
        dtype="bf16",
        page_size=PAGE,
        rate=rate,
        layout=Layout(kv="page token head dim", layers="pointers"),
        table=Dense(dtype="i32"),
        lengths_dtype="i32",
        quant=quant,
        **{"lengths": "after", "latent_dim": 48, "rope_dim": 16} | more,
    )


def _set(name: str, cache: Paged, *operations: Op) -> KernelSet:
    return KernelSet(name=name, q_heads=1, cache=cache, ops=operations, arch=("sm_90a",))


# V4's record in small, scales and a zero behind the rows of a page; V4.1's, whose codes cover the RoPE part.
_POWERS: Final[dict[str, Any]] = {
    "dtype": "e4m3",
    "scale_dtype": "e8m0",
    "recipe": "pow2",
    "amax_min": 1e-4,
    "place": "page",
}
CODES = Quant(**_POWERS, block=Block(dim=16), scale_pad=4)
ALL_CODES = Quant(**_POWERS, block=Block(dim=32))
INDEX = presets.vllm_indexer(head_dim=32, page_size=PAGE).model_copy(update={"rate": 4})
INDEX_ROPE = Rope(style="interleaved", theta=1e4, dim=16, part="last")
# DeepSeek V4's kinds in small: entries of 4 that overlap, latent rows and index keys; of 32, whose groups have two batches;
# V4.1's of 2, and of single tokens.
_OVERLAP = ops.PoolTokens(
    overlap=True, ape=True, drafts=3, norm=RmsNorm(), rope=ROPE, normed_dtype="same_unrotated"
)  # fmt: skip
_INDEX = ops.PoolTokens(
    overlap=True,
    state="paged",
    state_tokens=3,
    state_buffers=2,
    inputs="separate",
    norm=RmsNorm(weight=False),
    rope=INDEX_ROPE,
    hadamard="k",
    pooled_dtype="same",
    normed_dtype="same",
    rotated_dtype="same",
    latent_out=True,
)
_LONG = ops.PoolTokens(
    ape=True,
    input_dtype="same",
    norm=RmsNorm(multiply="before", weight_dtype="f32"),
    rope=ROPE,
    angles="halves",
    latent_out=True,
)
_TWO = ops.PoolTokens(
    drafts=3, state_tokens=8, rope=ROPE, normed_dtype="same", rotated_dtype="same", index_dtype="i64"
)  # fmt: skip
_ONE = ops.PoolTokens(norm=RmsNorm(), rope=ROPE, normed_dtype="same", rotated_dtype="same", latent_out=True)
_STORE = ops.Append(rows="slots")
SETS = {
    "overlap": _set("pool_overlap", _latent(4, CODES), _OVERLAP),
    "index": _set("pool_index", INDEX, _INDEX),
    "long": _set("pool_long", _latent(32, lengths="before", latent_dim=448, rope_dim=64), _LONG),
    "two": _set("pool_two", _latent(2, ALL_CODES, quant_rope=True), _TWO),
    "one": _set("pool_one", _latent(1, ALL_CODES, quant_rope=True), _ONE, _STORE),
}


@dataclass
class State:
    """The state's arrays by name, all memory around them, and which rows requests have."""

    arrays: dict[str, Raw]
    memory: list[Raw]
    places: dict[str, Raw]

    def copy(self) -> list[Raw]:
        return [m.copy() for m in self.memory]


def the_op(kernels: KernelSet) -> ops.PoolTokens:
    """A set's operation."""
    (found,) = (op for op in kernels.ops if isinstance(op, ops.PoolTokens))
    return found


def new_state(op: ops.PoolTokens, kernels: KernelSet, batch: Batch, rng: np.random.Generator, most: int) -> State:
    """A state for `batch`, whose requests have at most `most` tokens: NaN in all rows, canaries around them."""
    pooled, requests = op.pooled(kernels), len(batch.totals)
    if not pooled.gated:
        return State({}, [], {})
    columns = -(-most // pooled.state_tokens) if pooled.paged else 1
    count = requests * columns + 2
    arrays, memory = {}, []
    for name in ("state",) if pooled.buffers == 1 else ("kv_state", "score_state"):
        array, outer = rows_array(count, (pooled.state_tokens, pooled.row_stride), "f32", strided=batch.strided)
        array[...] = np.nan
        arrays[name] = array
        memory.append(outer)
    ids = rng.permutation(count)[: requests * columns].reshape(requests, columns)
    kind = dtype(op.index_dtype or kernels.kv.lengths_dtype).numpy()
    if pooled.paged:
        wide = np.full((requests, columns + 2), 0x7FFFFFFF).astype(kind)
        wide[:, :columns] = ids
        return State(arrays, memory, {"state_table": wide[:, :columns]})
    return State(arrays, memory, {"state_ids": ids[:, 0].astype(kind)})


class Sequence:
    """The rows of all tokens of some requests, whatever steps they come in."""

    def __init__(self, kernels: KernelSet, batch: Batch, most: int) -> None:
        self.kernels, self.op, self.batch = kernels, the_op(kernels), batch
        op = self.op
        self.rate = kernels.kv.entry_tokens
        rng = np.random.default_rng(batch.seed)
        pooled, self.kind = op.pooled(kernels), dtype(kernels.kv.dtype).numpy()
        kind = dtype(pooled.kind).numpy()
        shape = (len(batch.totals), most, pooled.columns)
        self.kv, self.gate = (rng.standard_normal(shape).astype(kind) for _ in range(2))
        self.gate = (2 * self.gate.astype(np.float32)).astype(kind)
        self.fixed = self._fixed(rng)
        self.state = new_state(op, kernels, batch, rng, most)
        self.rng = rng

    def _fixed(self, rng: np.random.Generator) -> dict[str, Raw]:
        """Weights, what positions add, angles."""
        found = {}
        for spec in getattr(package(self.kernels), self.op.name).KERNEL.arguments:
            if spec.name in ("ape", "k_weight", "cos_sin"):
                shape = [n if isinstance(n, int) else POSITIONS for n in spec.shape]
                array = np.ndarray(
                    shape, dtype(spec.dtype).numpy(), aligned(np.prod(shape) * dtype(spec.dtype).bytes).data
                )
                array[...] = rng.standard_normal(shape).astype(array.dtype)
                found[spec.name] = array
        return found


@dataclass
class Ran:
    """One launch: the error word, latent_out, what the oracle says."""

    word: int
    latent: Raw | None
    wanted: PooledStep


def scene_of(sequence: Sequence, totals: tuple[int, ...]) -> Scene:
    """A scene with room for so many tokens a request."""
    batch = replace(sequence.batch, totals=totals, new=(0,) * len(totals), shared=False)
    scene = Scene(sequence.kernels, batch, totals)
    return scene


def arguments_of(sequence: Sequence, rows: Raw, given: Raw, total: int) -> dict[str, Any]:
    """Arrays of a step: row rows[i] has token given[i, 1] of request given[i, 0]."""
    found: dict[str, Any] = dict(sequence.fixed)
    width = sequence.kv.shape[2]
    kind = {np.dtype(np.float32): "f32"}.get(sequence.kv.dtype, sequence.kernels.kv.dtype)
    fused = sequence.rate > 1 and sequence.op.inputs == "fused"
    strided = sequence.batch.strided
    x, _ = rows_array(total, (2 * width if fused else width,), kind, strided=strided)
    x[...] = np.nan
    b, token = given.T if len(given) else (np.zeros(0, int),) * 2
    token = token % sequence.kv.shape[1]  # of a request whose length is wrong, any
    x[rows, :width] = sequence.kv[b, token]
    found["x"] = x
    if fused:
        x[rows, width:] = sequence.gate[b, token]
    elif sequence.rate > 1:
        gate, _ = rows_array(total, (width,), kind, strided=strided)
        gate[...] = np.nan
        gate[rows] = sequence.gate[b, token]
        found["gate"] = gate
    return found | sequence.state.arrays | sequence.state.places


def run_step(
    sequence: Sequence,
    scene: Scene,
    before: tuple[int, ...],
    new: tuple[int, ...],
    *,
    hold: bool = True,
    offsets: Mapping[int, int] | None = None,
) -> Ran:
    """Tokens [before, before + new) of every request in one launch; with `hold`, all memory against the oracle's. `offsets` are
    row offsets that are wrong."""
    op, batch, kernels = sequence.op, sequence.batch, sequence.kernels
    total = batch.leading + sum(new) + batch.padding
    rows = np.arange(batch.leading, batch.leading + sum(new))
    given = np.array([(b, before[b] + t) for b, n in enumerate(new) for t in range(n)]).reshape(-1, 2)
    index = op.index_dtype or kernels.kv.lengths_dtype
    starts = offsets_of(new, index, batch.leading)
    for at, value in (offsets or {}).items():
        starts[at] = value
    lengths = scene.tables["lengths"]
    counted = new if kernels.kv.lengths == "after" else (0,) * len(new)
    lengths[...] = np.add(before, counted).astype(lengths.dtype)
    return launch(sequence, scene, arguments_of(sequence, rows, given, total), starts, hold=hold)


def launch(sequence: Sequence, scene: Scene, arguments: dict[str, Any], offsets: Raw, *, hold: bool = True) -> Ran:
    """One launch beside the oracle."""
    op, kernels, state = sequence.op, sequence.kernels, sequence.state
    generated = package(kernels)
    total, outer = len(arguments["x"]), None
    latent = None
    if op.latent_out:
        latent, outer = rows_array(total, (kernels.kv.head_dim,), kernels.kv.dtype, strided=scene.batch.strided)
        arguments = arguments | {"latent_out": latent}
    wanted = _wanted(sequence, scene, arguments, offsets) if hold else None
    expected, around = scene.snapshot(), None if outer is None else outer.copy()
    before = state.copy()
    word = np.zeros(1, np.uint64)
    with on_machine(scene.batch):
        cache = generated.Cache(**scene.arguments())[scene.layer]
        getattr(generated, op.name)(
            cache, **arguments, row_offsets=offsets, errors=word if scene.batch.errors else None
        )
    if wanted is None:
        return Ran(int(word[0]), latent, PooledStep([], None, None, (), 0))  # type: ignore[arg-type]
    step, after = wanted
    _check_cache(scene, expected, step)
    _check_state(sequence, before, after)
    if latent is not None:
        assert around is not None and outer is not None
        _check_latent(scene, latent, outer, around, step)
    if scene.batch.errors:
        assert int(word[0]) == step.word, f"error word {describe(int(word[0]))}, not {describe(step.word)}"
    return Ran(int(word[0]), latent, step)


def _wanted(
    sequence: Sequence, scene: Scene, arguments: dict[str, Any], offsets: Raw
) -> tuple[PooledStep, PoolState | None]:
    """The oracle's step, on copies of the state's rows."""
    op, kernels = sequence.op, sequence.kernels
    arrays = arguments | {name: a.copy() for name, a in sequence.state.arrays.items()} | {"row_offsets": offsets}
    after = state_of(op, kernels, arrays)
    return pooled_step(op, kernels, scene.view, arrays, after), after


def _check_cache(scene: Scene, expected: Any, step: PooledStep) -> None:
    """Entries within what rounding allows, and all other memory as it was."""
    (mine,), (theirs,) = scene.rows(), scene.rows(expected)
    for row, at in enumerate(step.found):
        if at.places is not None:
            check_row(mine, theirs, at.places[0], at.token, step.stored, row, f"the entry of row {row}")
    for memory, parts in scene.snapshot().items():
        for part, right in zip(parts, expected[memory], strict=True):
            np.testing.assert_array_equal(part, right, err_msg=memory)


def _check_state(sequence: Sequence, before: list[Raw], after: PoolState | None) -> None:
    """Rows that a later step may need as the oracle has them, bit for bit; everything else as it was."""
    if after is None:
        return
    state = sequence.state
    found = [m.copy() for m in state.memory]
    for memory, old in zip(state.memory, before, strict=True):
        memory[...] = old
    arrays = list(state.arrays.values())
    width = after.kv.shape[2]
    if len(arrays) == 2:
        arrays[0][...], arrays[1][...] = after.kv, after.score
    else:
        arrays[0][..., :width], arrays[0][..., width:] = after.kv, after.score
    for memory, right in zip(found, state.memory, strict=True):
        np.testing.assert_array_equal(memory, right, err_msg="state")


def _check_latent(scene: Scene, latent: Raw, outer: Raw, around: Raw, step: PooledStep) -> None:
    """Entries before RoPE in the rows of their last tokens, NaN where they are not known, other rows as they were."""
    error = latent_error(step.latent, latent.dtype)
    found = outer.copy()
    emitted = [row for row, at in enumerate(step.found) if at.state != "padding"]
    values = latent.copy()
    outer[...] = around
    for row in emitted:
        if row in step.unknown:
            assert np.isnan(values[row].astype(np.float32)).all()
        else:
            off = np.abs(values[row].astype(np.float64) - step.latent.rows[row, 0])
            assert (off <= error[row, 0]).all() or np.isinf(error[row, 0]).all(), f"latent of row {row}"
        latent[row] = values[row]
    np.testing.assert_array_equal(found, outer)


def plain(requests: int, **more: Any) -> Batch:
    """A quiet batch of so many requests."""
    return replace(PLAIN, totals=(0,) * requests, new=(0,) * requests, **more)
