"""The digest of code: blind to comments, blank lines, indentation and `#line`, and to nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from kvgen.codegen.emit import render_all, units_of
from kvgen.compile import code_digest, compile_unit, default_cache, text_digest
from kvgen.schema.loader import load_file

from .tiny import TEXT, unit_of

ROOT: Final = Path(__file__).resolve().parents[2]
EQUAL: Final = (
    ("int a;\n", "// what it is\n\n  int a;  // more\n"),
    ("int a;\n", "/* one\n   two */ int a;\n\n\n"),
    ("int a;\n", '#line 7 "x.cuh"\nint a;\n#line 9 "x.cu"\n'),
    ("int a;\nint b;\n", 'int a;\n#line 1 "y.cuh"\nint b;\n'),
    ("int a;\n", "// a comment that \\\n goes on\nint a;\n"),
    ("#define A b c\n", "#define A b\\\n c\n"),
    ("int a; \n", "int a;/* \" and ' */\n"),
    ("int n = 0x1'000'000;\nint a;\n", "int n = 0x1'000'000;  // it's one\nint a;\n"),
    ("char c = '\"';\n", "char c = '\"';  // \"\n"),
    ('auto s = R"x(// "no" comment)x";\nint a;\n', 'auto s = R"x(// "no" comment)x";\n// one\nint a;\n'),
    ("assert_that();\nstatic_assert(true);\n", "assert_that();\n// one\nstatic_assert(true);\n"),
)
DIFFERENT: Final = (
    ("int a;\n", "int b;\n"),
    ("int a; int b;\n", "int a;\nint b;\n"),  # a newline ends a directive, so lines count
    ('auto s = "// a";\n', 'auto s = "// b";\n'),
    ('auto s = "/* a */";\n', 'auto s = "/* b */";\n'),
    ('auto s = "a  b";\n', 'auto s = "a b";\n'),
    ('auto s = "\\"// a";\n', 'auto s = "\\"// b";\n'),
    ("char c = '\\''; // a\n", "char c = '\\'' // a\n"),
    ('auto c = u8\'"\'; f("// a");\n', 'auto c = u8\'"\'; f("// b");\n'),
    ("int n = 0x1'000; char c = '\"'; // \"\n", "int n = 0x1'000; char c = '\"' + 1; // \"\n"),
    ('auto s = R"(// a)";\n', 'auto s = R"(// b)";\n'),
    ('auto s = R"(a\n\n  b)";\n', 'auto s = R"(a\nb)";\n'),
    ('auto s = LR"x(" // a)x";\n', 'auto s = LR"x(" // b)x";\n'),
    ("#define A b \\\n\nint c;\n", "#define A b \\\nint c;\n"),
    ("#pragma unroll\n", "#pragma unroll 1\n"),
    ("a/**/b\n", "ab\n"),
    # A text that names its own lines: every character counts.
    ("int a = __LINE__;\n", "\nint a = __LINE__;\n"),
    ("// one\nassert(a);\n", "// two\nassert(a);\n"),
    # A comment or raw string across an #include, and one without an end.
    ('/* a\n#line 1 "x.cuh"\n*/ int a;\n', '/* b\n#line 1 "x.cuh"\n*/ int a;\n'),
    ('f(R"(a\n#line 1 "x"\n)");\n', 'f(R"(a\n#line 2 "x"\n)");\n'),
    ("/* a", "/* b"),
)


def test_digests() -> None:
    assert [pair for pair in EQUAL if code_digest(pair[0]) != code_digest(pair[1])] == []
    assert [pair for pair in DIFFERENT if code_digest(pair[0]) == code_digest(pair[1])] == []


def test_a_comment_in_a_header_of_the_device_library_is_no_other_code() -> None:
    """Every comment of a kernel's header and of what it includes: reworded, moved to lines of its own, and left out."""
    (loaded,) = load_file(ROOT / "specs/llama3_8b.py", "specs/llama3_8b.py")
    for unit in units_of(loaded, render_all([loaded]), "generated"):
        assert '#line 1 "generated/device/base/fault.cuh"' in unit.text and "  // " in unit.text
        comment = re.compile(r"(?m)(^|  )// .*$")
        for text in (comment.sub(r"\1// another", unit.text), comment.sub("\n// more\n", unit.text)):
            assert text != unit.text and code_digest(text) == code_digest(unit.text) != text_digest(unit.text)
        text = unit.text.replace("uint32_t", "unsigned", 1)
        assert code_digest(text) != code_digest(unit.text)


def test_comments_and_lines_do_not_reach_machine_code() -> None:
    """The digest rests on this: a kernel of another text and the same code is the same cubin."""
    other = "// Turns 32 floats around.\n\n" + TEXT.replace("\n    ", "\n\n  // a step\n  ").replace(
        "#line 1", "#line 40"
    )
    assert code_digest(other) == code_digest(TEXT)
    first, second = (compile_unit(unit_of(text), "sm_80", cache=default_cache()) for text in (TEXT, other))
    assert first.data == second.data and first.resources == second.resources
