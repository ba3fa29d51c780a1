"""From generated CUDA text to cubin, PTX and resource counts, with NVRTC: no GPU and no driver needed.

Importing this package loads nothing of `cuda.*`; the first compile does. Disassembly is in `kvgen.compile.sass`.
"""

from __future__ import annotations

from kvgen.architectures import ARCHS, Arch
from kvgen.compile.aot import (
    Launchers,
    Manifest,
    ManifestEntry,
    ManifestSet,
    find,
    parse_manifest,
    read_folder,
    read_launchers,
    write_folder,
)
from kvgen.compile.arch import archs_given, select_arch, supported_archs
from kvgen.compile.code_digest import code_digest
from kvgen.compile.cubin_cache import Cache, CacheStats, default_cache
from kvgen.compile.diagnostics import Diagnostic, Origin, UnitError
from kvgen.compile.nvrtc import nvrtc_version
from kvgen.compile.program import (
    Image,
    ImageKind,
    Job,
    Unit,
    UnitsError,
    compile_many,
    compile_unit,
    jit_allowed,
    quick_on_cpu,
    text_digest,
)
from kvgen.compile.resources import Resources
from kvgen.paths import cache_folder

__all__ = [
    "ARCHS",
    "Arch",
    "Cache",
    "CacheStats",
    "Diagnostic",
    "Image",
    "ImageKind",
    "Job",
    "Launchers",
    "Manifest",
    "ManifestEntry",
    "ManifestSet",
    "Origin",
    "Resources",
    "Unit",
    "UnitError",
    "UnitsError",
    "archs_given",
    "cache_folder",
    "code_digest",
    "compile_many",
    "compile_unit",
    "default_cache",
    "find",
    "jit_allowed",
    "nvrtc_version",
    "parse_manifest",
    "quick_on_cpu",
    "read_folder",
    "read_launchers",
    "select_arch",
    "supported_archs",
    "text_digest",
    "write_folder",
]
