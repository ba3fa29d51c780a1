"""How fast: the memory of this GPU first, then every operation against it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Final

import numpy as np

from benchmarks.gpu.apart import Apart
from benchmarks.gpu.set_facts import Facts, facts_of
from benchmarks.gpu.workload import Node, Workload
from kvgen import KernelSet
from kvgen.cases.contents import span
from kvgen.cases.operation import cases_of
from kvgen.cases.scene import LAYER, Scene
from kvgen.cases.workload import Workload as Listed
from kvgen.errors import DeviceError
from kvgen.layout.dtypes import dtype
from kvgen.ops import Decode, MlaDecode
from kvgen.plan.params import Array
from kvgen.reference import cache_rows, mla_decode
from kvgen.runtime import cuda
from kvgen.schema.kernel_set import Op
from kvgen.verify import timing
from kvgen.verify.bandwidth import Fill
from kvgen.verify.device import Gpu, Timing

SAMPLES = 5
APPEND_ROWS = (1, 8, 128, 4096)
PROMPT = 1024  # rows from which on they are one prompt's
SEALS = (64, 4096)  # requests whose last row fills a group, rows of four prompts
CONTEXT = 1024  # tokens of a request that gets one more
GATHERS = ((4, 1024), (32, 1024))  # requests, tokens
DECODES = ((1, 4096), (8, 4096), (32, 4096), (64, 8192), (128, 1024))
RAGGED = (64, 16, 8192)  # requests, shortest, longest
# Prompts, a chunk behind a prefix, a prompt beside decoding requests: tokens of each request, and those of them that are rows.
EXTENDS: Final = {
    "1x4096": ((4096,), (4096,)),
    "8x1024": ((1024,) * 8, (1024,) * 8),
    "512 of 8192": ((8192,), (512,)),
    "4096 and 60": ((4096,) * 61, (4096, *(1,) * 60)),
}
# A step of a model: append and decode of every layer, in one graph behind one plan.
STEP: Final = "step"
STEPS = ((1, 4096), (8, 4096), (64, 4096))  # requests, tokens
STEP_LAYERS = 32
# Operations that kvgen.verify.timing times: requests, tokens, new ones, tokens that a list names.
DENSE_MLA = {"many heads": (128, 32768), "few heads": (64, 8192)}  # from 64 heads on they are many
LISTED_MLA = {"one cache": (256, 8192, 2048), "several caches": (128, 8192, 640)}
SCORED = (64, 32768)
POOLED = ((128, 1024, 1), (1, 4096, 4096))
CONVERTED = (32, 2048)
PAGE_LISTS = (64, 8192)
# Page tables that benchmarks.gpu.workload lays.
TABLES: Final = ("dense", "csr", "per_kv", "indirect", "mapped", "ring", "block")
LAYERS_AT_MOST = 64
CALLS = (20, 200)  # how often the host's cost is taken, calls each time
POOL_BYTES_AT_MOST = 24 << 30
L2_MULTIPLE = 4
# Relative to the largest value: what f32 sums of thousands of terms and one rounding may lose.
TOLERANCE = {"f32": 2.0**-14, "f16": 2.0**-9, "bf16": 2.0**-7}


class WrongResult(Exception):
    """A timed launch computed something else than it must."""


def other_workloads(kernels: KernelSet, op: Op) -> list[Listed]:
    """The workloads of an operation that kvgen.verify.timing times; none for others."""
    match cases_of(op).served:
        case "":
            return []
        case "latent rows":
            batch, tokens = DENSE_MLA["many heads" if kernels.q_heads >= 64 else "few heads"]
        case "lists of one cache" | "lists of several caches" as lists:
            batch, tokens, listed = LISTED_MLA[lists.removeprefix("lists of ")]
            return [Listed(f"{batch}x{listed} of {tokens}", (tokens,) * batch, (1,) * batch, listed)]
        case "keys of an indexer":
            batch, tokens = SCORED
        case "another cache":
            batch, tokens = CONVERTED
        case "pages of lists":
            batch, tokens = PAGE_LISTS
            return [Listed(f"{batch}x{tokens}, lists", (tokens,) * batch, (1,) * batch)]
        case "new entries":
            return [Listed(f"{b}x{tokens}, {new} new", (tokens,) * b, (new,) * b) for b, tokens, new in POOLED]
        case served:
            raise ValueError(f"{op.kind}: got served={served!r}; no batches are called so")
    return [Listed(f"{batch}x{tokens}", (tokens,) * batch, (1,) * batch)]


@contextmanager
def without_pdl() -> Iterator[None]:
    """Launches that are bound inside start when their predecessor has finished, as on GPUs before sm_90."""
    real = cuda.Function.bind

    def bind(self: cuda.Function, *arguments: Any, pdl: bool = False) -> Any:
        return real(self, *arguments, pdl=False)

    cuda.Function.bind = bind  # type: ignore[method-assign]
    try:
        yield
    finally:
        cuda.Function.bind = real  # type: ignore[method-assign]


@dataclass(frozen=True)
class Timed:
    """One case of one operation, ready to run."""

    op: str
    case: str
    run: Callable[[], dict[str, Any]]


class Timer:
    """The timed cases of one set. `apart` are the separate kernels of an append, beside which it is timed; None: none."""

    def __init__(
        self,
        gpu: Gpu,
        kernels: KernelSet,
        package: ModuleType,
        fill: Fill,
        empty: Node,
        bandwidth: Mapping[str, float],
        apart: Apart | None = None,
    ) -> None:
        self.gpu, self.kernels, self.package, self.bandwidth = gpu, kernels, package, bandwidth
        self.fill, self.empty, self.apart = fill, empty, apart
        self.facts: Facts = facts_of(kernels)
        self.page = package.Cache.PAGE_TOKENS if not self.facts.states else None
        self.token_bytes = self.facts.token_bytes
        self.row_bytes = 0
        if not self.facts.states:
            dims = self.facts.head_dim + (self.facts.v_dim if self.facts.stores == "kv" else 0)
            self.row_bytes = self.facts.kv_heads * dims * dtype(self.facts.dtype).bytes

    def cases(self) -> Iterator[Timed]:
        """Every case; nothing is allocated before it runs."""
        for op in self.kernels.ops if self.facts.table in TABLES else ():
            name = op.name
            if op.kind == "append":
                for count in APPEND_ROWS:
                    yield Timed(name, f"rows {count}", partial(self._append, name, count))
            elif op.kind == "seal":
                for count in SEALS:
                    yield Timed(name, f"rows {count}", partial(self._seal, name, count))
            elif op.kind == "gather" and self._dequantizes(name):
                for batch, length in GATHERS:
                    yield Timed(name, f"{batch}x{length}", partial(self._gather, name, [length] * batch))
            elif isinstance(op, Decode) and op.pages == "all":
                for case, totals in self._batches().items():
                    yield Timed(name, case, partial(self._decode, name, totals))
            elif op.kind == "extend":
                for case, (totals, rows) in EXTENDS.items():
                    yield Timed(name, case, partial(self._extend, name, totals, rows))
            for work in other_workloads(self.kernels, op):
                yield Timed(name, work.name, partial(self._other, op, work))
        first = next((name for name, kind in self.facts.ops if kind == "append"), None)
        if first is not None and self.facts.table in TABLES:
            yield Timed(first, "python", partial(self._python, first))

    def steps(self) -> Iterator[Timed]:
        """A step of all layers of a model."""
        for batch, tokens in STEPS:
            yield Timed(STEP, f"{batch}x{tokens}", partial(self._step, batch, tokens))

    def _time(self, launches: Sequence[Callable[[int], None]]) -> Timing:
        return self.gpu.time(launches, samples=SAMPLES)

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

    def _dequantizes(self, name: str) -> bool:
        """True for a gather of values, not of codes, from one layer, request by request."""
        kernel = getattr(self.package, name).KERNEL
        names = {p.name for p in kernel.params}
        return "starts" in names and not kernel.all_layers and ("k_out" in names or not self.facts.loss)

    def _append_call(self, name: str, count: int) -> tuple[Workload, list[dict[str, Any]], int]:
        """(a cache, the arguments of every layer's call, the bytes that a call must move)."""
        new = [1] * count if count < PROMPT else [count]
        totals = [self._fits((CONTEXT if count < PROMPT else 0) + n) for n in new]
        op = getattr(self.package, name)
        # What is stored depends on the window, and the layers on what is moved: rows taken and given back are most of it.
        work = self._workload(totals, new, count * (self.row_bytes + self.token_bytes))
        shared: dict[str, Any] = {}
        calls = [work.arguments(op, shared) for _ in range(work.layers)]
        rows = sum(math.prod(a.shape) * dtype(p.dtype).bytes for a, p in self._specs(op, calls[0], shared))
        stored = sum(min(n, work.alive(b)) for b, n in enumerate(new))
        return work, calls, rows * stored // count + stored * self.token_bytes

    def _specs(self, op: Any, call: dict[str, Any], shared: dict[str, Any]) -> list[tuple[Any, Any]]:
        """The arrays of rows, and what the launcher says of them."""
        return [(call[p.name], p) for p in op.KERNEL.arguments if p.name in call and p.name not in shared]

    def _append(self, name: str, count: int) -> dict[str, Any]:
        work, calls, least = self._append_call(name, count)
        op = getattr(self.package, name)
        timing = self._time([op.bind(work.cache[i], **calls[i]) for i in range(work.layers)])
        self._check_append(name, work, calls[-1])
        result = self._result(timing, least, "write", work.layers)
        result["percent_copy"] = 100 * least / timing.median / 1e3 / self.bandwidth["copy"]
        if self.apart is None or name != self.apart.op:
            return result
        with without_pdl():
            plain = self._time([op.bind(work.cache[i], **calls[i]) for i in range(work.layers)])
        nodes = {pdl: self._time([self.empty(pdl)] * work.layers).median for pdl in (True, False)}
        launches, q = self.apart.bind(work, calls)
        kernels = len(launches) // work.layers
        apart = self._time(launches).median * kernels
        if q is not None and "q" in calls[-1] and "q_out" in calls[-1]:
            self._check_q(work.download(calls[-1]["q_out"]), work.download(q))
        return result | {
            "us_no_pdl": plain.median,
            "empty_us": nodes[True],
            "empty_us_no_pdl": nodes[False],
            "kernels_apart": kernels,
            "apart_us": apart,
        }

    def _check_append(self, name: str, work: Workload, last: dict[str, Any]) -> None:
        """The rows that are stored as they come: K and V, unless norms, RoPE or biases change them. Full groups are seal's."""
        gather = self._op("gather")
        changed = self.facts.changed.get(name, "") + ("k" if self.facts.residual else "")
        roles = [r for r, _ in work.roles if r not in changed and (r in last or "qkv" in last)]
        roles = [
            r for r in roles if len(last[r if r in last else "qkv"].shape) == (3 if r in last else 2)
        ]  # not padded
        for b in {0, work.farthest} if gather is not None and roles else ():
            kept, end = min(work.new[b], work.alive(b)), sum(work.new[: b + 1])
            stored = work.gathered(gather, b, work.layers - 1)
            for (role, _), found in zip(work.roles, stored, strict=True):
                if role in roles and not self._same(found[-kept:], self._given(work, last, role)[end - kept : end]):
                    raise WrongResult(f"request {b}: the rows that gather finds are not those that were appended")

    def _given(self, work: Workload, call: dict[str, Any], role: str) -> Any:
        """K's or V's rows as a call brings them, on their own or in rows q | k | v."""
        if role in call:
            return work.download(call[role])
        dims, flat = dict(work.roles), work.download(call["qkv"])
        end = flat.shape[1] - (self.facts.kv_heads * dims["v"] if role == "k" else 0)
        return flat[:, end - self.facts.kv_heads * dims[role] : end].reshape(len(flat), self.facts.kv_heads, dims[role])

    def _check_q(self, fused: Any, apart: Any) -> None:
        """Separate kernels round once each."""
        one, other = fused.astype(np.float64), apart.astype(np.float64)
        tolerance = 2.0**-3 if fused.dtype.itemsize == 1 else 4 * TOLERANCE[self.facts.dtype]
        off = float(np.abs(one - other).max(initial=0.0))
        if not off <= tolerance * max(1.0, float(np.abs(one).max(initial=0.0))):
            raise WrongResult(f"q_out: off by {off:.3g} from that of separate kernels")

    def _same(self, found: Any, given: Any) -> bool:
        """True for equal rows, but for what quantization takes."""
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
        timing, gather = self._time(bound), self._op("gather")
        for b in {0, work.farthest} if gather is not None else ():
            found, end = work.gathered(gather, b, work.layers - 1)[0], sum(work.new[: b + 1])
            if not self._same(found[-work.new[b] :], work.download(k[-1])[end - work.new[b] : end]):
                raise WrongResult(f"request {b}: the keys that gather finds are not those that were sealed")
        return self._result(timing, least, "copy", work.layers)

    @property
    def _bytes(self) -> int:
        return dtype(self.facts.dtype).bytes

    def _op(self, kind: str) -> Any:
        name = next((n for n, k in self.facts.ops if k == kind and (k != "gather" or self._dequantizes(n))), None)
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
        timing = self._time(bound)
        return self._result(timing, least, "copy", work.layers)

    def _decode(self, name: str, totals: list[int]) -> dict[str, Any]:
        op = getattr(self.package, name)
        each, heads = self.facts.rows[name], self.facts.q_heads
        rows = each * len(totals)
        tokens = sum(min(n, self.facts.window or n) for n in totals)
        least = tokens * self.token_bytes + rows * heads * (self.facts.head_dim + self.facts.v_dim) * self._bytes
        # decode counts the step's tokens itself: lengths "before" leave them out.
        work = self._workload(totals, [each] * len(totals), least)
        more, planner = self._planned(work, op, rows)
        result = {} if planner is None else {"plan_us": self._time([planner]).median}
        timing = self._attend(work, name, [each] * len(totals), more)
        return result | self._result(timing, least, "read", work.layers)

    def _extend(self, name: str, totals: Sequence[int], rows: Sequence[int]) -> dict[str, Any]:
        """With the rate of its products where the mask's are counted here."""
        op = getattr(self.package, name)
        totals = [self._fits(n) for n in totals]
        rows = [min(n, total) for n, total in zip(rows, totals, strict=True)]
        heads, dims = self.facts.q_heads, self.facts.head_dim + self.facts.v_dim
        least = sum(totals) * self.token_bytes + sum(rows) * heads * dims * self._bytes
        work = self._workload(totals, rows, least)
        workspace = op.workspace(sum(rows), device=f"cuda:{self.gpu.ordinal}")
        index = dtype(next(p.dtype for p in op.PLAN.params if p.name == "row_offsets")).numpy()
        offsets = work.upload(np.cumsum([0, *rows]).astype(index))
        op.plan(work.cache[0], workspace, row_offsets=offsets, rows=sum(rows), stream=self.gpu.stream)
        planner = op.bind_plan(work.cache[0], workspace, row_offsets=offsets, rows=sum(rows))
        result = {"plan_us": self._time([planner]).median}
        timing = self._attend(work, name, rows, {"workspace": workspace})
        if (window := self.facts.sees.get(name)) is not None:
            seen = [np.arange(n - r, n) + 1 for n, r in zip(totals, rows, strict=True)]
            pairs = sum(int(np.minimum(own, window or own).sum()) for own in seen)
            result["tflop_s"] = 2 * pairs * heads * dims / timing.median / 1e6
        return result | self._result(timing, least, "read", work.layers)

    def _attend(self, work: Workload, name: str, rows: Sequence[int], more: dict[str, Any]) -> Timing:
        """Time an attention of all layers; the last rows of some requests are held to float64 where `sees` says what they see."""
        op, heads = getattr(self.package, name), self.facts.q_heads
        kinds = {p.name: p.dtype for p in op.KERNEL.arguments if isinstance(p, Array)}
        if "sinks" in kinds:
            more = more | {"sinks": work.random((heads,), "f32")}
        more = more | {n: work.random((1,), kinds[n], scales=True) for n in ("q_scale", "out_scale") if n in kinds}
        q = [work.random((sum(rows), heads, self.facts.head_dim), kinds["q"]) for _ in range(work.layers)]
        outs = [work.random((sum(rows), heads, self.facts.v_dim), kinds["out"]) for _ in range(work.layers)]
        bound = [op.bind(work.cache[i], q=q[i], out=outs[i], **more) for i in range(work.layers)]
        timing = self._time(bound)
        gather = self._op("gather")
        if gather is not None and name in self.facts.sees and kinds["q"] == self.facts.dtype:
            for b in sorted({0, int(np.argmax(work.totals)), work.farthest}):
                self._check_attention(work, gather, name, q[-1], outs[-1], b, sum(rows[: b + 1]) - 1)
        return timing

    def _check_attention(self, work: Workload, gather: Any, name: str, q: Any, out: Any, b: int, row: int) -> None:
        """The last row of a request of a large batch against float64, over the tokens that gather finds."""
        scale, window = self.facts.scales[name], self.facts.sees[name]
        k, v = (a.astype(np.float64)[-window:] for a in work.gathered(gather, b, work.layers - 1))
        query, got = (work.download(a)[row].astype(np.float64) for a in (q, out))
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

    def _other(self, op: Op, work: Listed) -> dict[str, Any]:
        """Timed by kvgen.verify; attention to all latent rows of a request is held to float64, as decode is."""
        other = timing.Timer(self.gpu, self.kernels, self.package, self.fill, self.bandwidth["read"], SAMPLES)
        attends = isinstance(op, MlaDecode) and not op.sparse and self.facts.table == "dense"
        found = other.run(op, work, partial(self._check_latent, op) if attends else None)
        result = {"us": found.us, "us_least": found.us_least, "layers": found.launches, "past_l2": found.past_l2}
        if found.nbytes:
            result |= {"least_bytes": found.nbytes, "gb_s": found.gb_s, "percent": found.percent, "against": "read"}
            result["against_gb_s"] = self.bandwidth["read"]
        return result

    def _check_latent(self, op: MlaDecode, scene: Scene, pools: dict[str, Any], given: dict[str, Any]) -> None:
        """The rows of the request that has the pool's last page, against float64 over its latent rows."""
        b = int(np.argmax([ids.max() for ids in scene.ids]))
        host = {name: pool[LAYER] if isinstance(pool, list) else pool for name, pool in scene.pools.items()}
        for name, tensor in host.items():
            device = pools[name][LAYER] if isinstance(pools[name], list) else pools[name]
            for page in scene.ids[b].ravel() * self.facts.id_multiplier:
                size, at = span(tensor[page]), device.pointer + int(page) * tensor.strides[0]
                data = self.gpu.driver.read(at, size, self.gpu.ordinal)
                tensor[page] = np.ndarray(tensor[page].shape, tensor.dtype, data, strides=tensor[page].strides)
        tables = {name: array[b : b + 1] for name, array in scene.tables(cases_of(op).lengths, op.rows).items()}
        (rows,) = cache_rows(scene.kv, {**host, **tables}, LAYER)
        q, got = (self._rows_of(given[name], b, op.rows) for name in ("q", "out"))
        how: dict[str, Any] = {"scale": op.softmax_scale(self.kernels), "rows": op.rows}
        sinks = given.get("sinks")
        if sinks is not None:
            how |= {"sinks": self._rows_of(sinks, 0, self.facts.q_heads), "sinks_in_lse": op.sinks == "lse"}
        wanted = mla_decode(scene.view(tables), rows, q, **how).out
        off = float(np.abs(got.astype(np.float64) - wanted).max())
        if not off <= 4 * TOLERANCE[self.facts.dtype]:  # rows are below 1, products of codes rounded once more
            raise WrongResult(f"request {b}: off by {off:.3g} from attention over its rows in float64")

    def _rows_of(self, array: Any, b: int, rows: int) -> Any:
        """Rows `[b * rows, (b + 1) * rows)` of a device array."""
        named = {dtype(n).numpy().name: dtype(n).numpy() for n in ("bf16", "e4m3", "e5m2")}
        kind = named.get(array.dtype) or np.dtype(array.dtype)
        each = math.prod(array.shape[1:]) * kind.itemsize
        data = self.gpu.driver.read(array.pointer + b * rows * each, rows * each, self.gpu.ordinal)
        return np.frombuffer(data, kind).reshape(rows, *array.shape[1:])

    def _step(self, batch: int, tokens: int) -> dict[str, Any]:
        """A plan, then append and decode of every layer, in one graph; beside it the time that the rows' bytes take alone."""
        append, decode = self._op("append"), self._op("decode")
        if append is None or decode is None:
            raise DeviceError(f"{self.facts.name}: got no append and decode; a step is made of both")
        totals, layers = [tokens] * batch, STEP_LAYERS
        work = Workload(self.gpu, self.package, self.facts, self.fill, totals, [1] * batch, layers)
        shared: dict[str, Any] = {}
        calls = [work.arguments(append, shared) for _ in range(layers)]
        more, planner = self._planned(work, decode, batch)
        q = [work.random((batch, self.facts.q_heads, self.facts.head_dim)) for _ in range(layers)]
        outs = [work.random((batch, self.facts.q_heads, self.facts.v_dim)) for _ in range(layers)]
        launches = [] if planner is None else [planner]
        for i in range(layers):
            launches.append(append.bind(work.cache[i], **calls[i]))
            launches.append(decode.bind(work.cache[i], q=q[i], out=outs[i], **more))
        whole = self._time(launches)
        least = layers * (sum(totals) * self.token_bytes + batch * self.row_bytes)
        us = whole.median * len(launches)
        return {
            "us": us,
            "us_least": whole.least * len(launches),
            "launches": len(launches),
            "layers": layers,
            "least_bytes": least,
            "bytes_us": least / self.bandwidth["read"] / 1e3,
            "gb_s": least / us / 1e3,
            "against": "read",
            "against_gb_s": self.bandwidth["read"],
            "percent": 100 * least / us / 1e3 / self.bandwidth["read"],
            "past_l2": least >= L2_MULTIPLE * self.gpu.l2_bytes,
        }

    def _planned(self, work: Workload, op: Any, rows: int) -> tuple[dict[str, Any], Callable[[int], None] | None]:
        """The workspace of a decode, planned, and the planner's launch; nothing and None for one without a plan."""
        if not hasattr(op, "workspace"):
            return {}, None
        longest = work.cache.max_cache_length if op.SPLIT_PLAN.chunk_tokens else None
        workspace = op.workspace(rows, device=f"cuda:{self.gpu.ordinal}", max_tokens=longest)
        op.plan(work.cache[0], workspace, rows=rows, stream=self.gpu.stream)
        return {"workspace": workspace}, op.bind_plan(work.cache[0], workspace, rows=rows)

    def _python(self, name: str) -> dict[str, Any]:
        """The cost of a bound call to the host, in microseconds; a stream takes some hundreds before it pushes back."""
        work, calls, _ = self._append_call(name, 1)
        step, best = getattr(self.package, name).bind(work.cache[0], **calls[0]), math.inf
        times, count = CALLS
        for _ in range(times):
            self.gpu.wait()
            begin = time.perf_counter()
            for _ in range(count):
                step(self.gpu.stream)
            best = min(best, (time.perf_counter() - begin) / count * 1e6)
        self.gpu.wait()
        return {"us": best, "host": True}
