"""How fast: the memory of this GPU first, then every operation against it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.gpu.cases import Facts
from benchmarks.gpu.device import Gpu, Timing
from benchmarks.gpu.memory import GpuBytes
from benchmarks.gpu.workload import THREADS, Fill, Workload
from kvgen.dtypes import dtype
from kvgen.runtime import cuda, packing

APPEND_ROWS = (1, 8, 64, 4096)
SEALS = (64, 4096)  # requests whose last row fills a group, rows of four prompts
CONTEXT = 1024  # tokens of a request that gets one more; a few hundred rows or more are prompts of their own
GATHERS = ((4, 1024), (32, 1024))  # requests, tokens
DECODES = ((1, 4096), (32, 4096), (128, 1024))
RAGGED = (64, 16, 8192)  # requests, shortest, longest
LAYERS_AT_MOST = 64
POOL_BYTES_AT_MOST = 24 << 30
L2_MULTIPLE = 4
# Relative to the largest value: what f32 sums of thousands of terms and one rounding may lose.
TOLERANCE = {"f32": 2.0**-14, "f16": 2.0**-9, "bf16": 2.0**-7}


class WrongResult(Exception):
    """A timed launch computed something else than it must."""


def measure_bandwidth(gpu: Gpu, cubin: bytes, nbytes: int) -> dict[str, float]:
    """GB/s of reading, writing and copying `nbytes` (a copy counts bytes read and bytes written), best grid of several."""
    piece = THREADS * 8 * 16
    nbytes -= nbytes % piece
    source, target = GpuBytes(nbytes, gpu.ordinal), GpuBytes(nbytes, gpu.ordinal)
    found: dict[str, float] = {}
    for name in ("write", "copy", "read"):  # the write is what fills the source with something
        function = cuda.function(cubin, f"bandwidth_{name}", device=gpu.ordinal)
        first = source if name == "write" else target
        params = packing.PackedArgs(("ptr", "ptr", "u64"), (source.pointer, first.pointer, nbytes // 16))
        best = 0.0
        for blocks in (1, 2, 4, 16):
            launch = function.bind((gpu.multiprocessors * blocks, 1, 1), (THREADS, 1, 1), params)
            taken = gpu.time([launch], samples=7)
            best = max(best, (2 if name == "copy" else 1) * nbytes / taken.median / 1e3)
        found[name] = best
    return found


@dataclass(frozen=True)
class Timed:
    """One case of one operation, ready to run."""

    op: str
    case: str
    run: Callable[[], dict[str, Any]]


class Timer:
    """The timed cases of one set."""

    def __init__(self, gpu: Gpu, package: ModuleType, facts: Facts, fill: Fill, bandwidth: dict[str, float]) -> None:
        self.gpu, self.package, self.facts, self.fill, self.bandwidth = gpu, package, facts, fill, bandwidth
        self.page = package.Cache.PAGE_TOKENS
        self.token_bytes = facts.token_bytes
        self.row_bytes = (
            facts.kv_heads * (facts.head_dim + (facts.v_dim if facts.stores == "kv" else 0)) * dtype(facts.dtype).bytes
        )

    def cases(self) -> Iterator[Timed]:
        """Every case; nothing is allocated before it runs."""
        for name, kind, rows in self.facts.ops:
            if kind == "append":
                for count in APPEND_ROWS:
                    yield Timed(name, f"rows {count}", lambda n=name, r=rows, c=count: self._append(n, r, c))  # type: ignore[misc]
            elif kind == "seal":
                for count in SEALS:
                    yield Timed(name, f"rows {count}", lambda n=name, c=count: self._seal(n, c))  # type: ignore[misc]
            elif kind == "gather":
                for batch, length in GATHERS:
                    yield Timed(name, f"{batch}x{length}", lambda n=name, b=batch, c=length: self._gather(n, [c] * b))  # type: ignore[misc]
            elif kind == "decode":
                for case, totals in self._batches().items():
                    yield Timed(name, case, lambda n=name, t=totals: self._decode(n, t))  # type: ignore[misc]
        first = next((name for name, kind, _ in self.facts.ops if kind == "append"), None)
        if first is not None:
            yield Timed(first, "python", lambda: self._python(first))

    def _fits(self, total: int) -> int:
        """A length that a block can hold."""
        return min(total, self.page) if self.facts.table == "block" and self.page else total

    def _batches(self) -> dict[str, list[int]]:
        requests, shortest, longest = RAGGED
        ragged = np.exp(np.random.default_rng(3).uniform(math.log(shortest), math.log(longest), requests))
        found = {f"{batch}x{length}": [length] * batch for batch, length in DECODES}
        found[f"ragged {requests}"] = [int(n) for n in ragged]
        return {name: [self._fits(n) for n in totals] for name, totals in found.items()}

    def _workload(self, totals: list[int], new: list[int], call_bytes: int) -> Workload:
        """A cache with enough layers that a round over them moves several times what L2 holds."""
        wanted = -(-L2_MULTIPLE * self.gpu.l2_bytes // max(call_bytes, 1))
        page = self.page or max(totals)
        tokens = sum(-(-n // page) * page for n in totals)
        if self.facts.table == "block":
            tokens = len(totals) * page
        layer_bytes = tokens * self.token_bytes * self.facts.id_multiplier * (2 if self.facts.table == "per_kv" else 1)
        room = min(POOL_BYTES_AT_MOST, self.gpu.free_bytes() // 2) // layer_bytes
        if room < 1:
            raise MemoryError(f"a layer of this batch takes {layer_bytes} bytes; {self.gpu.free_bytes()} are free")
        layers = max(1, min(wanted, LAYERS_AT_MOST, room))
        return Workload(self.gpu, self.package, self.facts, self.fill, totals, new, layers)

    def _result(self, timing: Timing, least_bytes: int, against: str, layers: int) -> dict[str, Any]:
        rate = least_bytes / timing.median / 1e3
        return {
            "us": timing.median,
            "us_least": timing.least,
            "least_bytes": least_bytes,
            "gb_s": rate,
            "against": against,
            "against_gb_s": self.bandwidth[against],
            "percent": 100 * rate / self.bandwidth[against],
            "layers": layers,
            "past_l2": least_bytes * layers >= L2_MULTIPLE * self.gpu.l2_bytes,
        }

    def _new_rows(self, work: Workload, count: int) -> dict[str, Any]:
        return {n: work.random((count, self.facts.kv_heads, d)) for n, d in work.roles}

    def _append_call(self, name: str, rows: str, count: int) -> tuple[Workload, list[Any], dict[str, Any]]:
        new = [1] * count if count <= 64 else [count // 4] * 4
        context = 0 if count > 64 else CONTEXT
        totals = [self._fits(context + n) for n in new]
        work = self._workload(totals, new, count * (self.row_bytes + self.token_bytes))
        op = getattr(self.package, name)
        places = {"slots": work.slots(op)} if rows == "slots" else {"row_offsets": work.offsets(op, new)}
        inputs = [self._new_rows(work, count) for _ in range(work.layers)]
        bound = [op.bind(work.cache[i], **inputs[i], **places) for i in range(work.layers)]
        return work, bound, inputs[-1]

    def _append(self, name: str, rows: str, count: int) -> dict[str, Any]:
        work, bound, last = self._append_call(name, rows, count)
        timing = self.gpu.time(bound)
        gather = self._op("gather")
        for b in {0, work.farthest} if gather is not None else ():
            kept, end = min(work.new[b], work.alive(b)), sum(work.new[: b + 1])
            stored = work.gathered(gather, b, work.layers - 1)
            for role, given, found in zip(last, last.values(), stored, strict=True):
                if role == "k" and self.facts.residual:
                    continue  # full groups are seal's
                if not self._same(found[-kept:], work.download(given)[end - kept : end]):
                    raise WrongResult(f"request {b}: the rows that gather finds are not those that were appended")
        stored_rows = sum(min(n, work.alive(b)) for b, n in enumerate(work.new))
        return self._result(timing, stored_rows * (self.row_bytes + self.token_bytes), "copy", work.layers)

    def _same(self, found: Any, given: Any) -> bool:
        """Whether these are the same rows, but for what quantization takes."""
        if not self.facts.loss:
            return bool(found.tobytes() == given.tobytes())
        return bool(np.abs(found.astype(np.float64) - given.astype(np.float64)).max(initial=0.0) <= self.facts.loss)

    def _seal(self, name: str, count: int) -> dict[str, Any]:
        """Groups that are full with the step's rows: one a request, or all of four prompts."""
        group = self.facts.residual
        new = [1] * count if count <= 64 else [count // 4 // group * group] * 4
        totals = [max(CONTEXT // group, 1) * group if n == 1 else n for n in new]
        groups = sum(n // group - (n - own) // group for n, own in zip(totals, new, strict=True))
        least = groups * group * (self.facts.key_bytes + self.facts.kv_heads * self.facts.head_dim * self._bytes)
        work = self._workload(totals, new, least)
        op = getattr(self.package, name)
        k = [work.random((sum(new), self.facts.kv_heads, self.facts.head_dim)) for _ in range(work.layers)]
        offsets = work.offsets(op, new)
        bound = [op.bind(work.cache[i], k=k[i], row_offsets=offsets) for i in range(work.layers)]
        timing, gather = self.gpu.time(bound), self._op("gather")
        for b in {0, work.farthest} if gather is not None else ():
            found, end = work.gathered(gather, b, work.layers - 1)[0], sum(work.new[: b + 1])
            if not self._same(found[-work.new[b] :], work.download(k[-1])[end - work.new[b] : end]):
                raise WrongResult(f"request {b}: the keys that gather finds are not those that were sealed")
        return self._result(timing, least, "copy", work.layers)

    @property
    def _bytes(self) -> int:
        return dtype(self.facts.dtype).bytes

    def _op(self, kind: str) -> Any:
        name = next((n for n, k, _ in self.facts.ops if k == kind), None)
        return None if name is None else getattr(self.package, name)

    def _gather(self, name: str, totals: list[int]) -> dict[str, Any]:
        op = getattr(self.package, name)
        totals = [self._fits(n) for n in totals]
        alive = [min(n, self.facts.window or n) for n in totals]
        count = sum(alive)
        least = count * (self.row_bytes + self.token_bytes)
        work = self._workload(totals, [0] * len(totals), least)
        offsets = work.offsets(op, alive)
        kind = dtype(next(p.dtype for p in op.KERNEL.params if p.name == "starts")).numpy()
        starts = work.upload((np.array(totals) - np.array(alive)).astype(kind))
        outs = [{f"{n}_out": a for n, a in self._new_rows(work, count).items()} for _ in range(work.layers)]
        bound = [op.bind(work.cache[i], row_offsets=offsets, starts=starts, **outs[i]) for i in range(work.layers)]
        timing = self.gpu.time(bound)
        return self._result(timing, least, "copy", work.layers)

    def _decode(self, name: str, totals: list[int]) -> dict[str, Any]:
        op = getattr(self.package, name)
        batch, heads = len(totals), self.facts.q_heads
        tokens = sum(min(n, self.facts.window or n) for n in totals)
        least = tokens * self.token_bytes + batch * heads * (self.facts.head_dim + self.facts.v_dim) * self._bytes
        # decode counts the step's token itself: lengths "before" leave it out.
        work = self._workload(totals, [1] * batch, least)
        more: dict[str, Any] = {}
        result: dict[str, Any] = {}
        if hasattr(op, "workspace"):
            more["workspace"] = op.workspace(batch, device=f"cuda:{self.gpu.ordinal}")
            op.plan(work.cache[0], more["workspace"], stream=self.gpu.stream)
            planner = op.prepare(work.cache[0], (more["workspace"],), op.PLAN)
            result["plan_us"] = self.gpu.time([planner]).median
        q = [work.random((batch, heads, self.facts.head_dim)) for _ in range(work.layers)]
        outs = [work.random((batch, heads, self.facts.v_dim)) for _ in range(work.layers)]
        bound = [op.bind(work.cache[i], q=q[i], out=outs[i], **more) for i in range(work.layers)]
        timing = self.gpu.time(bound)
        gather = self._op("gather")
        if gather is not None:
            for b in sorted({0, int(np.argmax(totals)), work.farthest}):
                self._check_decode(work, gather, self.facts.scales[name], q[-1], outs[-1], b)
        return result | self._result(timing, least, "read", work.layers)

    def _check_decode(self, work: Workload, gather: Any, scale: float, q: Any, out: Any, b: int) -> None:
        """One request of a large batch against float64, over the tokens that gather finds."""
        k, v = (a.astype(np.float64) for a in work.gathered(gather, b, work.layers - 1))
        query, got = (work.download(a)[b].astype(np.float64) for a in (q, out))
        group = self.facts.q_heads // self.facts.kv_heads
        for h in range(self.facts.q_heads):
            scores = scale * (k[:, h // group] @ query[h])
            weights = np.exp(scores - scores.max())
            wanted = weights @ v[:, h // group] / weights.sum()
            off = float(np.abs(got[h] - wanted).max())
            # gather has rounded what it dequantized, to the cache's dtype; decode has not.
            largest = max(1.0, float(np.abs(v).max())) * (4 if self.facts.loss else 1)
            if not off <= TOLERANCE[self.facts.dtype] * largest:
                raise WrongResult(f"request {b}, head {h}: off by {off:.3g}; values are up to {np.abs(v).max():.3g}")

    def _python(self, name: str) -> dict[str, Any]:
        """What a bound call costs the host, in microseconds; a stream takes some hundreds before it pushes back."""
        rows = next(r for n, _, r in self.facts.ops if n == name)
        _, bound, _ = self._append_call(name, rows, 1)
        step, best = bound[0], math.inf
        for _ in range(20):
            self.gpu.wait()
            begin = time.perf_counter()
            for _ in range(200):
                step(self.gpu.stream)
            best = min(best, (time.perf_counter() - begin) / 200 * 1e6)
        self.gpu.wait()
        return {"us": best, "host": True}
