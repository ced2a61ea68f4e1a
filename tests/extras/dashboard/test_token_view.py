"""The token view of a real step: the numbers of rollouts.jsonl, of metrics.jsonl, and of the learner."""

import numpy as np
import pytest
from dashboard_client import api_of

from palestra.cli.main import run
from palestra.core.run_folder import RunFolder


def test_the_token_view_equals_rollouts_and_metrics_to_a_millionth(tmp_path) -> None:
    folder = tmp_path / "trained"
    settings = {"train.max_steps": 1, "train.problems_per_step": 3, "rollout.group_size": 4, "eval.cases": 1}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    assert run(["train", "--output_dir", str(folder), *words, "--checkpoint.every", "0"]) == 0
    trained = RunFolder(next(folder.iterdir()))
    api = api_of(trained, tmp_path / "home")
    rows = api.rows()
    records = list(trained.rollouts())
    assert len(rows) == len(records) == 12
    columns: dict[str, list] = {name: [] for name in ("mask", "gap", "ratio", "entropy", "logprob", "learner_logprob")}
    for row, record in zip(rows, records, strict=True):
        tokens = api(f"rollouts/{row['id']}/tokens")
        written = [x for turn in record["turns"] for x in turn.get("logprobs", [None] * len(turn["token_ids"]))]
        shown = tokens["logprob"]
        assert [x is None for x in shown] == [x is None for x in written]
        assert np.allclose(
            [x for x in shown if x is not None], [x for x in written if x is not None], rtol=0, atol=1e-6
        )
        sampled = [a for a, maker in zip(tokens["advantage"], tokens["maker"], strict=True) if maker == "model"]
        assert set(sampled) == {row["advantage"]}
        for name, values in columns.items():
            values += tokens[name]
    metrics = trained.metrics()[0]
    mask = np.array(columns["mask"])
    numbers = {name: np.array(values, dtype=float)[mask] for name, values in columns.items() if name != "mask"}
    assert mask.sum() == metrics["tokens_trained"]
    assert np.mean(numbers["entropy"]) == pytest.approx(metrics["entropy"], abs=1e-6)
    assert np.abs(numbers["gap"]).max() == pytest.approx(metrics["sampler_gap_max"], abs=1e-6)
    assert np.mean(numbers["ratio"]) == pytest.approx(metrics["ratio_mean"], abs=1e-6)
    assert np.max(numbers["ratio"]) == pytest.approx(metrics["ratio_max"], abs=1e-6)
    advantages = [row["advantage"] for row in rows]
    assert max(advantages) == pytest.approx(metrics["advantage_max"], abs=1e-6)
    assert min(advantages) == pytest.approx(metrics["advantage_min"], abs=1e-6)
    text = "".join(api(f"rollouts/{rows[0]['id']}/tokens")["text"])
    assert rows[0]["question"] in text, "by the tokenizer of the run"
    assert trained.record["reward_weights"] == {"right_total": 1.0}
