"""What a spec may say of a kernel of the user's, and the words for what it may not."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvgen import KernelSet, Paged, ops
from kvgen.errors import SpecError
from kvgen.expr.nodes import ceil_div, evaluate, var
from kvgen.expr.rules import parse_rule
from kvgen.ops import Array, Custom, Scalar, Size
from kvgen.plan.entries import entries
from tests.custom.conftest import KERNEL


def make(**fields: Any) -> Custom:
    given = {"name": "fill", "text": KERNEL, "grid": 1} | fields
    return Custom(**{k: v for k, v in given.items() if v is not None})


def within(op: Custom, **fields: Any) -> KernelSet:
    cache = Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16)
    return KernelSet(**({"name": "own", "q_heads": 8, "cache": cache, "ops": (op,)} | fields))


def said(action: Any) -> str:
    with pytest.raises(SpecError) as raised:
        action()
    return str(raised.value)


X = Array("x", "f32", ("N",))

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": None}, "name: missing"),
    ({"name": "Fill"}, "name: got 'Fill'"),
    ({"text": None}, "source: got neither source nor text"),
    ({"source": "/x.cu"}, "source: got text beside source"),
    ({"text": None, "source": "x.cu"}, "tests/custom/x.cu: cannot be read (No such file"),
    ({"text": None, "source": "/no/such.cu"}, "source: got '/no/such.cu'; /no/such.cu: cannot be read (No such file"),
    ({"text": KERNEL.replace("void fill", "void other")}, "no __global__ function called 'fill' (it has other)"),
    ({"text": "// __global__ void fill(\n"}, "no __global__ function called 'fill' (it has none)"),
    ({"text": KERNEL.replace('extern "C" ', "")}, "'fill' of <fill> is not extern \"C\""),
    ({"text": KERNEL + "\f\n"}, "text: got a control or surrogate character in <fill>:9"),
    ({"text": KERNEL + "// \u2028\n"}, "text: got a control or surrogate character in <fill>:9"),
    ({"text": KERNEL + "// \ud800\n"}, "text: got a control or surrogate character in <fill>:9"),
    ({"params": (X, X)}, "params: got x twice"),
    ({"params": ("x",)}, "Custom.params.0: got 'x'"),
    ({"grid": None}, "Custom.grid: missing"),
    ({"grid": ()}, "Custom.grid: got ()"),
    ({"grid": (1, 1, 1, 1)}, "Custom.grid: got (1, 1, 1, 1)"),
    ({"grid": 0}, "grid: got 0; a grid has at least 1 block"),
    ({"grid": "T +"}, "grid: got 'T +'; it cannot be read"),
    ({"grid": (1, "T ** 2")}, "grid: got 'T ** 2'; 'T ** 2' is not allowed; a rule is made of names"),
    ({"grid": "f(T)"}, "'f(T)' is not allowed"),
    ({"threads": 1025}, "Custom.threads: got 1025"),
    ({"shared": 300_000}, "Custom.shared: got 300000"),
    ({"doc": "a\x07"}, "doc: got 'a\\x07'"),
]


@pytest.mark.parametrize(("fields", "expected"), WRONG)
def test_a_wrong_field(fields: dict[str, Any], expected: str) -> None:
    assert expected in said(lambda: make(**fields))


ARGUMENTS: list[tuple[Any, str]] = [
    (lambda: Array("x", "f64", ("N",)), "Array.dtype: got 'f64'"),  # type: ignore[arg-type]
    (lambda: Array("x", "e2m1", ("N",)), "Array.dtype: got 'e2m1'"),  # type: ignore[arg-type]
    (lambda: Array("x", "f32", ()), "Array.shape: got ()"),
    (lambda: Array("x", "f32", (0,)), "shape: got 0"),
    (lambda: Array("x", "f32", ("2N",)), "shape: got '2N'"),
    (lambda: Array("x", "f32", ("N*2",)), "shape: got 'N*2'"),
    (lambda: Array("x", "f32", ("min",)), "shape: got 'min'"),
    (lambda: Array("x", "f32", ("N",), "read"), "Array.access: got 'read'"),  # type: ignore[arg-type]
    (lambda: Array("x", "f32", ("N",), align=12), "align: got 12"),
    (lambda: Array("x", "f32", ("N",), in_place=("y",)), "in_place: got y for x, which is only read"),
    (lambda: Array("x", "f32", ("N",), "out", in_place=("y", 3)), "Array.in_place.1: got 3"),  # type: ignore[list-item]
    (lambda: Array("stream", "f32", ("N",)), "name: got 'stream'"),
    (lambda: Array("class", "f32", ("N",)), "name: got 'class'"),
    (lambda: Array("a-b", "f32", ("N",)), "name: got 'a-b'"),
    (lambda: Array("x", "f32", ("N",), doc="a\nb"), "doc: got 'a\\nb'"),
    (lambda: Scalar("s", "f16"), "Scalar.dtype: got 'f16'"),  # type: ignore[arg-type]
    (lambda: Size("s", "N", "f32"), "Size.dtype: got 'f32'"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("action", "expected"), ARGUMENTS)
def test_a_wrong_argument(action: Any, expected: str) -> None:
    assert expected in said(action)


SETS: list[tuple[dict[str, Any], str]] = [
    ({"params": (Size("n", "N"),)}, "ops: fill: params: n: got 'N'; there are B, M, layers, pages"),
    ({"params": (X, Size("n", "x.stride"))}, "ops: fill: params: n: got 'x.stride'; there are"),
    ({"params": (Array("x", "f32", ("N",), optional=True), Size("n", "N"))}, "ops: fill: params: n: got 'N'"),
    ({"grid": "ceil_div(N, 4)"}, "ops: fill: grid: got 'ceil_div(N, 4)'; 'N' is no name here; there are B, M"),
    ({"grid": "B // (q_heads - 8)"}, "ops: fill: grid: got 'B // (q_heads - 8)'; it divides by zero"),
    ({"grid": var("N")}, "'N' is no name here"),
    (
        {"params": (Array("pool", "f32", ("N",)),)},
        "ops: fill: got a parameter called 'pool', which is an array or a field",
    ),
    (
        {"params": (Array("y", "f32", ("N",), "out", in_place=("x",)),)},
        "ops: fill: in_place: y: got 'x'; it is an array of",
    ),
    (
        {"params": (Array("y", "f32", ("N",), "out", in_place=("y",)),)},
        "ops: fill: in_place: y: got 'y'; it is an array of",
    ),
    ({"params": (Scalar("num_pages", "u32"),)}, "ops: fill: got a parameter called 'num_pages', which is an array or"),
]


@pytest.mark.parametrize(("fields", "expected"), SETS)
def test_what_only_the_cache_tells(fields: dict[str, Any], expected: str) -> None:
    assert expected in said(lambda: within(make(**fields)))


def test_words_become_numbers() -> None:
    x = Array("x", "f32", ("B+1", "q_heads", "group", "kv_heads+1", "head_dim", "page_size", "v_head_dim", "N + 2"))
    (plan,) = (
        within(make(params=(x,), grid=("B * q_heads", ceil_div(var("N"), 4), 3))).ops[0].plan(within(make(params=(x,))))
    )
    assert plan.params[0].shape == ("B+1", 8, 4, 3, 64, 16, 64, "N+2")
    assert plan.params[0].fields == (None, "q_heads", "group", "kv_heads", "head_dim", "page_size", "v_head_dim", None)
    assert [evaluate(part, {"B": 3, "N": 9}) for part in plan.grid] == [24, 3, 3]
    assert [p.dtype for p in within(make(params=(x, Size("n", "N"), Size("b", "B", "i64")))).ops[0].plan(
        within(make(params=(x,))))[0].params] == ["f32", "u32", "i64"]  # fmt: skip


def test_a_grid_is_one_rule_or_several() -> None:
    assert make(grid="B").grid == ("B",)
    assert make(grid=[1, "B"]).grid == (1, "B")


def test_rules_mean_what_python_means() -> None:
    rng = random.Random(0)
    names = {"T": 37, "B": 5, "N": 130}
    functions = {"min": min, "max": max, "ceil_div": lambda a, b: -(-a // b)}

    def rule(depth: int) -> str:
        if depth == 0:
            return rng.choice([*names, str(rng.randint(1, 9))])
        if rng.random() < 0.4:
            return f"{rng.choice(list(functions))}({rule(depth - 1)}, {rule(depth - 1)})"
        return f"({rule(depth - 1)} {rng.choice(['+', '*', '//', '%'])} {rule(depth - 1)})"

    for _ in range(300):
        text = rule(rng.randint(1, 3))
        try:
            wanted = eval(text, dict(functions), dict(names))
            found = evaluate(parse_rule(text), names)
        except (ZeroDivisionError, ValueError):
            continue
        assert found == wanted, text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("__import__('os')", "__import__('os')"),
        ("T.x", "T.x"),
        ("T[0]", "T[0]"),
        ("T / 2", "T / 2"),
        ("-T", "-T"),
        ("1.5", "1.5"),
        ("True", "True"),
        ("'T'", "'T'"),
        ("lambda: T", "lambda: T"),
        ("min(T)", "min(T)"),
        ("ceil_div(T, 2, 3)", "ceil_div(T, 2, 3)"),
        ("ceil_div(a=T, b=2)", "ceil_div(a=T, b=2)"),
        ("min", "min"),
        ("3 - 5", "3 - 5"),
        ("T + 4 // 0", "4 // 0"),
        ("ceil_div(3, 0)", "ceil_div(3, 0)"),
        ("T if T else 1", "T if T else 1"),
        ("", ""),
        ("T\n+", "T\n+"),
        ("(" * 90 + "T" + ")" * 90 + "(", "("),
        ("T\0", ""),
        ("T" * 201, "T"),
    ],
)
def test_other_text_is_no_rule(text: str, part: str) -> None:
    with pytest.raises(ValueError, match="got ") as raised:
        parse_rule(text)
    assert part.strip() in str(raised.value) or repr(part)[1:-1] in str(raised.value)


def test_entries_of_a_text() -> None:
    text = """
    // extern "C" __global__ void no(
    /* extern "C" __global__ void neither() */
    const char* s = "__global__ void nor(";
    extern "C" __global__ void __launch_bounds__(128, 2) a(int x) {}
    extern "C" __global__ __launch_bounds__(128) void b(int x) {}
    extern "C" {
    __global__
    void c() {}
    }
    """
    assert entries(text) == {"a": True, "b": True, "c": True}
    assert entries("__global__ void d(int x) {}") == {"d": False}


def test_the_source_of_a_set_in_memory_is_absolute(tmp_path: Path) -> None:
    path = tmp_path / "fill.cu"
    path.write_text(KERNEL)
    plan = within(make(text=None, source=str(path))).ops[0].plan(within(make()))[0]
    assert plan.source is not None and plan.source.text == KERNEL and plan.source.path == path.as_posix()


def test_the_vocabulary_is_exported() -> None:
    assert {"Array", "Custom", "Scalar", "Size", "TensorMap"} <= set(dir(ops))


def test_a_spec_with_a_kernel_of_its_own_can_be_imported(tmp_path: Path) -> None:
    """Its file is found beside it, as when kvgen loads it; without a file there is nothing that it could be relative to."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "fill.cu").write_text(KERNEL)
    made = "from kvgen import ops\nop = ops.Custom(name='fill', source='kernels/fill.cu', grid='N')\n"
    (tmp_path / "mine.py").write_text(made)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))}
    outcomes = [
        subprocess.run([sys.executable, "-c", program], cwd="/", env=environment, capture_output=True, text=True)
        for program in ("import mine; print(mine.op.name)", made)
    ]
    assert outcomes[0].stdout == "fill\n", outcomes[0].stderr
    assert "it is relative to the file that makes the spec, and there is none" in outcomes[1].stderr
