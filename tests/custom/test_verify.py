"""`kvgen verify` over kernels of the user's: run on drawn arrays in check mode, and held to the spec's oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvgen
from kvgen import KernelSet, Paged, ops
from kvgen.errors import CompileError
from kvgen.ops import Array, Custom, Scalar, Size, TensorMap
from kvgen.verify.memory import HostMemory
from kvgen.verify.results import KernelResult
from kvgen.verify.run import Verifier
from tests.custom.conftest import KERNEL, Write

PARAMS = (Array("x", "f32", ("N",), "inout"), Size("n", "N"), Scalar("by", "f32"))
TOKENS = """#include "cache.cuh"
extern "C" __global__ void sums(const __grid_constant__ Cache cache, float* sums, int64_t* tokens, uint64_t* errors) {
  const KeyCache keys = get_key_cache(cache);
  pdl_wait();
  const uint32_t b = blockIdx.x, n = cache.length(b);
  float sum = 0.0f;
  for (uint32_t t = 0; t < n; ++t) {
    if (cache.page(b, t / cache.page_tokens).fault != Fault::none) return report(errors, Fault::page_id, b, t);
    sum += keys.load<1, float>(b, 1, t, 3).e[0];
  }
  sums[b] = sum;
  tokens[b] = n;
}
"""
SUMS = (Array("sums", "f32", ("B",), "out"), Array("tokens", "i64", ("B",), "out"))


def verified(text: str = KERNEL, params: Any = PARAMS, name: str = "fill", **fields: Any) -> KernelResult:
    """The result of a kernel over a cache of f16 rows."""
    cache = Paged(dtype="f16", kv_heads=2, head_dim=8, page_size=4)
    op = Custom(name=name, text=text, params=params, **({"grid": "ceil_div(N, 128)"} | fields))
    kernels = KernelSet(name=f"own_{name}", q_heads=2, cache=cache, ops=(op,), arch=("sm_90a",))
    module: Any = kvgen.load(kernels)
    return Verifier(kernels, module, HostMemory()).run(op)


def wrong(result: KernelResult) -> set[str]:
    assert result.status == "wrong"
    return {line for case in result.cases for line in case.wrong}


def test_against_an_oracle() -> None:
    """Arrays and scalars by name; the only array that is written, as it is or in a dict."""
    result = verified(oracle=lambda x, by: by * x)
    assert result.status == "ok" and result.why == "" and 0 <= result.share < 1
    assert [case.batch for case in result.cases if not case.fault] == ["small", "mixed"] and result.hostile
    assert verified(oracle=lambda by, x: {"x": by * x}).status == "ok"
    assert (
        wrong(verified(oracle=lambda x, by: by * x + 1e-3))
        and verified(oracle=lambda x, by: by * x + 1e-3, tolerance=2e-3).status == "ok"
    )


def test_without_an_oracle_accesses_are_checked() -> None:
    result = verified()
    assert result.status == "ok" and "the spec has no oracle=" in result.why
    found = wrong(verified(KERNEL.replace("if (i < n)", "if (i <= n)")))
    assert all("global_out_of_bounds" in line and "<fill>:" in line for line in found)
    found = wrong(verified(KERNEL.replace("x[i] = by * x[i];", "*(float*)cache.page_table = by;")))
    assert all("read_only" in line or "global_out_of_bounds" in line for line in found)


def test_k_and_v_of_each_request() -> None:
    """Tokens that requests hold, in float64; integers are equal; hostile data is run, and only the kernel knows what it says."""

    def oracle(keys: Any, lengths: Any) -> dict[str, Any]:
        return {"sums": [k[:, 1, 3].sum() for k in keys], "tokens": lengths}

    fields: dict[str, Any] = {"name": "sums", "grid": "B", "threads": 1, "errors": True, "oracle": oracle}
    result = verified(TOKENS, SUMS, **fields)
    assert result.status == "ok", result.cases
    assert any(case.reported for case in result.hostile)
    found = wrong(verified(TOKENS.replace("tokens[b] = n;", "tokens[b] = n + b % 2;"), SUMS, **fields))
    assert "tokens: 1 of 2 numbers differ, the first at (1,): got 6, it must be 5" in found
    found = wrong(verified(TOKENS.replace("sum += keys", "sum = b == 1 ? nan_f32() : sum + keys"), SUMS, **fields))
    assert any(
        line.startswith("sums: 1 of 2 numbers are infinite or NaN on one side only, the first at (1,)")
        for line in found
    )


@pytest.mark.parametrize(
    ("oracle", "said"),
    [
        (lambda x: {"y": x}, "oracle: it returned y; it must return x"),
        (lambda x: {}, "oracle: it returned nothing; it must return x"),
        (lambda x: x[:-1], "oracle: x has the shape (6,); the array's is (7,)"),
        (lambda x: np.linalg.inv(x), "oracle: it raised LinAlgError: "),
    ],
)
def test_what_an_oracle_returns(oracle: Any, said: str) -> None:
    assert any(line.startswith(said) for line in wrong(verified(oracle=oracle)))


def test_sizes_and_untrusted_numbers() -> None:
    """Sizes of the spec are taken; an untrusted array has any number, others 0 and 1."""
    text = KERNEL.replace(
        "float* x, uint32_t n, float by", "float* x, const int32_t* at, const int32_t* any, uint32_t n"
    )
    text = text.replace("x[i] = by * x[i];", "x[i] = 100.0f * at[i] + (any[i] > 1 || any[i] < 0);")
    numbers = (Array("at", "i32", ("N",)), Array("any", "i32", ("N",), untrusted=True))
    seen = list[tuple[int, ...]]()

    def oracle(at: Any, any: Any) -> Any:
        seen.append((len(at), int(at.max()), int(((any > 1) | (any < 0)).sum())))
        return 100 * at + ((any > 1) | (any < 0))

    result = verified(
        text, (Array("x", "f32", ("N",), "out"), *numbers, Size("n", "N")), sizes={"N": 37}, oracle=oracle
    )
    assert result.status == "ok" and seen == [(37, 1, 37)] * 2


def test_a_tensor_map_is_not_drawn() -> None:
    text = (
        '#include "cache.cuh"\n#include "../device/tma/tma.cuh"\n'
        + KERNEL.partition("\n\n")[2]
        .replace("float* x, uint32_t n, float by", "const __grid_constant__ TensorMap map")
        .partition("const uint32_t i")[0]
        + "}\n"
    )
    result = verified(text, (TensorMap("map"),), grid=1)
    assert result.status == "not run" and result.why == "map is a tensor map, which kvgen verify cannot draw"


def test_the_command(write: Write) -> None:
    project = write(more="\n            oracle=lambda x, by: by * x,")
    project.kvgen("build")
    done = project.kvgen("verify", "own/fill")
    assert "own/fill  sm_90a  ok" in done.stdout and "all right" in done.stdout and "oracle" not in done.stdout
    write()
    project.kvgen("build")  # nothing changes: an oracle is in no generated file
    said = project.kvgen("verify", "own/fill", "--quick").stdout
    assert "own/fill: ran, and its accesses were checked; its results were compared with nothing" in said


def test_cuda_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """<cuda_fp16.h> of NVIDIA's wheel, before cache.cuh or behind it; without the wheel the message says what to install."""
    for text in (
        "#include <cuda_fp16.h>\n" + KERNEL,
        KERNEL.replace('#include "cache.cuh"', '#include "cache.cuh"\n#include <cuda_bf16.h>\n#include <cuda_fp16.h>'),
    ):
        text = text.replace("x[i] = by * x[i];", "x[i] = __half2float(__float2half(x[i]));")
        result = verified(text, oracle=lambda x: x.astype(np.float16))
        assert result.status == "ok", result.cases
    text = KERNEL.replace('#include "cache.cuh"', '#include "cache.cuh"\n#include <cuda_fp8.h>\n')
    monkeypatch.setattr("kvgen.compile.program.header_folder", lambda: None)
    with pytest.raises(CompileError, match=r'could not open source file "cuda_fp8\.h"') as caught:
        verified(text)
    assert "install them with `pip install 'cuda-toolkit[cudart]==1" in str(caught.value)


def test_oracles_are_part_of_no_digest() -> None:
    """Specs that differ in their oracles alone are dumped alike, and are hashed."""
    cache = Paged(dtype="f16", kv_heads=2, head_dim=8, page_size=4)

    def of(**fields: Any) -> KernelSet:
        op = ops.Custom(name="fill", text=KERNEL, params=PARAMS, grid=1, **fields)
        return KernelSet(name="own", q_heads=2, cache=cache, ops=(op,))

    one, other = of(oracle=lambda x: x), of()
    assert one.model_dump_json() == other.model_dump_json() and isinstance(hash(one), int)
