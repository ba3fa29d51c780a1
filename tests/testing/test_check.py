"""kvgen.testing.Check on generated operations: a whole step, its workspace planned inside."""

from __future__ import annotations

import numpy as np

from kvgen.testing import Check
from tests.support.calls import Call
from tests.support.launching import zeros


def test_a_step_of_generated_operations() -> None:
    """append, gather and decode over one cache; what they write is put back between the schedules."""
    call = Call("paged", "append")
    rng = np.random.default_rng(3)
    call.pools["pool"][...] = rng.standard_normal(call.pools["pool"].shape)
    call.tables["page_table"][...] = [[0, 1, 2], [3, 4, 0]]
    k, v = (rng.standard_normal((2, 2, 16)).astype(zeros(1).dtype) for _ in range(2))
    q, out, offsets = zeros(2, 4, 16), zeros(2, 4, 16), call.arguments["row_offsets"]
    q[...] = rng.standard_normal(q.shape)
    outs = zeros(2, 2, 16), zeros(2, 2, 16)
    cache = call.cache()
    starts = call.tables["lengths"].copy()

    def step() -> None:
        call.set.append(cache[1], k, v, offsets)
        call.set.gather(cache[1], offsets, *outs, starts=starts)
        workspace = call.set.decode.workspace(2)
        call.set.decode.plan(cache[1], workspace)
        call.set.decode(cache[1], q, out, workspace)

    launches = Check()(step)
    assert [x.entry for x in launches] == ["paged_append", "paged_gather", "paged_decode_plan", "paged_decode"]
    assert outs[0].tobytes() == k.tobytes() and outs[1].tobytes() == v.tobytes()
    assert out.astype(np.float32).any()
    assert launches[0].counters.per_buffer["pool"].store_bytes == k.nbytes + v.nbytes
