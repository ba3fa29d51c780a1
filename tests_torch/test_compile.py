"""torch.compile without graph breaks, and torch.export there and back: the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.export import Dim

from tests_torch.toy_model import Model, step_of

ROOT = Path(__file__).parent.parent
X, POOL, WORKSPACE, ERRORS = 0, 1, 5, 6


@pytest.fixture(autouse=True)
def nothing_recorded() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def assert_same(found: torch.Tensor, arguments: tuple[torch.Tensor, ...], model: Model, requests: int) -> None:
    """That a run on `arguments` gave and wrote what eager PyTorch gives and writes."""
    wanted_of = step_of(requests)
    pool = wanted_of[POOL].clone()
    wanted = model(*wanted_of)
    assert wanted_of[ERRORS].tolist() == [0] and wanted.isfinite().all() and wanted.abs().max() > 0.1
    assert not torch.equal(pool, wanted_of[POOL]), "append is to write"
    assert torch.equal(found, wanted)
    for number in (POOL, WORKSPACE, ERRORS):
        assert torch.equal(arguments[number], wanted_of[number]), number


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_one_graph(model: Model, backend: str) -> None:
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for requests in (2, 3, 4):
        arguments = step_of(requests)
        assert_same(compiled(*arguments), arguments, model, requests)
    # The second batch size makes the graph dynamic, and no further one a new graph.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_inductor_copies_no_pool(model: Model) -> None:
    from torch._inductor.utils import run_and_get_code

    arguments, wanted_of = step_of(2), step_of(2)
    found, (code,) = run_and_get_code(torch.compile(model, fullgraph=True), *arguments)
    wanted = model(*wanted_of)
    # inductor rounds projections and sums elsewhere than eager PyTorch: two bits of bf16 at most.
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-5)
    torch.testing.assert_close(arguments[POOL], wanted_of[POOL], rtol=2**-6, atol=2**-5)
    assert torch.equal(arguments[WORKSPACE], wanted_of[WORKSPACE]) and arguments[ERRORS].tolist() == [0]
    calls = [line.strip() for line in code.splitlines() if "torch.ops.kvgen_llama3_8b." in line and "(arg" in line]
    assert len(calls) == 5, "a plan, and append and decode of each layer"
    given = [line.partition(".default(")[2].split(", ") for line in calls]
    assert len({names[0] for names in given}) == 1, "every operator gets the pool of the call"
    workspaces = {
        n[4 if "decode_plan" in line else 6] for n, line in zip(given, calls, strict=True) if "decode" in line
    }
    assert len(workspaces) == 1 and workspaces.pop().startswith("arg"), (
        "the plan and all layers get the workspace of the call"
    )


def test_exported_saved_and_loaded_in_another_process(model: Model, tmp_path: Path) -> None:
    program = torch.export.export(model, step_of(2))
    assert_same(program.module()(*(arguments := step_of(2))), arguments, model, 2)
    torch.export.save(program, tmp_path / "step.pt2")
    wanted_of = step_of(2)
    torch.save((model(*wanted_of), wanted_of), tmp_path / "wanted.pt")
    script = (
        "import sys, torch\n"
        "from kvgen.torch import register\n"
        "register('generated.llama3_8b')\n"
        "program = torch.export.load(sys.argv[1] + '/step.pt2')\n"
        "wanted, after = torch.load(sys.argv[1] + '/wanted.pt')\n"
        "from tests_torch.toy_model import step_of\n"
        "arguments = step_of(2)\n"
        "with torch.no_grad():\n"
        "    found = program.module()(*arguments)\n"
        "assert torch.equal(found, wanted)\n"
        "assert all(torch.equal(a, b) for a, b in zip(arguments, after, strict=True))\n"
        "print('the same')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the same\n"


def test_exported_for_any_batch_and_made_functional(model: Model) -> None:
    batch = Dim("batch", min=2, max=4)
    rows = {0: batch}
    shapes = (rows, None, rows, rows, {0: batch + 1}, {0: Dim.AUTO}, None)
    program = torch.export.export(model, step_of(3), dynamic_shapes=shapes)
    functional = program.run_decompositions()
    for requests in (2, 3, 4):
        for form in (program, functional):
            arguments = step_of(requests)
            assert_same(form.module()(*arguments), arguments, model, requests)
    assert any("auto_functionalized" in str(node.target) for node in functional.graph.nodes)


def test_the_set_takes_the_batch_of_a_replayed_step_from_its_tensors(model: Model) -> None:
    """Nothing of a call is kept in Python: the same compiled graph, other lengths in the same tensors."""
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    arguments, wanted_of = step_of(2), step_of(2)
    for lengths in ([17, 3], [20, 9], [31, 0]):
        for each in (arguments, wanted_of):
            each[2].copy_(torch.tensor(lengths))
        assert torch.equal(compiled(*arguments), model(*wanted_of))
        assert torch.equal(arguments[POOL], wanted_of[POOL])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
