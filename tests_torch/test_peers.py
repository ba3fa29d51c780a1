"""The peers of benchmarks/run_gpu.py (attention and a product of PyTorch) at a small size, without a GPU: events are stubs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from benchmarks.gpu import peers


class Event:
    """An event that has taken two milliseconds."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 2.0


@dataclasses.dataclass
class Cpu:
    """The device of a GPU whose memory is the host's."""

    ordinal: int = 0


def test_each_peer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(peers, "SIDE", 64)
    small: dict[str, Any] = {
        "prompt": lambda t, _: peers._attention(t, "cpu", 1, 8, 8),
        "decode": lambda t, _: peers._attention(t, "cpu", 3, 1, 16),
        "product": lambda t, _: peers._product(t, "cpu"),
    }
    monkeypatch.setattr(peers, "CASES", small)
    q, kv = 32 * 128, 8 * 128  # elements of a row
    wanted = {
        "prompt": (4 * 32 * 36 * 128, 2 * 8 * (2 * q + 2 * kv)),
        "decode": (4 * 3 * 32 * 16 * 128, 2 * 3 * (2 * q + 16 * 2 * kv)),
        "product": (2 * 64**3, 2 * 3 * 64**2),
    }
    calls = max(3, round(peers.SAMPLE_US / (2000 / 3)))  # of a sample, after one of three calls in two milliseconds
    for case, (flops, nbytes) in wanted.items():
        found = peers.run(Cpu(), torch, case)  # type: ignore[arg-type]
        assert found["least_bytes"] == nbytes, case
        assert found["us"] == found["us_least"] == pytest.approx(2000 / calls)
        assert found["tflop_s"] == pytest.approx(flops / found["us"] / 1e6)
        assert found["gb_s"] == pytest.approx(nbytes / found["us"] / 1e3) and found["torch"] == torch.__version__
