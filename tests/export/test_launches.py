"""Exported launch functions give the driver what kvgen's launchers give it: every byte, of every kernel of every checked-in set.

Python's side is a right call of each kernel over arrays without memory (tests/support/call_tables.py). In C++ the same arrays go
through layer_of(), pages_of(), use() and the members' defaults, so that all of these are held to it as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvgen.codegen.emit import set_plans
from kvgen.codegen.render import render
from kvgen.config import find_config
from kvgen.export.header import header_context
from kvgen.paths import templates_root
from kvgen.plan.params import Array, Count, Scalar, Size
from kvgen.plan.split_plan import SplitPlan
from kvgen.runtime import Workspace, cuda, gpu, tensor_map
from kvgen.runtime.arrays import ArrayView
from kvgen.runtime.other_cache import OtherCache
from kvgen.runtime.page_pool import PagePool
from kvgen.schema.loader import LoadedSet, load_folder
from tests.export.toolchain import program, run
from tests.support import call_tables
from tests.support.call_tables import DEVICE, SETS, Call, Memory, calls, workspace_at
from tests.support.launching import NotingDriver

ROOT = Path(__file__).resolve().parents[2]
GROUPS = [SETS[start::8] for start in range(8)]
CAPABILITIES = {"sm_80": (8, 0), "sm_89": (8, 9), "sm_90a": (9, 0), "sm_100f": (10, 0), "sm_120f": (12, 0)}
WORKSPACE = {"max_rows": 8, "multiprocessors": 4, "max_tokens": 2**20}  # as call_tables makes one

HEAD = """
#include <cstdio>
#include <vector>

void note_sizes(std::vector<size_t> sizes);

template <typename T>
void set(T*& member, CUdeviceptr address) { member = kvgen::device_pointer<T>(address); }
"""


class Driver(NotingDriver):
    """A driver of a GPU of any capability."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__()
        self.is_of = capability

    def capability(self, device: int) -> tuple[int, int]:
        return self.is_of


@dataclass(frozen=True)
class Expected:
    """A launch of Python's, as the stub prints one."""

    label: str
    line: str


def contiguous(memory: Memory, tensor: Any) -> ArrayView:
    """A tensor of the pool, as exported headers take them."""
    found = memory.array(tensor.dtype if isinstance(tensor.dtype, str) else tensor.dtype[0], tensor.shape)
    if tensor.page_align == 1:
        return found
    assert (tensor.dtype, tensor.axes) == ("u8", ("page", "byte"))
    return found._replace(strides=(-(-found.shape[1] // tensor.page_align) * tensor.page_align, 1))


def launched(call: Call, label: str, capability: tuple[int, int]) -> Expected:
    """What Python's launcher gives the driver."""
    driver = Driver(capability)
    driver.multiprocessors = lambda device: WORKSPACE["multiprocessors"]  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "driver", lambda: driver)
        patch.setattr(gpu, "cubin", lambda *_: b"stub")
        patch.setattr(tensor_map, "encode", lambda plan, device: bytes(128))  # as the stub of the driver leaves them
        gpu._function.cache_clear()
        cache = call.cache()
        given = [call.arguments[p.name] for p in call.kernel.arguments]
        given = [workspace_at(call.op, w.view.pointer, DEVICE) if isinstance(w, Workspace) else w for w in given]
        call.op.prepare(cache if call.kernel.all_layers else cache[1], given, None, call.kernel, call.planned_rows)()
        gpu._function.cache_clear()
    (found,) = driver.launches
    numbers = (
        *found["grid"],
        *found["block"],
        found["shared"],
        int(found["pdl"]),
        driver.shared.get(found["entry"], 0),
    )
    params = " ".join(data.hex() for data in found["params"])
    return Expected(label, f"{found['entry']} {' '.join(map(str, numbers))} {params}")


# The same in C++ -----------------------------------------------------------------------------------------------------------


def sizes_of(shape: tuple[int | str, ...], array: ArrayView) -> dict[str, int]:
    """The names in a shape, with what they are in an array."""
    named = {}
    for name, size in zip(shape, array.shape, strict=True):
        if isinstance(name, str):
            plain, _, more = name.partition("+")
            named[plain] = size - int(more or 0)
    return named


def filled(
    struct: str, prefix: str, kind: Any, pools: dict[str, Any], tables: dict[str, Any], layers: int
) -> list[str]:
    """Statements that make `struct`, a vector of the layers of a cache."""
    per_layer = not any("layer" in t.axes for t in kind.TENSORS)
    lines = [f"std::vector<{struct}> {prefix}layers;", f"{prefix}Tables {prefix}tables;"]
    known: dict[str, int] = {}
    for table in getattr(kind, "TABLES", ()):
        if table.name in tables:
            known |= sizes_of(table.shape, tables[table.name])
            lines.append(f"set({prefix}tables.{table.name}, {tables[table.name].pointer}ull);")
    lines += [f"{prefix}tables.{name} = {size};" for name, size in known.items()]
    for layer in range(layers):
        lines.append(f"{{ {prefix}Pools pools;")
        for tensor in kind.TENSORS:
            array = pools[tensor.name][layer] if per_layer else pools[tensor.name]
            lines.append(f"set(pools.{tensor.name}, {array.pointer}ull);")
            extents = sizes_of(tensor.shape, array)
            lines += [f"pools.{name} = {size};" for name, size in extents.items() if name not in known]
        more = "" if per_layer else f", {layer}"
        lines.append(f"{prefix}layers.push_back(layer_of(pools, {prefix}tables{more})); }}")
    return lines


def in_cpp(call: Call, label: str, archs: tuple[str, ...]) -> list[str]:
    """Statements that launch the kernel of `call` once for every target."""
    kernel, cache = call.kernel, type(call.cache())
    name = kernel.file.removesuffix(".cu")
    title = "".join(part.title() for part in name.split("_"))
    layers = len(call.cache())
    lines = [f"{{ using namespace kvgen::{call.set.__name__.rpartition('.')[2]};  // {label}"]
    lines += filled("Cache", "", cache, call.pools, call.tables, layers)
    lines += [f"{title}Arguments a;", f"a.cache = layers[{0 if kernel.all_layers else 1}];"]
    dims: dict[str, int] = {"one": 1}
    workspace = 0
    for table in cache.TABLES:
        dims |= sizes_of(table.shape, call.tables[table.name])
    for p in kernel.params:
        given = call.arguments.get(p.name)
        if isinstance(p, Array) and p.name == "workspace":
            workspace = given.view.pointer
        elif isinstance(p, Array):
            dims |= sizes_of(p.shape, given)
            lines.append(f"set(a.{p.name}, {given.pointer}ull);")
        elif isinstance(p, Scalar | Count):
            lines.append(f"a.{p.name} = 1;")
        elif isinstance(p, PagePool):
            of = "layers"
            if p.argument:
                of = "other"
                pools = dict(zip((t.name for t in type(given).TENSORS), given.given, strict=True))
                lines += ["std::vector<Cache> other; {"]
                lines += filled("Cache", "", type(given), pools, {}, layers)
                lines += ["other = layers; }"]
            lines.append(f"if (!pages_of({of}.data(), {layers}, &a.{p.name})) return 1;")
        elif isinstance(p, OtherCache):
            views = {n.partition("[")[0]: array for n, array, _ in given.memory} | dict(given.tables)
            prefix = p.cache.__name__
            pools = {t.name: [views[t.name]] * 2 if per_layer(p.cache) else views[t.name] for t in p.cache.TENSORS}
            lines += filled(prefix, prefix, p.cache, pools, views, 2)
            lines.append(f"a.{p.name} = {prefix}layers[1];")
    for p in kernel.params:
        if isinstance(p, Size):
            lines += number(p, kernel.params, dims, call.planned_rows)
    lines.append("const std::vector<size_t> sizes = {sizeof(a.cache)")
    lines += [f", sizeof(a.{p.name})" for p in kernel.params] + ["};", "note_sizes(sizes);"]
    for arch in archs:
        if workspace:
            op, split = call.op.KERNEL.file.removesuffix(".cu"), split_on(call.op, arch)
            tokens = f", {WORKSPACE['max_tokens']}" if split.chunk_tokens else ""
            made = (
                f"{op}_workspace({WORKSPACE['max_rows']}, {WORKSPACE['multiprocessors']}{tokens}, kvgen::Arch::{arch})"
            )
            lines.append(f"use({made}, kvgen::device_pointer<uint8_t>({workspace}ull), &a);")
            lines.append(f"if ({made}.bytes != {split.sizes(**WORKSPACE)['bytes']}) return 1;")
        lines += [
            '{ CUfunction f; CUmodule m; if (cuModuleLoadData(&m, "") != CUDA_SUCCESS) return 1;',
            f"if (kvgen::load<{title}Kernel>(&f, m, kvgen::Arch::{arch}) != CUDA_SUCCESS) return 1;",
            f"if (const char* wrong = problem(a, kvgen::Arch::{arch})) {{ std::puts(wrong); return 1; }}",
            f"if ({name}(f, nullptr, a, kvgen::Arch::{arch}) != CUDA_SUCCESS) return 1; }}",
        ]
    return [*lines, "}"]


def split_on(op: Any, arch: str) -> SplitPlan:
    """How the launcher divides a workspace on an architecture."""
    found: SplitPlan = dict(op.SPLIT_PLANS).get(arch, op.SPLIT_PLAN)
    return found


def per_layer(kind: Any) -> bool:
    return not any("layer" in t.axes for t in kind.TENSORS)


def number(p: Size, params: tuple[Any, ...], dims: dict[str, int], rows: int) -> list[str]:
    """A statement that sets a size from the shapes alone; none where use() or the member's default does. A planner plans
    `rows`."""
    if p.value == "planned_rows":
        return [f"a.{p.name} = {rows};"]
    if p.value in ("num_sm_parts", "max_rows", "max_chunks", "max_slots"):
        return []
    if p.value.endswith((".stride", ".row_stride")):
        name, _, which = p.value.partition(".")
        array = next(q for q in params if isinstance(q, Array) and q.name == name)
        inner = array.shape[1 if which == "stride" else 2 :]
        if all(isinstance(n, int) for n in inner):
            return []
        return [f"a.{p.name} = {' * '.join(str(extent(n, dims)) for n in inner)};"]
    if p.value.endswith("_tokens"):
        return [f"a.{p.name} = a.{p.value.removesuffix('_tokens')}.max_cache_length;"]
    return [f"a.{p.name} = {' * '.join(str(dims[n]) for n in p.value.split('*'))};"]


def extent(axis: int | str, dims: dict[str, int]) -> int:
    name, _, more = str(axis).partition("+")
    return axis if isinstance(axis, int) else dims[name] + int(more or 0)


@functools.cache
def checked_in() -> dict[str, LoadedSet]:
    """The project's sets."""
    config = find_config(ROOT)
    return {s.kernels.name: s for s in load_folder(config.specs, config.root)}


def every_call(names: tuple[str, ...]) -> Iterator[tuple[Call, str]]:
    for name in names:
        for label, call in calls(name):
            yield call, f"{name} {label}"


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_the_driver_gets_the_same_bytes(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_tables.Memory, "tensor", contiguous)
    loaded = checked_in()
    kernels = 0
    source = [HEAD, "int main() {"]
    includes = []
    expected: list[Expected] = []
    for name in names:
        found = loaded[name]
        plans = set_plans(found)
        context = header_context(found.kernels, found.doc, plans, tuple(op.name for op in found.kernels.ops))
        (tmp_path / f"{name}.h").write_text(render("export/set.h.j2", context), encoding="utf-8")
        includes.append(f'#include "{name}.h"')
        assert {k.entry for k in context.kernels} == {p.entry for group in plans.values() for p in group}
        kernels += len(context.kernels)
    for call, label in every_call(names):
        archs = loaded[label.split()[0]].kernels.arch
        expected += [launched(call, label, CAPABILITIES[arch]) for arch in archs]
        source += in_cpp(call, label, archs)
    assert len({e.line.split()[0] for e in expected}) == kernels, "every kernel is launched"
    text = "\n".join([*includes, *source, "return 0; }", ""])
    got = run(str(program(tmp_path, text, tmp_path, templates_root() / "export"))).splitlines()
    assert len(got) == len(expected)
    for line, wanted in zip(got, expected, strict=True):
        assert line == wanted.line, wanted.label
