"""What the engine says a token's logprob was, and what the learner computes for it: the same number."""

from __future__ import annotations

import pytest
import torch
from engine_families import tiny_model

from palestra.algo.batch import Batch
from palestra.core.types import Sample, SamplingParams
from palestra.engine.engine import Engine
from palestra.learner.forward import Scorer
from palestra.learner.tree_attention import pack_batch

PROMPT = [5, 17, 99, 23, 64, 3, 42, 81, 7, 12, 90, 31, 56, 44, 8, 77, 15, 60, 29]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_and_learner_agree_on_every_logprob(family: str, temperature: float) -> None:
    model = tiny_model(family)
    engine = Engine(model, page_size=4, kv_memory_gib=0.01)
    group = engine.fork(engine.open(PROMPT), 4)
    logprobs: list[list[float]] = [[0.0] * len(PROMPT) for _ in group]
    for more in ([], [9, 8, 7], [4] * 6):  # three turns with tool results between them
        for i, session in enumerate(group):
            engine.append(session, more)
            logprobs[i] += [0.0] * len(more)
        params = [SamplingParams(8 + i, temperature=temperature, seed=i) for i in range(4)]
        for i, turn in enumerate(engine.sample(group, params)):
            logprobs[i] += turn.logprobs.tolist()
    samples = [
        Sample(
            session.token_ids,
            policy_mask=[x != 0.0 for x in row],
            echo_mask=[False] * len(row),
            logprobs=row,
            advantages=1.0,
            prompt_length=len(PROMPT),
        )
        for session, row in zip(group, logprobs, strict=True)
    ]
    scorer = Scorer(model, temperature=temperature)
    packed = pack_batch(
        Batch.of(samples), max_tokens=4096, share_prefix=scorer.shares_prefix, echo=False, device=torch.device("cpu")
    )
    for micro in packed:
        with torch.no_grad(), scorer.session():
            learned, _ = scorer(micro)
        assert (learned - micro.inputs["logprobs"])[micro.policy].abs().max() <= 1e-5
