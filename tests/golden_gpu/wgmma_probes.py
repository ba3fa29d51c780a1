"""wgmma: types, both majors, every swizzle, A from shared memory and from registers; then what the device library makes
of it (kernels/wgmma.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact, random_bytes
from tests.golden_gpu.mma_probes import from_registers, matrix_of, places_a, product, to_registers
from tests.golden_gpu.numbers import DTYPES, Array
from tests.golden_gpu.probe import Arrays, Probe, pattern

N: Final = 32
A_BYTES: Final = 8192
B_BYTES: Final = 4096
CASES: Final = 2
SWIZZLE_CODE: Final = {0: 0, 128: 1, 64: 2, 32: 3}


@dataclass(frozen=True)
class Wgmma:
    """One form: m64n32, k of 32 bytes. `a_major` is "k", "mn", or "registers"."""

    a: str
    b: str
    acc: str
    a_major: str = "k"
    b_major: str = "k"
    swizzle: int = 128
    accumulate: bool = True
    negate_a: bool = False

    @property
    def k(self) -> int:
        return 32 // int(DTYPES[self.a].itemsize)


FORMS: Final = (
    *(Wgmma("bf16", "bf16", "f32", swizzle=s) for s in (0, 32, 64, 128)),
    *(Wgmma("bf16", "bf16", "f32", "mn", "mn", s) for s in (0, 32, 64, 128)),
    *(Wgmma("f16", "f16", "f32", a, b, s) for a, b, s in (("k", "mn", 128), ("mn", "k", 64), ("k", "k", 32))),
    Wgmma("f16", "f16", "f16"),
    Wgmma("bf16", "bf16", "f32", accumulate=False),
    Wgmma("bf16", "bf16", "f32", negate_a=True),
    Wgmma("bf16", "bf16", "f32", "registers", "mn", 128),
    Wgmma("f16", "f16", "f16", "registers", "k", 64),
    *(Wgmma("e4m3", "e4m3", "f32", swizzle=s) for s in (0, 32, 64, 128)),
    Wgmma("e5m2", "e4m3", "f32"),
    Wgmma("e4m3", "e5m2", "f16"),
    Wgmma("e4m3", "e4m3", "f32", "registers"),
)


def image(matrix: Array, major: str, swizzle: int) -> tuple[Array, int, int]:
    """(bytes, leading and stride byte offset) of a matrix [m or n, k] as the canonical layouts have it."""
    size = matrix.itemsize
    rows, k = matrix.shape
    r, c = np.ogrid[:rows, :k]
    if major == "k":
        leading, stride = (128, 256) if swizzle == 0 else (16, 8 * swizzle)
        if swizzle == 0:
            at = r % 8 * 16 + r // 8 * stride + c * size // 16 * leading + c * size % 16
        else:
            at = r % 8 * swizzle + r // 8 * stride + c * size
    elif swizzle == 0:
        leading, stride = 128 * (rows * size // 16), 128
        at = c % 8 * 16 + r * size // 16 * stride + c // 8 * leading + r * size % 16
    else:
        leading, stride = 8 * swizzle * (k // 8), 8 * swizzle
        at = r * size % swizzle + r * size // swizzle * leading + c % 8 * swizzle + c // 8 * stride
    at = swizzled(np.broadcast_to(at, matrix.shape), swizzle)
    out = np.zeros(int(at.max()) + size, np.uint8)
    raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(rows, k, size)
    for byte in range(size):
        out[at + byte] = raw[:, :, byte]
    return out, leading, stride


def swizzled(offset: Array, swizzle: int) -> Array:
    """Offsets in memory aligned to 1024 bytes: 16-byte chunks exchanged by the address bits from 7 on."""
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    moved: Array = offset ^ ((offset >> 7 & mask) << 4)
    return moved


def descriptor(leading: int, stride: int, swizzle: int) -> int:
    """All but the address."""
    return leading >> 4 << 16 | stride >> 4 << 32 | SWIZZLE_CODE[swizzle] << 62


def _places(acc: str) -> tuple[Array, Array]:
    """Rows and columns of the accumulators' elements, [register, thread, element]."""
    per = 4 // DTYPES[acc].itemsize
    register, thread, element = np.ogrid[: N // (2 * per), :128, :per]
    index = register * per + element
    shape = (N // (2 * per), 128, per)
    lane = thread % 32
    row = thread // 32 * 16 + lane // 4 + 8 * (index // 2 % 2)
    return np.broadcast_to(row, shape), np.broadcast_to(8 * (index // 4) + 2 * (lane % 4) + index % 2, shape)


def _matrices(form: Wgmma, case: int, seed: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    return (
        matrix_of(form.a, (64, form.k), case, rng),
        matrix_of(form.b, (N, form.k), case, rng),
        matrix_of(form.acc, (64, N), case, rng),
    )


def _inputs() -> dict[str, Array]:
    count = CASES * len(FORMS)
    images = np.zeros((count, A_BYTES + B_BYTES), np.uint8)
    registers = np.zeros((count, 128, 4), np.uint32)
    descriptors = np.zeros((count, 2), np.uint64)
    accumulators = np.zeros((count, 128, 16), np.uint32)
    for case in range(CASES):
        for i, form in enumerate(FORMS):
            at = case * len(FORMS) + i
            a, b, c = _matrices(form, case, 100 + at)
            accumulators[at, :, : N * DTYPES[form.acc].itemsize // 8] = to_registers(c, _places(form.acc))
            b_image, leading, stride = image(b, form.b_major, form.swizzle)
            images[at, A_BYTES : A_BYTES + len(b_image)] = b_image
            descriptors[at, 1] = descriptor(leading, stride, form.swizzle)
            if form.a_major == "registers":
                own = places_a(16, form.k, 4 // a.itemsize)
                registers[at] = np.concatenate([to_registers(a[16 * w : 16 * w + 16], own) for w in range(4)])
            else:
                a_image, leading, stride = image(a, form.a_major, form.swizzle)
                images[at, : len(a_image)] = a_image
                descriptors[at, 0] = descriptor(leading, stride, form.swizzle)
    out = np.zeros((count, 128 * 16), np.uint32)
    return {"images": images, "registers": registers, "descriptors": descriptors, "c": accumulators, "out": out}


def _wanted(arrays: Arrays) -> dict[str, Wanted]:
    count = CASES * len(FORMS)
    out, rules = np.zeros((count, 128, 16), np.uint32), []
    for case in range(CASES):
        for i, form in enumerate(FORMS):
            at = case * len(FORMS) + i
            a, b, _ = _matrices(form, case, 100 + at)
            n = N * DTYPES[form.acc].itemsize // 8
            c = from_registers(arrays["c"][at, :, :n], _places(form.acc), form.acc, (64, N))
            d, scale = product(a, b.T, c if form.accumulate else np.zeros_like(c))
            if form.negate_a:
                d = (c.astype(np.float64) if form.accumulate else 0) * 2 - d
            out[at, :, :n] = to_registers(d.astype(DTYPES[form.acc]), _places(form.acc))
            error = 2.0**-9 if form.acc == "f16" else 2.0**-11 if form.a[0] == "e" else 2.0**-20
            rules.append(Rule(form.acc, 4 // DTYPES[form.acc].itemsize, absolute=error * scale if case else 0.0))
    return {"out": Wanted(out.reshape(count, -1), tuple(rules))}


HEAD: Final = """
// Block b runs form b % FORMS: its images of A and B, at multiples of 1024 bytes of shared memory, are multiplied once.
extern "C" __global__ void __launch_bounds__(128) wgmma(const unsigned char* images, const unsigned* registers,
    const unsigned long long* descriptors, const unsigned* accumulators, unsigned* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned t = threadIdx.x, b = blockIdx.x, base = (unsigned)__cvta_generic_to_shared(memory);
  for (unsigned i = t; i < BYTES / 4; i += 128) ((unsigned*)memory)[i] = ((const unsigned*)(images + b * BYTES))[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const unsigned long long desc_a = descriptors[2 * b] | base >> 4, desc_b = descriptors[2 * b + 1] | (base + A_BYTES) >> 4;
  const unsigned* a = registers + (b * 128 + t) * 4;
  const unsigned* c = accumulators + (b * 128 + t) * 16;
  unsigned* d = out + (b * 128 + t) * 16;
"""


def cuda() -> str:
    """The kernel's text."""
    text = (
        HEAD.replace("A_BYTES", str(A_BYTES)).replace("BYTES", str(A_BYTES + B_BYTES)).replace("FORMS", str(len(FORMS)))
    )
    for i, form in enumerate(FORMS):
        count = N * DTYPES[form.acc].itemsize // 8
        kind, letter = ("float", "f") if form.acc == "f32" else ("unsigned", "r")
        regs = ", ".join(f"%{j}" for j in range(count))
        from_registers_ = form.a_major == "registers"
        inputs = [f'"r"(x[{j}])' for j in range(4)] if from_registers_ else ['"l"(desc_a)']
        first = ", ".join(f"%{count + j}" for j in range(4))
        a_text = f"{{{first}}}" if from_registers_ else f"%{count}"
        b_text = f"%{count + len(inputs)}"
        majors = (
            [] if DTYPES[form.a].itemsize == 1 else [form.b_major] if from_registers_ else [form.a_major, form.b_major]
        )
        tail = ", ".join(
            [str(int(form.accumulate)), "-1" if form.negate_a else "1", "1", *(str(int(m == "mn")) for m in majors)]
        )
        ptx = f"wgmma.mma_async.sync.aligned.m64n{N}k{form.k}.{form.acc}.{form.a}.{form.b} {{{regs}}}, {a_text}, {b_text}, "
        scale, rest = tail.split(", ", 1)
        ptx = f"{{ .reg .pred p; setp.ne.u32 p, {scale}, 0; {ptx}p, {rest}; }}"
        outputs = ", ".join(f'"+{letter}"(r[{j}])' for j in range(count))
        inputs.append('"l"(desc_b)')
        text += (
            f"  if (b % {len(FORMS)} == {i}) {{\n"
            f"    {kind} r[{count}];\n    unsigned x[4] = {{a[0], a[1], a[2], a[3]}};\n"
            f"    for (unsigned j = 0; j < {count}; ++j) r[j] = ((const {kind}*)c)[j];\n"
            '    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");\n'
            f'    asm volatile("{ptx}" : {outputs} : {", ".join(inputs)});\n'
            '    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");\n'
            '    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");\n'
            f"    for (unsigned j = 0; j < {count}; ++j) (({kind}*)d)[j] = r[j];\n  }}\n"
        )
    return text + "}\n"


# The device library -------------------------------------------------------------------------------------------------

UNIT: Final = "wgmma_library"
TOKENS, DIMS, WIDE = 32, 64, 256
# Sizes of groups of threads that meet at barriers of their own.
MEETINGS: Final = (32, 64, 128, 256)


def _products_inputs(kind: str, values: bool, outs: tuple[str, ...], cases: int) -> dict[str, Array]:
    """A block in two adds to what is there; the others must not see it. The first half of them has whole numbers."""
    rng, cols, b_shape = np.random.default_rng(210), TOKENS, (TOKENS, DIMS)
    if values:
        cols, b_shape = WIDE, (TOKENS, WIDE)
    made = [
        [matrix_of(name, shape, 2 * i // cases, rng) for i in range(cases)]
        for name, shape in ((kind, (64, DIMS)), (kind, b_shape), ("f32", (64, cols)))
    ]
    a, b, c = (np.stack(matrices) for matrices in made)
    c[::2] = np.nan
    found = {"a": pattern(a).view(np.uint32), "b": pattern(b).view(np.uint32), "c": pattern(c)}
    return found | {name: np.zeros((cases, 64 * cols), np.uint32) for name in outs}


def _products(kind: str, values: bool, outs: tuple[str, ...], arrays: Arrays) -> dict[str, Wanted]:
    a, b = (arrays[name].view(DTYPES[kind]) for name in "ab")
    c, out, rules = arrays["c"].view(np.float32), [], []
    for i in range(len(a)):
        half = TOKENS * (i // 2 % 2)
        left, right = (a[i, :, half : half + TOKENS], b[i]) if values else (a[i], b[i].T)
        d, scale = product(left, right, c[i] if i % 2 else np.zeros_like(c[i]))
        out.append(pattern(d.astype(np.float32)).ravel())
        rules.append(Rule("f32", absolute=2.0**-18 * scale if 2 * i >= len(a) else 0.0))
    return {name: Wanted(np.stack(out), tuple(rules)) for name in outs}


def _descriptors_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(211)
    # All of an H100's shared memory, in tiles and in steps along a row.
    addresses = rng.integers(0, 227, 32) * 1024 + rng.integers(0, 4, 32) * 32
    panels = rng.integers(1, 64, 32) * 1024
    addresses[:2], panels[:3] = [0, 226 * 1024 + 96], [1024, 65536, 16]
    found = {"addresses": addresses.astype(np.uint32), "panels": panels.astype(np.uint32)}
    return found | {"out": np.zeros((32, 5), np.uint64)}


def _descriptors(arrays: Arrays) -> dict[str, Wanted]:
    rows = []
    for i, (address, panel) in enumerate(zip(arrays["addresses"].tolist(), arrays["panels"].tolist(), strict=True)):
        tiles = ((panel, address), (16, address), (panel, address), (panel, address), (panel, address + 16 * i))
        rows.append([descriptor(step, 1024, 128) | at >> 4 for step, at in tiles])
    return {"out": exact(np.array(rows, np.uint64))}


def _barriers_inputs() -> dict[str, Array]:
    return {"in": random_bytes(4 * 256 * 4, 212).view(np.uint32), "out": np.zeros((len(MEETINGS), 256), np.uint32)}


def _barriers(arrays: Arrays) -> dict[str, Wanted]:
    out = arrays["in"].reshape(len(MEETINGS), 256).copy()
    for own, size in zip(out, MEETINGS, strict=True):
        for group, begin in enumerate(range(0, 256, size)):
            for turn in range(2 + group):
                own[begin : begin + size] = np.roll(own[begin : begin + size] * np.uint32(3) + np.uint32(turn), -37)
    return {"out": exact(out)}


def _library() -> list[Probe]:
    found = [
        Probe("library_wgmma_descriptors", UNIT, "wgmma_descriptors", _descriptors_inputs, _descriptors, 32),
        Probe("library_wgmma_barriers", UNIT, "wgmma_barriers", _barriers_inputs, _barriers, 256),
    ]
    # Blocks: whole numbers and ordinary ones; each half of a's columns, with panels of b of each pitch; added or not.
    for what, values, outs, blocks, shared in (
        ("keys", False, ("shared", "registers"), 4, 8192 + 4096),
        ("values", True, ("out",), 8, 8192 + 4 * 6144),
    ):
        for kind in ("bf16", "f16"):
            inputs = partial(_products_inputs, kind, values, outs, blocks)
            wanted = partial(_products, kind, values, outs)
            name = f"wgmma_{what}_{kind}"
            found.append(Probe(f"library_{name}", UNIT, name, inputs, wanted, 128, (blocks, 1, 1), shared))
    return found


def probes() -> list[Probe]:
    """All of this module."""
    rows = [f"{f} {case}" for case in range(CASES) for f in FORMS]
    shared = A_BYTES + B_BYTES
    form = Probe("wgmma", "wgmma", "wgmma", _inputs, _wanted, 128, (CASES * len(FORMS), 1, 1), shared, rows=rows)
    return [form, *_library()]
