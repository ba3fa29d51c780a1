"""append with bias, norms and RoPE against the oracle: changed rows within an ulp, all other memory byte for byte."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from kvgen.cases.tolerance import Distance, compare
from kvgen.layout.dtypes import dtype
from kvgen.ops import Append
from kvgen.reference import Rows
from kvgen.reference.append import Change, Changed, NewRow, changed, locate
from kvgen.reference.elements import Elements
from kvgen.reference.pool import Raw
from kvgen.reference.quant import LARGEST, values
from kvgen.reference.rope import Table
from kvgen.reference.rounding import ulp
from kvgen.reference.segments import Coded, Plain
from kvgen.reference.tables import index
from kvgen.runtime import describe
from kvgen.runtime.faults import Fault
from tests.support.append_sets import SETS
from tests.support.batches import PLAIN, Batch, batches
from tests.support.harness import on_machine, package, surroundings
from tests.support.memory import CANARY, rows_array
from tests.support.scenes import Scene

MOST = 300  # rows of a table of angles


@dataclass
class Call:
    """One append: its arguments, the rows behind them role by role, and what is done to each."""

    scene: Scene
    op: Append
    rows: int
    arguments: dict[str, Raw]
    inputs: dict[str, Raw]
    outer: dict[str, Any]
    positions: Raw | None = None

    @property
    def places(self) -> dict[str, Raw]:
        return {n: self.arguments[n] for n in ("row_offsets", "slots", "valid_lengths") if n in self.arguments}

    def located(self) -> tuple[list[NewRow], int]:
        most = len(self.arguments["cos_sin"]) if "cos_sin" in self.arguments else 2**24

        def position_out_of_range(row: int, position: int | None) -> bool:
            if self.op.rope is None and (self.positions is None or self.op.position_scale is None):
                return False
            if self.positions is None:
                assert position is not None
                return position >= most
            found = [index(p) for p in self.given()[:, row]]
            return any(p is None or p >= most for p in found)

        stored = self.op.inputs != "q"
        return locate(
            self.scene.view, self.rows, position_out_of_range=position_out_of_range, stored=stored, **self.places
        )

    def changed(self, found: list[NewRow]) -> dict[str, Changed]:
        """Every role's rows after all of it; rows of unknown position at 0, whoever looks at them is wrong."""
        op, kernels = self.op, self.scene.kernels
        positions = None
        if self.positions is None:
            positions = np.array([p.position or 0 for p in found], np.int64)
        else:
            known = np.array([p.state == "known" for p in found])
            rate = kernels.cache.entry_tokens  # an entry turns by its first token's position
            positions = np.where(known, self.given() // rate * rate, 0)
            positions = positions if len(op.sections) > 1 else positions[0]
        latent = kernels.cache.rope_part
        result = {}
        for role, array in self.inputs.items():
            norm = {"q": op.q_norm, "k": op.k_norm, "v": op.v_norm}[role]
            table = None
            if op.angles != "computed":
                table = Table(self.arguments["cos_sin"], op.angles)
            do = Change(
                bias=self._bias(role),
                norm=norm,
                weight=self.arguments.get(f"{role}_weight"),
                norm_bias=self.arguments.get(f"{role}_norm_bias"),
                mean_square=self.arguments.get(f"{role}_mean_square"),
                norm_order=op.norm_order,
                rope=None if role == "v" else op.new_rows(kernels).rope,
                positions=positions,
                table=table,
                sections=op.sections,
                sections_order=op.sections_order,
                position_scale=op.position_scale if role == "q" else None,
                hadamard=role in (op.hadamard or ""),
                local=op.rope == "local",
                latent=array.shape[2] - latent if latent else 0,
                whole=role == "q" or (norm is not None and norm.whole_row),
            )
            result[role] = changed(array, do)
        return result

    def given(self) -> Raw:
        """The positions `[sections or 1, rows]`."""
        return np.asarray(self.positions).reshape(max(1, len(self.op.sections)), self.rows)

    def _bias(self, role: str) -> Raw | None:
        if not self.op.bias:
            return None
        if "bias" not in self.arguments:
            return self.arguments[f"{role}_bias"]
        sizes = {r: a.shape[1:] for r, a in self.inputs.items()}
        begin = sum(int(np.prod(s)) for r, s in sizes.items() if "qkv".index(r) < "qkv".index(role))
        return self.arguments["bias"][begin : begin + int(np.prod(sizes[role]))].reshape(sizes[role])


def call_of(scene: Scene, rows: int, places: Mapping[str, Raw]) -> Call:
    """Random rows, weights and positions for the set's append."""
    kernels, cache = scene.kernels, scene.cache
    op = kernels.ops[0]
    assert isinstance(op, Append)
    call = Call(scene, op, rows, dict(places), {}, {})
    for spec in package(kernels).append.KERNEL.arguments:
        if spec.name in ("errors", *places):
            continue
        sizes = {"T": rows, "B": len(scene.batch.totals), "P": MOST}
        sizes["S"] = rows // sizes["B"] if sizes["B"] else 0
        shape = [n if isinstance(n, int) else sizes[n] for n in spec.shape]
        if not spec.strided:
            array = np.zeros(shape, dtype(spec.dtype).numpy())
        else:
            array, around = rows_array(shape[0], shape[1:], spec.dtype, strided=scene.batch.strided)
            call.outer[spec.name] = around
        if spec.access == "in":
            fill(scene, spec.name, array)
        call.arguments[spec.name] = array
    call.positions = call.arguments.get("positions")
    padded = op.rows == "padded"
    arrays = {
        n: a.reshape(rows, *a.shape[2:]) if padded and n in call.outer and n != "cos_sin" else a
        for n, a in call.arguments.items()
    }
    if op.inputs == "qkv":
        shapes = {"q": (kernels.q_heads, op.q_dim or cache.head_dim), "k": (cache.kv_heads, cache.head_dim)}
        shapes["v"] = (cache.kv_heads, cache.v_dim)
        begin = 0
        for role, inner in shapes.items():
            size = int(np.prod(inner))
            call.inputs[role] = arrays["qkv"][:, begin : begin + size].reshape(rows, *inner)
            begin += size
    elif op.inputs == "parts":
        call.inputs["k"] = np.concatenate([arrays["k_latent"], arrays["k_rope"]], axis=2)
    call.inputs |= {n: arrays[n] for n in ("q", "k", "v") if n in arrays}
    return call


def fill(scene: Scene, name: str, array: Raw) -> None:
    rng = scene.rng
    if name == "positions":
        array[...] = rng.integers(0, MOST, array.shape)
    elif name == "cos_sin":
        angle = rng.standard_normal(array.shape)
        array[...] = np.cos(angle).astype(array.dtype)
    elif name == "q_scale":
        array[...] = 0.37
    elif name.endswith("mean_square"):
        array[...] = 0.25 + rng.random(array.shape)
    else:
        array[...] = (rng.standard_normal(array.shape) * 2).astype(array.dtype)


def run(call: Call) -> int:
    """Launch it; returns the error word."""
    word = np.zeros(1, np.uint64)
    generated = package(call.scene.kernels)
    with on_machine(call.scene.batch):
        generated.append(generated.Cache(**call.scene.arguments())[call.scene.layer], **call.arguments, errors=word)
    return int(word[0])


def check(call: Call) -> tuple[list[NewRow], int]:
    """Run it and compare all memory with the oracle's."""
    expected = call.scene.snapshot()
    found, wanted = call.located()
    change = call.changed(found)
    word = run(call)
    mine, theirs = call.scene.rows(), call.scene.rows(expected)
    for row, at in enumerate(found):
        for role, actual, kept, place in zip("kv", mine, theirs, at.places or (), strict=False):
            if kept.residual:  # K as it comes, in the tail until seal has a group
                assert at.position is not None
                kept.put(at.b, at.position, place, call.inputs[role][row], at.after)
                continue
            check_row(actual, kept, place, at.token, change[role], row, f"{role} of row {row}")
    after = call.scene.snapshot()
    for name, parts in after.items():
        for part, right in zip(parts, expected[name], strict=True):
            np.testing.assert_array_equal(part, right, err_msg=name)
    if "q_out" in call.arguments:
        scale = float(call.arguments["q_scale"][0]) if "q_scale" in call.arguments else 1.0
        check_q(call.arguments["q_out"], call.outer["q_out"], found, change["q"], scale)
    assert word == wanted, f"error word {describe(word)}, not {describe(wanted)}"
    return found, word


def check_row(actual: Rows, kept: Rows, place: Any, token: int, change: Changed, row: int, name: str) -> None:
    """A stored row against what it should be; `kept`, the oracle's memory, then takes it over, bit for bit."""
    begin = 0
    for mine, theirs in zip(actual.parts, kept.parts, strict=True):
        dims = slice(begin, begin + mine.dim)
        want, lost = change.rows[row, :, dims], change.lost[row, :, dims]
        if isinstance(mine, Plain):
            _close(mine.read(place, token), want, lost, name)
            _take(mine.elements, theirs.elements, place.page, token)
        else:
            assert isinstance(mine, Coded) and isinstance(theirs, Coded)
            _check_codes(mine, place, token, want, lost, name)
            _take(mine.codes, theirs.codes, place.page, token)
            if isinstance(mine.scales, Elements):
                assert theirs.scales is not None
                _take(mine.scales, theirs.scales, place.scales, token)
        begin += mine.dim


def _take(mine: Elements, theirs: Elements, page: int, token: int) -> None:
    theirs.write(page, token, mine.read(page, token))


def _close(got: Raw, want: Raw, lost: Raw, name: str) -> None:
    off = np.abs(got.astype(np.float64) - want)
    off[np.isinf(lost)] = 0
    allowed = ulp(want, got.dtype) / 2 + lost
    assert (off <= allowed).all(), f"{name}: off by {(off / allowed).max():.2f} of what rounding allows"


def _check_codes(part: Coded, place: Any, token: int, want: Raw, lost: Raw, name: str) -> None:
    """A computed scale within an ulp of the scales that the rows may have; values within half a step of theirs."""
    if part.quant.codebook is not None or part.quant.recipe == "min":
        distance = Distance()
        compare(part, place, token, want, lost, distance)
        assert distance.share <= 1, f"{name}: off by {distance.share:.2f} of what is allowed"
        return
    numbers = part.numbers(place, token)
    scale, _ = part._stored(part.scales.read(place.scales, token) if part.scales else None)
    if part.scales is not None:
        exact, _ = part._chosen(want[None].astype(np.float32))
        assert scale is not None
        off = np.sign(want) * (np.abs(want) * 2.0**-20 + np.where(np.isfinite(lost), lost, 0))
        low, high = (part._chosen((want + by)[None].astype(np.float32))[0] for by in (-off, off))
        near = np.abs(scale.astype(np.float64) - exact.astype(np.float64))
        allowed = ulp(exact.astype(np.float64), exact.dtype) + np.abs(high.astype(np.float64) - low.astype(np.float64))
        assert (near <= allowed).all(), f"{name}: scale off by {near.max()}"
    step = part._spread(scale)
    unit = np.ones(want.shape) if step is None else step.astype(np.float64)
    if part.global_scale is not None:
        unit = unit * part.global_scale
    if part.given is not None or scale is None:  # nobody chose a scale for these rows: codes saturate
        most = LARGEST[part.quant.codes.name] * unit
        want = np.clip(want, -most, most)
    codes = np.abs(values(part.codes.read(place.page, token), part.quant.codes.name))
    half = unit * _half_step(part.quant.dtype, codes)
    if part.quant.zero and part.quant.scale_dtype == "bf16":  # all codes times what its scale is rounded by
        half = half + unit * LARGEST[part.quant.codes.name] * 2.0**-8
    if part.quant.recipe == "max":  # values go through e4m3
        half = half + np.abs(numbers) * 2.0**-4
    assert (np.abs(numbers - want) <= half * 1.001 + lost + np.abs(want) * 2.0**-20 + 1e-30).all(), (
        f"{name}: codes are off"
    )


def _half_step(kind: str, codes: Raw) -> Raw:
    """Half the distance of the codes around each, with room for a neighbour's wider half and, in fp8, for saturation."""
    if kind in ("i8", "i4", "i3", "i2"):
        return np.full(codes.shape, 0.502 if kind == "i8" else 0.51)
    mantissa, least = {"e4m3": (3, -6), "e5m2": (2, -14), "e2m1": (1, 0)}[kind]
    exponent = np.floor(np.log2(np.maximum(codes, 2.0**least)))
    return 2.0 ** (exponent - mantissa - 1) * 1.07


def check_q(out: Raw, memory: Raw, found: list[NewRow], change: Changed, scale: float = 1.0) -> None:
    """q_out against what it should be, and the memory around it; padding is left alone, rows of unknown place are NaN."""
    flat = out.reshape(len(found), *out.shape[-2:])
    heads = change.rows.shape[1]
    padding = np.array([at.state == "padding" for at in found], bool)
    assert (np.ascontiguousarray(flat[padding]).view(np.uint8) == CANARY).all(), "padding was written"
    assert (np.ascontiguousarray(flat[~padding, heads:]).view(np.uint8) == 0).all(), "heads behind q's are not zeros"
    flat = flat[:, :heads]
    most = 448 if out.dtype.itemsize == 1 else np.inf
    for row, at in enumerate(found):
        got = flat[row].astype(np.float64)
        if at.state == "padding":
            assert (np.ascontiguousarray(flat[row]).view(np.uint8) == CANARY).all(), (
                f"q of row {row}: padding was written"
            )
        elif at.state == "unknown":
            assert np.isnan(got).all(), f"q of row {row} is not NaN"
        else:
            want = np.clip(change.rows[row] / scale, -most, most)
            off = np.abs(got - want)
            allowed = ulp(want, flat.dtype) * 0.5001 + change.lost[row] / scale + np.abs(want) * 2.0**-22
            assert (off <= allowed).all(), f"q of row {row}: off by {(off / allowed).max():.2f} of what rounding allows"
    assert (surroundings(out, memory) == CANARY).all(), "written beside q_out"


# ---------------------------------------------------------------------------------------------------------------------


def scene_of(name: str, batch: Batch) -> Scene:
    kernels = SETS[name]
    before = [n - new for n, new in zip(batch.totals, batch.new, strict=True)]
    scene = Scene(kernels, batch, batch.totals if kernels.cache.lengths == "after" else before)
    scene.fill(before)
    return scene


def places_of(scene: Scene, op: Append) -> tuple[int, dict[str, Raw]]:
    """(rows, what says where they go)."""
    batch = scene.batch
    kind = dtype(op.index_dtype or ("i64" if op.rows == "slots" else scene.cache.lengths_dtype)).numpy()
    if op.rows == "padded":
        run_length = max(batch.new, default=0) + batch.padding
        return run_length * len(batch.new), {"valid_lengths": np.array(batch.new, kind)}
    rows = batch.leading + sum(batch.new) + batch.padding
    if op.rows == "slots":
        slots = scene.rng.permutation(scene.pages * scene.tokens)[:rows]
        slots = np.where(scene.rng.random(len(slots)) < 0.3, -1, slots)
        return len(slots), {"slots": slots.astype(kind)}
    return rows, {"row_offsets": np.cumsum([batch.leading, *batch.new]).astype(kind)}


def call_for(name: str, batch: Batch) -> Call:
    scene = scene_of(name, batch)
    op = SETS[name].ops[0]
    assert isinstance(op, Append)
    rows, places = places_of(scene, op)
    return call_of(scene, rows, places)


# Norms, RoPE and codes that others of these sets have, or tests/ops/test_transformers_rows.py, in another order or over another
# cache: a campaign has them.
ALIKE = (
    "qwen3", "gemma", "latent_rope", "max_qkv", "nvfp4", "own", "tiles", "per_kv", "k_only", "llama4_nope", "qwen3_vl",
    "gemma4_full", "proportional_pairs", "cohere", "indexer", "hadamard", "hadamard_indexer",
)  # fmt: skip
RUN = [name for name in SETS if "KVGEN_FAMILY" in os.environ or name not in ALIKE]


@pytest.mark.parametrize("name", RUN)
@settings(max_examples=4)
@drawn(data=st.data())
def test_drawn_batches(name: str, data: Any) -> None:
    batch = replace(data.draw(batches(SETS[name])), errors=True)
    check(call_for(name, batch))


STEP = replace(PLAIN, totals=(5, 40, 1), new=(2, 3, 1), padding=1)


@pytest.mark.parametrize("name", [n for n in RUN if SETS[n].ops[0].positions == "given"])
@pytest.mark.parametrize("value", [-1, 2**24, 2**31 - 1])
def test_a_bad_position(name: str, value: int) -> None:
    """The row is not stored, its q is NaN, and the error word says so; a skipped row says nothing."""
    call = call_for(name, replace(STEP, totals=tuple(min(n, 20) for n in STEP.totals)))
    assert call.positions is not None
    # Row 1, or where an entry stands for several tokens the first row that is one.
    row = next(i for i, at in enumerate(call.located()[0]) if i > 0 and at.state != "padding")
    call.given()[-1, row] = value
    found, word = check(call)
    assert found[row].state == "unknown"
    if "slots" not in call.arguments or call.arguments["slots"][row] != -1:
        report = describe(word)
        assert report is not None and report.code is Fault.POSITION
    if "slots" in call.arguments:
        call.arguments["slots"][row] = -1
        _, word = check(call)
        assert describe(word) is None


def test_a_bad_total() -> None:
    """Rows in several blocks' parts. A last offset of 0 makes every row padding; what is wrong is reported nevertheless."""
    call = call_for("channels", replace(STEP, new=(1, 0, 0), padding=0))
    call.arguments["row_offsets"][-1] = 0
    _, word = check(call)
    report = describe(word)
    assert report is not None and report.code is Fault.ROW_OFFSETS


def test_past_the_table_of_angles() -> None:
    call = call_for("phi", replace(STEP, totals=(5, 40, 1)))
    call.arguments["cos_sin"] = call.arguments["cos_sin"][:38].copy()
    _, word = check(call)
    report = describe(word)
    assert report is not None and (report.code, report.request, report.position) == (Fault.POSITION, 1, 38)


@pytest.mark.parametrize("value", [-1, 2**31 - 1, 9])
def test_bad_valid_lengths(value: int) -> None:
    call = call_for("padded", STEP)
    call.arguments["valid_lengths"][1] = np.array(value, np.int64).astype(call.arguments["valid_lengths"].dtype)
    _, word = check(call)
    report = describe(word)
    assert report is not None and (report.code, report.request) == (Fault.ROW_OFFSETS, 1)


def test_a_bad_page_leaves_q_alone_and_a_bad_length_does_not() -> None:
    call = call_for("llama", replace(STEP, totals=(5, 40, 1)))
    call.scene.tables["page_table"][1] = 2**31 - 1
    found, word = check(call)
    assert describe(word) is not None and found[2].state == "known" and found[2].places is None
    call = call_for("llama", replace(STEP, totals=(5, 40, 1)))
    call.scene.tables["lengths"].view(np.int32)[1] = -1
    found, word = check(call)
    assert str(describe(word)).startswith("LENGTH") and found[2].state == "unknown"


def test_two_gpus_normalise_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has half of a row's heads; what they make of it is what the norm of the whole row makes of those heads."""
    batch = replace(STEP, totals=(5, 1, 40), new=(2, 1, 3), padding=0)
    calls = [call_for("row_given", batch) for _ in range(2)]
    positions = np.array([p.position for p in calls[0].located()[0]], np.int64)
    wanted: dict[str, Changed] = {}
    for role in "qk":
        norm = getattr(calls[0].op, f"{role}_norm")
        whole = np.concatenate([call.inputs[role] for call in calls], axis=1) * np.array(
            3.0, calls[0].inputs[role].dtype
        )
        weight = np.concatenate([call.arguments[f"{role}_weight"] for call in calls])
        row = Change(
            norm=norm.model_copy(update={"mean_square": "computed"}),
            weight=weight,
            rope=calls[0].op.rope,
            positions=positions,
        )
        wanted[role] = changed(whole, row)
        # An engine sums: each GPU's mean of its own squares, a sum over the GPUs, divided by their number; in f32.
        parts = np.split(whole, 2, axis=1)
        mean = sum(np.mean(part.astype(np.float32) ** 2, axis=(1, 2)) for part in parts) / np.float32(2)
        for call, part in zip(calls, parts, strict=True):
            call.arguments[role][...] = part
            call.arguments[f"{role}_mean_square"][...] = mean
    for gpu, call in enumerate(calls):
        mine = {"v": call.changed(call.located()[0])["v"]}
        for role, of_whole in wanted.items():
            heads = slice(gpu * call.inputs[role].shape[1], (gpu + 1) * call.inputs[role].shape[1])
            rows, lost = of_whole.rows[:, heads], of_whole.lost[:, heads]
            mine[role] = Changed(rows, lost + 2.0**-21 * np.abs(rows).max(axis=2, keepdims=True))  # the mean is rounded
        monkeypatch.setattr(call, "changed", lambda found, mine=mine: mine)
        check(call)
        wrong = {**mine, "q": Changed(mine["q"].rows * 1.02, mine["q"].lost)}
        monkeypatch.setattr(call, "changed", lambda found, wrong=wrong: wrong)
        with pytest.raises(AssertionError, match="q of row 0: off by"):
            check(call)


@pytest.mark.parametrize("name", ["q_alone", "q_alone_kivi", "q_alone_row"])
def test_q_alone_looks_up_no_page(name: str) -> None:
    """Pages that are wrong are no fault and the pool stays as it is; a wrong length is one, and q of its rows is NaN."""
    call = call_for(name, STEP)
    for table in ("page_table", "k_page_table", "v_page_table"):
        if table in call.scene.tables:
            call.scene.tables[table][...] = 2**31 - 1
    found, word = check(call)
    assert describe(word) is None and all(at.state in ("known", "padding") for at in found)
    call = call_for(name, STEP)
    call.scene.tables["lengths"].view(np.int32)[1] = -1
    found, word = check(call)
    assert str(describe(word)).startswith("LENGTH") and any(at.state == "unknown" for at in found)


def test_q_factor_of_a_long_sequence() -> None:
    """The last position that has a factor."""
    call = call_for("q_alone_row", replace(STEP, totals=(5,), new=(2,)))
    assert call.positions is not None
    call.positions[...] = 2**24 - 1
    found, word = check(call)
    assert describe(word) is None and found[0].state == "known"
