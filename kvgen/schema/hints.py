"""Advice about a value that a spec refuses: the words behind the field and the value in a message."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Final

from pydantic_core import ErrorDetails

from kvgen.architectures import GPUS

# What other libraries call an element type: torch, NumPy, ml_dtypes, vLLM.
_ELEMENTS: Final = {
    "bfloat16": "bf16",
    "float16": "f16",
    "half": "f16",
    "fp16": "f16",
    "float32": "f32",
    "float": "f32",
    "fp32": "f32",
    "int8": "i8",
    "uint8": "u8",
    "int32": "i32",
    "int": "i32",
    "uint32": "u32",
    "int64": "i64",
    "long": "i64",
    "uint64": "u64",
    "float8_e4m3fn": "e4m3",
    "float8_e4m3": "e4m3",
    "fp8_e4m3": "e4m3",
    "fp8": "e4m3",
    "f8": "e4m3",
    "float8_e5m2": "e5m2",
    "fp8_e5m2": "e5m2",
    "int4": "i4",
    "int3": "i3",
    "int2": "i2",
    "fp4": "e2m1",
    "nvfp4": "e2m1",
    "float4_e2m1fn": "e2m1",
}
_QUANTS: Final = {
    "e4m3": 'Quant(dtype="e4m3")',
    "e5m2": 'Quant(dtype="e5m2")',
    "i8": 'Quant(dtype="i8", scale_dtype="f32")',
    "i4": 'Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(dim=32))',
    "i3": 'Quant(dtype="i3", scale_dtype="f16", zero=True)',
    "i2": 'Quant(dtype="i2", scale_dtype="f16", zero=True, block=Block(dim=32))',
    "e2m1": 'Quant(dtype="e2m1", scale_dtype="e4m3", recipe="max")',
}
_EXAMPLES: Final = {
    "Block": "Block(dim=32)",
    "AnyCache": 'Paged(dtype="bf16", kv_heads=8, head_dim=128, page_size=16)',
    "Interleave": "Interleave(ranks=2)",
    "LayerNorm": "LayerNorm()",
    "Layout": 'Layout(kv="page kv token head dim")',
    "Mask": "Mask(window=4096)",
    "Model": 'Model(architecture="LlamaForCausalLM", layers=32)',
    "Op": "ops.Append()",
    "PositionScale": "PositionScale(scale=0.1, period=8192, offset=1)",
    "Quant": 'Quant(dtype="e4m3")',
    "RmsNorm": "RmsNorm()",
    "Rope": 'Rope(style="neox", theta=10_000.0)',
    "Score": "Score(softcap=50.0)",
}
_CACHES: Final = ("Continuous", "Latent", "Paged", "Ragged")
# What other libraries call a field.
FIELDS: Final = {
    "block_size": "page_size",
    "page_tokens": "page_size",
    "num_kv_heads": "kv_heads",
    "num_key_value_heads": "kv_heads",
    "num_heads": "q_heads",
    "num_q_heads": "q_heads",
    "num_qo_heads": "q_heads",
    "num_attention_heads": "q_heads",
    "head_size": "head_dim",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "logits_soft_cap": "softcap",
    "sliding_window": "window",
    "window_left": "window",
    "kv_cache_dtype": "quant",
}
_TABLES: Final = ("Dense", "CSR", "Indirect", "Mapped", "PerKV", "Ring")
# The class of an operation, by its field `kind`.
_CLASS: Final = re.compile(r"^class (\w+)\([^\n]*:\n(?:(?:    [^\n]*)?\n)*?    kind: ", re.MULTILINE)
_LISTS: Final = {"arch": '["sm_90a"]', "ops": "[ops.Append()]"}


def wanted(item: ErrorDetails, title: str, path: str) -> str:
    """The rule that a value breaks, and what to write: of every mistake but one of a field that takes another spec."""
    kind, value = item["type"], item["input"]
    if kind == "tuple_type":
        alone = isinstance(value, str | int | float)
        return f"it must be a list{f', such as [{value!r}]' if alone else ''}"
    if kind == "too_short":
        return f"it must have at least {item['ctx']['min_length']} item{_such_as(_LISTS.get(path.split('.')[0]))}"
    if kind in ("model_attributes_type", "union_tag_invalid", "union_tag_not_found"):
        return f"it must be one of {', '.join(f'{name}()' for name in _TABLES)}{_table(value)}"
    rule = f"{item['msg'][0].lower()}{item['msg'][1:]}"
    if kind == "int_type" and isinstance(value, str) and re.fullmatch(r"\d+", value):
        return f"{rule}; write {value}, without quotes"
    if kind == "literal_error":
        return rule + nearest(value, re.findall(r"'([^']*)'", item["ctx"]["expected"]), title, path)
    return rule


def called(name: str) -> str:
    """A call of a spec's class, with the fields that have no default."""
    return _EXAMPLES.get(name, f"{name}()")


def example(item: ErrorDetails, title: str, path: str) -> str:
    """A spec that a field takes, where it got something else."""
    name, value = item["ctx"]["class_name"], item["input"]
    if name == "Op" and isinstance(value, str):
        near = _operation(value)
        return _such_as(f"ops.{near}()" if near else "ops.Append() or ops.Decode()")
    if name == "Quant":
        code = _code(value)
        return f"; write {_QUANTS[code]}" if code else _such_as(_EXAMPLES["Quant"])
    return _such_as(_EXAMPLES.get(name))


def _such_as(text: str | None) -> str:
    return f", such as {text}" if text else ""


def operations_with(flag: str) -> str:
    """The kinds of operations that kvgen writes and that say `flag` of themselves, such as "ragged". Their texts are read, since
    an operation is imported where a spec names it alone."""
    says = f"    {flag}: ClassVar[bool] = True\n"
    texts = {path.stem: path.read_text(encoding="utf-8") for path in _modules().values() if path.stem != "custom"}
    return ", ".join(name for name, text in texts.items() if says in text)


def _modules() -> dict[str, Path]:
    """The modules of kvgen.ops by their names without _: each has one operation, whose kind is the name."""
    return {path.stem.replace("_", ""): path for path in sorted((Path(__file__).parents[1] / "ops").glob("[a-z]*.py"))}


def _operation(word: str) -> str | None:
    """The class of the operation that a word is nearest to, as its module's text calls it: "decode", "Decode" and "copy_pages"
    are ones."""
    modules = _modules()
    near = difflib.get_close_matches(word.lower().replace("_", "").removeprefix("ops."), modules, n=1)
    found = _CLASS.search(modules[near[0]].read_text(encoding="utf-8")) if near else None
    return found[1] if found else None


def _table(value: object) -> str:
    """The page table that a word or a class means."""
    name = value.__name__ if isinstance(value, type) else value if isinstance(value, str) else ""
    near = [table for table in _TABLES if table.lower() == name.lower().replace("_", "")]
    return f"; write {near[0]}()" if near else ""


def _word(value: object) -> str:
    """The name of an element type: torch.bfloat16, np.float16, np.dtype("float16") and "bfloat16" by their last word."""
    text = value if isinstance(value, str) else str(getattr(value, "__name__", value))
    return text.rpartition(".")[2].lower()


def _code(value: object) -> str | None:
    """The codes that a word for a quantized type means."""
    word = _word(value)
    found = _ELEMENTS.get(word, word)
    return found if found in _QUANTS else None


def nearest(value: object, valid: list[str], title: str, path: str) -> str:
    """The one of the `valid` words that was probably meant."""
    word = _word(value)
    field = path.split(".")[0]
    if field == "arch":
        runs = _target(word, valid)
        return (
            f"; {word} runs the code of {runs}: write {runs!r}"
            if runs
            else f"; none of these runs on {word}: kvgen needs compute capability 8.0 or newer"
        )
    if field == "dtype" and title in _CACHES:
        code = _code(value)
        if code:
            return f"; codes of fewer bits are another field: quant={_QUANTS[code]}"
    meant = _ELEMENTS.get(word)
    near = [meant] if meant in valid else difflib.get_close_matches(word, valid, n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near and near[0] != value else ""


def _target(word: str, valid: list[str]) -> str | None:
    """The target whose code runs on a GPU called sm_XY (compute capability X.Y), with or without a suffix."""
    match = re.fullmatch(r"(?:(?:sm|compute)_?)?(\d{2,3})[af]?", word)
    if match is None:
        return GPUS.get(word)
    from kvgen.compile.arch import select_arch
    from kvgen.errors import KvgenError

    try:
        return select_arch(divmod(int(match[1]), 10), valid)
    except KvgenError:
        return None
