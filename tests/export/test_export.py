"""`kvgen export` beyond the launches: its files, its words, its grids, its workspaces, its examples."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvgen import KernelSet, Latent, Paged, Quant, ops
from kvgen.codegen.emit import render_all, set_plans
from kvgen.codegen.render import render
from kvgen.compile import Unit, compile_unit
from kvgen.config import find_config
from kvgen.errors import ToolError
from kvgen.export.folder import export_files
from kvgen.export.header import header_context
from kvgen.export.words import comment, identifier
from kvgen.expr.nodes import Expr, ceil_div, const, evaluate, maximum, minimum, var
from kvgen.expr.to_cpp import cpp
from kvgen.layout.dtypes import DTYPES
from kvgen.paths import templates_root
from kvgen.plan.params import TensorMap
from kvgen.plan.split_plan import SplitPlan
from kvgen.runtime.faults import Fault, describe
from kvgen.schema.loader import LoadedSet, load_file
from tests.cli.conftest import Folder
from tests.export.toolchain import FLAGS, clean, compiler, cuda_include, program, run
from tests.sets import spec_path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = (
    "llama3_8b",
    "layout_ragged",
    "llama3_8b_kivi",
    "engine_qwen3_fp8",
    "engine_llama3_8b",
    "deepseek_v3_hopper",
)


def exported(folder: Path, *loaded: LoadedSet) -> Path:
    """The files of an export of these sets, written to a folder."""
    files = export_files(
        [(s, tuple(op.name for op in s.kernels.ops)) for s in loaded], render_all(list(loaded)), "generated"
    )
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def small(*operations: Any, **fields: Any) -> LoadedSet:
    """A small set of these operations."""
    cache = Paged(dtype="f16", kv_heads=2, head_dim=16, page_size=4)
    kernels = KernelSet(name="small", q_heads=4, cache=cache, ops=operations, **fields)
    return LoadedSet(kernels, "specs/small.py", "A small set.")


def checked_in(name: str) -> LoadedSet:
    path = spec_path(name)
    (found,) = load_file(path, path.relative_to(ROOT).as_posix())
    return found


def headers(folder: Path, *names: str) -> None:
    """The headers of checked-in sets alone."""
    for name in names:
        loaded = checked_in(name)
        plans = set_plans(loaded)
        context = header_context(loaded.kernels, loaded.doc, plans, tuple(plans))
        (folder / f"{name}.h").write_text(render("export/set.h.j2", context), encoding="utf-8")


# Words ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["new", "Cache", "uint32_t", "a__b", "2a", "a b", "é", "CUtensorMap", "std", "bf16", ""]
)
def test_names_that_cpp_takes_otherwise_are_refused(name: str) -> None:
    with pytest.raises(ToolError, match=r"^small/x: got .*; the exported header needs a name that is free in C\+\+"):
        identifier(name, "small/x")


@pytest.mark.parametrize(
    ("name", "kind"), [("load", "function"), ("most", "function"), ("layer", "size"), ("arguments", "size")]
)
def test_what_is_free_as_a_member_may_not_be_elsewhere(name: str, kind: Any) -> None:
    assert identifier(name, "small/x") == name
    with pytest.raises(ToolError, match=r"no name of kvgen\.h"):
        identifier(name, "small/x", kind)


def test_the_header_has_every_element_type() -> None:
    """Types of C++ aside; a member called so is refused."""
    text = (templates_root() / "export" / "kvgen.h").read_text(encoding="utf-8")
    own = {d.c for d in DTYPES.values() if d.c != "float" and not d.c.endswith("_t")}
    assert own == set(re.findall(r"^struct (\w+) { uint(?:8|16)_t bits; };", text, re.MULTILINE))
    for name in {d.c for d in DTYPES.values()}:
        with pytest.raises(ToolError, match=r"free in C\+\+"):
            identifier(name, "small/x")


@pytest.mark.parametrize("name", ["q", "k_stride", "T", "num_rows", "page_table"])
def test_other_names_are_taken(name: str) -> None:
    assert identifier(name, "small/x") == name


def test_a_comment_ends_with_its_line(tmp_path: Path) -> None:
    """Whatever a spec's texts hold, no code comes out of a comment, and the next line is code."""
    texts = [
        "ends in a backslash\\",
        "*/ int x = 1; /*",
        "a\nint y = 2;",
        "turned \u202eround",
        "??/",
        "tab\there\x00\x1b[31m",
        "\u2028z",
        "#error",
    ]
    lines = [f"//{' ' if line else ''}{line}" for text in texts for line in comment(text)]
    assert all(line.isprintable() for line in lines)
    run(str(program(tmp_path, "\n".join([*lines, "int main() { return 0; }", ""]))))


def test_paragraphs_stay_and_lines_are_filled() -> None:
    text = "One\ntwo.\n\nThree.\n- four\n- five"
    assert comment(text) == ("One two.", "", "Three.", "- four", "- five")
    assert max(map(len, comment("word " * 200))) <= 121


# Grids ---------------------------------------------------------------------------------------------------------------------


def drawn(rng: random.Random, depth: int) -> Expr:
    if depth == 0:
        return var(rng.choice("TBN")) if rng.random() < 0.7 else const(rng.choice((0, 1, 3, 8, 2**31, 2**32)))
    a, b = drawn(rng, depth - 1), drawn(rng, depth - 1)
    try:
        return rng.choice(
            (
                lambda: a + b,
                lambda: a - b,
                lambda: a * b,
                lambda: a // b,
                lambda: a % b,
                lambda: ceil_div(a, b),
                lambda: minimum(a, b),
                lambda: maximum(a, b),
            )
        )()
    except (ValueError, ZeroDivisionError):
        return a


def test_grid_rules_in_cpp_give_what_python_gives(tmp_path: Path) -> None:
    """Every operator over drawn numbers; what is negative, divides by zero or passes 64 bits is not valid."""
    rng = random.Random(5)
    lines, counts = [], {True: 0, False: 0}
    for _ in range(300):
        expr, sizes = drawn(rng, 3), {n: rng.choice((0, 1, 2, 7, 255, 2**31 - 1, 2**32 - 1)) for n in "TBN"}
        value = value_of(expr, sizes)
        names = "".join(f"[[maybe_unused]] const Blocks {n} = blocks(uint32_t{{{v}u}}); " for n, v in sizes.items())
        wanted = f"x.valid && x.number == {value}ull" if value is not None else "!x.valid"
        lines.append(f"{{ {names}const Blocks x = {cpp(expr)}; if (!({wanted})) return {len(lines) % 250 + 1}; }}")
        counts[value is not None] += 1
    assert min(counts.values()) > 20
    text = '#include "kvgen.h"\nusing namespace kvgen;\nint main() {\n' + "\n".join(lines) + "\nreturn 0; }\n"
    run(str(program(tmp_path, text, templates_root() / "export")))


def value_of(expr: Expr, sizes: dict[str, int]) -> int | None:
    """The value of a rule; None where a part of it is no number of 64 bits."""
    from kvgen.expr.nodes import Binary

    if isinstance(expr, Binary):
        left, right = value_of(expr.left, sizes), value_of(expr.right, sizes)
        if left is None or right is None or (right == 0 and expr.op in ("/", "%", "ceil_div")):
            return None
        found = evaluate(Binary(0, expr.op, const(left), const(right)), {})
        return found if 0 <= found < 2**64 else None
    return int(evaluate(expr, sizes))


def test_a_grid_that_no_gpu_takes_is_refused_and_an_empty_one_is_not(tmp_path: Path) -> None:
    text = """
#include "kvgen.h"
using namespace kvgen;
int main() {
  static_assert(Grid{2147483647, 65535, 65535}.valid() && !Grid{2147483648ull, 1, 1}.valid() && !Grid{1, 65536, 1}.valid());
  static_assert(!blocks(int32_t{-1}).valid && blocks(int32_t{0}).valid && blocks(int64_t{5}).number == 5);
  static_assert(runs_on(Arch::sm_80, 8, 6) && !runs_on(Arch::sm_89, 8, 6));
  static_assert(!runs_on(Arch::sm_90a, 10, 0) && runs_on(Arch::sm_120f, 12, 1));
  if (launch(nullptr, nullptr, Arch::sm_80, Grid{1, 1, 65536}, 32, 0, nullptr) != CUDA_ERROR_INVALID_VALUE) return 1;
  return launch(nullptr, nullptr, Arch::sm_80, Grid{0, 1, 1}, 32, 0, nullptr) == CUDA_SUCCESS ? 0 : 2;
}
"""
    assert run(str(program(tmp_path, text, templates_root() / "export"))) == ""


def test_a_grid_over_a_size_that_the_kernel_does_not_take_is_refused() -> None:
    text = (
        '#include "cache.cuh"\nextern "C" __global__ void dump(const __grid_constant__ Cache cache, const f16* x) {}\n'
    )
    custom = ops.Custom(name="dump", text=text, params=[ops.Array("x", "f16", ("T", 4))], grid="T")
    with pytest.raises(ToolError) as caught:
        export_files([(small(custom), ("dump",))], {}, "generated")
    assert str(caught.value) == (
        "small/dump: its grid is worked out from 'T', which the kernel does not take, so a launch function in C++ does not know "
        "it; add Size(..., 'T') to params and to the kernel, or export the set's other operations: `kvgen export small/OPERATION`"
    )


# Workspaces, problems, tensor maps ----------------------------------------------------------------------------------------------


def test_workspaces_are_divided_as_in_python(tmp_path: Path) -> None:
    """On each architecture as its kernel asks: sm_89 has room for smaller blocks of an extend, and for half of mla_decode's
    columns."""
    archs = ("sm_80", "sm_89", "sm_90a")
    decodes = ops.Decode(split="balanced"), ops.Decode(name="fixed", split="invariant"), ops.Extend()
    latent = ops.MlaDecode(name="decode", scale=0.1, split="balanced")
    sets = {
        "small": KernelSet(
            name="small",
            q_heads=4,
            cache=Paged(dtype="f16", kv_heads=2, head_dim=192, page_size=16),
            ops=decodes,
            arch=archs,
        ),
        "rows": KernelSet(
            name="rows", q_heads=128, cache=Latent(dtype="bf16", page_size=64), ops=(latent,), arch=archs
        ),
    }
    exported(tmp_path, *(LoadedSet(kernels, f"specs/{name}.py", "A small set.") for name, kernels in sets.items()))
    plans = {(name, op.name): op.plan(kernels)[0] for name, kernels in sets.items() for op in kernels.ops}
    differing = {name: len({plan.on(arch).split for arch in archs}) for (_, name), plan in plans.items()}
    assert differing == {"decode": 2, "fixed": 1, "extend": 2}
    lines = []
    for rows, sms, tokens in ((1, 1, 0), (2, 132, 1), (77, 78, 100_000), (4096, 148, 131_072), (65_535, 65_535, 2**20)):
        for ((name, op), plan), arch in itertools.product(plans.items(), archs):
            split = plan.on(arch).split
            assert isinstance(split, SplitPlan)
            sizes = split.sizes(rows, tokens, sms)
            made = f"{name}::{op}_workspace({rows}, {sms}{f', {tokens}' if split.chunk_tokens else ''}, Arch::{arch})"
            lines += [f"static_assert({made}.{field} == {value}ull);" for field, value in sizes.items()]
    for none in ("0, 1", "1, 0"):
        lines.append(f"static_assert(small::decode_workspace({none}, Arch::sm_80).bytes == 0);")
    text = (
        '#include "small.h"\n#include "rows.h"\nusing namespace kvgen;\nint main() {\n'
        + "\n".join(lines)
        + "\nreturn 0; }\n"
    )
    run(str(program(tmp_path, text, tmp_path)))


def test_problem_names_the_member_and_the_rule(tmp_path: Path) -> None:
    exported(tmp_path, small(ops.Append()))
    text = """
#include "small.h"
#include <cstdio>
using namespace kvgen;
int main() {
  small::AppendArguments a;
  auto say = [&] { const char* text = small::problem(a, Arch::sm_80); std::puts(text == nullptr ? "fine" : text); };
  say();
  a.num_rows = 3;
  say();
  a.k = device_pointer<f16>(0x1008);
  say();
  a.k = device_pointer<f16>(0x1000);
  a.v = device_pointer<f16>(0x2000);
  a.row_offsets = device_pointer<@>(0x3000);
  a.k_stride = 33;
  say();
  a.k_stride = 40;
  say();
  a.cache.k = a.cache.v = device_pointer<f16>(0x8000);
  a.cache.lengths = a.cache.page_table = device_pointer<@>(0x9000);
  say();
}
""".replace("@", "uint32_t" if small(ops.Append()).kernels.cache.lengths_dtype == "u32" else "int32_t")
    assert run(str(program(tmp_path, text, tmp_path))).splitlines() == [
        "fine",
        "k: is null; append needs it",
        "k: its address is no multiple of 16 bytes",
        "k_stride: is no multiple of 8 elements",
        "cache.k: is null; every kernel needs it",
        "fine",
    ]


def test_pages_of_refuses_layers_that_one_launch_cannot_have(tmp_path: Path) -> None:
    """Too many or none, or pages at other distances; and scales in fewer pages than values leave the pages that have both."""
    headers(tmp_path, "engine_qwen3_fp8")
    text = """
#include "engine_qwen3_fp8.h"
using namespace kvgen;
int main() {
  engine_qwen3_fp8::Cache layers[3];
  for (auto& layer : layers) {
    layer.k_page_stride = 640;
    layer.num_pages = 9;
    layer.num_scale_pages = 7;
  }
  layers[1].num_pages = 8;
  layers[2].k_page_stride = 641;
  PageAddresses<4, 2> room_for_two;
  PageAddresses<4, 3> room_for_three;
  if (!pages_of(layers, 2, &room_for_two) || room_for_two.num_layers != 2) return 1;
  if (room_for_two.num_pages != 7 || room_for_two.num_scale_pages != 7) return 2;
  if (pages_of(layers, 0, &room_for_two) || pages_of(layers, 3, &room_for_two)) return 3;
  return pages_of(layers, 3, &room_for_three) ? 4 : 0;
}
"""
    run(str(program(tmp_path, text, tmp_path, templates_root() / "export")))


def test_error_words_are_decoded_as_in_python(tmp_path: Path) -> None:
    rng = random.Random(7)
    lines = ["static_assert(report_of(0).fault == Fault::none);", 'must(name_of(report_of(~0ull).fault), "none");']
    for fault in Fault:
        request, position = rng.choice((0, 5, 2**24 - 1)), rng.choice((0, 77, 2**32 - 1))
        word = 2**64 - 1 - (position << 32 | request << 8 | fault)
        found = describe(word)
        assert found is not None
        place = (
            f"report_of({word}ull).request == {found.request}u && report_of({word}ull).position == {found.position}u"
        )
        lines.append(f"static_assert({place} && report_of({word}ull).fault == Fault::{found.code.name.lower()});")
        lines.append(f'must(name_of(Fault::{found.code.name.lower()}), "{found.code.name.lower()}");')
    unknown = f"name_of(static_cast<Fault>({max(Fault) + 1}))"
    lines.append(f'must({unknown}, "no fault that kernels report: the word was not 0 before the first launch");')
    head = """
#include "kvgen.h"
#include <cstdlib>
#include <cstring>
using namespace kvgen;
void must(const char* got, const char* wanted) { if (std::strcmp(got, wanted) != 0) std::exit(1); }
int main() {
"""
    run(str(program(tmp_path, head + "\n".join(lines) + "\n}\n", templates_root() / "export")))


def test_a_tensor_map_is_passed_by_value(tmp_path: Path) -> None:
    text = (
        '#include "cache.cuh"\n#include "../device/memory/mbarrier.cuh"\n#include "../device/tma/tma.cuh"\n'
        'extern "C" __global__ void box(const __grid_constant__ Cache cache, const __grid_constant__ TensorMap map,\n'
        "                               int32_t row) {}\n"
    )
    custom = ops.Custom(name="box", text=text, params=[ops.TensorMap("map"), ops.Scalar("row", "i32")], grid=1)
    exported(tmp_path, small(custom))
    code = """
#include "small.h"
#include <vector>
using namespace kvgen;
void note_sizes(std::vector<size_t> sizes);
int main() {
  small::BoxArguments a;
  static_assert(alignof(small::BoxArguments) == 64 && sizeof(a.map) == 128);
  CUtensorMap encoded;
  for (size_t i = 0; i < sizeof(encoded); ++i) reinterpret_cast<unsigned char*>(&encoded)[i] = static_cast<unsigned char>(i + 1);
  a.map = encoded;
  a.row = -2;
  CUmodule module; CUfunction function;
  cuModuleLoadData(&module, "");
  load<small::BoxKernel>(&function, module, Arch::sm_90a);
  note_sizes({sizeof(a.cache), sizeof(a.map), sizeof(a.row)});
  return small::box(function, nullptr, a, Arch::sm_90a);
}
"""
    words = run(str(program(tmp_path, code, tmp_path))).split()
    assert words[:9] == ["box", "1", "1", "1", "128", "1", "1", "0", "1"]
    assert words[11:] == [bytes(range(1, 129)).hex(), "feffffff"]


def test_headers_are_clean_under_strict_warnings_and_as_cpp_20(tmp_path: Path) -> None:
    """In an engine's own files, whatever it warns of, and side by side in one of them."""
    headers(tmp_path, *EXAMPLES)
    text = "".join(f'#include "{name}.h"\n' for name in EXAMPLES)
    (tmp_path / "all.cpp").write_text(text, encoding="utf-8")
    strict = ("-Wconversion", "-Wsign-conversion", "-Wshadow", "-Wold-style-cast")
    for standard in ("-std=c++17", "-std=c++20"):
        clean(tmp_path / "all.cpp", *strict, standard, f"-I{templates_root() / 'export'}")


# Files ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_launches_every_kernel(name: str, tmp_path: Path) -> None:
    loaded = checked_in(name)
    folder = exported(tmp_path / "out", loaded)
    plans = [p for group in set_plans(loaded).values() for p in group]
    plans = [p for p in plans if not any(isinstance(x, TensorMap) for x in p.params)]  # zeros are no map
    kernels, arch = [p.name for p in plans], loaded.kernels.arch[-1]
    cubins = tmp_path / "cubins" / name
    cubins.mkdir(parents=True)
    for plan in plans:
        (cubins / f"{plan.on(arch).name}.{arch}.cubin").write_bytes(b"a cubin\0")
    made = program(tmp_path, (folder / f"{name}_example.cpp").read_text(encoding="utf-8"), folder)
    capability = "8.0" if loaded.kernels.arch[-1] == "sm_80" else "9.0"
    said = run(str(made), str(tmp_path / "cubins"), **{**os.environ, "STUB_CAPABILITY": capability}).splitlines()
    assert sorted(line.partition(":")[0] for line in said if line.endswith(": launched")) == sorted(kernels)
    entries = [line.split()[0] for line in said if re.match(r"\w+( \d+){9}$", line)]
    assert sorted(entries) == sorted(p.entry for p in plans)
    assert said[-1] == "fault: none"


def test_the_step_of_the_docs_compiles_and_launches(tmp_path: Path) -> None:
    (code,) = re.findall(r"```cpp\n(.*?)```", (ROOT / "docs" / "export.md").read_text(encoding="utf-8"), re.S)
    folder = exported(tmp_path / "out", checked_in("llama3_8b"))
    cubins = tmp_path / "cubins" / "llama3_8b"
    cubins.mkdir(parents=True)
    for kernel in ("append", "decode", "decode_plan"):
        (cubins / f"{kernel}.sm_90a.cubin").write_bytes(b"a cubin\0")
    code += """
int main(int, char** argv) {
  Step step{};
  step.pools.layers = 2;
  step.tables.B = 3;
  step.workspace = llama::decode_workspace(8, 132, Arch::sm_90a);
  decode_step(Kernels(argv[1], Arch::sm_90a), nullptr, step);
}
"""
    said = run(str(program(tmp_path, code, folder)), str(tmp_path / "cubins")).splitlines()
    assert [line.split()[0].removeprefix("llama3_8b_") for line in said] == ["decode_plan", *["append", "decode"] * 2]
    assert [line.split()[1] for line in said] == ["1", "3", "264", "3", "264"]


def test_an_exported_kernel_is_the_same_machine_code(tmp_path: Path) -> None:
    """NVRTC takes the file as well, and what is added for nvcc changes nothing."""
    loaded = small(ops.Gather())
    text = (exported(tmp_path, loaded) / "small" / "gather.cu").read_text(encoding="utf-8")
    flat = text[text.index("#line 1 ") :]
    images = [compile_unit(Unit("small/gather", "small_gather", t), "sm_80", cache=None) for t in (text, flat)]
    assert images[0].data == images[1].data


@pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="nvcc is not installed; engines that have it compile the .cu files"
)
def test_nvcc_compiles_an_exported_kernel(tmp_path: Path) -> None:
    """One-byte elements, at which nvcc 13.0 fails unless it is told less; no word on loops over no elements (#186)."""
    cache = Paged(dtype="f16", kv_heads=2, head_dim=16, page_size=4, quant=Quant(dtype="e4m3"))
    kernels = KernelSet(name="small", q_heads=4, cache=cache, ops=(ops.Append(), ops.Decode()))
    folder = exported(tmp_path, LoadedSet(kernels, "specs/small.py", "A small set."))
    for name, kind, begin in (("append", "-cubin", b"\x7fELF"), ("decode", "-ptx", b"//")):
        command = [
            "nvcc",
            kind,
            "-arch=sm_80",
            "-std=c++17",
            "-o",
            str(tmp_path / "x"),
            str(folder / f"small/{name}.cu"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "warning" not in done.stderr + done.stdout
        assert (tmp_path / "x").read_bytes().strip().startswith(begin)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="CMake is not installed")
def test_cmake_takes_cubins_that_kvgen_made(tmp_path: Path) -> None:
    folder = exported(tmp_path / "out", small(ops.Append(), arch=("sm_80",)))
    (tmp_path / "cubins" / "small").mkdir(parents=True)
    (tmp_path / "cubins" / "small" / "append.sm_80.cubin").write_bytes(b"a cubin\0")
    run(
        compiler(),
        *FLAGS,
        "-shared",
        "-fPIC",
        "-isystem",
        cuda_include(),
        str(Path(__file__).parent / "stub.cpp"),
        "-o",
        str(tmp_path / "libcuda.so"),
    )
    run(
        "cmake", "-S", str(folder), "-B", str(tmp_path / "build"), f"-DKVGEN_CUBINS={tmp_path}/cubins",
        f"-DKVGEN_CUDA_INCLUDE={cuda_include()}", f"-DKVGEN_LIBCUDA={tmp_path}/libcuda.so", "-DKVGEN_NVCC=/nowhere/nvcc",
    )  # fmt: skip
    run("cmake", "--build", str(tmp_path / "build"))
    assert (tmp_path / "build" / "cubins" / "small" / "append.sm_80.cubin").read_bytes() == b"a cubin\0"
    said = run(
        str(tmp_path / "build" / "small_example"),
        str(tmp_path / "build" / "cubins"),
        **{**os.environ, "STUB_CAPABILITY": "8.6"},
    )
    assert "append: launched" in said


def test_the_readme_says_what_a_launch_takes_on_each_architecture() -> None:
    """Threads and shared memory, where an architecture has a kernel of its own."""
    loaded = checked_in("deepseek_v3_fp8")
    readme = export_files([(loaded, ("mla_decode",))], render_all([loaded]), "generated")["README.md"].decode()
    (row,) = (line for line in readme.splitlines() if "`deepseek_v3_fp8_mla_decode`" in line)
    (plan, *_) = next(op for op in loaded.kernels.ops if op.name == "mla_decode").plan(loaded.kernels)
    assert "| 256, 512 on sm_90a |" in row and f"{plan.shared_on('sm_90a')} on sm_90a" in row


def test_the_command_writes_what_changed_and_keeps_what_was_edited(project: Folder) -> None:
    said = project.kvgen("export", "tiny", "wide/gather", "-o", "cpp").stdout
    assert said.startswith("tiny, wide: 9 files in cpp, 9 written\n")
    assert sorted(p.relative_to(project.root / "cpp").as_posix() for p in (project.root / "cpp").rglob("*") if p.is_file()) == [
        "CMakeLists.txt", "README.md", "kvgen.h", "tiny.h", "tiny/append.cu", "tiny_example.cpp", "wide.h", "wide/gather.cu",
        "wide_example.cpp",
    ]  # fmt: skip
    assert "0 written" in project.kvgen("export", "tiny", "wide/gather", "-o", "cpp").stdout
    assert "append" not in (project.root / "cpp" / "wide.h").read_text(encoding="utf-8").partition("#ifndef")[2]
    project.change("cpp/tiny.h", "namespace", "name space")
    (project.root / "cpp" / "README.md").write_text("mine\n", encoding="utf-8")
    said = project.kvgen("export", "tiny", "-o", "cpp", code=2).stderr
    assert said == (
        "error: cpp/README.md: changed by hand, or not written by kvgen\ncpp/tiny.h: changed by hand, or not written by kvgen\n"
        "nothing was written; choose another folder, or overwrite with `--force`\n"
    )
    assert "2 written" in project.kvgen("export", "tiny", "wide/gather", "-o", "cpp", "--force").stdout
    said = project.kvgen("export", "tinny", "-o", "cpp", code=2).stderr
    assert "did you mean tiny?" in said


def test_no_path_of_this_machine_is_in_the_files(tmp_path: Path) -> None:
    for path in exported(tmp_path, checked_in("llama3_8b")).rglob("*"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert str(find_config(ROOT).root) not in text and text.endswith("\n"), path
            assert not re.search(r"[ \t]+$", text, re.M), path
