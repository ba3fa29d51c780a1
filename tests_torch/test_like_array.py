"""Tensors like one that was bound or called with: their addresses, and none for those that differ."""

from __future__ import annotations

import pytest
import torch

import kvgen
from kvgen import KernelSet, Paged, ops
from kvgen.errors import DeviceError
from kvgen.runtime.arrays import view
from kvgen.runtime.like_array import like_array

SHAPE = (64, 32, 128)
NUMBER = 64 * 32 * 128


def zeros(**options: object) -> torch.Tensor:
    return torch.zeros(SHAPE, dtype=torch.bfloat16, **options)  # type: ignore[call-overload, no-any-return]


def test_a_tensor_like_it_gives_its_address() -> None:
    bound = zeros()
    address = like_array(bound, view(bound, "q"), 16, written=True)
    moved, tracked = zeros(), zeros(requires_grad=True)
    for tensor in (bound, moved, torch.zeros(NUMBER + 8, dtype=torch.bfloat16)[8:].view(SHAPE)):
        assert address(tensor) == tensor.data_ptr() != 0
    before = moved.data_ptr()
    moved.set_(zeros())
    assert address(moved) == moved.data_ptr() != before, "the same object, other memory"
    assert address(tracked) == 0
    with torch.no_grad():
        assert address(tracked) == tracked.data_ptr()


@pytest.mark.parametrize(
    "other",
    [
        zeros().float(),
        zeros()[:5],
        zeros().transpose(0, 1),
        zeros().to("meta"),
        torch.zeros(NUMBER + 8, dtype=torch.bfloat16)[1 : NUMBER + 1].view(SHAPE),
        zeros().resize_(64, 32, 64),
        torch.nn.Parameter(zeros(), requires_grad=False),
        None,
    ],
)
def test_another_gives_none(other: object) -> None:
    bound = zeros()
    assert like_array(bound, view(bound, "q"), 16, written=True)(other) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="no GPU is what the test is about")
def test_an_empty_cache_on_a_gpu_that_is_not_there_is_no_error_of_torch() -> None:
    spec = KernelSet(
        q_heads=2, cache=Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16), ops=[ops.Gather()], arch=["sm_90a"]
    )
    with pytest.raises(DeviceError):
        kvgen.load(spec, name="like_nothing").Cache.empty(pages=2, layers=1, requests=1, device="cuda:0")
