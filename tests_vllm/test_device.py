"""What a GPU would be given, without one."""

from __future__ import annotations

import pytest
import torch

import kvgen
from kvgen.integrations.vllm import device
from kvgen.integrations.vllm.shard import Pages, Shard, kernel_set

SHARD = Shard(4, 2, 64, "bf16", 0.125, draft_tokens=3)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 3), "sm_100f"),
        ((12, 1), "sm_120f"),
    ],
)
def test_the_architecture_of_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda which: capability)
    assert device.runs_on(capability)
    assert device.archs_of(torch.device("cuda", 0)) == (arch,)


def test_a_gpu_without_kernels() -> None:
    assert not device.runs_on((7, 5))


def test_every_kernel_of_a_set_is_compiled_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each, in the file that this architecture takes, and none on the CPU."""
    module = kvgen.load(kernel_set(SHARD, Pages(16, "LBHNC", 8), ("sm_80", "sm_90a")))
    compiled: list[str] = []
    monkeypatch.setattr(device, "cubin", lambda made, file, entry, capability: compiled.append(file))
    device.compile_for(module, torch.device("cpu"))
    assert not compiled
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda which: (9, 0))
    device.compile_for(module, torch.device("cuda", 0))
    plans = ["decode_plan.cu", "extend_plan_sm_90a.cu", "verify_plan.cu"]
    assert sorted(compiled) == sorted(["append.cu", "decode.cu", "extend_sm_90a.cu", "verify.cu", *plans])
