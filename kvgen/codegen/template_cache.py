"""Templates that Jinja has compiled, kept on disk from one run to the next: compiling one costs more than all it renders."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Final

import jinja2
from jinja2.bccache import Bucket, BytecodeCache

from kvgen.errors import KvgenError
from kvgen.files import read_bytes, write_inside
from kvgen.paths import cache_folder

_LIMIT: Final = 1 << 24  # bytes; a compiled template has some ten KiB
_CHECKSUM_BYTES: Final = 32


class TemplateCache(BytecodeCache):
    """One file a template in the user's cache folder, checksummed: a damaged one is compiled anew.

    Jinja compares each with its template's text. `maker` is the text of whatever else decides how templates are compiled.
    A folder that cannot be read or written costs time and nothing else.
    """

    def __init__(self, maker: str) -> None:
        self._maker = hashlib.sha256(f"{jinja2.__version__}\n{maker}".encode()).hexdigest()[:16]

    def load_bytecode(self, bucket: Bucket) -> None:
        """Fill the bucket with what is kept, if that is intact."""
        with contextlib.suppress(KvgenError):
            data = read_bytes(self._folder / bucket.key, limit=_LIMIT)
            code = data[_CHECKSUM_BYTES:]
            if data[:_CHECKSUM_BYTES] == hashlib.sha256(code).digest():
                bucket.bytecode_from_string(code)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keep the bucket."""
        code = bucket.bytecode_to_string()
        with contextlib.suppress(KvgenError):
            write_inside(self._folder, bucket.key, hashlib.sha256(code).digest() + code)

    @property
    def _folder(self) -> Path:
        return cache_folder() / "templates" / self._maker
