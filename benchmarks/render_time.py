"""Seconds to render kernels, and milliseconds to import a generated package (best and median of several processes).

python benchmarks/render_time.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORT = "import time; t = time.perf_counter(); import generated.llama3_8b; print((time.perf_counter() - t) * 1e3)"
RENDER = """
import time
t = time.perf_counter()
from kvgen.config import find_config
from kvgen.codegen.emit import load_and_render
sets, files = load_and_render(find_config())
kernels = sum(path.endswith(".cu") for path in files)
print(kernels, time.perf_counter() - t)
"""


def output(code: str) -> list[float]:
    """The numbers a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def main() -> None:
    """Measure and print."""
    start = time.perf_counter()
    renders = [output(RENDER) for _ in range(5)]
    kernels = renders[0][0]
    seconds = [r[1] for r in renders]
    per_100 = statistics.median(seconds) / kernels * 100
    print(f"render {kernels:.0f} kernels, imports and specs included: median {statistics.median(seconds):.2f} s")
    print(f"  per 100 kernels {per_100:.2f} s   (target <= 2)")
    imports = [output(IMPORT)[0] for _ in range(15)]
    print(
        f"import a generated package: best {min(imports):.1f} ms, median {statistics.median(imports):.1f} ms   (target <= 50)"
    )
    print(f"({time.perf_counter() - start:.0f} s in all)")


if __name__ == "__main__":
    main()
