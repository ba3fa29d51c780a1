"""Two engines of vLLM, processes of their own: one computes prompts, the other one reads the pages over NIXL and decodes.

    python -m tests_vllm.two_engines prefill|decode FOLDER

is one of the processes. What a router does between two servers, files in FOLDER do here: the prefilling engine writes what it
says of each request (`kv_transfer_params`), the decoding one passes that on with the same prompt.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from tests_vllm.engine import OPTIONS, OWN, TIMEOUT, EngineError, environment, read_counts

Role = Literal["prefill", "decode"]
ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")
CONNECTOR: Final = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
# What a router adds to a request whose pages another engine is to read.
REMOTE_DECODE: Final[dict[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class Side:
    """What one of the engines did: tokens of each prompt, and by process how often each kernel and vLLM's attention ran."""

    tokens: list[list[int]]
    by_process: dict[int, Counter[str]]
    log: str

    @property
    def launches(self) -> Counter[str]:
        """Of all of its processes, by kernel."""
        return sum(self.by_process.values(), Counter[str]()) - Counter({OWN: self.own})

    @property
    def own(self) -> int:
        """Calls of vLLM's own attention."""
        return sum(counts[OWN] for counts in self.by_process.values())


def run(
    model: Path, prompts: Sequence[Sequence[int]], *, tokens: int, options: dict[str, Any], ranks: dict[Role, int]
) -> dict[Role, Side]:
    """The greedy tokens of `prompts`; `ranks`: workers of each engine, `options`: of both.

    Raises EngineError with what both printed, where one of them failed.
    """
    with TemporaryDirectory(prefix="kvgen-vllm-") as name:
        folder = Path(name)
        processes: dict[Role, subprocess.Popen[str]] = {}
        try:
            for role in ROLES:
                job = {"options": _options(model, ranks[role], options), "prompts": prompts, "tokens": tokens}
                (folder / f"{role}.job").write_text(json.dumps(job), encoding="utf-8")
                processes[role] = _started(role, folder)
            failed = _failed(list(processes.values()))
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
        logs = {role: (folder / f"{role}.log").read_text(encoding="utf-8") for role in ROLES}
        if failed:
            raise EngineError("\n".join(f"--- {role}\n{log}" for role, log in logs.items()))
        return {
            role: Side(
                json.loads((folder / f"{role}.tokens").read_text(encoding="utf-8")),
                read_counts(folder / f"{role}.counts"),
                logs[role],
            )
            for role in ROLES
        }


def _failed(processes: Sequence[subprocess.Popen[str]]) -> bool:
    """Wait until all have ended well, or one has not, or the time is over."""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return any(codes)
        time.sleep(0.2)
    return True


def _options(model: Path, ranks: int, more: dict[str, Any]) -> dict[str, Any]:
    parallel = {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"} if ranks > 1 else {}
    return {
        **OPTIONS,
        "model": str(model),
        "attention_backend": "KVGEN",
        "num_gpu_blocks_override": 48,
        "kv_transfer_config": CONNECTOR,
        **parallel,
        **more,
    }


def _started(role: Role, folder: Path) -> subprocess.Popen[str]:
    (folder / f"{role}.counts").touch()
    env = environment(
        KVGEN_TEST_COUNTS=str(folder / f"{role}.counts"),
        VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
    )
    with open(folder / f"{role}.log", "w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "tests_vllm.two_engines", role, str(folder)]
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, text=True)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _generated(engine: Any, job: dict[str, Any], tokens: int, transfers: Sequence[dict[str, Any]]) -> list[Any]:
    """What an engine makes of the prompts, each with what a router says of its pages."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": transfer},
        )
        for transfer in transfers
    ]
    made: list[Any] = engine.generate([{"prompt_token_ids": p} for p in job["prompts"]], sampling, use_tqdm=False)
    return made


def _wait_for(file: Path) -> None:
    """Until the other process has written it; raises TimeoutError when the test has given up, or soon will."""
    end, parent = time.monotonic() + TIMEOUT, os.getppid()
    while not file.exists():
        if time.monotonic() > end or os.getppid() != parent:
            raise TimeoutError(f"{file.name}: the other engine has not written it")
        time.sleep(0.1)


def _write(file: Path, found: object) -> None:
    """All of it at once."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found, default=list), encoding="utf-8")
    part.rename(file)


def main() -> None:
    """One of the processes."""
    from vllm import LLM

    role, folder = sys.argv[1], Path(sys.argv[2])
    job = json.loads((folder / f"{role}.job").read_text(encoding="utf-8"))
    engine = LLM(**job["options"])
    if role == "prefill":
        made = _generated(engine, job, 1, [REMOTE_DECODE] * len(job["prompts"]))
        _write(folder / "transfers", [m.kv_transfer_params for m in made])
        _wait_for(folder / "decode.tokens")
    else:
        _wait_for(folder / "transfers")
        transfers = json.loads((folder / "transfers").read_text(encoding="utf-8"))
        made = _generated(engine, job, job["tokens"], transfers)
    _write(folder / f"{role}.tokens", [list(m.outputs[0].token_ids) for m in made])


if __name__ == "__main__":
    main()
