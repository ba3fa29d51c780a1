"""The plugin in vLLM itself: its names are known wherever vLLM takes one, and who chooses another has vLLM as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from kvgen.integrations.vllm import plugin
from kvgen.integrations.vllm.versions import KNOWN
from tests.support.engine_runs import Show
from tests_vllm.engine import environment, run

PROMPTS = [[(7 * i + j) % 509 + 3 for j in range(n)] for i, n in enumerate((37, 5, 64, 18))]
OF_PLUGIN = ["kvgen", "kvgen.integrations", "kvgen.integrations.vllm", "kvgen.integrations.vllm.plugin"]

PARSED = """
import pickle, subprocess, sys
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

args = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--attention-backend", *sys.argv[1:]])
member = EngineArgs.from_cli_args(args).attention_backend
member = getattr(member, "name", member)
from vllm.config.attention import AttentionConfig
config = AttentionConfig(backend=sys.argv[1].lower())
child = "import pickle, sys; print(pickle.load(sys.stdin.buffer).backend)"
done = subprocess.run([sys.executable, "-c", child], input=pickle.dumps(config), capture_output=True, check=True)
print("SAID", member, config.backend.name, done.stdout.decode().strip())
"""


def test_vllm_finds_the_entry_point() -> None:
    (found,) = (each for each in entry_points(group="vllm.general_plugins") if each.name == "kvgen")
    assert found.value == f"{plugin.__name__}:register"
    assert found.load() is plugin.register


@pytest.mark.parametrize("name", plugin.BACKENDS)
def test_the_command_line_and_configs_take_the_names(name: str, llama: Path) -> None:
    """As options, in lower case in Python, and in a process that has not run plugins when it gets its config."""
    command = [sys.executable, "-c", PARSED, name, "--model", str(llama)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"SAID {name} {name} AttentionBackendEnum.{name}" in done.stdout


def test_it_costs_5_ms_where_vllm_has_its_registry() -> None:
    program = (
        "import time\n"
        f"import {plugin.REGISTRY}\n"
        "start = time.process_time()\n"
        "from kvgen.integrations.vllm.plugin import register\n"
        "register()\n"
        "print('COST', time.process_time() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    assert float(done.stdout.rpartition("COST")[2]) <= 0.005


def test_who_does_not_choose_it_has_vllm_as_it_was(llama: Path) -> None:
    """Three engines: no plugin runs; kvgen's does, and nobody asks for it; kvgen's does, and another backend is asked for."""
    without = run(llama, PROMPTS, backend=None, env={"VLLM_PLUGINS": "kvgen_on_cpu"})
    silent = run(llama, PROMPTS, backend=None)
    other = run(llama, PROMPTS, backend="CPU_ATTN")
    assert (without.modules, silent.modules, other.modules) == ([], OF_PLUGIN, OF_PLUGIN)
    assert without.tokens == silent.tokens == other.tokens
    for each in (without, silent, other):
        assert not each.launches and each.own > 0


def test_the_name_reaches_processes_that_vllm_spawns(llama: Path, shown: Show) -> None:
    """The engine in a process of its own, started anew: its config, with the name, is the first thing that it loads."""
    own = run(llama, PROMPTS, backend=None)
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}
    made = run(llama, PROMPTS, env=env)
    assert made.tokens == own.tokens
    assert made.own == 0 and made.launches["append"] > 0
    assert made.modules == OF_PLUGIN, "attention is computed in the other process"
    equal = sum(a == b for x, y in zip(made.tokens, own.tokens, strict=True) for a, b in zip(x, y, strict=True))
    shown(
        "the engine in a process that was spawned",
        model="Llama: 2 layers, 8 query heads over 2 KV heads of 64",
        dtype="float32",
        equal=equal,
        of=sum(map(len, own.tokens)),
        launches=made.launches,
    )


def test_the_installed_version_is_proved() -> None:
    import vllm

    assert vllm.__version__.partition("+")[0] in [known.version for known in KNOWN if known.how == "proved"]
    assert "KVGEN_VLLM_UNTESTED" not in os.environ
