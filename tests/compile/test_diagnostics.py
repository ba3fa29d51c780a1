"""A refused kernel is shown as its generated line and the template line behind it."""

from __future__ import annotations

import pytest

from kvgen.compile import ImageKind, UnitError, compile_unit
from kvgen.compile.diagnostics import relative_file_table, source_lines

from .tiny import TEXT, unit_of


def refusal(text: str, kind: ImageKind = "cubin") -> str:
    def origin(file: str, line: int) -> str | None:
        return f"templates/ops/reverse/reverse.cu.j2:{line + 10}" if file.endswith(".cu") else None

    with pytest.raises(UnitError) as caught:
        compile_unit(unit_of(text), "sm_80", kind, cache=None, origin=origin)
    assert str(caught.value) == f"tiny/reverse for sm_80: does not compile\n{caught.value.body}"
    return caught.value.body


@pytest.mark.parametrize("kind", ["cubin", "ptx"])
def test_error_shows_generated_and_template_line(kind: ImageKind) -> None:
    assert refusal(TEXT.replace("s[31 -", "bogus[31 -"), kind) == (
        'generated/tiny/reverse.cu:5: error: identifier "bogus" is undefined\n'
        "    p[threadIdx.x] = bogus[31 - threadIdx.x];\n"
        "    from templates/ops/reverse/reverse.cu.j2:15"
    )


def test_error_in_another_file_without_origin() -> None:
    assert refusal(TEXT.replace("2.0f * x", "2.0f * y")) == (
        'generated/tiny/vec.cuh:1: error: identifier "y" is undefined\n'
        "    __device__ float twice(float x) { return 2.0f * y; }"
    )


def test_explanations_stay_and_warnings_go() -> None:
    text = TEXT.replace("__shared__", "int unused;\n    __shared__").replace("twice(p", "twice(1.0f, p")
    body = refusal(text)
    assert body.startswith("generated/tiny/reverse.cu:4: error: too many arguments in function call\n")
    assert "unused" not in body
    overload = TEXT.replace("__device__ float twice(float x)", "template <class T> __device__ T twice(T* x, T* y)")
    assert "    argument types are: (float)\n" in refusal(overload)


def test_only_the_first_errors_are_shown() -> None:
    body = refusal(TEXT.replace("__syncthreads();", " ".join(f"bad{i}();" for i in range(20))))
    assert body.count(": error: ") == 8
    assert body.endswith("and 12 more errors")


def test_refused_inline_ptx_is_traced() -> None:
    text = TEXT.replace("__syncthreads();", 'asm volatile("bar.bogus 0;");')
    body = refusal(text)
    assert body.startswith("generated/tiny/reverse.cu:4: error: ")
    assert "'.bogus'" in body
    assert '    asm volatile("bar.bogus 0;");\n    PTX: bar.bogus 0;\n' in body
    assert body.endswith("    from templates/ops/reverse/reverse.cu.j2:14")


def test_assembler_error_of_the_whole_kernel() -> None:
    body = refusal(TEXT.replace("s[32]", "s[32000]"))
    assert body.startswith("error: Entry function 'reverse' uses too much shared data")
    assert "ptxas info" not in body


def test_source_lines_follow_the_directives() -> None:
    lines = source_lines('a\n#line 7 "x.cu"\nb\nc\n# line 3\nd\n#pragma unroll\n')
    assert lines == {
        ("kvgen.cu", 1): "a",
        ("x.cu", 7): "b",
        ("x.cu", 8): "c",
        ("x.cu", 3): "d",
        ("x.cu", 4): "#pragma unroll",
    }


def test_file_table_becomes_relative() -> None:
    ptx = '\t.file\t1 "/home/u/w/generated/a/b.cu"\n\t.file\t2 "C:\\w\\generated\\a\\c.cuh"\n'
    ptx += '\t.file\t3 "/other.h"\n'
    assert relative_file_table(ptx, ["b.cu", "generated/a/b.cu", "generated/a/c.cuh"]) == (
        '\t.file\t1 "generated/a/b.cu"\n\t.file\t2 "generated/a/c.cuh"\n\t.file\t3 "/other.h"\n'
    )
