"""`kvgen new`: a project to begin with: settings, one commented spec, a page that says how to use it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from kvgen.architectures import DEFAULT_ARCHS
from kvgen.cli.console import say

SET: Final = "small"
_PYPROJECT: Final = """\
# Where kvgen keeps this project's specs and generated code, and which kvgen it is for.
[tool.kvgen]
specs = "specs"
out = "generated"
requires = ">={version}"

# In a wheel the CUDA text, and cubins of `kvgen compile -o generated/cubins`, are package data.
[tool.setuptools.package-data]
"*" = ["*.cu", "*.cuh", "*.cubin", "*.json"]
"""
_LIST: Final = ", ".join(f'"{name}"' for name in DEFAULT_ARCHS)
_SPEC: Final = f'''\
"""A small cache to begin with: 8 query heads over 2 KV heads of 64 in bf16, pages of 16 tokens."""

from kvgen import Dense, KernelSet, Paged, ops

# The file's name is the set's: `kvgen build {SET}` writes generated/{SET}/.
kernels = KernelSet(
    q_heads=8,
    # Memory: K and V of a token, in pages that a page table finds. `kvgen show {SET} --plan` prints shapes and strides.
    cache=Paged(
        dtype="bf16",  # what operations take and give; quant=Quant(dtype="e4m3") stores fewer bits
        kv_heads=2,
        head_dim=64,
        page_size=16,
        lengths_dtype="i32",
        table=Dense(dtype="i32"),  # page ids, a row a request
    ),
    # Kernels: a step's new rows into the cache, rows out of it again, and attention of the newest tokens.
    ops=[ops.Append(index_dtype="i32"), ops.Gather(index_dtype="i32"), ops.Decode()],
    # sm_80 serves all of Ampere and Ada, sm_90a Hopper; sm_100f and sm_120f are Blackwell.
    arch=[{_LIST}],
)
'''
_README: Final = f"""\
# A kvgen project

`specs/` says what is wanted, `generated/` has the CUDA and the launchers that kvgen writes for it. Check both in.

    kvgen build            # write generated/ from specs/
    kvgen check            # is it in step? for CI
    kvgen compile          # registers and shared memory of each kernel; needs no GPU
    kvgen show {SET}/append

The generated package takes host arrays, on which kernels run on the CPU, and arrays on a GPU. One token of one request, stored
and attended to, from this folder:

```python
import numpy as np, ml_dtypes
from generated.{SET} import Cache, append, decode
pool, k, v, q, out = (np.ones(s, ml_dtypes.bfloat16) for s in ((8, 2, 1, 16, 2, 64), *2 * [(1, 2, 64)], *2 * [(1, 8, 64)]))
cache = Cache(pool, lengths=np.array([0], np.int32), page_table=np.array([[3, 1]], np.int32))
append(cache[0], k, 2 * v, np.array([0, 1], np.int32)); decode(cache[0], q, out); print(out[0, 0, :4])
```

The pool's axes are pages, K and V, layers, tokens, KV heads and head dim; `help(decode)` tells the others.

A spec for a model: `kvgen init --from config.json -o specs/model.py`, from its config.json on Hugging Face.
"""
_IGNORED: Final = "__pycache__/\n*.pyc\n.pytest_cache/\ncubins/\n"
_ATTRIBUTES: Final = "generated/** text eol=lf linguist-generated\n"


def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", hidden=True)],
) -> None:
    """Begin a project in DIR: pyproject.toml with [tool.kvgen], a commented spec, a README. Touches nothing that is there.

    \b
    kvgen new engine && cd engine && kvgen build
    kvgen new .                                   in this folder
    """
    from kvgen.errors import ConfigError
    from kvgen.files import kind_of, named, write_inside
    from kvgen.version import __version__

    shown = named(folder)
    kind = kind_of(folder)
    if kind not in ("missing", "folder"):
        raise ConfigError(f"DIR: got {shown!r}, which is a {kind}; give a new folder")
    files = {
        "pyproject.toml": _PYPROJECT.format(version=__version__),
        f"specs/{SET}.py": _SPEC,
        "README.md": _README,
        ".gitignore": _IGNORED,
        ".gitattributes": _ATTRIBUTES,
    }
    there = [name for name in (*files, "specs", "generated") if kind_of(folder / name) != "missing"]
    if there:
        raise ConfigError(
            f"DIR: got {shown!r}, which has {', '.join(there)} already; give a new folder, or add [tool.kvgen] to its "
            "pyproject.toml and write a spec with `kvgen init`"
        )
    for name, text in files.items():
        write_inside(folder, name, text.encode())
    for name in files:
        say(f"new      {named(folder / name)}")
    say(f"next: {'' if str(folder) == '.' else f'cd {shown} && '}kvgen build")
