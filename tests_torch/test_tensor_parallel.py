"""KvgenCache of models whose heads two processes share: each has kernels of its shard, and the tokens of eager attention."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine_runs import Show
from tests_torch.test_transformers import model_of

ROOT = Path(__file__).parent.parent


# Query and KV heads of a rank; transformers' plan for gpt-oss shares its experts and leaves attention whole on each.
@pytest.mark.parametrize(("name", "heads"), [("Llama", (2, 1)), ("Gemma3Text", (2, 1)), ("GptOss", (4, 2))])
def test_two_ranks_make_the_tokens_of_eager_attention(
    name: str, heads: tuple[int, int], tmp_path: Path, shown: Show
) -> None:
    model_of(name).save_pretrained(tmp_path)
    program = Path(__file__).with_name("shards.py")
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*ranks, str(program), str(tmp_path), *map(str, heads)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"equal ([01]) (\d+ \d+ \d+)", done.stdout))  # ranks share the line
    assert set(found) == {"0", "1"}, done.stdout
    equal, tokens, launches = (
        sum(counts) for counts in zip(*(map(int, text.split()) for text in found.values()), strict=True)
    )
    shown(
        "two ranks, tp_plan='auto' over gloo, beside eager attention there",
        engine="transformers",
        model=name,
        dtype="float32",
        equal=equal,
        of=tokens,
        launches={"append, plan and attention": launches},
    )
