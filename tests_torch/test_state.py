"""What operators keep between calls: addresses only. Versions, streams and memory are PyTorch's."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvgen.errors import ArgumentError
from kvgen.torch.operators import stream_of
from tests_torch.inputs import Step

STEP = Step("llama3_8b")
llama = STEP.operations


def test_no_tensor_is_kept() -> None:
    given = STEP.arguments(llama.decode)
    llama.decode(**given)
    storages = [weakref.ref(v.untyped_storage()) for v in given.values() if isinstance(v, torch.Tensor)]
    del given
    gc.collect()
    assert [s for s in storages if s() is not None] == []


def test_the_cache_of_the_same_tensors_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = STEP.module.Cache.__init__

    def counted(self: Any, *arguments: Any, **named: Any) -> None:
        made.append(1)
        real(self, *arguments, **named)

    monkeypatch.setattr(STEP.module.Cache, "__init__", counted)
    given = STEP.arguments(llama.append)
    for layer in (0, 1, 0, 1):
        llama.append(**given | {"layer": layer})
    given_tables = {n: given[n] for n in ("pool", "lengths", "page_table", "layer")}
    llama.gather.returning(**given_tables, row_offsets=given["row_offsets"], num_rows=2)
    assert len(made) == 1, "one for all layers and operators"
    llama.append(**given | {"page_table": given["page_table"].clone()})
    llama.append(**given | {"max_cache_length": 32})
    assert len(made) == 3, "tables elsewhere, another bound: another cache"


def test_no_more_than_so_many_caches_are_kept() -> None:
    from kvgen.torch.over_tensors import _KEPT, kept_of

    given = STEP.arguments(llama.append)
    tables = [given["page_table"].clone() for _ in range(_KEPT + 3)]
    for table in (*tables, tables[0]):
        llama.append(**given | {"page_table": table})
    assert len(kept_of(STEP.module.Cache)._found) == _KEPT
    assert given["errors"].tolist() == [0]


def test_other_shapes_at_the_same_address() -> None:
    given = STEP.arguments(llama.append)
    llama.append(**given)
    one, other = STEP.arguments(llama.append), STEP.arguments(llama.append)
    first = {n: one[n][:1] for n in ("q", "k", "v", "q_out")} | {"row_offsets": one["row_offsets"][:2]}
    tables = {"lengths": one["lengths"][:1], "page_table": one["page_table"][:1]}
    llama.append(**one)
    other_tables = {n: one[n] for n in ("pool", "layer", "errors")} | tables
    llama.append(**other_tables, **first)
    assert one["errors"].tolist() == [0]
    llama.append(**other)
    assert torch.equal(one["q_out"], other["q_out"])


def test_writes_are_seen_by_autograd() -> None:
    weight = torch.ones(2, 32, 128, dtype=torch.bfloat16, requires_grad=True)
    given = STEP.arguments(llama.append)
    product = given["q_out"] * weight  # keeps q_out for the backward pass
    versions = {n: t._version for n, t in given.items() if isinstance(t, torch.Tensor)}
    llama.append(**given)
    assert {n for n, v in versions.items() if given[n]._version != v} == {"pool", "q_out", "errors"}
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_copied_model_has_the_same_operators() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernels, self.plan = llama, llama.decode.plan

    for made in (copy.deepcopy(Model()), copy.copy(llama), pickle.loads(pickle.dumps(llama))):
        assert getattr(made, "kernels", made) is llama
        assert getattr(made, "plan", llama.decode.plan) is llama.decode.plan
    assert pickle.loads(pickle.dumps(llama.decode.plan)) is llama.decode.plan
    with pytest.raises(AttributeError, match="append has no method 'plan'"):
        llama.append.plan  # noqa: B018


def test_a_pool_that_requires_a_gradient_is_looked_at_every_time() -> None:
    given = STEP.arguments(llama.append)
    llama.append(**given)  # kept from here on
    given["pool"].requires_grad_()
    with torch.no_grad():
        llama.append(**given)
    with pytest.raises(ArgumentError, match=r"^pool: got a tensor that requires a gradient"):
        llama.append(**given)


def test_inference_mode() -> None:
    with torch.inference_mode():
        given = STEP.arguments(llama.append)
        llama.append(**given)
    assert given["errors"].tolist() == [0] and given["q_out"].is_inference()


def test_the_current_stream_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def current(device: Any) -> Any:
        asked.append(device)
        return SimpleNamespace(cuda_stream=0x77)

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    assert stream_of(SimpleNamespace(is_cuda=True, device="cuda:1")) == 0x77
    assert asked == ["cuda:1"]
    assert stream_of(torch.zeros(1)) is None
    given = STEP.arguments(llama.append)
    monkeypatch.setattr("kvgen.torch.operators.stream_of", lambda pool: 0x77 if pool is given["pool"] else None)
    with pytest.raises(ArgumentError, match=r"^stream: got int on the CPU"):  # which refuses what reaches it
        llama.append(**given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and PyTorch for it")
def test_a_captured_graph_replays_with_new_lengths() -> None:
    made = Step("llama3_8b", "cuda:0")
    ours, theirs = made.arguments(llama.append), made.arguments(llama.append)
    llama.append(**ours)  # loads the kernel, which a capture does not allow
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        llama.append(**ours)
    for lengths in ([20, 5], [31, 0]):
        for given in (ours, theirs):
            given["lengths"].copy_(torch.tensor(lengths, device="cuda:0"))
        graph.replay()
        llama.append(**theirs)
        torch.cuda.synchronize()
        assert torch.equal(ours["q_out"], theirs["q_out"]) and theirs["errors"].tolist() == [0]
