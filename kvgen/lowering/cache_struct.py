"""The struct that every kernel takes first: the fields of a cache, in the order in which the cache object packs them."""

from __future__ import annotations

from kvgen.layout.dtypes import dtype
from kvgen.lowering.tables import table_form
from kvgen.plan.params import Array, Field, Pool, Size
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet


def _scale_fields(cache: Cache) -> list[Field]:
    """What quantization adds: scales of the caller's, the tail of newest tokens."""
    storage = cache.storage
    found: list[Field] = []
    found += [Pool(t.name, t.dtypes[0]) for t in storage.tensors if t.given]
    if storage.residual:
        doc = "tokens of each request that are quantized"
        found += [
            Pool("k_tail", cache.dtype),
            Size("k_tail_stride", "i64", "k_tail_stride"),
            Array(
                "k_sealed", cache.lengths_dtype, ("B",), access="inout", untrusted=True, doc=doc, field="lengths_dtype"
            ),
        ]
    return found


def cache_fields(cache: Cache) -> tuple[Field, ...]:
    """The fields of `Cache`, the struct that the cache object packs for every kernel, in their order."""
    bases = cache.storage.bases
    found: list[Field] = [Pool(b.name, b.element.name) for b in bases]
    found += [Size(f"{b.name}_page_stride", "i64", f"{b.name}_page_stride") for b in bases]
    found.append(Size("num_pages", "u32", "rows" if cache.ragged else "pages"))
    if any(t.name.endswith("scales") for t in cache.storage.tensors):
        found.append(Size("num_scale_pages", "u32", "rows" if cache.ragged else "scale_pages"))
    if cache.page_tokens is None and not cache.ragged:
        found.append(Size("page_tokens", "u32", "tokens"))
    if not cache.page_table.counts_tokens:
        doc = f"tokens of each request {cache.lengths} this step"
        lengths = dtype(cache.lengths_dtype)
        found.append(Array("lengths", lengths.name, ("B",), untrusted=True, doc=doc, field="lengths_dtype"))
    found.append(Size("batch", "u32", "B"))
    longest = [Size(name, "u32", name) for name in ("max_seq_length", "max_cache_length")]
    return (*found, *table_form(cache).fields, *_scale_fields(cache), *longest)


def state_fields(cache: AnyCache) -> tuple[Field, ...]:
    """The same of a cache of states, which has no lengths and nothing to quantize."""
    bases = cache.storage.bases
    found: list[Field] = [Pool(b.name, b.element.name) for b in bases]
    found += [Size(f"{b.name}_page_stride", "i64", f"{b.name}_page_stride") for b in bases]
    return (*found, Size("num_pages", "u32", "pages"), Size("batch", "u32", "B"), *table_form(cache).fields)


def entry_name(kernels: KernelSet, kernel: str) -> str:
    """The C name of a kernel: `<set>_<kernel>`."""
    return f"{kernels.name}_{kernel}"


ERRORS = Array(
    "errors",
    "u64",
    (1,),
    access="inout",
    optional=True,
    doc="sticky error word, 0 if nothing happened: a kvgen.ErrorWord, or an array that kvgen.runtime.describe() reads",
)
