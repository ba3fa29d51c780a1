"""Operators: what opcheck of torch.library says of them, and that they do what the launchers do."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.library import opcheck

from kvgen.plan.params import Array
from kvgen.runtime import Launcher, OtherCache, PagePool
from kvgen.torch import Operation, register
from tests_torch.inputs import Step

GENERATED = Path(__file__).parent.parent / "generated"
DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]
# bf16 with one pool; fp8 with scales in pages; fp8 with given scales and a tensor a layer; latent rows; vLLM's tables;
# pages of all layers, page moves, conversion, LoRA, merges; states.
# Of engine_deepseek_v3 what takes a list, a tensor a layer.
SETS = (
    "llama3_8b",
    "qwen3_30b_fp8",
    "llama3_70b_fp8",
    "deepseek_v3",
    "layout_vllm",
    "engine_llama3_8b",
    "engine_deepseek_v3",
    "state_qwen3_next",
)
ONLY = {"engine_deepseek_v3": ("copy_pages", "copy_pages_check", "zero_pages", "convert")}


@cache
def step(name: str, device: str) -> Step:
    return Step(name, device)


def operations(name: str) -> list[Operation]:
    """All of a set's, plans and other methods among them."""
    found = []
    for operation in register(f"generated.{name}").operations.values():
        found += [operation, *(x for x in vars(operation).values() if isinstance(x, Operation))]
    return found


CASES = [
    pytest.param(
        name, number, returning, id=f"{name}.{(o.returning if returning else o.op)._schema.name.split('::')[1]}"
    )
    for name in SETS
    for number, o in enumerate(operations(name))
    if o.name in ONLY.get(name, (o.name,))
    for returning in ([False, True] if o.returning is not None else [False])
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "number", "returning"), CASES)
def test_opcheck(name: str, number: int, returning: bool, device: str) -> None:
    operation = operations(name)[number]
    op = operation.returning if returning else operation.op
    arguments = step(name, device).arguments(operation, op)
    op(**arguments)
    if "errors" in arguments:
        assert arguments["errors"].tolist() == [0], "the arguments are to be good ones"
    opcheck(op, (), step(name, device).arguments(operation, op))


def test_opcheck_sees_a_schema_that_does_not_say_what_is_written() -> None:
    operation = register("generated.llama3_8b").append
    arguments = step("llama3_8b", "cpu").arguments(operation)
    library = torch.library.Library("kvgen_wrong", "DEF")
    library.define(operation.schema.partition("::")[2].replace("(a0!)", ""))
    library.impl("append", lambda *given: operation.op(*given), "CPU")
    torch.library.register_fake("kvgen_wrong::append", lambda *given: None, lib=library)
    with pytest.raises(Exception, match="pool is not defined as mutable but was mutated"):
        opcheck(torch.ops.kvgen_wrong.append.default, (), arguments, test_utils="test_schema")


def _plainly(operation: Operation, made: Step, given: dict[str, Any]) -> None:
    """What the launcher does with the arguments of the operator."""
    method, module = operation.method, made.module
    cache = _cache(module.Cache, given, whole=method.kernel.all_layers)
    arguments = {p.name: given[p.name] for p in method.given if p.name in given}
    for param in method.given:
        if isinstance(param, OtherCache):
            arguments[param.name] = _cache(param.cache, given, prefix=f"{param.name}_")
        elif isinstance(param, PagePool):
            arguments[param.name] = module.Pages(
                **{t.name: given[f"{param.name}_{t.name}"] for t in module.Pages.TENSORS}
            )
    if "workspace" in arguments:
        arguments["workspace"] = method.launcher.workspace(2, device=made.device, memory=given["workspace"])
    getattr(method.launcher, method.bind)(cache, **arguments)()


def _cache(kind: Any, given: dict[str, Any], *, whole: bool = False, prefix: str = "") -> Any:
    """The cache over tensors of the call, or the layer."""
    pools = {t.name: given[prefix + t.name] for t in kind.TENSORS}
    numbered = f"{prefix}layer" in given
    if not numbered and not whole:
        pools = {n: [pool] for n, pool in pools.items()}
    cache = kind(**pools, **{t.name: given[prefix + t.name] for t in kind.TABLES if prefix + t.name in given})
    return cache if whole else cache[given[f"{prefix}layer"] if numbered else 0]


SAME = [c for c in CASES if not c.values[2]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "number", "returning"), SAME)
def test_the_operators_write_what_the_launcher_writes(name: str, number: int, returning: bool, device: str) -> None:
    operation, made = operations(name)[number], step(name, device)
    ours, theirs = made.arguments(operation), made.arguments(operation)
    before = {n: t.clone() for n, t in tensors(ours).items()}
    operation(**ours)
    _plainly(operation, made, theirs)
    for argument, value in tensors(theirs).items():
        assert torch.equal(_bits(tensors(ours)[argument]), _bits(value)), argument
    written = {a.name for a in operation.op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    changed = {n for n, t in before.items() if not torch.equal(_bits(t), _bits(tensors(ours)[n]))}
    assert {n.partition("[")[0] for n in changed} <= written
    if operation.returning is not None:
        fresh = made.arguments(operation, operation.returning)
        outs = operation.returning(**fresh)
        kept = [
            p.name for p in operation.method.given if isinstance(p, Array) and p.name not in fresh and p.name in ours
        ]
        for out, named in zip(outs if isinstance(outs, tuple) else (outs,), kept, strict=True):
            assert out.shape == ours[named].shape and out.dtype == ours[named].dtype
            if named in changed:
                assert torch.equal(_bits(out), _bits(ours[named])), named


def tensors(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors of a call by name, those of a list by number."""
    lists = {f"{n}[{i}]": t for n, v in given.items() if isinstance(v, list) for i, t in enumerate(v)}
    return lists | {n: v for n, v in given.items() if isinstance(v, torch.Tensor)}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", sorted(p.parent.name for p in GENERATED.glob("*/__init__.py")))
def test_every_launcher_of_every_set_has_an_operator(name: str) -> None:
    module = import_module(f"generated.{name}")
    found = register(module)
    launchers = {n: v for n, v in vars(module).items() if isinstance(v, Launcher)}
    assert set(found.operations) == set(launchers)
    for attribute, operation in found.operations.items():
        assert getattr(found, attribute) is operation
        assert getattr(getattr(torch.ops, found.namespace), attribute).default is operation.op
        for op in filter(None, (operation.op, operation.returning)):
            for key in ("CPU", "CUDA"):
                assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key), (op, key)


def test_a_set_is_registered_once() -> None:
    assert register("generated.llama3_8b") is register(import_module("generated.llama3_8b"))
    assert repr(register("generated.llama3_8b")) == "<kvgen operations of llama3_8b: append, gather, extend, decode>"
    assert repr(register("generated.llama3_8b").decode.plan) == "<kvgen operation kvgen_llama3_8b::decode_plan>"


def test_a_namespace_of_ones_own() -> None:
    from generated import layout_vllm

    ours = register(layout_vllm, namespace="attention_of_mine")
    assert torch.ops.attention_of_mine.decode.default is ours.decode.op
    assert "Tensor(a0!) pool, Tensor lengths, Tensor page_table, Tensor k," in ours.append.schema, (
        "no layer: a tensor is one"
    )


SCHEMAS = {
    "llama3_8b.append": "(Tensor(a0!) pool, Tensor lengths, Tensor page_table, SymInt layer, Tensor q, Tensor k, Tensor v, "
    "Tensor(a7!) q_out, Tensor row_offsets, Tensor(a9!)? errors=None, SymInt? max_seq_length=None, "
    "SymInt? max_cache_length=None) -> ()",
    "llama3_8b.decode": "(Tensor pool, Tensor lengths, Tensor page_table, SymInt layer, Tensor q, Tensor(a5!) out, "
    "Tensor(a6!) workspace, Tensor(a7!)? lse=None, Tensor(a8!)? errors=None, SymInt? max_seq_length=None, "
    "SymInt? max_cache_length=None) -> ()",
    "llama3_8b.decode.plan": "(Tensor pool, Tensor lengths, Tensor page_table, SymInt layer, Tensor(a4!) workspace, "
    "Tensor? row_offsets=None, SymInt? rows=None, SymInt? max_seq_length=None, SymInt? max_cache_length=None) -> ()",
    "llama3_8b_kivi.seal": "(Tensor(a0!) k_pool, Tensor(a1!) v_pool, Tensor(a2!) k_scales, Tensor(a3!) v_scales, "
    "Tensor(a4!) k_tail, Tensor lengths, Tensor page_table, Tensor(a7!) k_sealed, SymInt layer, Tensor k, Tensor row_offsets, "
    "Tensor(a11!)? errors=None, SymInt? max_seq_length=None, SymInt? max_cache_length=None) -> ()",
    "engine_llama3_8b.swap_out": "(Tensor pool, Tensor lengths, Tensor page_table, Tensor(a3!) other_pool, Tensor pairs, "
    "Tensor? num_pairs=None, Tensor(a6!)? errors=None, SymInt? max_seq_length=None, SymInt? max_cache_length=None) -> ()",
    "engine_deepseek_v3.copy_pages": "(Tensor(a0!)[] pool, Tensor lengths, Tensor page_table, Tensor pairs, "
    "Tensor? num_pairs=None, Tensor(a5!)? errors=None, bool check=False, SymInt? max_seq_length=None, "
    "SymInt? max_cache_length=None) -> ()",
    "engine_llama3_8b.convert": "(Tensor(a0!) pool, Tensor lengths, Tensor page_table, SymInt layer, Tensor source_pool, "
    "Tensor source_lengths, Tensor source_page_table, Tensor(a7!)? errors=None, SymInt? max_seq_length=None, "
    "SymInt? max_cache_length=None) -> ()",
    "engine_llama3_8b.rows_add": "(Tensor(a0!) pool, Tensor lengths, Tensor page_table, SymInt layer, Tensor a, "
    "Tensor row_offsets, SymInt batch_offset, Tensor(a7!)? errors=None, SymInt? max_seq_length=None, "
    "SymInt? max_cache_length=None) -> ()",
}


@pytest.mark.parametrize("path", SCHEMAS)
def test_schemas(path: str) -> None:
    name, *attributes = path.split(".")
    found: Any = register(f"generated.{name}")
    for attribute in attributes:
        found = getattr(found, attribute)
    assert found.schema == f"kvgen_{name}::{'_'.join(attributes)}{SCHEMAS[path]}"


def test_types_of_arrays_by_name() -> None:
    types = register("generated.qwen3_30b_fp8").append.dtypes
    assert types["pool"] is torch.float8_e4m3fn and types["scales"] is torch.float32 and types["k"] is torch.bfloat16
    assert set(types) >= {"lengths", "page_table", "row_offsets", "errors"}
