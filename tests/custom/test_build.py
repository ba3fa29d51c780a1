"""A kernel of the user's through the verbs: built, compared, compiled, shown; and what is said where it is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

from kvgen.cli.project import generated
from kvgen.codegen.emit import BANNER_LINES
from kvgen.compile import find, read_folder, text_digest
from kvgen.errors import CompileError
from tests.custom.conftest import KERNEL, PARAMS, Write

FILE = "own/fill.cu"


def test_the_text_is_the_users_under_three_lines(write: Write) -> None:
    project = write()
    project.kvgen("build")
    built = project.tree()[FILE].decode()
    banner, line, text = built.partition("// entry: ")[0], built.splitlines()[BANNER_LINES], built.split("\n", 3)[3]
    assert "from specs/own.py and specs/kernels/fill.cu;" in banner
    assert line.startswith("// entry: fill(cache ") and line.endswith(
        ", x ptr, n u32, by f32) of specs/kernels/fill.cu"
    )
    assert text == KERNEL
    project.kvgen("check")


@pytest.mark.parametrize(
    "kernel", [KERNEL.replace("\n", "\r\n"), KERNEL.rstrip("\n"), "\ufeff" + KERNEL], ids=["crlf", "no-newline", "bom"]
)
def test_line_endings_are_the_same_everywhere(write: Write, kernel: str) -> None:
    project = write(kernel)
    project.kvgen("build")
    assert project.tree()[FILE].decode().split("\n", 3)[3] == KERNEL
    project.kvgen("check")


def test_a_change_of_the_source_is_seen(write: Write) -> None:
    project = write()
    project.kvgen("build")
    project.change("specs/kernels/fill.cu", "by * x[i]", "x[i] * by")
    assert "stale    generated/own/fill.cu" in project.kvgen("check", code=1).stdout
    shown = project.kvgen("diff").stdout
    assert "-  if (i < n) x[i] = by * x[i];" in shown and "+  if (i < n) x[i] = x[i] * by;" in shown
    assert "changed  generated/own/fill.cu" in project.kvgen("build", "own/fill").stdout
    project.kvgen("check")
    project.change("generated/own/fill.cu", "x[i] * by", "x[i] + by")
    assert "edited   generated/own/fill.cu" in project.kvgen("check", code=1).stdout


def test_it_compiles_and_shows_like_any_operation(write: Write) -> None:
    project = write()
    project.kvgen("build")
    found = json.loads(project.kvgen("compile", "own/fill", "-o", "cubins", "--json").stdout)["kernels"]
    assert [(k["kernel"], k["arch"]) for k in found] == [("own/fill", "sm_80"), ("own/fill", "sm_90a")]
    assert "grid (-(-N // 128), 1, 1) of 128 threads" in project.kvgen("show", "own/fill", "--plan").stdout
    origins = project.kvgen("show", "own/fill", "--map").stdout
    assert "specs/kernels/fill.cu:4     7 | extern" in origins
    ptx = project.kvgen("show", "own/fill", "--ptx").stdout
    assert '"specs/kernels/fill.cu"' in ptx and ".entry fill(" in ptx
    flat = project.kvgen("show", "own/fill", "--flat").stdout
    assert '#line 1 "specs/kernels/fill.cu"' in flat and '#line 3 "specs/kernels/fill.cu"' in flat


def test_bench_leaves_it_out_unless_asked(write: Write) -> None:
    project = write()
    project.kvgen("build")
    assert "fill" not in project.kvgen("bench", "--batch", "1", "--tokens", "4").stdout
    assert "whose fewest bytes nobody knows" in project.kvgen("bench", "own/fill", code=2).stderr


def test_a_cubin_of_other_params_is_refused(write: Write) -> None:
    """One text, told other parameters: nothing compiled for the old ones fits it. `Factor` is a type of the user's, which
    only the compiler knows."""
    kernel = KERNEL.replace("float by", "Factor by").replace("// Multiplies x.", "using Factor = float;")
    project = write(kernel)
    project.kvgen("build")
    before = json.loads(project.kvgen("compile", "own/fill", "--json").stdout)["kernels"][0]["digest"]
    write(kernel, params=PARAMS.replace('"by", "f32"', '"by", "u32"'))
    project.kvgen("build")
    assert (
        "(by): the kernel takes 4 bytes (a float), the launcher passes u32" in project.kvgen("compile", code=1).stderr
    )
    flat = project.kvgen("show", "own/fill", "--flat").stdout
    assert text_digest(flat) != before


def test_an_error_of_nvrtc_names_the_users_line(write: Write) -> None:
    project = write(KERNEL.replace("by * x", "bye * x"))
    project.kvgen("build")
    said = project.kvgen("compile", "own/fill", code=1).stderr
    assert 'specs/kernels/fill.cu:7: error: identifier "bye" is undefined\n    if (i < n) x[i] = bye * x[i];\n' in said
    assert "from " not in said


def test_a_refused_kernel_hides_no_other(write: Write) -> None:
    """The table of what compiled, the error of what did not; cubins of some kernels are not written."""
    project = write(KERNEL.replace("by * x", "bye * x"))
    project.kvgen("build")
    done = project.kvgen("compile", "own", "-o", "cubins", "--record", code=1)
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:3]] == [
        ["own/append", "sm_80"],
        ["own/append", "sm_90a"],
    ]
    assert "own/fill" not in done.stdout and "\n2 cubins, NVRTC" in done.stdout
    assert done.stderr.startswith("error: 2 of 4 compiles failed\n\nown/fill for sm_80, sm_90a: does not compile\n")
    assert done.stderr.endswith("\n\nnothing was written to cubins and resources.json: they hold all kernels or none\n")
    assert not (project.root / "cubins").exists() and not (project.out / "own/resources.json").exists()
    found = json.loads(project.kvgen("compile", "own", "--json", code=1).stdout)
    assert {k["kernel"] for k in found["kernels"]} == {"own/append"} and "own/fill for sm_80" in found["refused"]
    (project.root / "specs/other.py").write_text("kernels = None\n", encoding="utf-8")
    said = project.kvgen("compile", code=2)
    assert (
        "own/append" in said.stdout and "own/fill for" in said.stderr and "specs/other.py: kernels: got" in said.stderr
    )


def test_an_error_at_the_launch_does_too(write: Write) -> None:
    project = write(KERNEL.replace("by * x", "bye * x"))
    project.kvgen("build")
    pool, lengths, table = np.zeros((1, 2, 1, 16, 2, 64), bfloat16), np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
    with generated(project.out, "own") as package:
        cache = package.Cache(pool, lengths=lengths, page_table=table)
        with pytest.raises(CompileError) as raised:
            package.fill(cache[0], np.zeros(4, np.float32), 1.0)
    assert 'specs/kernels/fill.cu:7: error: identifier "bye" is undefined' in str(raised.value)


WRITTEN = [
    ("float by", "double by", "parameter 4 (by): the kernel takes `double by`, the launcher passes f32 (4 bytes); make params"),
    ("float by", "const int by", "parameter 4 (by): the kernel takes `const int by`, the launcher passes f32 (4 bytes)"),
    ("uint32_t n", "unsigned long long n", "parameter 3 (n): the kernel takes `unsigned long long n`, the launcher passes u32"),
    ("uint32_t n", "float n", "parameter 3 (n): the kernel takes `float n`, the launcher passes u32 (4 bytes)"),
    ("float* x, ", "uint32_t m, float* x, ", "parameter 2 (x): the kernel takes `uint32_t m`, the launcher passes a pointer"),
    (", float by", ", float by, int z", "parameter 5: the kernel takes `int z` that the launcher does not pass (5 parameters"),
    (", float by", "", "parameter 4 (by): the kernel takes 3 parameters, the launcher passes 4, this one f32 (4 bytes)"),
    ("__grid_constant__ Cache cache", "Cache* cache", "parameter 1 (cache): the kernel takes `const Cache* cache`, the launcher"),
    ("const __grid_constant__ Cache cache, float* x, uint32_t n, float by", "", "the kernel takes 0 parameters, the launcher"),
]  # fmt: skip
# Types and lists that only the compiler knows.
COMPILED = [
    (
        "float by",
        "Double by",
        "parameter 4 (by): the kernel takes 8 bytes (a float), the launcher passes f32 (4 bytes)",
    ),
    ("float by", "Int by", "parameter 4 (by): the kernel takes 4 bytes (no float), the launcher passes f32 (4 bytes)"),
    ("uint32_t n", "Long n", "parameter 3 (n): the kernel takes 8 bytes, the launcher passes u32 (4 bytes)"),
    ("float* x, ", "MORE float* x, ", "parameter 2 (x): the kernel takes 4 bytes, the launcher passes ptr (8 bytes)"),
    (", float by", ", float by LAST", "parameter 5: the kernel takes 4 bytes that the launcher does not pass"),
    (
        ", float by",
        " NONE",
        "parameter 4 (by): the kernel takes 3 parameters, the launcher passes 4, this one f32 (4 bytes)",
    ),
]
NAMES = """using Double = double; using Int = int; using Long = unsigned long long;
#define MORE unsigned m,
#define LAST , int z
#define NONE
"""


@pytest.mark.parametrize(("old", "new", "said"), WRITTEN)
def test_written_parameters_are_compared(write: Write, old: str, new: str, said: str) -> None:
    """By build, which needs no compiler."""
    project = write(KERNEL.replace(old, new))
    shown = project.kvgen("build", code=2).stderr
    assert "specs/kernels/fill.cu:4: parameter " in shown and said in shown


@pytest.mark.parametrize(("old", "new", "said"), COMPILED)
def test_parameters_are_compared(write: Write, old: str, new: str, said: str) -> None:
    kernel = KERNEL.replace("// Multiplies x.\n", NAMES).replace(old, new)
    project = write(kernel if "by" in new or "by" not in old else kernel.replace("by *", "(float)2 *"))
    project.kvgen("build")
    shown = project.kvgen("compile", "own/fill", code=1).stderr
    assert f"own/fill for sm_80, sm_90a: does not compile\nspecs/kernels/fill.cu: {said}" in shown


FITTING = [
    ("float* x", "float* __restrict__ x"),
    ("float* x", "float x[]"),
    ("float* x", "uint64_t x_address"),
    ("float* x", "Vec<float, 1>* x"),
    ("float by", "/* a, b */ const float by  // a factor\n"),
    ("uint32_t n", "unsigned n"),
    ("uint32_t n", "std::uint32_t n"),
    ("Cache cache", "Cache\n    cache"),
]


@pytest.mark.parametrize(("old", "new"), FITTING)
def test_parameters_that_fit_in_other_words(write: Write, old: str, new: str) -> None:
    write(KERNEL.replace(old, new)).kvgen("build")


def test_a_set_of_two_kernels_and_two_names_for_one(write: Write) -> None:
    project = write(more="\n            name_taken=1,")
    assert "Custom.name_taken: unknown field" in project.kvgen("build", code=2).stderr
    project = write()
    project.change("specs/own.py", "ops.Append(),", 'ops.Append(), ops.Append(name="fill"),')
    assert "ops: got fill twice" in project.kvgen("build", code=2).stderr
    project = write(KERNEL.replace("void fill", "void own_append"))
    project.change("specs/own.py", 'name="fill"', 'name="own_append"')
    assert (
        "name: 'own_append' would be a kernel's name in C, where it is taken" in project.kvgen("build", code=2).stderr
    )


def test_a_source_in_the_project_but_not_below_specs(write: Write) -> None:
    project = write(None, source="../cuda/fill.cu")
    (project.root / "cuda").mkdir()
    Path(project.root / "cuda" / "fill.cu").write_text(KERNEL, encoding="utf-8")
    project.kvgen("build")
    assert project.tree()[FILE].decode().splitlines()[2].endswith("of cuda/fill.cu")


def test_a_link_out_of_the_project_leads_out(write: Write, tmp_path: Path) -> None:
    outside = tmp_path / "outside.cu"
    outside.write_text(KERNEL, encoding="utf-8")
    project = write(None)
    (project.root / "specs" / "kernels" / "fill.cu").symlink_to(outside)
    assert "it must lie inside the project" in project.kvgen("build", code=2).stderr


def test_cubins_made_ahead_of_time_are_those_of_the_launcher(write: Write) -> None:
    """What `kvgen compile -o` wrote is found under the digest that the launcher asks for."""
    project = write()
    project.kvgen("build")
    project.kvgen("compile", "-o", "cubins")
    manifest = read_folder(project.root / "cubins")
    with generated(project.out, "own") as package:
        module = package.fill.KERNEL.module
        assert ("fill.cu", "fill") in module.kernels and ("append.cu", "own_append") in module.kernels
        digest = text_digest(module.unit("fill.cu", "fill").text)
    assert find(manifest, "own", "fill", "sm_90a", digest).startswith(b"\x7fELF")
    entry = manifest.entry("own", "fill", "sm_90a")
    assert entry is not None and entry.entry == "fill"
