"""PyTorch's attention and cuBLAS in the same run, by events around a loop: what kernels of this repository stand beside."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from typing import Any, Final

from benchmarks.gpu.timings import SAMPLES
from kvgen.verify.device import SAMPLE_US, Gpu

HEADS, KV_HEADS, DIM = 32, 8, 128  # of llama3_8b
SIDE: Final = 8192


def torch_or_none() -> Any:
    """The module, where it can be imported."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def run(gpu: Gpu, torch: Any, case: str) -> dict[str, Any]:
    """Time one case on random numbers."""
    work, flops, nbytes = CASES[case](torch, f"cuda:{gpu.ordinal}")
    us, least = _time(torch, work)
    del work
    torch.cuda.empty_cache()  # what is timed next in this process needs the memory
    found = {"us": us, "us_least": least, "least_bytes": nbytes, "gb_s": nbytes / us / 1e3}
    return found | {"tflop_s": flops / us / 1e6, "torch": torch.__version__}


def _time(torch: Any, work: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds of a call: the median and the least of samples, each of so many calls between two events."""

    def sample(calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / calls

    sample(3)
    calls = max(3, round(SAMPLE_US / max(sample(3), 1.0)))
    found = [sample(calls) for _ in range(SAMPLES)]
    return statistics.median(found), min(found)


def _attention(torch: Any, device: str, requests: int, rows: int, tokens: int) -> tuple[Callable[[], Any], float, int]:
    """scaled_dot_product_attention of the last `rows` of `tokens` tokens, causal where a prompt is all of them."""
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    q = torch.randn(requests, HEADS, rows, DIM, **kind)
    k, v = (torch.randn(requests, KV_HEADS, tokens, DIM, **kind) for _ in range(2))
    causal = rows == tokens
    pairs = rows * (rows + 1) // 2 if causal else rows * tokens

    def work() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    nbytes = 2 * (k.numel() + v.numel() + 2 * q.numel())
    return work, 4.0 * requests * HEADS * pairs * DIM, nbytes


def _product(torch: Any, device: str) -> tuple[Callable[[], Any], float, int]:
    """One product of cuBLAS on random numbers; zeros would run faster."""
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2.0 * SIDE**3, 2 * 3 * SIDE**2


CASES: Final[dict[str, Callable[[Any, str], tuple[Callable[[], Any], float, int]]]] = {
    "sdpa 1x4096 causal": lambda torch, device: _attention(torch, device, 1, 4096, 4096),
    "sdpa 64x8192 decode": lambda torch, device: _attention(torch, device, 64, 1, 8192),
    "matmul 8192": _product,
}
