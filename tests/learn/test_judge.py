"""Trainings whose reward is a judge's: noisy, unreliable, or fond of long answers."""

import hashlib
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from tests.support.judge_server import attempts_of, ranks, stub_model

from palestra import demo, judge, ruler, train_grpo
from palestra.core.config import RunConfig
from palestra.core.files import read_jsonl
from palestra.result import GRPOTrainingResult

SHORT = {"train.problems_per_step": 8, "train.scheduler": "constant", "eval.cases": 24}


def train(folder: Path, measures: list[Any], weights: list[float], *layers: dict[str, Any]) -> GRPOTrainingResult:
    config = RunConfig.build(demo.config, SHORT, *layers, {"output_dir": str(folder)})
    return train_grpo(
        demo.agent, demo.suite, measures, reward_weights=weights, config=config, held_out=demo.held_out, progress=False
    )


def is_right(question: str, answer: str) -> bool:
    expected = re.search(r"# Expected\n(\d+)", question)
    numbers = re.findall(r"\d+", answer.rpartition("assistant:")[2])
    return expected is not None and bool(numbers) and numbers[-1] == expected[1]


def kinds_of(result: GRPOTrainingResult) -> list[str]:
    return [finding["kind"] for finding in (result.run.report() or {})["findings"]]


def chance(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") / 2**32


def noisy_ranks(question: str) -> str:
    """Right or wrong; one verdict in five is the opposite."""
    wrong = [chance(f"{question}{i}") < 0.2 for i in range(99)]
    return ranks([float(is_right(question, text) != wrong[i]) for i, text in enumerate(attempts_of(question))])


@pytest.mark.slow("a training of a minute")
def test_a_judge_with_noise_still_lifts_the_demo(tmp_path: Path) -> None:
    """The judge alone is rewarded; the exact measure is a check metric, by which the result is told."""
    with stub_model(noisy_ranks) as stub:
        measures = [ruler("stub", base_url=stub.base_url, price_in=1.0, price_out=10.0), demo.right_total]
        steps = {"train.max_steps": 16, "train.problems_per_step": 12, "eval.cases": 60}
        result = train(tmp_path, measures, [1.0, 0.0], steps)
    rate = {m.name: m.pass_rate.rate for m in result.after.measures}["right_total"]
    print(f"right_total after training by a judge with 20 % noise: {rate:.1%}")
    assert rate >= 0.9
    first = result.metrics[0]
    assert first["judge/calls"] + first.get("judge/cached", 0) == first["groups"]
    assert first["judge/tokens"] == 110 * first["judge/calls"]
    assert first["judge/cost"] == pytest.approx(200e-6 * first["judge/calls"])
    assert "length_preference" not in kinds_of(result)


def test_a_judge_that_prefers_long_answers_is_flagged(tmp_path: Path) -> None:
    def by_length(question: str) -> str:
        lengths = [len(text.rpartition("assistant:")[2]) for text in attempts_of(question)]
        return ranks([round(length / max(lengths), 3) for length in lengths])

    with stub_model(by_length) as stub:
        result = train(
            tmp_path, [ruler("stub", base_url=stub.base_url)], [1.0], {"train.max_steps": 3, "eval.cases": 4}
        )
    assert "length_preference" in kinds_of(result)
    assert result.metrics[-1]["judge/length_correlation/ruler"] > 0.5


def test_429s_timeouts_and_invalid_json_neither_stop_a_run_nor_count_as_0(tmp_path: Path) -> None:
    """Every fourth attempt is judged; the others meet a server that refuses, hangs or writes nonsense."""
    numbers = itertools.count()

    def unreliable(question: str) -> Any:
        match next(numbers) % 4:
            case 0:
                return 429
            case 1:
                return Response("{", media_type="application/json")
            case 2:
                return "no JSON at all"
        return '{"score": 1}' if is_right(question, question) else '{"score": 0.3}'

    with stub_model(unreliable) as stub:
        flaky = judge("stub", "Right?", base_url=stub.base_url, attempts=1, retry_pause_s=0.0, cache=False)
        slow = judge("slow", "Right?", base_url=stub.base_url, attempts=1, timeout_s=1e-4, name="slow")
        result = train(tmp_path, [flaky, slow], [1.0, 0.0], {"train.max_steps": 2, "eval.cases": 8})
    rows = list(read_jsonl(result.run.rollouts_file))
    lost = [row for row in rows if row["scores"]["judge"]["error"]]
    judged = [row for row in rows if not row["scores"]["judge"]["error"]]
    assert len(result.metrics) == 2
    assert lost
    assert all(row["error"] for row in lost)  # no verdict: in no baseline, and not trained on
    assert {row["reward"] for row in judged} <= {0.3, 1.0}
    assert all(row["scores"]["slow"]["error"] and row["error"] is None for row in judged)
    assert result.metrics[0]["judge/errors"] > 0
    assert result.metrics[0]["reward_min"] >= 0.3
