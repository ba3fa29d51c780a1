"""A GPU that rounds otherwise than the CPU machine is right, for every operation whose sums are the hardware's; one that loses a
token is not. Nothing is launched: what the GPU leaves is float64's result, rounded to the type of the output."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from kvgen.cases import attention, indexer_scores
from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Case
from kvgen.cases.operation import cases_of
from kvgen.cli.project import generated
from kvgen.reference import Decoded, Scored
from kvgen.schema.loader import load_file
from kvgen.verify import run
from kvgen.verify.launch import Left
from kvgen.verify.memory import HostMemory
from kvgen.verify.run import Verifier

ROOT: Final = Path(__file__).resolve().parents[2]
# Sets whose results byte for byte are the CPU machine's alone: sums in other orders, products of codes, exponentials.
SETS: Final = {
    "deepseek_v2_lite_sglang": "mla_decode",
    "deepseek_v3_fp8": "mla_sparse",
    "deepseek_v32_indexer": "indexer_scores",
    "engine_qwen3_fp8": "extend",
}
CASES: Final = ("small", "page ids and lengths", "indices")


class Ideal:
    """Memory of a GPU whose arithmetic is float64's. `nudge` changes the results before they are rounded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nudge: Any) -> None:
        self.patch, self.nudge = monkeypatch, nudge
        self.found: list[tuple[Any, Any]] = []

    @contextmanager
    def asked(self) -> Any:
        """Keeps what oracles compare with, in place of comparing."""

        def attended(j: Comparison, wanted: Decoded, given: Any, heads: Any = None) -> int:
            self.found.append((wanted, heads))
            return wanted.errors

        def held(j: Comparison, name: str, wanted: Scored, *, fill: bool) -> int:
            self.found.append((name, wanted))
            return wanted.errors

        with self.patch.context() as patch:
            patch.setattr(attention, "take_attended", attended)
            patch.setattr(indexer_scores, "take_scores", held)
            yield

    def launch(self, case: Case, memory: Any, arch: str | None = None) -> Left:
        self.found.clear()
        left = case.before.copy()
        with self.asked():
            word = cases_of(case.call.op).compare(Comparison(case, case.before.copy(), left))
        left.arrays["errors"][0] = word
        for first, second in self.found:
            if isinstance(first, Decoded):
                out, lse = left.arrays["out"], left.arrays.get("lse")
                out[...] = self.nudge(first.out).astype(out.dtype)
                if lse is not None:
                    lse[...] = first.lse.astype(np.float32)
                    lse[first.lse != first.lse] = np.nan
            else:
                scores, taken = left.arrays[first], second.seen | case.call.op.fill  # type: ignore[attr-defined]
                scores[taken] = self.nudge(second.logits)[taken].astype(np.float32)
        return Left(left, ())


def verified(name: str, op_name: str, monkeypatch: pytest.MonkeyPatch, nudge: Any) -> Any:
    kernels = load_file(ROOT / "specs" / f"{name}.py", f"specs/{name}.py")[0].kernels
    monkeypatch.setattr(run, "launch", Ideal(monkeypatch, nudge).launch)
    with generated(ROOT / "generated", name) as package:
        verifier = Verifier(kernels, package, HostMemory())
        op = next(op for op in kernels.ops if op.name == op_name)
        return [verifier.case(op, plan) for plan in verifier.plans(op) if plan.name in CASES]


@pytest.mark.parametrize(("name", "op"), SETS.items())
def test_other_roundings_are_right_and_other_numbers_wrong(name: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in another order and approximate exponentials are right; a quarter too much, and another row's result, are not."""
    noise = np.random.default_rng(0)
    results = verified(name, op, monkeypatch, lambda x: x * (1 + 2.0**-16 * noise.uniform(-1, 1, x.shape)))
    assert len(results) == 2 and [r.wrong for r in results] == [()] * 2
    for nudge in (lambda x: x * 1.25, lambda x: np.roll(x, 1, axis=0)):
        results = verified(name, op, monkeypatch, nudge)
        assert all(r.wrong for r in results if not r.fault), [r.name for r in results if not r.wrong]
