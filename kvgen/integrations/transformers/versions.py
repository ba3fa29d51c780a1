"""Versions of transformers that the integration knows, and what differs between them."""

from __future__ import annotations

from typing import Final

import transformers

# Minor versions, the oldest first: `make test-torch` runs generate and generate_batch under each of them.
KNOWN: Final = ("5.23", "5.24")
_NAME: Final = ".".join(transformers.__version__.split(".")[:2])

# The argument that a model takes its cache by; 5.24 warns of the name before.
ARGUMENT: Final = "past_key_values" if _NAME == "5.23" else "cache"
# In continuous batching attention modules update the cache; before, the attention function did, and got it as an argument.
MODULES_UPDATE: Final = _NAME != "5.23"


def check() -> None:
    """Raise ImportError for a transformers that is not in KNOWN; any patch release of these is."""
    if _NAME not in KNOWN:
        known = " and ".join(KNOWN)
        raise ImportError(
            f"kvgen.integrations.transformers works with transformers {known}; got {transformers.__version__}; pip install "
            f"'transformers>={KNOWN[0]},<{_after(KNOWN[-1])}'",
            name="transformers",
        )


def _after(version: str) -> str:
    major, minor = version.split(".")
    return f"{major}.{int(minor) + 1}"
