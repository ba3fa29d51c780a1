"""What operators and launchers refuse of PyTorch, and what they say."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from generated import llama3_8b
from kvgen.errors import ArgumentError
from kvgen.runtime import ABI, Bound, Kernel, Launcher, LayerCache, Module, TensorMap, launcher
from kvgen.torch import register
from tests_torch.inputs import Step

STEP = Step("llama3_8b")
llama = STEP.operations
NEEDS_GRADIENT = "got a tensor that requires a gradient; kernels have no backward"


def arguments(**other: Any) -> dict[str, Any]:
    return STEP.arguments(llama.append) | other


def plainly(given: dict[str, Any]) -> None:
    cache = llama3_8b.Cache(given["pool"], lengths=given["lengths"], page_table=given["page_table"])
    names = ("q", "k", "v", "q_out", "row_offsets")
    llama3_8b.append(cache[given["layer"]], *(given[n] for n in names), errors=given["errors"])


@pytest.mark.parametrize("name", ["pool", "q", "v", "q_out"])
@pytest.mark.parametrize("call", [plainly, lambda given: llama.append(**given)], ids=["launcher", "operator"])
def test_a_tensor_that_requires_a_gradient(call: Any, name: str) -> None:
    given = arguments()
    given[name].requires_grad_()
    with pytest.raises(ArgumentError, match=rf"^{name}: {NEEDS_GRADIENT}.*; pass {name}\.detach\(\), or call under"):
        call(given)
    with torch.no_grad():
        call(given)
    call(given | {name: given[name].detach()})


def test_a_gradient_in_a_compiled_function() -> None:
    weight = torch.eye(128, dtype=torch.bfloat16, requires_grad=True)

    def step(given: dict[str, Any]) -> torch.Tensor:
        return llama.append.returning(**(given | {"q": given["q"] @ weight}))

    given = arguments()
    del given["q_out"]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=f"q: {NEEDS_GRADIENT}"):
        compiled(given)
    with torch.no_grad():
        assert compiled(given).shape == (2, 32, 128)


def test_a_launcher_in_a_trace_names_the_operators() -> None:
    with FakeTensorMode() as mode:
        pool = mode.from_tensor(arguments()["pool"])
        with pytest.raises(
            ArgumentError, match=r"^pool: got a FakeTensor, .*; call the operators of kvgen\.torch\.register"
        ):
            plainly(arguments(pool=pool))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"q": torch.zeros(2, 32, 128)}, "q: got dtype torch.float32; it must be torch.bfloat16, dtype of the spec"),
        ({"k": torch.zeros(2, 4, 128, dtype=torch.bfloat16)}, "k: got shape (2, 4, 128); the spec fixes"),
        ({"lengths": torch.zeros(2, 1, dtype=torch.int8)}, "lengths: got dtype torch.int8"),
    ],
)
def test_a_trace_refuses_what_no_launch_takes(other: dict[str, Any], said: str) -> None:
    torch._dynamo.reset()
    given = arguments(**other)
    compiled = torch.compile(lambda given: llama.append(**given), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=re.escape(said)):
        compiled(given)
    with pytest.raises(ArgumentError, match=f"^{next(iter(other))}: got "):
        llama.append(**given)


@pytest.mark.parametrize("returning", [False, True], ids=["writing", "returning"])
def test_none_and_meta_in_place_of_each_tensor(returning: bool) -> None:
    """PyTorch takes None for any tensor of an operator, and calls the operator's fake for a meta tensor among others."""
    call = llama.append.returning if returning else llama.append
    given = STEP.arguments(llama.append, call) if returning else arguments()
    tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 9 - returning
    for name in tensors:
        other = next(n for n in tensors if n != name)
        says = (
            rf"^{name}: got a meta tensor, which has no memory, where {other} is on cpu; pass it on cpu too; for shapes"
        )
        with pytest.raises(ArgumentError, match=says):
            call(**given | {name: given[name].to("meta")})
        if name == "errors":
            call(**given | {name: None})
            continue
        dtype = str(given[name].dtype)
        with pytest.raises(
            ArgumentError, match=rf"^{name}: got None; llama3_8b_append needs it; pass a tensor of {dtype}$"
        ):
            call(**given | {name: None})
    shapes = call(**{n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in given.items()})
    assert (shapes.device.type, shapes.shape) == ("meta", (2, 32, 128)) if returning else shapes is None


def decode(**other: Any) -> dict[str, Any]:
    return STEP.arguments(llama.decode) | other


def test_workspaces() -> None:
    need = llama.decode.workspace_bytes(1)
    for small in (0, need - 1):
        with pytest.raises(
            ArgumentError, match=rf"^workspace: got {small} bytes; one row takes {need}; pass .*workspace_bytes"
        ):
            llama.decode(**decode(workspace=torch.zeros(small, dtype=torch.uint8)))
    with pytest.raises(ArgumentError, match=r"^workspace: got dtype i8; it must be u8"):
        llama.decode(**decode(workspace=torch.zeros(need, dtype=torch.int8)))
    with pytest.raises(ArgumentError, match=r"^workspace: got address .* multiple of 16"):
        llama.decode(**decode(workspace=torch.zeros(need + 1, dtype=torch.uint8)[1:]))
    with pytest.raises(ArgumentError, match=r"^workspace: got one for 1 rows and q with 2"):
        llama.decode(**decode(workspace=torch.zeros(need, dtype=torch.uint8)))
    with pytest.raises(ArgumentError, match=r"^append: takes no workspace"):
        llama.append.workspace(4)


def test_a_plan_of_other_rows_is_seen_in_the_bytes() -> None:
    given = decode()
    tables = {n: given[n] for n in ("pool", "lengths", "page_table", "layer")}
    llama.decode.plan(
        **tables,
        workspace=given["workspace"],
        row_offsets=torch.tensor([0, 1, 1], dtype=given["lengths"].dtype),
        rows=1,
    )
    llama.decode(**given)
    assert given["out"].isnan().all() and given["errors"].tolist() != [0]


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 63, 64, 1000])
@pytest.mark.parametrize("more", [0, 5, 40])
def test_bytes_say_for_how_many_rows_a_workspace_is(rows: int, more: int) -> None:
    from kvgen.torch.over_tensors import workspace_over

    memory = torch.zeros(llama.decode.workspace_bytes(rows) + more, dtype=torch.uint8)
    given = decode()
    cache = llama3_8b.Cache(given["pool"], lengths=given["lengths"], page_table=given["page_table"])
    made = workspace_over(llama3_8b.decode, memory, cache[0])
    assert rows <= made.max_rows <= rows + 1 + more // 48
    assert made.nbytes <= memory.numel() < llama.decode.workspace_bytes(made.max_rows + 1)
    if not more:
        assert made.max_rows == rows


def test_registering() -> None:
    with pytest.raises(
        ArgumentError, match=r"^package: got 'json'; it has no Cache; pass a package that `kvgen build` wrote"
    ):
        register("json")
    with pytest.raises(ArgumentError, match=r"^package: got type; it has no Cache"):
        register(llama3_8b.Cache)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^namespace: got 'my ops'; .*identifier"):
        register(llama3_8b, namespace="my ops")
    with pytest.raises(
        ArgumentError, match=r"^namespace: got 'kvgen_llama3_8b', which has the operators of .*llama3_8b; "
    ):
        register("generated.layout_vllm", namespace="kvgen_llama3_8b")
    with pytest.raises(ArgumentError, match=r"^namespace: got 'aten'"):
        register(llama3_8b, namespace="aten")
    with pytest.raises(ModuleNotFoundError):
        register("generated.llama9")
    with pytest.raises(
        AttributeError, match="llama3_8b has no operation 'prefill'; it has append, gather, extend, decode"
    ):
        llama.prefill  # noqa: B018


def test_a_layer_that_is_none() -> None:
    with pytest.raises(ArgumentError, match=r"^layer: got 2; the pool has 2 layers"):
        llama.append(**arguments(layer=2))


def test_an_operation_that_cannot_be_an_operator() -> None:
    module: Any = ModuleType("mapped")
    own = Module("mapped", __file__, arch=("sm_80",), abi=ABI)
    module.Cache = type("Cache", (llama3_8b.Cache,), {"MODULE": own})

    class LoadLauncher(Launcher):
        KERNEL = Kernel(
            own,
            "load.cu",
            "load",
            params=(TensorMap("tiles"),),
            grid=lambda d: (1, 1, 1),
            threads=1,
            shared=0,
            writes=False,
        )

        def bind(self, cache: LayerCache, tiles: object, *, stream: object = None) -> Bound:
            return self.prepare(cache, (tiles,), stream)

    module.load = LoadLauncher()
    found = register(module)
    assert found.operations == {}
    with pytest.raises(
        AttributeError, match="load: tiles is a TensorMap, which no operator of torch can take; call the launcher"
    ):
        found.load  # noqa: B018


def test_sizes_that_returned_tensors_cannot_have() -> None:
    given = STEP.arguments(llama.gather, llama.gather.returning)
    with pytest.raises(ArgumentError, match=r"^num_rows: got -1; it counts what is returned; pass 0 or more"):
        llama.gather.returning(**given | {"num_rows": -1})
    assert [t.shape for t in llama.gather.returning(**given | {"num_rows": 0})] == [(0, 8, 128)] * 2
    given = STEP.arguments(llama.append, llama.append.returning)
    with pytest.raises(ArgumentError, match=r"^q: got shape \(\); dimension 0 is the size of what is returned"):
        llama.append.returning(**given | {"q": given["q"][0, 0, 0]})
    with pytest.raises(ArgumentError, match=r"^q: got shape \(2, 32\); it must have 3 dimensions"):
        llama.append.returning(**given | {"q": given["q"][:, :, 0]})


@pytest.mark.parametrize("name", ["llama3_8b", "engine_llama3_8b", "page_lists"])
def test_each_axis_that_the_spec_fixes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every tensor of every operator: one more and one fewer are refused by name, in a call as in a trace."""
    monkeypatch.setattr(launcher, "_launch", lambda checked, args: lambda stream: None)
    step, count = Step(name), 0
    module: Any = step.module
    for operation in step.operations.operations.values():
        specs = {a.name: a for a in (*module.Cache.TENSORS, *module.Cache.TABLES, *operation.method.kernel.arguments)}
        given = step.arguments(operation)
        operation(**given)
        for argument, tensor in given.items():
            shape = getattr(specs.get(argument), "shape", ())
            for axis, size in enumerate(shape) if isinstance(tensor, torch.Tensor) else ():
                if not isinstance(size, int):
                    continue
                for other in (size - 1, size + 1):
                    sizes = (*tensor.shape[:axis], other, *tensor.shape[axis + 1 :])
                    with pytest.raises(ArgumentError, match=rf"^{argument}: got .+; .+"):
                        operation(**(given | {argument: torch.zeros(sizes, dtype=tensor.dtype)}))
                    count += 1
    assert count >= (8 if name == "page_lists" else 40)
