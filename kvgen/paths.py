"""Where kvgen's own files are, and where it keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path

from kvgen.errors import ConfigError, ToolError


def templates_root() -> Path:
    """The folder of templates: packaged inside an installed wheel, at the repository's top in an editable install."""
    package = Path(__file__).resolve().parent
    for root in (package / "_templates", package.parent / "templates"):
        if (root / "device").is_dir():
            return root
    raise ToolError(
        f"templates: neither {package / '_templates'} nor {package.parent / 'templates'} exists; reinstall kvgen"
    )


def cache_folder() -> Path:
    """Where kvgen keeps what it can make again: $KVGEN_CACHE_DIR, else $XDG_CACHE_HOME/kvgen, else ~/.cache/kvgen."""
    own = os.environ.get("KVGEN_CACHE_DIR")
    if own:
        try:
            return Path(own).expanduser().absolute()
        except RuntimeError as error:
            raise ConfigError(
                f"KVGEN_CACHE_DIR: got {own!r}; no such user's home is known; give the whole path"
            ) from error
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared and os.path.isabs(shared):  # the XDG rules: a relative path is ignored
        return Path(shared) / "kvgen"
    try:
        return Path.home() / ".cache" / "kvgen"
    except RuntimeError as error:
        raise ConfigError("KVGEN_CACHE_DIR: not set, and this user has no home folder; set it to a folder") from error
