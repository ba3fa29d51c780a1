"""The accessor's kernel over a configuration, and what the oracle expects of it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen import KernelSet, ops
from kvgen.layout.dtypes import dtype
from kvgen.reference import Rows
from kvgen.reference.segments import Coded, Plain
from tests.accessor.grid import Config
from tests.accessor.scene import REQUESTS, Bytes, Scene, aligned

HERE: Final = Path(__file__).parent
STORE, BY_POINTER, LOAD = range(3)
INPUTS: Final = ("main", "rope", "scale_rows")
OUTPUTS: Final = ("values", "floats", "raw", "found_scales", "zeros", "nulls")


def text(config: Config, file: str) -> str:
    """A kernel's text for a cache with V or without."""
    k, v = config.widths
    head = f"#define HAS_V {int('v' in config.cache.storage.roles)}\n#define K_WIDTHS {k}\n#define V_WIDTHS {v}\n"
    return head + (HERE / file).read_text(encoding="utf-8")


def accessor(config: Config) -> ops.Custom:
    """The kernel: `mode` of `value` (0: K, 1: V) over `tokens` tokens of every request."""
    arrays = [ops.Array(n, "u8", (f"{n}_bytes",), "inout", align=4) for n in (*INPUTS, *OUTPUTS)]
    numbers = [ops.Size("requests", "B"), *(ops.Scalar(n, "u32") for n in ("tokens", "mode", "value"))]
    return ops.Custom(
        name="accessor", text=text(config, "accessor.cu"), params=(*arrays, *numbers), grid="B", threads=64, writes=True
    )


def kernel_set(config: Config, *found: Any, of: str = "bytes") -> KernelSet:
    """A set of these operations over the configuration's cache; its name is its own for each `of`."""
    name = f"{of}_{zlib.crc32(config.name.encode()):08x}"
    return KernelSet(name=name, q_heads=config.cache.kv_heads, cache=config.cache, ops=found)


@dataclass(frozen=True)
class Shape:
    """What a role's row of a head is made of: dims of its main part and of its RoPE part, scales and places for them."""

    main: int
    packed: int
    rope: int
    heads: int
    scale_heads: int
    groups: int
    zero: int
    element: np.dtype[Any]
    scale: np.dtype[Any] | None
    given: bool

    @staticmethod
    def of(rows: Rows) -> Shape:
        """Of the oracle's rows."""
        part, rope = rows.parts[0], sum(p.dim for p in rows.parts[1:])
        if isinstance(part, Plain):
            return Shape(part.dim, 1, rope, part.heads, 1, 1, 0, part.elements._view.dtype, None, False)
        assert isinstance(part, Coded)
        quant, heads = part.quant, rows.heads // part.block[1]
        kind = dtype(quant.scale_dtype).numpy() if quant.scale_dtype else None
        groups = -(-part.dim // part.block[2])
        one = np.dtype(np.uint8)
        return Shape(
            part.dim, 1 + quant.codes.packed, rope, part.heads, heads, groups, int(quant.zero), one, kind,
            part.given is not None,
        )  # fmt: skip

    def widths(self, mask: int, *, loads: bool) -> list[int]:
        """Those of `mask` that the parts are multiples of."""
        other = self.rope if loads and self.rope else self.main
        least = self.packed
        return [w for w in (1, 2, 4, 8, 16, 32) if w & mask and w >= least and self.main % w == 0 and other % w == 0]


class Trial:
    """A role of a scene: random contents, the oracle's memory with them, and what loads give."""

    def __init__(self, scene: Scene, role: int, memory: dict[str, list[Bytes]]) -> None:
        """Writes the contents to `memory`, a snapshot of the scene's, through the oracle."""
        self.scene, self.role, self.mask = scene, role, scene.config.widths[role]
        self.rows = scene.rows(memory)[role]
        self.shape = shape = Shape.of(self.rows)
        self.count = REQUESTS * scene.tokens
        rng = scene.rng
        self.main = rng.integers(0, 256, (self.count, shape.heads, shape.main * shape.element.itemsize // shape.packed))
        value = dtype(scene.cache.dtype).numpy()
        self.rope = rng.integers(0, 256, (self.count, shape.heads, shape.rope * value.itemsize), np.uint8)
        self.main = self.main.astype(np.uint8)
        places = shape.groups * (1 + shape.zero)
        kind = shape.scale or np.dtype(np.uint8)
        self.scales = np.zeros((self.count, shape.scale_heads, places), kind)
        if shape.scale is not None:
            quant = scene.cache.quants["kv"[role]]
            assert quant is not None and quant.scale_dtype is not None
            self.scales[...] = scene.scales(self.scales.size, quant.scale_dtype).reshape(self.scales.shape)

    def write(self, *, rope: bool = True) -> None:
        """What the stores must do."""
        part = self.rows.parts[0]
        tokens = part.block[0] if isinstance(part, Coded) and part.block[0] else 1
        for i, (b, token, places) in enumerate(self.scene.places()):
            if places is None or not self.sealed(b, token):
                continue
            place, at = places[self.role], token % self.scene.page_tokens
            elements = part.codes if isinstance(part, Coded) else part.elements
            row = self.main[i].view(self.shape.element)
            if self.shape.packed == 2:
                row = np.stack([row & 15, row >> 4], axis=-1).reshape(len(row), -1)
            elements.write(place.page, at, row)
            if isinstance(part, Coded) and part.scales is not None and token % tokens == 0:
                part.scales.write(place.scales, at // tokens, self.scales[i])
            if self.shape.rope and rope:
                self.rows.parts[1].write(place, at, self.rope[i].view(dtype(self.scene.cache.dtype).numpy())[None])

    def sealed(self, b: int, token: int) -> bool:
        """Whether the token has codes; K's newest wait for theirs in the tail."""
        part = self.rows.parts[0]
        return not (isinstance(part, Coded) and part.quant.residual) or token < self.scene.tables["k_sealed"][b]

    def arguments(self) -> dict[str, Any]:
        """The kernel's arrays, the outputs full of canaries."""
        shape, value = self.shape, dtype(self.scene.cache.dtype).numpy()
        heads = self.count * shape.heads
        scale = heads * shape.groups * (shape.scale.itemsize if shape.scale is not None else 1)
        sizes = {
            "values": len(shape.widths(self.mask, loads=True)) * heads * (shape.main + shape.rope) * value.itemsize,
            "floats": heads * (shape.main + shape.rope) * 4,
            "raw": len(shape.widths(self.mask, loads=False)) * self.main.size,
            "found_scales": 2 * scale,
            "zeros": scale,
            "nulls": heads,
        }
        found = {n: aligned(max(a.nbytes, 4)) for n, a in self.inputs.items()}
        for name, given in self.inputs.items():
            found[name][: given.nbytes] = np.ascontiguousarray(given).reshape(-1).view(np.uint8)
        return found | {n: aligned(s) for n, s in sizes.items()}

    @property
    def inputs(self) -> dict[str, NDArray[Any]]:
        return {"main": self.main, "rope": self.rope, "scale_rows": self.scales}

    def check_loads(self, out: dict[str, Any]) -> None:
        """Every load of every width against the oracle's reading of the scene's memory."""
        shape, scene = self.shape, self.scene
        rows = scene.rows()[self.role]
        part, kind = rows.parts[0], dtype(scene.cache.dtype).numpy()
        values = np.zeros((self.count, shape.heads, shape.main + shape.rope), kind)
        floats = np.zeros(values.shape, np.float32)
        raw, nulls = np.zeros(self.main.shape, np.uint8), np.full((self.count, shape.heads), 3, np.uint8)
        scales = np.zeros((self.count, shape.heads, shape.groups * (1 + shape.zero)), shape.scale or np.uint8)
        scaled = shape.scale is not None
        for i, (b, token, places) in enumerate(scene.places()):
            if places is None:
                continue
            place, at = places[self.role], token % scene.page_tokens
            with np.errstate(all="ignore"):
                floats[i] = rows.token_numbers(b, token, place)
                values[i] = rows.token(b, token, place)
            if not self.sealed(b, token):
                continue
            nulls[i] = 0 if scaled else 2
            if scaled:
                assert isinstance(part, Coded)
                codes = part.codes.read(place.page, at)
                raw[i] = codes[:, 0::2] | codes[:, 1::2] << 4 if shape.packed == 2 else codes.view(np.uint8)
                stored = part.given if part.given is not None else None
                if stored is None:
                    assert part.scales is not None
                    stored = part.scales.read(place.scales, at // part.block[0])
                scales[i] = stored.repeat(shape.heads // shape.scale_heads, axis=0)
        if not scaled:
            nulls |= 4  # no scales begin anywhere
        quantized = isinstance(part, Coded)
        for n, width in enumerate(shape.widths(self.mask, loads=True)):
            found = out["values"].view(kind).reshape(-1, *values.shape)[n]
            same(found, values, f"load<{width}>", nan=quantized)
        same(out["floats"].view(np.float32).reshape(values.shape), floats, "load<float>", nan=True)
        for n, width in enumerate(shape.widths(self.mask, loads=False)):
            same(out["raw"].reshape(-1, *raw.shape)[n], raw, f"load_quantized<{width}>")
        same(out["nulls"].reshape(nulls.shape), nulls, "pointers")
        if scaled:
            each = scales[..., :: 1 + shape.zero]
            for n, found in enumerate(out["found_scales"].view(shape.scale).reshape(2, *each.shape)):
                same(found, each, f"load_scale {n}")
            zeros = scales[..., 1::2] if shape.zero else np.zeros_like(each)
            same(out["zeros"].view(shape.scale).reshape(each.shape), zeros, "load_zero")


def same(found: NDArray[Any], wanted: NDArray[Any], what: str, *, nan: bool = False) -> None:
    """The same bits; with `nan` any NaN is as good as another."""
    a, b = np.ascontiguousarray(found), np.ascontiguousarray(wanted).astype(found.dtype, copy=False)
    number = np.dtype(f"u{a.dtype.itemsize}")
    differ = a.view(number) != b.view(number)
    if nan:
        differ &= ~(np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32)))
    assert not differ.any(), (
        f"{what}: {differ.sum()} of {differ.size} differ, first at {np.argwhere(differ)[0]}: {a[differ][0]!r}, not "
        f"{b[differ][0]!r}"
    )


__all__ = ["BY_POINTER", "LOAD", "STORE", "Shape", "Trial", "accessor", "kernel_set", "same"]
