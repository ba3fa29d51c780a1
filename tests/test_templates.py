"""The templates: what they read, and what they may write."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any

import pytest
from jinja2 import meta, nodes

from kvgen import ops
from kvgen.architectures import ARCHS
from kvgen.codegen.emit import File, load_and_render
from kvgen.codegen.render import environment, render
from kvgen.config import find_config
from kvgen.errors import ToolError
from kvgen.export.example import ExampleContext
from kvgen.export.folder import FolderContext, KernelFile
from kvgen.export.header import HeaderContext
from kvgen.lowering.attention.decode_mma import DecodeMma
from kvgen.lowering.attention.decode_simt import DecodeSimt
from kvgen.lowering.attention.extend_mma import ExtendMma
from kvgen.lowering.attention.extend_problem import ExtendPlanContext
from kvgen.lowering.attention.extend_simt import ExtendSimt
from kvgen.lowering.attention.extend_sm90 import ExtendSm90
from kvgen.lowering.attention.mla_mma import MlaMma
from kvgen.lowering.attention.mla_mma_few_heads import MlaMmaFewHeads
from kvgen.lowering.attention.mla_sm90 import MlaSm90
from kvgen.lowering.attention.mla_sm90_few_heads import MlaSm90FewHeads
from kvgen.lowering.attention.mla_sm90_rows import MlaSm90Rows
from kvgen.lowering.attention.split_kv import PlanContext
from kvgen.lowering.cache_header import CacheContext, StatesContext
from kvgen.lowering.launcher_module import LauncherContext
from kvgen.lowering.launcher_table import TableContext
from kvgen.lowering.pooled_tokens import PoolTokensContext
from kvgen.lowering.row_kernel import AppendContext, AppendQContext, NormCacheContext, RotateCacheContext
from kvgen.paths import templates_root

ROOT = Path(__file__).resolve().parent.parent


def own_contexts() -> dict[str, type]:
    """The templates of kernels whose context is beside their operation: ops/copy_pages_check.cu.j2, CopyPagesCheckContext."""
    found: dict[str, type] = {}
    for op in ops.ALL:
        for name, context in vars(importlib.import_module(op.__module__)).items():
            words = re.findall("[A-Z][a-z0-9]*", name.removesuffix("Context"))
            template = f"ops/{'_'.join(words).lower()}.cu.j2"
            if name.endswith("Context") and (templates_root() / template).is_file():
                found[template] = context
    return found


# Each template and its context.
CONTEXTS: dict[str, type] = {
    **own_contexts(),
    "ops/append.cu.j2": AppendContext,
    "ops/append_q.cu.j2": AppendQContext,
    "ops/norm_cache.cu.j2": NormCacheContext,
    "ops/rotate_cache.cu.j2": RotateCacheContext,
    "ops/pool_tokens.cu.j2": PoolTokensContext,
    "ops/decode_mma.cu.j2": DecodeMma,
    "ops/decode_simt.cu.j2": DecodeSimt,
    "ops/decode_plan.cu.j2": PlanContext,
    "ops/extend_mma.cu.j2": ExtendMma,
    "ops/extend_plan.cu.j2": ExtendPlanContext,
    "ops/extend_simt.cu.j2": ExtendSimt,
    "ops/extend_sm90.cu.j2": ExtendSm90,
    "ops/mla_mma.cu.j2": MlaMma,
    "ops/mla_sm90.cu.j2": MlaSm90,
    "ops/mla_mma_few_heads.cu.j2": MlaMmaFewHeads,
    "ops/mla_sm90_few_heads.cu.j2": MlaSm90FewHeads,
    "ops/mla_sm90_rows.cu.j2": MlaSm90Rows,
    "cache/cache.cuh.j2": CacheContext,
    "cache/states.cuh.j2": StatesContext,
    "launcher/init.py.j2": LauncherContext,
    "launcher/table.py.j2": TableContext,
    "export/set.h.j2": HeaderContext,
    "export/example.cpp.j2": ExampleContext,
    "export/kernel.cu.j2": KernelFile,
    "export/CMakeLists.txt.j2": FolderContext,
    "export/README.md.j2": FolderContext,
}
# Macros, which get what they need as arguments: the page tables', imported by cache.cuh.j2; what attention kernels share; the
# structs and stores of kernels of rows, and where things lie.
TABLES = sorted(p.relative_to(templates_root()).as_posix() for p in templates_root().glob("cache/*.j2"))
TABLES.remove("cache/cache.cuh.j2")
TABLES.remove("cache/states.cuh.j2")
STEPS = sorted(
    p.relative_to(templates_root()).as_posix()
    for d in ("attention", "places")
    for p in templates_root().glob(f"{d}/*.j2")
)
MACROS = [*TABLES, *STEPS]


def source(template: str) -> str:
    return (templates_root() / template).read_text(encoding="utf-8")


def included(template: str) -> str:
    """A template's text with that of the templates that it includes."""
    return re.sub(r'{% include "([^"]+)" %}', lambda match: included(match[1]), source(template))


@pytest.fixture(scope="module")
def generated() -> dict[str, File]:
    """Every file of the project's own specs."""
    return load_and_render(find_config(ROOT))[1]


def test_every_template_is_listed() -> None:
    found = {p.relative_to(templates_root()).as_posix() for p in templates_root().rglob("*.j2")}
    assert found == {*CONTEXTS, *MACROS}


@pytest.mark.parametrize("template", CONTEXTS)
def test_a_template_reads_the_fields_of_its_context_and_no_others(template: str) -> None:
    read = meta.find_undeclared_variables(environment().parse(included(template)))
    # The one variable that is no operation's: whether scales of the set's cache are given.
    assert read - {"given_scales", "other_files"} == {f.name for f in fields(CONTEXTS[template])}


def test_each_template_says_which_of_its_lines_wrote_what(generated: dict[str, File]) -> None:
    by_template = {
        m[1]: file for file in generated.values() if (m := re.search(r"templates/(\S+\.cuh?\.j2)", file.text))
    }
    assert len(by_template) > 30
    for template, file in by_template.items():
        assert f"templates/{template}" in {place.rpartition(":")[0] for place in file.origins}, template


@pytest.mark.parametrize("template", MACROS)
def test_macros_read_their_arguments_alone(template: str) -> None:
    assert meta.find_undeclared_variables(environment().parse(source(template))) == set()


def test_the_tables_have_the_same_macros() -> None:
    """So that an operation that imports a table asks none what kind it is; and no macro that nobody asks for."""
    users = "".join(source(f"ops/{name}.cu.j2") for name in ("reorder", "compact", "compact_plan"))
    macros = {t: re.findall(r"{% macro (\w+\([^)]*\))", source(t)) for t in TABLES}
    first = macros[TABLES[0]]
    assert {m.partition("(")[0] for m in first} == set(re.findall(r"\btable\.(\w+)\(", users))
    assert all(found == first for found in macros.values())


def test_the_tables_have_the_same_functions() -> None:
    """A form's device type says how pages are found, or derives from another form's."""
    folder = templates_root() / "device" / "cache" / "tables"
    forms = {p.stem: p.read_text(encoding="utf-8") for p in folder.glob("*.cuh")}
    assert set(forms) == {Path(t).stem for t in TABLES} - {"states"}
    known = set(re.findall(r"Table::(\w+)\(", (folder.parent / "paged.cuh").read_text(encoding="utf-8")))
    for name, text in forms.items():
        found = set(re.findall(r"__device__ static [\w:*, ]+?\*? (\w+)\(const Cache&", text))
        parent = re.search(r"struct \w+ : (\w+)<PageIds>", text)
        assert found and found <= known and parent is not None, name
        assert parent[1] != "TableBase" or found >= {"holds", "list", "ids"}, name


# Held to the rules of pages that are read alone: a loop's tags stand on lines of their own, but in comments; the kernels of a
# step's rows.
PAGES = (
    *(
        f"ops/{name}.cu.j2"
        for name in ("append", "norm_cache", "pool_tokens", "rotate_cache", "lora_add", "rows_add", "store_scales")
    ),
    "places/rows.j2",
)


@pytest.mark.parametrize("template", PAGES)
def test_a_loop_guards_whole_lines(template: str) -> None:
    for line in source(template).splitlines():
        code = line.partition("//")[0]
        assert not re.search(r"\{%-? (for|endfor)\b", code) or re.fullmatch(r"\s*\{%.*%\}\s*", line), line


# Names in a set, and no choice inside a print ------------------------------------------------------------------------------

STATEMENTS = ("break", "continue", "return")


def c_in_sets(text: str) -> list[tuple[int, str]]:
    """(line, string) of strings in `{% set %}` that are no name: calls, operators, numbers, statements, parts of sentences.

    A name is what C takes as a type or an identifier, and no statement by itself. The empty string is allowed: text that a
    macro appends to. A `{% set %}` that holds a block of text is always found.
    """
    tree = environment().parse(text)
    found = [(block.lineno, "a block of text") for block in tree.find_all(nodes.AssignBlock)]
    for assign in tree.find_all(nodes.Assign):
        values = [n.value for n in (assign.node, *assign.node.find_all(nodes.Const)) if isinstance(n, nodes.Const)]
        strings = [value for value in values if isinstance(value, str)]
        found += [(assign.lineno, s) for s in strings if s in STATEMENTS or not re.fullmatch(r"([A-Za-z_]\w*)?", s)]
    return found


def choices_in_prints(text: str) -> list[int]:
    """The lines of `{{ }}` with an `if` inside, comments of the generated text included."""
    prints = environment().parse(text).find_all(nodes.Output)
    return [choice.lineno for output in prints for choice in output.find_all(nodes.CondExpr)]


def tags_beside_text(text: str) -> list[str]:
    """Lines on which an `{% if %}`, or what belongs to it, has text beside it: a line, or a sentence, out of fragments."""
    lines = (re.sub(r"\{#.*?#\}", "", line) for line in text.splitlines())
    return [
        line
        for line in lines
        if re.search(r"\{%-? (if|elif|else|endif)\b", line) and not re.fullmatch(r"\s*\{%[^%]*%\}\s*", line)
    ]


@pytest.mark.parametrize("template", (*CONTEXTS, *MACROS))
def test_a_set_holds_names_and_a_print_no_choice(template: str) -> None:
    text = source(template)
    assert not c_in_sets(text) and not choices_in_prints(text), template
    assert not tags_beside_text(text), template


C_IN_SETS = (
    "{% set at = 'k_at[0]' %}",
    "{% set at = 'page.id' if x else 'id' %}",
    "{% set more = ', scales' %}",
    "{% set factor = x ~ ' * kLog2e' %}",
    "{% set zero = '0.0f' %}",
    "{% set leave = 'return' %}",
    "{% set idle = ' (column ' ~ x ~ ' is idle)' %}",
    "{% set type = 'Key::Element' %}",
    "{% set all = ['Key', 'f()'] %}",
    "{% set at %}k_at{% endset %}",
    "{% set space.text = '(' ~ x ~ ')' %}",
)
NAMES_IN_SETS = (
    "{% set query = 'HeldQuery' if x else 'SharedQuery' %}",
    "{% set several = x > 1 %}",
    "{% set so_far = namespace(text='', single=true) %}",
    "{% set so_far.text = plus(so_far.text, x) %}",
    "{% set s, q = x.segment, x.scales %}",
)


def test_the_rules_find_what_they_should() -> None:
    assert [t for t in C_IN_SETS if not c_in_sets(t)] == []
    assert [t for t in NAMES_IN_SETS if c_in_sets(t)] == []
    assert choices_in_prints(
        "a\n// of a {{ 'token' if x else 'page' }}\n{% if x %}\n{{ f('a' if x else 'b') }}\n{% endif %}\n"
    ) == [2, 4]
    assert not choices_in_prints("{% for i in range(2 if x else 4) %}\n{{ i }}\n{% endfor %}\n")
    assert tags_beside_text("// Blocks{% if x %} of 2{% endif %}.\n{% if x %}\n{%- elif y %}\n{% endif %}\n") == [
        "// Blocks{% if x %} of 2{% endif %}."
    ]


def test_kernels_of_rows_name_what_they_call_with(generated: dict[str, File]) -> None:
    """At most three template arguments at a call, and barriers as statements of their own that say what is complete."""
    names = re.compile(r"/(append\w*|norm_cache|pool\w*|rotate_cache|lora_add|rows_add|store_scales)\.cu$")
    kernels = {path: file.text for path, file in generated.items() if names.search(path)}
    assert len(kernels) > 50
    for path, text in kernels.items():
        for arguments in re.findall(r"\b[a-zA-Z_]\w*<([^<>;()]*)>\(", text):
            assert arguments.count(",") < 3, f"{path}: <{arguments}>"
        assert all(re.search(r"//[ ]\w", line) for line in text.splitlines() if "__syncthreads()" in line), path


def test_no_template_asks_which_kind() -> None:
    """Decisions lie in typed Python: a condition tests a flag or a number of the context, never a class or a preset."""
    for template in (*CONTEXTS, *MACROS):
        for condition in re.findall(r"{% (?:el)?if (.*?) %}", source(template)):
            assert not re.search(r"\b(kind|preset|isinstance|type)\b", condition), f"{template}: {condition}"


# What the templates write ------------------------------------------------------------------------------------------------


def test_kernels_are_specialised_and_short_enough_to_review(generated: dict[str, File]) -> None:
    kernels = {path: file.text for path, file in generated.items() if path.endswith(".cu")}
    assert len(kernels) > 50
    for path, text in kernels.items():
        assert not re.search(r"^\s*#\s*(if|ifdef|ifndef|else|elif)\b", text, re.MULTILINE), path
        assert text.count("\n") <= 600, path
        assert not re.search(r"\{[{%#]|[%#]\}", text.replace("{{", "")), path
        assert len(re.findall(r'^extern "C" __global__ ', text, re.MULTILINE)) == 1, path


def test_a_kernel_waits_before_it_reads_what_another_wrote(generated: dict[str, File]) -> None:
    """Programmatic dependent launch: the wait is the first statement of every kernel. None lets the next one start before its own
    blocks end: they read until shortly before that."""
    for path, file in generated.items():
        if path.endswith(".cu"):
            _, _, body = file.text.partition('extern "C" __global__ ')
            assert body[body.index(") {") + 3 :].strip().startswith("pdl_wait();\n"), path
            assert "pdl_trigger" not in body, path


def test_generated_text_is_clean(generated: dict[str, File]) -> None:
    for path, file in generated.items():
        assert file.text.endswith("\n") and not file.text.endswith("\n\n"), path
        assert "\r" not in file.text and "\t" not in file.text and "\x01" not in file.text, path
        assert not re.search(r"[ ]+$", file.text, re.MULTILINE), path
        assert "\n\n\n\n" not in file.text, path


def test_generated_text_names_no_machine_and_no_day(generated: dict[str, File]) -> None:
    """Byte-identical everywhere: no absolute path, date or version."""
    for path, file in generated.items():
        assert not re.search(r"(?<![\w.])/(home|tmp|usr|work|root)/|\b20\d\d-\d\d-\d\d\b", file.text), path


def test_every_architecture_is_a_real_one(generated: dict[str, File]) -> None:
    for path, file in generated.items():
        for arch in re.findall(r"\bsm_\d\w*", file.text):
            assert arch in ARCHS, path


# The renderer ------------------------------------------------------------------------------------------------------------


def context_of(**values: Any) -> object:
    """A frozen dataclass with these fields."""
    return make_dataclass("Context", [(name, Any) for name in values], frozen=True)(**values)


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Renders a text as the template `x.j2`, over the given variables."""

    def go(text: str, **values: Any) -> str:
        from jinja2 import FileSystemLoader

        (tmp_path / "x.j2").write_text(text, encoding="utf-8")
        monkeypatch.setattr("kvgen.codegen.render.templates_root", lambda: tmp_path)
        monkeypatch.setattr(environment(), "loader", FileSystemLoader(tmp_path))
        monkeypatch.setattr(environment(), "cache", None)
        return render("x.j2", context_of(**values))

    return go


@dataclass(frozen=True)
class Role:
    name: str


def test_text_numbers_and_flags_are_printed(template: Any) -> None:
    assert template("{{ a }} {{ b }} {{ c }} {{ r.name }}\n", a="x", b=-3, c=True, r=Role("k")) == "x -3 true k\n"
    assert template("{{ 'y' if c else '' }}{{ n // 2 }}\n", c=False, n=7) == "3\n"


@pytest.mark.parametrize("value", [None, 0.5, [1], (1,), {"a": 1}, Role("k"), b"x"], ids=lambda v: type(v).__name__)
def test_nothing_else_is(template: Any, value: Any) -> None:
    with pytest.raises(ToolError) as caught:
        template("a\n{{ value }}\n", value=value)
    assert str(caught.value).startswith(
        f"templates/x.j2:2: printed a {type(value).__name__} ({value!r}); only str, int and bool"
    )


UNDEFINED = ("{{ absent }}", "{{ r.absent }}", "{% if absent %}{% endif %}", "{% for i in absent %}{% endfor %}")


@pytest.mark.parametrize("text", UNDEFINED)
def test_an_undefined_name_raises(template: Any, text: str) -> None:
    with pytest.raises(ToolError, match=r"^templates/x\.j2:2: .*'absent'"):
        template(f"a\n{text}\n", r=Role("k"))


def test_a_broken_template_names_its_line(template: Any) -> None:
    with pytest.raises(ToolError, match=r"^templates/x\.j2:2: "):
        template("a\n{% if %}\n")
