"""Two servers of vLLM, started as docs/disaggregation.md says, and what a router between them does for each request."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.docs.blocks import ROOT
from tests.support.engine_runs import Show
from tests_vllm.engine import TIMEOUT, EngineError, environment, read_counts, run
from tests_vllm.test_disaggregated import TOKENS, prompts
from tests_vllm.two_engines import REMOTE_DECODE, ROLES, free_port

PAGE: Final = ROOT / "docs" / "disaggregation.md"
# As tests_vllm/engine.py starts its engines; no tokenizer is there.
OPTIONS: Final = shlex.split(
    "--skip-tokenizer-init --dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 8 --block-size 32 "
    "--num-gpu-blocks-override 48 --host 127.0.0.1"
)


def shown_options() -> list[str]:
    """The options that the page gives `vllm serve MODEL`."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("    vllm serve MODEL "))
    words = shlex.split(lines[at].removesuffix("\\") + lines[at + 1])
    assert words[:3] == ["vllm", "serve", "MODEL"] and "--kv-transfer-config" in words
    return words[3:]


class Server:
    """A server of a model. The command `vllm` asks for metadata that a build for CPUs has not; its module does not."""

    def __init__(self, model: Path, folder: Path) -> None:
        folder.mkdir()
        self.model, self.port, self.counts, self.log = model, free_port(), folder / "counts", folder / "log"
        self.counts.touch()
        env = environment(
            KVGEN_TEST_COUNTS=str(self.counts),
            VLLM_ENABLE_V1_MULTIPROCESSING="1",
            VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            OMP_NUM_THREADS="1",
        )
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += [*shown_options(), *OPTIONS, "--port", str(self.port)]
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        """Until it answers; raises EngineError with its log where it does not."""
        end = time.monotonic() + TIMEOUT
        while self.process.poll() is None and time.monotonic() < end:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health").close()
                return
            except OSError:
                time.sleep(0.5)
        raise EngineError(self.log.read_text(encoding="utf-8"))

    def complete(self, prompt: list[int], tokens: int, transfer: dict[str, Any]) -> dict[str, Any]:
        """What it makes of a prompt: the answer of /v1/completions."""
        body = {
            "model": str(self.model),
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": transfer,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


@contextmanager
def servers(model: Path, folder: Path) -> Iterator[list[Server]]:
    """One to compute prompts and one to decode, ready."""
    started: list[Server] = []
    try:
        started += (Server(model, folder / role) for role in ROLES)
        for server in started:
            server.wait()
        yield started
    finally:
        for server in started:
            server.process.terminate()
        for server in started:
            server.process.wait(60)


def test_a_router_between_two_servers(llama: Path, tmp_path: Path, shown: Show) -> None:
    one = run(llama, prompts(), tokens=TOKENS, backend=None).tokens
    made = []
    with servers(llama, tmp_path) as (prefill, decode):
        for prompt in prompts():
            first = prefill.complete(prompt, 1, REMOTE_DECODE)
            made.append(decode.complete(prompt, TOKENS, first["kv_transfer_params"])["choices"][0]["token_ids"])
    assert made == one

    (computed,), (decoded,) = (read_counts(server.counts).values() for server in (prefill, decode))
    assert computed.keys() == {"append", "extend", "extend_plan"}
    assert decoded.keys() == {"append", "decode", "decode_plan"}
    count = sum(map(len, one))
    shown(
        "two servers and a router, prefill and decode apart over NIXL; launches of the decoder",
        model="Llama, 2 layers, 8/2 heads of 64",
        dtype="float32",
        equal=count,
        of=count,
        launches=decoded,
    )
