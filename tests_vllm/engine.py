"""vLLM's V1 engine in a process of its own: `run` starts it, generates, and says what it made and what attended.

    python -m tests_vllm.engine JOB.json OUT.json

is that process. Each engine has its own, so that none finds another's settings, compiled kernels or distributed state; those
that `refused` tries do not come into being.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
ON_PATH: Final = Path(__file__).resolve().parent / "on_path"
OWN: Final = "own"
# What every engine of the tests is started with.
OPTIONS: Final[dict[str, Any]] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "block_size": 32,
    "disable_log_stats": False,
}
TIMEOUT: Final = 900  # s, of one engine on a busy machine


@dataclass(frozen=True)
class Result:
    """What an engine made. `tokens[i]`: of the i-th prompt; `logprobs[i]`: theirs; `cached[i]`: how many of its tokens the prefix
    cache had.

    `launches` counts the kvgen kernels that ran, `own` the calls of vLLM's attention, of all processes together, `by_process`
    both by process. `metrics`: the engine's counters by name; `log`: what it printed.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached: list[int]
    launches: Counter[str]
    own: int
    by_process: dict[int, Counter[str]]
    metrics: dict[str, float]
    modules: list[str]
    log: str


def environment(**more: str) -> dict[str, str]:
    """Of a process that runs vLLM on this machine, with the test plugin."""
    path = os.pathsep.join(filter(None, (str(ROOT), str(ON_PATH), os.environ.get("PYTHONPATH"))))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **more,
    }


def run(
    model: Path,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int = 20,
    rounds: int = 1,
    backend: str | None = "KVGEN",
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> Result:
    """The greedy tokens of `prompts`, `rounds` times over, from an engine with these options; `backend` None is vLLM's own.

    Raises EngineError with what the engine printed, where it did not start or failed.
    """
    job = {
        "options": {**OPTIONS, "model": str(model), **options},
        "prompts": [list(p) for p in prompts],
        "tokens": tokens,
        "rounds": rounds,
    }
    if backend is not None:
        job["options"]["attention_backend"] = backend
    made, by_process, log = _process(job, env or {})
    launches = sum(by_process.values(), Counter[str]())
    own = launches.pop(OWN, 0)
    return Result(**made, launches=launches, own=own, by_process=by_process, log=log)


def refused(attempts: Sequence[Mapping[str, Any]], *, env: Mapping[str, str] | None = None) -> list[str]:
    """What vLLM says to each of these, which name a `model` and options, and do not start: the exception and its message.

    "STARTED" for one that does. The option "version" is what vLLM says its own is.
    """
    made, _, _ = _process({"attempts": [{**OPTIONS, **attempt} for attempt in attempts]}, env or {})
    return made["said"]


def _process(job: Mapping[str, Any], env: Mapping[str, str]) -> tuple[dict[str, Any], dict[int, Counter[str]], str]:
    """Do a job in a process of its own: its result, what was counted in each process, what was printed."""
    with TemporaryDirectory(prefix="kvgen-vllm-") as name:
        folder = Path(name)
        counts = folder / "counts"
        counts.touch()
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "tests_vllm.engine", str(folder / "job.json"), str(folder / "out.json")],
            cwd=folder,
            env=environment(KVGEN_TEST_COUNTS=str(counts), **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
        )
        if done.returncode:
            raise EngineError(done.stdout)
        return json.loads((folder / "out.json").read_text(encoding="utf-8")), read_counts(counts), done.stdout


def read_counts(path: Path) -> dict[int, Counter[str]]:
    """What the test plugin wrote down, by process."""
    found: dict[int, Counter[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        process, what = line.split()
        found.setdefault(int(process), Counter())[what] += 1
    return found


class EngineError(Exception):
    """What an engine printed that did not start, or failed."""


def main() -> None:
    """The engine's own process."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    out = _attempted(job["attempts"]) if "attempts" in job else _generated(job)
    Path(sys.argv[2]).write_text(json.dumps(out), encoding="utf-8")


def _attempted(attempts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

    own, said = vllm.__version__, []
    for options in attempts:
        vllm.__version__ = options.pop("version", own)
        try:
            vllm.LLM(**options)
            said.append("STARTED")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        cleanup_dist_env_and_memory()
    return {"said": said}


def _generated(job: Mapping[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    engine = LLM(**job["options"])
    sampling = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]
    made: list[Any] = []
    for _ in range(job["rounds"]):
        made += engine.generate(prompts, sampling, use_tqdm=False)
    return {
        "tokens": [list(m.outputs[0].token_ids) for m in made],
        "logprobs": [
            [found[token].logprob for token, found in zip(m.outputs[0].token_ids, m.outputs[0].logprobs, strict=True)]
            for m in made
        ],
        "cached": [m.num_cached_tokens or 0 for m in made],
        "metrics": {m.name: m.value for m in engine.get_metrics() if hasattr(m, "value")},
        "modules": sorted(name for name in sys.modules if name.split(".")[0] == "kvgen"),
    }


if __name__ == "__main__":
    main()
