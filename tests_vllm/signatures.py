"""Write the record of what an adapter relies on of vLLM's Python: kvgen/integrations/vllm/signatures.json.

    python -m tests_vllm.signatures vllm-0.32.0.tar.gz vllm-0.33.0.tar.gz

reads source distributions, as on PyPI: for the first version what was found, for the others what differs from it and why that
does not matter (`EXPLAINED`). tests/integrations/test_vllm_signatures.py holds the record to the adapter as it is, and the table
of versions to the record.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
from pathlib import Path
from typing import Final

from kvgen.integrations.vllm.signatures import RECORD, Sources, asked_by, differing, found_in

# Version -> what differs there, and why the adapter serves it none the less.
EXPLAINED: Final[dict[str, dict[str, str]]] = {
    "0.33.0": {
        "calls of __init__": "one more: of a builder of cache configs, which are no metadata",
        "calls of do_kv_cache_update": "MLA's has one more argument, which the adapter takes: skip_scale says that k_scale is 1",
        "calls of get_name": "one more: of MLA's own prefill backends",
        "vllm.config.speculative:SpeculativeConfig.kv_cache_dtype": "a drafter's; the adapter reads that of its layers",
        "vllm.model_executor.layers.attention.mla_attention:MLACommonImpl.do_kv_cache_update": "skip_scale, as in the calls",
    },
}


class Archive(Sources):
    """A source distribution of vLLM."""

    def __init__(self, path: Path) -> None:
        self.sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        files: dict[str, str] = {}
        with tarfile.open(path) as archive:
            for member in archive:
                top, _, name = member.name.partition("/")
                if member.isfile() and name.startswith("vllm/") and name.endswith(".py"):
                    stream = archive.extractfile(member)
                    assert stream is not None
                    files[name] = stream.read().decode("utf-8")
                self.version = top.removeprefix("vllm-")
        super().__init__(files)


def main() -> None:
    """Compare the source distributions named on the command line and write the record."""
    first, *others = (Archive(Path(path)) for path in sys.argv[1:])
    adapter = "v" + "_".join(first.version.split(".")[:2])
    asked = asked_by(adapter)
    found = found_in(first, asked)
    record = {
        "adapter": adapter,
        "asked": {"imports": asked.imports, "names": asked.names, "methods": asked.methods},
        "version": first.version,
        "sha256": first.sha256,
        "found": found,
        "compared": {
            other.version: {
                "sha256": other.sha256,
                "differing": differing(found, found_in(other, asked), EXPLAINED.get(other.version, {})),
            }
            for other in others
        },
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for version, compared in record["compared"].items():
        unexplained = [name for name, found in compared["differing"].items() if not found["why"]]
        print(
            f"{version}: {len(found)} compared, {len(compared['differing'])} differ; not explained: {unexplained or 'none'}"
        )


if __name__ == "__main__":
    main()
