"""A package like a generated one, by hand: four operations, three of them wrong."""

from __future__ import annotations

from pathlib import Path

PACKAGE = """
from kvgen.runtime import ABI, Array, BaseCache, Kernel, Launcher, Module, Pool, Size, Tensor, at_once

_MODULE = Module("toy", __file__, arch=("sm_80", "sm_90a"), abi=ABI)


class Cache(BaseCache):
    MODULE = _MODULE
    PAGE_TOKENS = 4
    TENSORS = (
        Tensor("pool", "f32", ("k",), axes=("page", "layer", "token", "dim"), shape=("pages", "layers", 4, 32),
               strides=(None, None, 32, 1), align=4),
    )
    FIELDS = (Pool("k"), Size("batch", "u32", "B"), Array("lengths", "u32", ("B",)))

    def __init__(self, pool, *, lengths):
        super().__init__((pool,), (lengths,))


class _Launcher(Launcher):
    def bind(self, cache, out, *, stream=None):
        return self.prepare(cache, (out,), stream)

    __call__ = at_once(bind)


def _operation(name):
    kernel = Kernel(
        _MODULE, f"{name}.cu", f"toy_{name}",
        params=(Array("out", "u32", ("T", 2), access="out", strided=True), Size("n", "u32", "T")),
        grid=lambda d: (1, 1, 1), threads=64, shared=0, writes=True,
    )
    return type(name, (_Launcher,), {"KERNEL": kernel})()


fill, racy, past, ticket, padded = (_operation(name) for name in ("fill", "racy", "past", "ticket", "padded"))
"""

KERNELS = {
    "fill": "if (i == 0) cache.k[0] += 1.0f; if (i < n) out[2 * i] = i, out[2 * i + 1] = 7;",
    "racy": """
  __shared__ unsigned s[64];
  s[i] = i;
  if (i < n) out[2 * i] = s[63 - i], out[2 * i + 1] = 7;""",
    "past": "out[2 * (i < n ? i : n)] = i;",
    # No race: the order of the tickets is the order of the threads, and nobody promised one.
    "ticket": """
  __shared__ unsigned next;
  if (i == 0) next = 0;
  __syncthreads();
  const unsigned mine = atomicAdd(&next, 1u);
  if (i < n) out[2 * i] = 0, out[2 * i + 1] = mine;""",
    # Reads eight bytes of which nobody has written four, and uses the others.
    "padded": """
  __shared__ uint2 s[64];
  s[i].x = i;
  unsigned x, y;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"((unsigned)__cvta_generic_to_shared(s + i)) : "memory");
  if (i < n) out[2 * i] = x, out[2 * i + 1] = 7;""",
}

CACHE = "struct Cache { float* k; unsigned batch; const unsigned* lengths; };\n"

# Launchers let a kernel start while the one before it still runs.
WAIT = """#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
"""


def write_package(folder: Path) -> None:
    """The package `toy` under `folder`."""
    home = folder / "toy"
    home.mkdir()
    (home / "__init__.py").write_text(PACKAGE)
    for name, body in KERNELS.items():
        parameters = "const __grid_constant__ Cache cache, unsigned* out, unsigned n"
        head = f'{CACHE}extern "C" __global__ void toy_{name}({parameters}) {{\n'
        (home / f"{name}.cu").write_text(f"{head}  const unsigned i = threadIdx.x;\n{WAIT}  {body}\n}}\n")
