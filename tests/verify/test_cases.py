"""kvgen.verify: every operation has an oracle and batches; what is wrong in a kernel, or beside an array, is found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgen
from kvgen import CSR, KernelSet, Paged, Quant, ops
from kvgen.cases.append import AppendCases
from kvgen.cases.comparison import Comparison
from kvgen.cases.decode import DecodeCases
from kvgen.cases.gather import GatherCases
from kvgen.cases.operation import cases_of
from kvgen.cases.scene import Scene
from kvgen.cases.workload import Workload
from kvgen.cli.project import generated
from kvgen.emulator.errors import HostCompilerError
from kvgen.errors import DeviceError
from kvgen.schema.loader import load_file
from kvgen.verify import run
from kvgen.verify.batches import batches, case_of, hostile_batch
from kvgen.verify.memory import Bytes, HostMemory, HostPlaced, Placed
from kvgen.verify.run import Verifier

ROOT = Path(__file__).resolve().parents[2]
# Checked-in sets, and the operations of each that no smaller one has.
EVERY = {
    "layout_f32": ("append", "gather", "decode"),
    "llama3_8b_kivi": ("seal",),
    "layout_sglang": ("extend", "to_dense"),
    "deepseek_v3_fp8": ("mla_decode", "mla_sparse"),
    "engine_deepseek_v3": (
        *("append_slots", "gather_rows", "remap_topk", "list_keys", "combine_lists", "mla_plan", "mla_decompress", "convert"),
    ),
    "deepseek_v32_indexer": ("indexer_query", "indexer_scores"),
    "engine_qwen3_fp8": ("norm_cache", "store_scales", "gather_raw", "attention_output", "move_tokens"),
    "deepseek_v4_index_keys": ("pool_tokens",),
    "engine_llama3_8b": (
        *("append_padded", "rotate_cache", "lora_add", "sliced_add", "rows_add", "scatter", "copy_pages", "zero_pages"),
        *("swap_out", "swap_in", "reorder", "compact", "row_offsets", "advance", "to_csr", "slot_mapping", "merge_states"),
    ),
    "state_qwen3_next": (
        *("copy_pages", "zero_pages", "swap_out", "swap_in", "compact", "reorder", "gather_states", "scatter_states"),
    ),
}  # fmt: skip
# Whose data has nothing that can be wrong: no table, no list, no count.
HARMLESS = ("attention_output", "merge_states")


@contextmanager
def verifier(name: str, memory: Any = None, **how: Any) -> Iterator[Verifier]:
    """A checked-in set on the CPU machine; its batches are few."""
    kernels = load_file(ROOT / "specs" / f"{name}.py", f"specs/{name}.py")[0].kernels
    with generated(ROOT / "generated", name) as package:
        yield Verifier(kernels, package, memory or HostMemory(), **({"quick": True} | how))


def op_of(kernels: KernelSet, name: str) -> Any:
    return next(op for op in kernels.ops if op.name == name)


def test_each_file_of_an_operation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU machine: that of the set's last architecture, and one of every other file. A GPU has its own alone."""
    asked: list[str | None] = []

    def refused(case: Any, memory: Any, arch: str | None) -> Any:
        asked.append(arch)
        raise DeviceError("nothing runs")

    monkeypatch.setattr(run, "launch", refused)
    with verifier("deepseek_v3") as found:
        decode = op_of(found.kernels, "mla_decode")
        assert found.other_archs(decode) == ["sm_80"] and not found.other_archs(op_of(found.kernels, "append"))
        assert found.run(decode, arch="sm_80").arch == "sm_80" and found.run(decode).arch == ""
        assert set(asked) == {"sm_80", None}
    elsewhere = HostMemory()
    elsewhere.device = "cuda:0"
    with verifier("deepseek_v3", elsewhere) as found:
        assert not found.other_archs(op_of(found.kernels, "mla_decode"))


def test_every_operation_is_run() -> None:
    """Between them, EVERY's sets have all operations but custom, which is in tests/custom."""
    met = set()
    for name, names in EVERY.items():
        kernels = load_file(ROOT / "specs" / f"{name}.py", f"specs/{name}.py")[0].kernels
        met |= {op_of(kernels, op).kind for op in names}
    assert met == {op.kind for op in ops.ALL}


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "specs").glob("*.py")))
def test_caches_of_every_set_are_taken(name: str) -> None:
    """The pools and tables of a good batch and of a hostile one, as the generated Cache checks them; nothing is launched."""
    for kernels in (loaded.kernels for loaded in load_file(ROOT / "specs" / f"{name}.py", f"specs/{name}.py")):
        with generated(ROOT / "generated", kernels.name) as package:
            for op in kernels.ops:
                assert Verifier(kernels, package, HostMemory()).why_not(op) == "", op.name
                for workload in (*batches(kernels, op, quick=True), hostile_batch(kernels, op)):
                    case = case_of(kernels, op, package, workload, 0)
                    package.Cache(**case.before.pools, **case.before.tables)


def test_scales_of_counted_calls_are_numbers() -> None:
    """A scale of 0 would be a fault, which a call that is counted or timed must not have."""
    with verifier("engine_qwen3_fp8") as v:
        scene = Scene(v.kernels, v.package, Workload("two", (20, 9), (3, 1)))
        calls = [cases_of(op).call(scene) for op in v.kernels.ops if cases_of(op).counted]
        found = [array for call in calls for name, array in call.arrays.items() if name in ("q_scale", "out_scale")]
        assert found and all((array == 1).all() for array in found)


def in_this_run(name: str, op: str) -> bool:
    """Pages of states are moved as pages of tokens are, in a campaign."""
    return "KVGEN_FAMILY" in os.environ or name != "state_qwen3_next" or op.endswith("_states")


CASES = [(name, op) for name, names in EVERY.items() for op in names if in_this_run(name, op)]


@pytest.mark.parametrize(("name", "op"), CASES)
def test_on_the_cpu_machine(name: str, op: str) -> None:
    """A good batch and a hostile one: nothing is wrong, and what is reported is what the oracle reports."""
    with verifier(name) as v:
        result = v.run(op_of(v.kernels, op))
    assert [c.wrong for c in result.cases] == [()] * len(result.cases), result.cases
    assert result.status == "ok" and result.why == ""
    good = [c for c in result.cases if not c.fault]
    assert [c.reported for c in good] == [""] and 0 <= result.share <= 1
    assert bool(result.hostile) == (result.kind not in HARMLESS)
    assert all(c.reported and c.reported == c.expected for c in result.hostile)


def test_all_cases_of_one_operation() -> None:
    """Without quick: several batches, several kinds of hostile data, other numbers with another seed."""
    with verifier("layout_f32", quick=False) as v:
        op = op_of(v.kernels, "append")
        result = v.run(op)
        assert result.status == "ok"
        assert [c.batch for c in result.cases if not c.fault] == ["small", "mixed", "drafts"]
        assert [c.fault for c in result.hostile] == [
            "page ids and lengths", "lengths past the table", "row offsets past the rows", "row offsets that decrease"
        ]  # fmt: skip
        assert len({c.reported for c in result.hostile}) >= 3
        plan = v.plans(op)[1]
        first, same, other = (case_of(v.kernels, op, v.package, plan.workload, seed) for seed in (0, 0, 1))
        assert first.before.arrays["k"].tobytes() == same.before.arrays["k"].tobytes()
        assert first.before.arrays["k"].tobytes() != other.before.arrays["k"].tobytes()


def test_to_dense_and_what_has_no_batch() -> None:
    cache = Paged(dtype="f16", kv_heads=1, head_dim=32, page_size=4, table=CSR())
    loaded: Any = kvgen.load(KernelSet(name="verified", q_heads=1, cache=cache, ops=[ops.ToDense()], arch=["sm_90a"]))
    kernels = KernelSet(name="verified", q_heads=1, cache=cache, ops=[ops.ToDense()], arch=["sm_90a"])
    result = Verifier(kernels, loaded, HostMemory()).run(kernels.ops[0])
    assert result.status == "ok" and len(result.hostile) >= 1
    # Free pages for every scale's own table: nothing lays these yet.
    quant = Quant(dtype="i8", scale_dtype="f32", own_table=True)
    cache = Paged(dtype="f16", kv_heads=1, head_dim=32, page_size=4, quant=quant)
    kernels = KernelSet(name="unverified", q_heads=1, cache=cache, ops=[ops.Reorder()], arch=["sm_90a"])
    found: Any = kvgen.load(kernels)
    result = Verifier(kernels, found, HostMemory()).run(kernels.ops[0])
    assert result.status == "not run" and result.why == "kvgen verify has no batches for reorder over such a page table"


# What is wrong is found ----------------------------------------------------------------------------------------------


class Spilling(HostMemory):
    """Memory behind whose largest array somebody wrote a byte."""

    def place(self, data: Bytes) -> Placed:
        placed = HostPlaced(data)
        real = placed.read

        def read() -> Bytes:
            found = real()
            found[-1] ^= 1
            return found

        placed.read = read  # type: ignore[method-assign]
        return placed


def test_a_write_beside_an_array_is_found() -> None:
    with verifier("layout_f32", Spilling()) as v:
        result = v.run(op_of(v.kernels, "gather"))
    assert result.status == "wrong"
    assert "pool: written beside the array" in result.cases[0].wrong
    assert "row_offsets: written beside the array" in result.cases[0].wrong


@pytest.mark.parametrize("name", ["pool", "lengths of the cache", "row_offsets", "k_out", "errors"])
def test_every_changed_byte_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An oracle that leaves one bit otherwise, wherever."""
    real = GatherCases.compare

    def other(cases: GatherCases, comparison: Comparison) -> int:
        word = real(cases, comparison)
        if name == "errors":
            return word ^ (2**64 - 1 ^ 0x0101)
        comparison.wanted.flat()[name].reshape(-1).view(np.uint8)[5] ^= 0x10
        return word

    monkeypatch.setattr(GatherCases, "compare", other)
    with verifier("layout_f32") as v:
        result = v.run(op_of(v.kernels, "gather"))
    assert result.status == "wrong" and all(len(c.wrong) == 1 for c in result.cases)
    said = "errors: got " if name == "errors" else f"{name}: 1 of "
    assert all(c.wrong[0].startswith(said) for c in result.cases)


@pytest.mark.parametrize("op", ["decode", "append"])
def test_numbers_that_are_too_far_off_are_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's results are held to their bound: attention, and rows that RoPE rotates."""
    name = {"decode": "layout_f32", "append": "engine_llama3_8b"}[op]
    cases_type: Any = {"decode": DecodeCases, "append": AppendCases}[op]
    real = cases_type.compare

    def other(cases: Any, comparison: Comparison) -> int:
        array = {"decode": lambda: comparison.got.arrays["out"], "append": lambda: comparison.got.arrays["q_out"]}[op]()
        array[0, 0, 0] += np.asarray(0.125).astype(array.dtype)
        return real(cases, comparison)

    monkeypatch.setattr(cases_type, "compare", other)
    with verifier(name) as v:
        result = v.run(op_of(v.kernels, op))
    assert result.status == "wrong" and result.share > 1
    assert any("times its bound" in line for line in result.cases[0].wrong)


def test_a_lost_context_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU whose context is gone nothing more runs, and every kernel left says why."""

    class Lost(HostMemory):
        device = "cuda:0"

        def place(self, data: Bytes) -> Placed:
            raise DeviceError("cuMemAlloc: got CUDA_ERROR_ILLEGAL_ADDRESS")

    with verifier("layout_f32", Lost()) as v:
        first, second = (v.run(op_of(v.kernels, name)) for name in ("append", "gather"))
    assert first.status == "wrong" and len(first.cases) == 1
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in first.cases[0].wrong[0] and "context was lost" in first.why
    assert second.status == "not run" and "context was lost" in second.why


def test_without_a_host_compiler_nothing_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: Any) -> Any:
        raise DeviceError("layout_f32/gather.cu on the CPU machine: g++: not found") from HostCompilerError("g++")

    monkeypatch.setattr("kvgen.verify.run.launch", launch)
    with verifier("layout_f32") as v, pytest.raises(DeviceError, match="not found"):
        v.run(op_of(v.kernels, "gather"))
