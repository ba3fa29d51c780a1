"""The balance of kernels: what the `.cu` shows, what the device library does, and what neither may have.

A kernel's text has the constants, phases, barriers and stores; the device library has loops over elements and address
arithmetic. The tests read templates/, and generated/ as the specs render it now. A rule that some text still breaks has a
list beside it: how often which template does. The counts are exact, so that a list only shrinks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from kvgen.codegen.emit import load_and_render
from kvgen.config import find_config
from kvgen.paths import templates_root
from tests import sets

ROOT: Final = Path(__file__).resolve().parent.parent


# Text ------------------------------------------------------------------------------------------------------------------


def code(text: str) -> str:
    """CUDA without comments and strings; every line keeps its number."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', text)
    return re.sub(r"//.*", "", text)


def closing(text: str, start: int, opens: str, closes: str) -> int:
    """The place of what closes the bracket at `start`; the end where nothing does."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == opens) - (text[i] == closes)
        if depth == 0:
            return i
    return len(text)


def split_arguments(text: str) -> list[str]:
    """The arguments of a list, split at its outer commas."""
    found, depth = [""], 0
    for char in text:
        depth += (char in "<([{") - (char in ">)]}")
        if char == "," and depth == 0:
            found.append("")
        else:
            found[-1] += char
    return found


@dataclass(frozen=True)
class Function:
    """A device function: its name, the lines from its name to its closing brace, its parameters and its body."""

    name: str
    lines: int
    params: str
    body: str


def functions(text: str) -> Iterator[Function]:
    """Every function that a device header defines."""
    plain = code(text)
    for found in re.finditer(r"__device__[^;{}=()]*?\b(\w+|operator\W+)\(", plain):
        if found[1] in ("__launch_bounds__", "__align__"):
            continue
        end = closing(plain, found.end() - 1, "(", ")")
        opening = re.match(r"[\s\w:&]*\{", plain[end + 1 :])
        if opening is None:
            continue
        begin = end + opening.end()
        last = closing(plain, begin, "{", "}")
        lines = plain.count("\n", found.start(1), last) + 1
        yield Function(found[1], lines, plain[found.end() : end], plain[begin : last + 1])


STORE: Final = re.compile(
    r"\bst\.global|\bred\.global|\batomic[A-Z]\w*\(|\b(?:store|write)(?:_\w+)?(?:<[^;{}]*>)?\("  # PTX, and functions that say so
    r"|\*\([^()=;]*\*\)(?!&)[^;=]*[^;=!<>] = "  # through a pointer that is cast, as vectors are stored; not to a variable
)


def stores(function: Function) -> bool:
    """A device function stores to memory that its caller sees: by PTX, by a function that does, through a cast pointer
    or through a pointer that it is given."""
    given = re.findall(
        r"(?<!const )\b(?!const\b)[\w:]+(?:<[^()]*>)? ?\* ?(?:const )?(\w+)",
        re.sub(r"const \w+\*", "", function.params),
    )
    through = [rf"(?<![\w.])(?:{name}\[[^;=]*\]|\*{name}) [-+|&]?= " for name in given]
    return any(re.search(rule, function.body) for rule in (STORE, *through))


def template_calls(plain: str) -> Iterator[tuple[str, list[str]]]:
    """Every call with template arguments: the function's name, its arguments."""
    for found in re.finditer(r"\b(\w+)<", plain):
        end = closing(plain, found.end() - 1, "<", ">")
        inside = plain[found.end() : end]
        if plain[end + 1 : end + 2] == "(" and not re.search(r"[;{}]|&&|\|\|", inside) and found[1] != "template":
            yield found[1], split_arguments(inside)


def dead_arithmetic(plain: str) -> list[str]:
    """Arithmetic without a use: factors and divisors of 1, terms of 0, loops of one trip, functions of nothing."""
    rules = (
        r"[%/] 1\b(?!\.)(?! <<)",
        r"(?<![\w)\]] )(?<=[\w)\]]) \* 1\b(?![.\d])",
        r"(?<=[\w)\]]) \+ 0\b(?!x|\.\d)",
        r"\bfloat \w+ = 1\.0f;",
        r"\bfor \([^;()]*= 0; \w+ < 1; ",
        r"\([^()]*\)(?: const)? \{\s*return 0(?:\.0f)?;\s*\}",
    )
    return [m[0] for rule in rules for m in re.finditer(rule, plain)]


def decided_branches(plain: str) -> list[str]:
    """`if constexpr` on a constant whose value stands in the same text."""
    known = set(re.findall(r"\bconstexpr \w+ (k\w+) =", plain))
    tested = re.findall(r"\bif constexpr \(([^{}\n]*)\) ", plain)
    return [
        c for c in tested if c in ("true", "false") or ((names := set(re.findall(r"\bk\w+", c))) and names <= known)
    ]


def nested_lambdas(plain: str) -> list[str]:
    """Lambdas inside the body of another one."""
    found = []
    for outer in re.finditer(r"\[[&=\w, ]*\]\s*(?:\([^()]*(?:\([^()]*\)[^()]*)*\))?\s*(?:->\s*\w+\s*)?\{", plain):
        body = plain[outer.end() : closing(plain, outer.end() - 1, "{", "}")]
        found += re.findall(r"\[[&=]\]\s*\([^\n]*", body)
    return found


def inline_conditions(text: str) -> list[str]:
    """Lines of a template in which `{{ }}` decides, or a tag guards less than the line; comments and commas aside."""
    found = []
    for line in re.sub(r"\{#.*?#\}", "", text, flags=re.DOTALL).splitlines():
        plain = line.partition("//")[0]
        for inside in re.findall(r"\{\{(.*?)\}\}", plain):
            if re.search(r"\bif\b", inside) and "loop.last" not in inside:
                found.append(line.strip())
        if re.search(r"\{%-? *(?:if|elif|else|endif)\b", plain) and not re.fullmatch(r"\s*(?:\{%[^%]*%\}\s*)+", plain):
            found.append(line.strip())
    return found


# What is read ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A generated kernel: where it lies, the template it is made of, its lines and its code."""

    path: str
    template: str
    lines: int
    plain: str


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    found = []
    for path, file in (load_and_render(find_config(ROOT))[1] | sets.files()).items():
        if path.endswith(".cu"):
            template = re.search(r"templates/(\S+\.j2)", file.text)
            assert template, path
            found.append(Kernel(path, template[1], file.text.count("\n"), code(file.text)))
    assert len(found) > 100
    return found


@pytest.fixture(scope="module")
def device() -> dict[str, list[Function]]:
    headers = sorted((templates_root() / "device").rglob("*.cuh"))
    return {p.relative_to(templates_root()).as_posix(): list(functions(p.read_text())) for p in headers}


def counted(kernels: list[Kernel], rule: Callable[[str], list[str]]) -> Counter[str]:
    """How often kernels break a rule, by template."""
    found: Counter[str] = Counter()
    for k in kernels:
        found[k.template] += len(rule(k.plain))
    return +found


# The rules -----------------------------------------------------------------------------------------------------------------

# How often templates, or the kernels made of them, still break a rule.
INLINE: Final[dict[str, int]] = {}
ARGUMENTS: Final[dict[str, int]] = {}
DEAD: Final[dict[str, int]] = {}
DECIDED: Final[dict[str, int]] = {}
NESTED: Final[dict[str, int]] = {}
BARRIERS: Final[dict[str, int]] = {}
LONG: Final[dict[str, int]] = {}
# A cache is its fields over the methods of device/cache/paged.cuh; a form of page table adds to the entries of another one.
HEIRS: Final[dict[str, int]] = {
    "cache/cache.cuh.j2": 2,
    "device/cache/paged.cuh": 2,
    "device/cache/tables/csr.cuh": 1,
    "device/cache/tables/csr_last.cuh": 1,
    "device/cache/tables/dense.cuh": 3,
    **{f"device/cache/tables/{form}.cuh": 1 for form in ("indirect", "mapped", "offsets", "per_kv", "ring")},
}


def test_a_tag_guards_whole_lines() -> None:
    """No `if` inside `{{ }}`, and no tag inside a line of CUDA."""
    found = {p: inline_conditions(p.read_text()) for p in templates_root().rglob("*.j2")}
    assert {p.relative_to(templates_root()).as_posix(): len(lines) for p, lines in found.items() if lines} == INLINE


def test_a_call_has_at_most_three_template_arguments(kernels: list[Kernel]) -> None:
    """More belong into a struct that the kernel spells out."""
    assert counted(kernels, lambda t: [n for n, a in template_calls(t) if len(a) > 3]) == ARGUMENTS


def test_a_specialisation_has_no_dead_arithmetic(kernels: list[Kernel]) -> None:
    assert counted(kernels, dead_arithmetic) == DEAD


def test_a_specialisation_decides_no_constants(kernels: list[Kernel]) -> None:
    assert counted(kernels, decided_branches) == DECIDED


def test_callbacks_are_not_nested(kernels: list[Kernel]) -> None:
    assert counted(kernels, nested_lambdas) == NESTED


WAITS: Final = re.compile(
    r"__syncthreads|__syncwarp|\bbar\.sync|cp\.async\.\w*\.?wait|mbarrier\.try_wait|cp_async_wait|\bwait_all\("
)
SAYS_SO: Final = re.compile(r"sync|wait|merge|store|commit")


def test_a_device_function_that_waits_says_so(device: dict[str, list[Function]]) -> None:
    """By its name: a barrier or a wait in a function called load_... is not seen from the kernel."""
    found = Counter(
        path for path, own in device.items() for f in own if WAITS.search(f.body) and not SAYS_SO.search(f.name)
    )
    assert found == BARRIERS


STORES_SAY_SO: Final = re.compile(r"store|write|merge|commit|report")
# Those that store under other names: no memory of the pool or of a result.
STORING: Final = {
    "device/attention/mla/latent_sources.cuh: sync_tile": 1,  # a tile that waited in registers, to its stage in shared memory
    "device/attention/common/merge.cuh: sync_finish_among": 1,  # the counter of a request's chunks, for the next launch
    "device/attention/common/merge.cuh: weigh_partials": 1,  # weights of partial results, in shared memory
    "device/attention/plan/plan_kv.cuh: sync_sums": 1,  # sums over the block, in shared memory
    "device/attention/extend/row_wgmma.cuh: sync_finish_of": 1,  # the same counter
    "device/attention/extend/row_wgmma.cuh: await_work": 1,  # what one warp has asked for, in shared memory
    "device/attention/common/tile_scales.cuh: copy_any": 1,  # scales that no copy can bring, into the stage
    "device/attention/common/tile_scales.cuh: fetch": 1,  # the same, a fetch later
    "device/attention/common/tile_scales.cuh: expand": 1,  # what products take of scales, in shared memory
    "device/quant/elements.cuh: pack_pair": 1,  # two elements of a vector in registers
}


def test_a_device_function_that_stores_says_so(device: dict[str, list[Function]]) -> None:
    """By its name: a kernel's text shows what is written where."""
    found = Counter(
        f"{path}: {f.name}"
        for path, own in device.items()
        for f in own
        if stores(f) and not STORES_SAY_SO.search(f.name)
    )
    assert found == STORING


def test_a_device_function_fits_a_screen(device: dict[str, list[Function]]) -> None:
    assert Counter(path for path, own in device.items() for f in own if f.lines > 45) == LONG


def test_nothing_inherits(kernels: list[Kernel]) -> None:
    heir = re.compile(r"\bstruct (?:alignas\(\d+\) )?\w+ : ")
    texts = {p.relative_to(templates_root()).as_posix(): code(p.read_text()) for p in templates_root().rglob("*.cuh*")}
    found = Counter({path: len(heir.findall(text)) for path, text in texts.items()})
    found.update(counted(kernels, heir.findall))
    assert +found == HEIRS


# Lines -----------------------------------------------------------------------------------------------------------------------

# The most lines of a kernel of an operation, and how many of its kernels have more.
LIMITS: Final = {
    "append": 100,
    "append_q": 80,
    "gather": 55,
    "gather_raw": 70,
    "gather_rows": 55,
    "scatter": 55,
    "convert": 90,
    "decode_plan": 45,
    "decode_local_plan": 45,
    "mla_decode_plan": 46,  # a header more, for a tile by architecture
    "mla_plan": 45,
    "verify_plan": 45,
}
LONGER: Final[dict[str, int]] = {
    # norms of q, k and v and RoPE, their Hadamard transforms, three positions a token, or 128 frequencies: phases, not lengths
    "append": 12,
}
# On average; roles are functions, whose arguments are written out: the body of a kernel went from 110-157 lines to 26-50.
DECODE_LINES: Final = 233
LLAMA_DECODE_LINES: Final = 237
SET_LINES: Final = 50_000 // 68  # of a set's kernels, on average; 22 sets have extend, for two kinds of tensor cores


def test_kernels_are_as_short_as_their_operation_allows(kernels: list[Kernel]) -> None:
    found = Counter(op for k in kernels if k.lines > LIMITS.get(op := Path(k.path).stem, 600))
    assert found == LONGER


def test_lines_of_decode_and_of_all_kernels(kernels: list[Kernel]) -> None:
    decode = [k.lines for k in kernels if Path(k.path).stem == "decode"]
    (llama,) = (k.lines for k in kernels if k.path == "llama3_8b/decode.cu")
    assert sum(decode) / len(decode) <= DECODE_LINES
    assert llama <= LLAMA_DECODE_LINES
    assert sum(k.lines for k in kernels) <= SET_LINES * len({Path(k.path).parent for k in kernels})


# What counts -------------------------------------------------------------------------------------------------------------------


def test_what_is_a_call_with_template_arguments() -> None:
    text = (
        "load<A, 2, B<3, 4>, true>(x); f<1>(y); if (a < b && c > (d)) return; Vec<float, 4> v; x.template g<A, B>(1);"
    )
    assert [(n, len(a)) for n, a in template_calls(text)] == [("load", 4), ("f", 1), ("g", 2)]


def test_what_is_dead() -> None:
    loop = "for (uint32_t i = 0; i < 1; ++i)"
    for text in ("i % 1 * 4", "a / 1;", "x * 1 + y", "(a) + 0)", "const float shrink = 1.0f;", loop):
        assert dead_arithmetic(text), text
    assert dead_arithmetic("uint32_t first(uint32_t position) {\n  return 0;\n}")
    for text in ("i % 16", "x / 1.5f", "x * 128", "a + 0x10", "1 << 3", "float x = 1.0f / y;", "i < 16; "):
        assert not dead_arithmetic(text), text


def test_what_is_a_nested_callback() -> None:
    assert nested_lambdas("f([&](int x) { return g([&](int y) { return y; }); });")
    assert not nested_lambdas("f([&](int x) { return a[x]; }); f([&](int x) { return 1; });")


def test_what_is_an_inline_condition() -> None:
    for line in ("x = {{ 'a' if b else 'c' }};", "x{% if b %} + 1{% endif %};", "{% if a %}x{% endif %}"):
        assert inline_conditions(line), line
    for line in (
        "// {{ 'a' if b else 'c' }}",
        "x = 1;  // {{ 'a' if b }}",
        "{% if b %}",
        "  {% else %}",
        "{# a if b #}",
    ):
        assert not inline_conditions(line), line


def test_what_a_function_is() -> None:
    text = """\
__device__ __forceinline__ int f(int x) {
  return g(x);
}
struct A {
  __device__ static int h() { __syncthreads(); return 1; }
  __device__ int declared(int x) const;
};
"""
    assert [(f.name, f.lines) for f in functions(text)] == [("f", 3), ("h", 1)]


def test_what_a_store_is() -> None:
    def one(params: str, body: str) -> bool:
        return stores(Function("f", 1, params, "{" + body + "}"))

    for body in (
        'asm("st.global.b32 [%0], 1;");',
        "store_rows<4>(x);",
        "write(p, x);",
        "*(Wide*)in_global(to) = x;",
        "atomicMax(p, 1);",
    ):
        assert one("", body), body
    for params, body in (
        ("float* out, int i", "out[i + 1] = 2;"),
        ("const Index* in, T *to", "*to = in[0];"),
        ("int* n", "n[0] += 1;"),
    ):
        assert one(params, body), body
    for params, body in (
        ("const float* in, float (&x)[4]", "x[0] = in[1];"),
        ("float* out", "return out[i] == 1;"),
        ("Raw& raw", "*(Access*)&raw.e[i] = *(const Access*)p;"),
        ("const T* p", "x = *(const Wide*)p;"),
    ):
        assert not one(params, body), body
