"""Plan -> text. The only module that knows Jinja; it reads templates and writes no file.

Jinja decides what exists, constexpr decides what is computed: templates get one frozen dataclass, undefined names raise,
and only str, int and bool reach the text.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from traceback import walk_tb
from typing import Any, Final

from jinja2 import (
    Environment,
    FileSystemLoader,
    StrictUndefined,
    TemplateError,
    TemplateRuntimeError,
    TemplateSyntaxError,
    Undefined,
    nodes,
)
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream

from kvgen.codegen.template_cache import TemplateCache
from kvgen.errors import ToolError
from kvgen.paths import templates_root

_MARK: Final = re.compile("\x01([^\x02]*)\x02")


def _only_text(value: Any) -> Any:
    """Let str, int and bool into the text, bool as C spells it; None, floats and containers are mistakes.

    What is undefined goes on to Jinja, which raises with its name.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, Undefined)):
        return value
    raise TemplateRuntimeError(f"printed a {type(value).__name__} ({value!r}); only str, int and bool become text")


class _Marks(Extension):
    """Prefixes every template line of literal text with its origin; stripped again after rendering."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for token in stream:
            if token.type != "data":
                yield token
                continue
            lines = token.value.split("\n")
            marked = [f"\x01{stream.name}:{token.lineno + i}\x02{line}" for i, line in enumerate(lines)]
            yield Token(token.lineno, "data", "\n".join(marked))

    def parse(self, parser: Any) -> nodes.Node:
        raise NotImplementedError


def _environment(*, marked: bool) -> Environment:
    return Environment(
        loader=FileSystemLoader(templates_root()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        auto_reload=False,
        finalize=_only_text,
        extensions=[_Marks] if marked else [],
        bytecode_cache=TemplateCache(f"{marked} {inspect.getsource(sys.modules[__name__])}"),
    )


@lru_cache(maxsize=2)
def environment(marked: bool = False) -> Environment:
    """The Jinja environment, made on first use."""
    return _environment(marked=marked)


def variables(context: object) -> dict[str, Any]:
    """The template's variables: the fields of its context dataclass, shallow."""
    return {f.name: getattr(context, f.name) for f in fields(context)}  # type: ignore[arg-type]


def _place(error: TemplateError, template: str) -> str:
    """The `templates/file:line` that an error arose at: a syntax error says, others have it in their traceback."""
    root, found = f"{templates_root()}/", f"templates/{template}"
    if isinstance(error, TemplateSyntaxError):
        return f"templates/{error.name or template}:{error.lineno}"
    for frame, line in walk_tb(error.__traceback__):
        if frame.f_code.co_filename.startswith(root):
            found = f"templates/{frame.f_code.co_filename.removeprefix(root)}:{line}"
    return found


def render(template: str, context: object, **more: bool | str) -> str:
    """The text of `template` over `context` and `more`, variables of every kernel: `given_scales`, whether scales of the set's
    cache are given by the caller, and `other_files`, the kernel's files for other architectures."""
    try:
        return environment().get_template(template).render(variables(context), **more)
    except TemplateError as error:
        raise ToolError(f"{_place(error, template)}: {error}") from error


def origins(template: str, context: object, text: str, **more: bool | str) -> tuple[str, ...]:
    """The `templates/file:line` behind each line of `text`, which `template` gave over `context`; "" where none wrote it.

    Renders once more, with marks in the text; raises ToolError where that differs from `text` in more than its marks.
    """
    marked = environment(True).get_template(template).render(variables(context), **more)
    if _MARK.sub("", marked) != text:
        raise ToolError(f"templates/{template}: the marked rendering differs from the clean one")
    found, last = [], ""
    for line in marked.split("\n"):
        marks = [(m[1], m.end()) for m in _MARK.finditer(line)]
        # The last mark that is followed by text wrote the line; a line of pure substitution keeps the mark before it.
        solid = [name for i, (name, end) in enumerate(marks) if _MARK.sub("", line[end:]).strip()]
        last = solid[-1] if solid else marks[-1][0] if marks else last
        found.append(f"templates/{last}" if last else "")
    return tuple(found)
