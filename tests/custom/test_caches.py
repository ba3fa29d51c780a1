"""The document's kernel over caches of other layouts, tables and element types: its text knows none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from kvgen import Block, Continuous, KernelSet, Latent, Paged, Quant, ops, presets
from kvgen.cli.project import generated
from kvgen.layout.dtypes import dtype
from kvgen.ops import Custom
from kvgen.runtime import describe
from kvgen.schema.loader import load_file
from tests.custom.building import CHECK, build
from tests.custom.document import blocks

CACHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "paged": (Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16), {"page_table": [[5, 1], [2, 4]]}),
    "packed": (
        presets.vllm_xpacked(dtype="f16", kv_heads=2, head_dim=32, page_size=16),
        {"page_table": [[5, 1], [2, 4]]},
    ),
    "blocks": (Continuous(dtype="f32", kv_heads=1, head_dim=8), {"page_table": [3, 1]}),
    "slots": (
        presets.sglang(dtype="bf16", kv_heads=2, head_dim=64),
        {"req_to_token": np.random.default_rng(1).permutation(64).reshape(2, 32), "request_ids": [1, 0]},
    ),
}


def scores_op(folder: Path) -> Custom:
    """The document's operation."""
    for name, text in blocks().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (loaded,) = load_file(folder / "specs" / "small.py", "specs/small.py", folder)
    (op,) = (op for op in loaded.kernels.ops if isinstance(op, Custom))
    return op


@pytest.mark.parametrize("name", CACHES)
def test_the_documents_kernel_over_other_caches(name: str, tmp_path: Path) -> None:
    cache, tables = CACHES[name]
    group, counts, columns = 2, np.array([19, 9]), 24
    op, heads = scores_op(tmp_path), cache.kv_heads * group
    kernels = KernelSet(name=name, q_heads=heads, cache=cache, ops=(ops.Append(), op))
    build(tmp_path / "out", kernels)
    rng, kind = np.random.default_rng(0), dtype(cache.dtype).numpy()
    k, v = (rng.standard_normal((28, cache.kv_heads, cache.head_dim)).astype(kind) for _ in "kv")
    with generated(tmp_path / "out", name) as package:
        sizes = {"pages": 64 if name == "slots" else 6, "layers": 2, "tokens": 32}
        pools = [
            np.zeros([n if isinstance(n, int) else sizes[n] for n in t.shape], kind) for t in package.Cache.TENSORS
        ]
        if package.Cache.TENSORS[0].axes.count("layer") == 0:
            pools = [[p, p.copy()] for p in pools]  # type: ignore[misc]
        arrays = {
            s.name: np.array(tables[s.name], dtype(s.dtype).numpy()) for s in package.Cache.TABLES if s.name in tables
        }

        def layer(lengths: Any) -> Any:
            return package.Cache(*pools, lengths=np.array(lengths, dtype(cache.lengths_dtype).numpy()), **arrays)[1]

        offsets = np.array([0, 19, 28], dtype(cache.lengths_dtype).numpy())
        package.append(layer([0, 0] if cache.lengths == "before" else counts), k, v, offsets)
        q = rng.standard_normal((2, heads, cache.head_dim)).astype(np.float32)
        scores, errors = np.full((2, heads, columns), 5, np.float32), np.zeros(1, np.uint64)
        CHECK(package.dump_scores, layer(counts), q, scores, 0.125, errors=errors)
        assert describe(errors) is None
        for b, rows in enumerate((k[:19], k[19:])):
            wanted = 0.125 * np.einsum("hd,nhd->hn", q[b], rows.astype(np.float64).repeat(group, axis=1))
            np.testing.assert_allclose(scores[b, :, : len(rows)], wanted, rtol=1e-5, atol=1e-5)
            assert np.isneginf(scores[b, :, len(rows) :]).all()

        if "page_table" in arrays:
            arrays["page_table"].reshape(2, -1)[1, 0] = 77
            CHECK(package.dump_scores, layer(counts), q, scores, 0.125, errors=errors)
            assert np.isnan(scores[1, :, :9]).all() and not np.isnan(scores[0]).any()
            assert str(describe(errors)).startswith("PAGE_ID")


QUANTIZED = {
    "fp8": Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16, quant=Quant(dtype="e4m3", scale_dtype="f32")),
    "latent": Latent(
        dtype="bf16",
        latent_dim=64,
        rope_dim=16,
        page_size=16,
        quant=Quant(dtype="e4m3", scale_dtype="f32", recipe="pow2", place="row", block=Block(dim=32)),
    ),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_documents_kernel_reads_values_whatever_is_stored(name: str, tmp_path: Path) -> None:
    """Against gather, which rounds what the kernel has in f32."""
    cache, counts = QUANTIZED[name], (19, 9)
    op, heads, sizes = scores_op(tmp_path), cache.kv_heads * 2, {"pages": 6, "scale_pages": 6, "layers": 2}
    build(tmp_path / "out", KernelSet(name=name, q_heads=heads, cache=cache, ops=(ops.Append(), ops.Gather(), op)))
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal((28, cache.kv_heads, cache.head_dim)).astype(bfloat16) for _ in cache.stores]
    offsets, table = np.array([0, 19, 28], np.int32), np.array([[5, 1], [2, 4]], np.int32)
    with generated(tmp_path / "out", name) as package:
        memory = {}
        for t in package.Cache.TENSORS:
            kind = t.dtype if isinstance(t.dtype, str) else t.dtype[0]
            memory[t.name] = np.zeros([n if isinstance(n, int) else sizes[n] for n in t.shape], dtype(kind).numpy())
        layer = package.Cache(**memory, lengths=np.zeros(2, np.int32), page_table=table)[1]
        package.append(layer, *rows, offsets)
        layer = package.Cache(**memory, lengths=np.array(counts, np.int32), page_table=table)[1]
        stored = [np.zeros_like(r) for r in rows]
        package.gather(layer, offsets, *stored)
        q, scores = (
            rng.standard_normal((2, heads, cache.head_dim)).astype(np.float32),
            np.zeros((2, heads, 24), np.float32),
        )
        CHECK(package.dump_scores, layer, q, scores, 0.125)
    for b, n in enumerate(counts):
        keys = stored[0][offsets[b] : offsets[b] + n].astype(np.float64).repeat(2, axis=1)
        allowed = 2.0**-8 * 0.125 * np.einsum("hd,nhd->hn", np.abs(q[b]), np.abs(keys)) + 1e-6
        assert (np.abs(scores[b, :, :n] - 0.125 * np.einsum("hd,nhd->hn", q[b], keys)) <= allowed).all()
