"""The files of a checkpoint that say how its attention and its cache are: config.json, and hf_quant_config.json beside it.

Both are untrusted: they are read as JSON and nothing else, and every mistake is a `ConfigError` that begins with the path.
Published files have `Infinity` and `NaN`, as Python's json module writes them; a field that is read takes neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kvgen.errors import ConfigError, ToolError
from kvgen.files import is_folder, kind_of, named
from kvgen.json_file import parse_object, read_object

CONFIG: Final = "config.json"
QUANTIZATION: Final = "hf_quant_config.json"  # ModelOpt's
SIZE_LIMIT: Final = 1 << 24  # bytes; a list of quantized layers has 3 MB


def config_path(path: str | Path) -> Path:
    """The config.json that is meant: `path` itself, or the file of that name in the folder `path`. Raises ToolError."""
    return Path(path) / CONFIG if is_folder(path) else Path(path)


def read(path: str | Path) -> dict[str, Any]:
    """The JSON object in a config.json of at most 16 MiB, or in that of a folder; `ConfigError` for anything else."""
    try:
        return read_object(config_path(path), limit=SIZE_LIMIT, constants=True)
    except ToolError as error:
        raise ConfigError(f"{error}; give the path of a model's config.json, or of its folder") from None


def read_quantization(path: str | Path) -> dict[str, Any] | None:
    """The JSON object in the hf_quant_config.json beside the config.json at `path`; None where there is no such file."""
    try:
        beside = config_path(path).with_name(QUANTIZATION)
        return None if kind_of(beside) == "missing" else read_object(beside, limit=SIZE_LIMIT, constants=True)
    except ToolError as error:
        raise ConfigError(f"{error}; it lies beside {named(path)} and says how KV is stored") from None


def parse(data: bytes, *, source: str) -> dict[str, Any]:
    """The JSON object in `data`; `source` names it in messages."""
    try:
        return parse_object(data, source, constants=True)
    except ToolError as error:
        raise ConfigError(str(error)) from None
