"""A cache whose tokens are dealt to several GPUs in turn: decode context parallelism."""

from __future__ import annotations

from pydantic import Field

from kvgen.schema.base import Spec


class Interleave(Spec):
    """Token i of a request lies on rank i // size % ranks, behind the rank's earlier ones, so that attention divides among GPUs
    that have the same heads (vLLM: decode_context_parallel_size, cp_kv_cache_interleave_size).
    """

    ranks: int = Field(ge=2, le=1024)
    """GPUs that share a request's tokens."""
    size: int = Field(default=1, ge=1, le=2**20)
    """Neighbouring tokens of a rank before the next rank's."""
