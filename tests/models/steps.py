"""One decode step of one layer: rows drawn from a seed, what transformers' eager attention made of them, what kvgen's kernels do.

transformers' side is `tests_torch/eager.py`; here are the rows, which both sides draw alike, the recordings, and kvgen's
side: the set that `kvgen init` writes for the config, with an f32 cache (bf16 for latent rows, which mla_decode wants), its
append for the cached tokens and for the new one, its decode for the new one, on the CPU machine.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvgen import KernelSet, models
from kvgen.codegen.emit import render_device, render_set, write_file
from kvgen.lowering.frequencies import cos_sin_factor, inverse_frequencies
from kvgen.models.layers import LayerFacts
from kvgen.ops import Append, Decode, MlaDecode
from kvgen.runtime.cpu import machine
from kvgen.schema.loader import LoadedSet
from kvgen.schema.model import LongRopeScaling

RECORDED = Path(__file__).parent / "recorded"
PACKAGE = "kvgen_model_tests"
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Step:
    """A layer of a config and the shapes of what it is given; `output` `[query heads, V dim]` of the last of `tokens`.

    `latent`: rank, RoPE, NoPE and V dims of latent attention; `k_dim` is then NoPE + RoPE. `weights`: shape of each norm's
    weights by role, `sinks` whether there are any. `one_projection`: V's rows are K's, before either's norm. `slopes`: ALiBi's,
    of each query head. `picked`: the tokens that the model's indexer picked for the last one. `positions`: M-RoPE's, a row a
    section. `source`: the step of the layer whose K and V this one reads, which has rows of q alone.
    """

    name: str
    config: dict[str, Any]
    layer: int
    tokens: int
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    latent: tuple[int, int, int, int] | None = None
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sinks: bool = False
    one_projection: bool = False
    slopes: list[float] | None = None
    picked: list[int] | None = None
    positions: list[list[int]] | None = None
    source: Step | None = None
    output: Floats | None = None

    def draw(self) -> dict[str, Floats]:
        """q, k, v `[tokens, heads, dim]`, or q, latent rows and up-projections; norms' weights; sinks."""
        seed = int.from_bytes(hashlib.sha256(f"{self.name} {self.layer}".encode()).digest()[:4], "little")
        rng = np.random.default_rng(seed)

        def some(*shape: int) -> Floats:
            return rng.standard_normal(shape, dtype=np.float32)

        found = {"q": some(self.tokens, self.q_heads, self.k_dim)}
        if self.latent is not None:
            rank, rope, nope, v = self.latent
            found |= {
                "k": _to_bf16(some(self.tokens, 1, rank + rope)),
                "up": some(self.q_heads, nope + v, rank) / rank**0.5,
            }
        elif self.source is None:
            found |= {
                "k": some(self.tokens, self.kv_heads, self.k_dim),
                "v": some(self.tokens, self.kv_heads, self.v_dim),
            }
            if self.one_projection:
                found["v"] = found["k"].copy()
        for role in sorted(self.weights):
            found[f"{role}_weight"] = rng.uniform(0.5, 1.5, self.weights[role]).astype(np.float32)
        if self.sinks:
            found["sinks"] = some(self.q_heads)
        return found

    def save(self, path: Path) -> None:
        """Write the step and its output; the rows are drawn anew when it is read."""
        assert self.output is not None
        facts = self._facts()
        digest = np.array([float(np.abs(a).sum(dtype=np.float64)) for _, a in sorted(self.draw().items())])
        np.savez_compressed(path, facts=np.array(json.dumps(facts)), output=self.output, drawn=digest)

    def _facts(self) -> dict[str, Any]:
        facts = {k: getattr(self, k) for k in _SAVED}
        return facts | {"source": self.source._facts() if self.source is not None else None}

    @staticmethod
    def _of(facts: dict[str, Any], output: Floats | None) -> Step:
        given = {**facts, "latent": tuple(facts["latent"]) if facts["latent"] else None}
        given["source"] = Step._of(facts["source"], None) if facts.get("source") else None
        return Step(**given, output=output)

    @staticmethod
    def read(path: Path) -> Step:
        """A recorded step; raises where this NumPy draws other rows than the one that recorded."""
        with np.load(path) as found:
            facts = json.loads(str(found["facts"]))
            step = Step._of(facts, found["output"])
            digest = np.array([float(np.abs(a).sum(dtype=np.float64)) for _, a in sorted(step.draw().items())])
            np.testing.assert_allclose(digest, found["drawn"], rtol=1e-6, err_msg=f"{path.name}: other rows are drawn")
        return step


_SAVED = (
    *("name", "config", "layer", "tokens", "q_heads", "kv_heads", "k_dim", "v_dim", "latent", "weights", "sinks"),
    *("one_projection", "slopes", "picked", "positions"),
)


def _to_bf16(a: Floats) -> Floats:
    """Rounded to what a bf16 cache holds."""
    return a.astype(ml_dtypes.bfloat16).astype(np.float32)


# kvgen's side ---------------------------------------------------------------------------------------------------------


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix=PACKAGE)
    for file in render_device().values():
        write_file(Path(folder.name) / PACKAGE, file)
    sys.path.insert(0, folder.name)
    return folder


def _built(kernels: KernelSet, text: str) -> ModuleType:
    """The generated package of a set of a spec's text."""
    name = f"set_{hashlib.sha256(f'{kernels.name} {text}'.encode()).hexdigest()[:12]}"
    if f"{PACKAGE}.{name}" not in sys.modules:
        made = LoadedSet(kernels.model_copy(update={"name": name}), "spec.py", "")
        for file in render_set(made).values():
            write_file(Path(_root().name) / PACKAGE, file)
        importlib.invalidate_caches()
    return importlib.import_module(f"{PACKAGE}.{name}")


def operations(config: dict[str, Any], layer: int, kv_dtype: str) -> tuple[ModuleType, Any, Any, LayerFacts]:
    """The package of the set that init's spec has for the layer, the layer's append and decode, and what kvgen read of it."""
    text = models.spec_text(config, source="config.json", arch=("sm_80",), kv_dtype=kv_dtype)
    there: dict[str, Any] = {"__name__": "spec"}
    exec(compile(text, "<spec>", "exec"), there)
    listed = there["kernels"]
    sets: list[KernelSet] = listed if isinstance(listed, list) else [listed]
    facts = models.facts(config).layers()[layer]
    kernels = next((s for s in sets if facts.kind in s.layers), sets[0])
    uses = kernels.layers.get(facts.kind)
    if uses is None:  # two kinds, as specs have had them from the start
        assert len(sets) == 1 or facts.mla, "a set per geometry says which kinds use it"
        names = [op.name for op in kernels.ops]
        local = facts.window is not None
        uses = [f"{n}_local" if local and f"{n}_local" in names else n for n in ("append", "decode", "mla_decode")]
    used = {type(op): op.name for op in kernels.ops if op.name in uses}
    module = _built(kernels, text)
    decode = used.get(Decode) or used[MlaDecode]
    return module, getattr(module, used[Append]), getattr(module, decode), facts


def kvgen_output(step: Step) -> Floats:
    """`[query heads, V dim]` of the step's last token, by the kernels of the set that init writes for the config."""
    kind: Any = ml_dtypes.bfloat16 if step.latent else np.float32
    stored_as = "bf16" if step.latent else "f32"
    module, append, decode, facts = operations(step.config, step.layer, stored_as)
    drawn, before = step.draw(), step.tokens - 1
    page = module.Cache.PAGE_SIZE
    pages = -(-step.tokens // page)
    sizes = {"pages": pages + 1, "layers": 1}
    pools = [np.zeros([sizes.get(n, n) for n in t.shape], _numpy(t.dtype)) for t in module.Cache.TENSORS]
    table = np.arange(1, pages + 1, dtype=np.int32)[None, ::-1].copy()

    def appended(step: Step, drawn: dict[str, Floats], append: Any, facts: LayerFacts, first: int, count: int) -> Any:
        """q as append leaves it, of `count` tokens from `first` on, whose K and V are in the cache then."""
        rows = {n: a[first : first + count].astype(kind) for n, a in drawn.items() if n in ("q", "k", "v")}
        if step.latent is not None:
            rows["q"] = rows["q"][..., step.latent[2] :].copy()
        given = {**rows, "row_offsets": np.array([0, count], np.int32), "q_out": np.zeros(rows["q"].shape, kind)}
        if step.positions is not None:
            given["positions"] = np.array(step.positions, np.int64)[:, first : first + count].copy()
        took = _fitting(append, given | _constants(step, drawn, facts, kind))
        append(made[0], **took)
        return took.get("q_out", rows["q"])  # append without norm or RoPE leaves q as it is

    stored = step.source.draw() if step.source is not None else drawn
    with machine(arch="sm_80"):
        q: Any = None
        for first, count in ((0, before), (before, 1)):
            made = module.Cache(*pools, lengths=np.array([first], np.int32), page_table=table)
            if step.source is None:
                q = appended(step, drawn, append, facts, first, count)
                continue
            there, storing, _, known = operations(step.config, step.source.layer, stored_as)
            assert there is module and facts.kv_source == step.source.layer
            appended(step.source, stored, storing, known, first, count)
            if count == 1:
                q = appended(step, drawn, append, facts, first, count)
        if step.latent is not None:
            nope = step.latent[2]
            absorbed = np.einsum("thn,hnr->thr", drawn["q"][before:, :, :nope], drawn["up"][:, :nope])
            q = np.concatenate([absorbed.astype(kind), q], axis=-1)
        out = np.zeros((1, step.q_heads, step.latent[0] if step.latent else step.v_dim), kind)
        given = {"q": q, "out": out, "row_offsets": np.array([0, 1], np.int32), **_constants(step, drawn, facts, kind)}
        if step.slopes is not None:
            given["alibi_slopes"] = np.array(step.slopes, np.float32)
        if step.picked is not None:
            tokens = np.array(step.picked)
            given["indices"] = (table[0, tokens // page] * page + tokens % page).astype(np.int32)[None]
        if hasattr(decode, "plan"):
            given["workspace"] = decode.workspace(max_rows=1, max_tokens=step.tokens)
            decode.plan(made[0], given["workspace"], rows=1)
        decode(made[0], **_fitting(decode, given))
    found = out[0].astype(np.float32)
    if step.latent is not None:
        found = np.einsum("hr,hvr->hv", found, drawn["up"][:, step.latent[2] :])
    return found


def _constants(step: Step, drawn: dict[str, Floats], facts: LayerFacts, kind: Any) -> dict[str, Any]:
    """Norms' weights, sinks, and the table of angles where the set wants one."""
    found: dict[str, Any] = {n: a.astype(kind) for n, a in drawn.items() if n.endswith("_weight")}
    if "latent_weight" in found:
        found["k_weight"] = found["latent_weight"]
    if "qk_weight" in found:
        found["q_weight"] = found["k_weight"] = found["qk_weight"]
    if step.sinks:
        found["sinks"] = drawn["sinks"]
    if facts.rope is not None:
        turned = facts.rope.dim or (step.latent[1] if step.latent else step.k_dim)
        scaling = facts.rope.scaling
        long = isinstance(scaling, LongRopeScaling) and step.tokens > scaling.original_max_positions
        frequencies = np.array(inverse_frequencies(facts.rope, turned, long=long), np.float32)
        angles = np.arange(step.tokens, dtype=np.float32)[:, None] * frequencies
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * cos_sin_factor(facts.rope)
        found["cos_sin"] = table.astype(np.float32)
    return found


def _fitting(launcher: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that an operation has, of those given."""
    names = {p.name for p in launcher.KERNEL.arguments}
    return {n: a for n, a in given.items() if n in names}


def _numpy(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bf16" else {"f32": np.float32, "f16": np.float16}[name]


def hold(step: Step, allowed: float | None = None) -> None:
    """Fail where kvgen's output differs from transformers' by more than f32 (latent rows: bf16) arithmetic loses.

    `allowed`: another bound of the difference, as a share of the largest output.
    """
    assert step.output is not None
    got = kvgen_output(step)
    off = np.abs(got.astype(np.float64) - step.output).max() / np.abs(step.output).max()
    allowed = allowed or (2.0**-6 if step.latent else 2e-5)
    assert off <= allowed, (
        f"{step.name}, layer {step.layer}: off by {off:.3g} of the largest output; allowed {allowed:.3g}"
    )
