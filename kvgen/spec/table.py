"""Page tables: how an engine says which page holds a request's tokens.

Every form answers one question, "which page holds logical page i of request b", and every entry is untrusted device data:
an id outside the pool is reported and skipped, never followed. An id is the entry times `id_multiplier`, checked after
scaling (an engine whose table counts big pages hands kvgen small ones).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvgen.spec.base import Spec

IndexName = Literal["u32", "i32", "i64"]


class PageTable(Spec):
    """What the forms share."""

    dtype: IndexName = "u32"
    id_multiplier: int = Field(default=1, ge=1, le=2**20)


class Dense(PageTable):
    """`page_table[batch, max_pages]`: MAX, vLLM, FlashMLA, FlashAttention.

    `align` promises that every row begins at a multiple of so many entries (checked when bound): the accessor's
    `populate` then reads that many at once.
    """

    kind: Literal["dense"] = "dense"
    align: Literal[1, 2, 4, 8] = 1


class CSR(PageTable):
    """`page_indices[nnz]` with `page_indptr[batch + 1]`: FlashInfer.

    With `last_page_len` the lengths come from the table too, as `(pages - 1) * page_size + last_page_len[b]`, counting
    the tokens of this step; otherwise from `lengths`.
    """

    kind: Literal["csr"] = "csr"
    dtype: IndexName = "i32"
    last_page_len: bool = False


class PerKV(PageTable):
    """`page_table[batch, 2, max_pages]`: K and V pages have ids of their own (TensorRT-LLM)."""

    kind: Literal["per_kv"] = "per_kv"
    dtype: IndexName = "i32"


class Indirect(PageTable):
    """`req_to_token[requests, max_tokens]` read at row `request_ids[b]`: a slot per token (SGLang).

    The pool is one of token slots, so `page_size` is 1.
    """

    kind: Literal["indirect"] = "indirect"
    dtype: IndexName = "i32"
    request_dtype: IndexName = "i64"


class Ring(PageTable):
    """`page_table[batch, ring_pages]` used as a ring: logical page i lives in column i % ring_pages.

    Only the last `window` tokens of a request are alive, so ring_pages >= ceil((window - 1) / page_size) + 1 keeps them all.
    """

    kind: Literal["ring"] = "ring"
    window: int = Field(ge=1, le=2**31 - 1)


class Offsets(PageTable):
    """`kv_offsets[batch + 1]`: no pages; request b has rows [kv_offsets[b], kv_offsets[b + 1]) of the tensors.

    The table of a Ragged cache, which says the lengths as well: cumulative sequence lengths, as varlen attention takes
    them.
    """

    kind: Literal["offsets"] = "offsets"


Table = Dense | CSR | PerKV | Indirect | Ring
