"""Requests that come together are sampled together, and nothing is held up by a sibling."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from palestra.core.types import SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.extras.tinker.server import sampler as module
from palestra.extras.tinker.server.base_model import BaseModel
from palestra.extras.tinker.server.messages import pb
from palestra.extras.tinker.server.requests import Prompt, Sample
from palestra.extras.tinker.server.sampler import ReadWeights, Sampler, SampleRequest


@dataclass
class FakePolicy:
    """Takes as many rounds of the event loop for a turn as it has tokens."""

    events: list[tuple[str, int]] = field(default_factory=list)

    def open(self, prompt_ids: Sequence[int]) -> int:
        self.events.append(("open", prompt_ids[0]))
        return prompt_ids[0]

    def fork(self, session: int, n: int) -> list[int]:
        return [session + i for i in range(n)]

    async def sample(self, session: int, params: SamplingParams) -> Turn:
        self.events.append(("begin", session))
        for _ in range(params.max_new_tokens):
            await asyncio.sleep(0)
        self.events.append(("end", session))
        count = params.max_new_tokens
        return Turn("model", np.zeros(count, np.int32), np.zeros(count, np.float32), np.zeros(count, np.int32))

    def close(self, session: int) -> None:
        self.events.append(("close", session))

    def update(self, weights: Weights) -> None:
        self.events.append(("update", weights.version))


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> FakePolicy:
    made = FakePolicy()
    monkeypatch.setattr(module, "build_policy", lambda *arguments: made)
    return made


@pytest.fixture
def sampler(policy: FakePolicy, base: BaseModel) -> Iterator[Sampler]:
    made = Sampler(base, None)
    yield made
    made.close()


def ask(sampler: Sampler, first: int, *tokens: int, weights: ReadWeights = dict) -> Any:
    answer: Future[Any] = Future()
    turns = [SamplingParams(n) for n in tokens]
    sampler.submit(SampleRequest(weights, [first], turns, Sample(prompt=Prompt(chunks=[]))), answer)
    return answer


def test_requests_that_come_before_a_pause_begin_together(sampler, policy, monkeypatch):
    monkeypatch.setattr(module, "PAUSE_S", 0.1)
    monkeypatch.setattr(module, "LONGEST_BURST_S", 5.0)
    answers = [ask(sampler, 10 * i, 1) for i in range(16)]
    for answer in answers:
        answer.result(10)
    names = [name for name, _ in policy.events if name in ("begin", "end")]
    assert names == ["begin"] * 16 + ["end"] * 16


def test_a_prompt_that_several_requests_of_a_burst_have_is_computed_once(sampler, policy, monkeypatch):
    monkeypatch.setattr(module, "PAUSE_S", 0.1)
    answers = [ask(sampler, 10 * (i % 2), 1, 1) for i in range(4)]
    for answer in answers:
        assert len(pb.SampleResponse.FromString(answer.result(10)).sequences) == 2
    assert [session for name, session in policy.events if name == "open"] == [0, 10]
    assert sorted(session for name, session in policy.events if name == "begin") == [0, 1, 2, 3, 10, 11, 12, 13]


def test_requests_that_never_pause_are_not_gathered_for_ever(sampler, policy, monkeypatch):
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    monkeypatch.setattr(module, "LONGEST_BURST_S", 0.05)
    first, until = ask(sampler, 0, 1), time.monotonic() + 10
    while not first.done() and time.monotonic() < until:
        ask(sampler, 1, 1)
        time.sleep(0.001)
    assert first.done()


def test_a_sample_that_ends_before_its_siblings_is_closed_at_once(sampler: Sampler, policy: FakePolicy) -> None:
    ask(sampler, 0, 1, 9).result(10)
    assert policy.events.index(("close", 0)) < policy.events.index(("end", 1))


def test_another_version_waits_until_the_samples_of_this_one_have_ended(sampler: Sampler, policy: FakePolicy) -> None:
    older = ask(sampler, 0, 5)
    newer = ask(sampler, 1, 1, weights=lambda: {})
    older.result(10)
    newer.result(10)
    names = [event for event in policy.events if event[0] in ("update", "end")]
    assert names == [("update", 1), ("end", 0), ("update", 2), ("end", 1)]
