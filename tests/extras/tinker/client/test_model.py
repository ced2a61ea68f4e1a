"""A model that its server loses is made again, exactly; what cannot be mended is told with the last good state."""

import asyncio
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import tinker
import torch
from small_learner import loss_of
from tinker.types import RequestErrorCategory

sys.path.insert(0, str(Path(__file__).parent))

from fake_tinker import FakeServer
from test_learner import learner_on, rows, step

from palestra.algo.batch import Batch
from palestra.core.errors import RolloutError, ServiceError, UnsupportedError
from palestra.core.types import SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.extras.tinker.client import model as model_module
from palestra.extras.tinker.client.learner import TinkerLearner, TinkerPolicy, sampling_params

BUSY = tinker.RateLimitError(
    "slow down", response=httpx.Response(429, request=httpx.Request("POST", "http://fake")), body=None
)
BROKEN = tinker.RequestFailedError("Request failed: it crashed", "r1", RequestErrorCategory.Server)
WRONG = tinker.RequestFailedError(
    "Request failed: no token 99 for self.request_id='r1' and expected", "r1", RequestErrorCategory.User
)
EXPIRED = type("RetryableException", (Exception,), {})("Promise expired")
AWAY = tinker.APIConnectionError(request=httpx.Request("POST", "http://fake"))


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def learner(server: FakeServer) -> TinkerLearner:
    return learner_on(server)


def sampled(policy: TinkerPolicy, seed: int = 1) -> Turn:
    return asyncio.run(policy.sample(policy.open([1, 2, 3]), SamplingParams(6, seed=seed)))


@pytest.mark.parametrize("moment", ["gradients", "step", "sampling", "saving", "reference"])
def test_a_session_that_is_lost_at_any_moment_changes_nothing(moment: str, tmp_path: Path) -> None:
    """Two steps, the second in two parts, with a server that forgets everything in between."""

    def train(restarts: bool) -> tuple[torch.Tensor, list[int]]:
        server, samples = FakeServer(), rows(4)
        torch.manual_seed(0)
        learner = learner_on(server)
        policy = TinkerPolicy(learner.model, 64)

        def at(name: str) -> None:
            if restarts and moment == name:
                server.restart()

        step(learner, samples)
        at("saving")
        learner.save(tmp_path)
        policy.update(learner.weights(1))
        at("sampling")
        tokens = sampled(policy).token_ids.tolist()
        terms = loss_of(samples)
        learner.forward_backward(Batch.of(samples[:2]), terms)
        at("reference")
        learner.forward(Batch.of(samples), reference=True)
        at("gradients")
        learner.forward_backward(Batch.of(samples[2:]), terms)
        at("step")
        learner.optim_step(0.1, max_grad_norm=1.0)
        policy.update(learner.weights(2))
        return learner.model._client.weights.detach(), tokens + sampled(policy).token_ids.tolist()

    with pytest.MonkeyPatch.context() as patch:
        samples = rows(4)
        patch.setattr(sys.modules[__name__], "rows", lambda count: samples)
        (weights, tokens), (mended, mended_tokens) = train(restarts=False), train(restarts=True)
    assert torch.equal(weights, mended)
    assert tokens == mended_tokens


def test_only_what_came_after_the_last_state_is_sent_again(server, learner):
    step(learner, rows())
    state = learner.model.save("mine")
    step(learner, rows())
    learner.weights(2)
    server.log.clear()
    server.restart()
    learner.forward(Batch.of(rows()))
    assert server.log == ["session", f"load {state}", "cross_entropy", "optim_step", "sampler", "close interrupted"]


def test_a_state_is_saved_now_and_then_and_the_one_before_is_deleted(monkeypatch, server, learner):
    monkeypatch.setattr(model_module, "STEPS_BETWEEN_STATES", 2)
    for _ in range(5):
        step(learner, rows())
    assert [path.rpartition("/")[2][:8] for path in server.states] == ["recovery"]
    assert learner.model.state in server.states
    assert len(learner.model._changes) == 2  # one gradient, one step


@pytest.mark.parametrize("error", [BUSY, BROKEN, EXPIRED, AWAY], ids=["busy", "broken", "expired", "away"])
def test_a_server_at_fault_is_asked_again(error, server, learner):
    expected = learner.forward(Batch.of(rows(1)))
    server.fails = [error]
    assert len(learner.forward(Batch.of(rows(1)))) == len(expected)
    assert not server.fails


def test_a_server_that_stays_at_fault_is_told_with_the_last_state(server, learner):
    state = learner.model.save("mine")
    server.fails = [BROKEN] * 9
    with pytest.raises(ServiceError, match=rf"session is lost.*it crashed.*last state that it saved is {state}"):
        learner.forward(Batch.of(rows()))


def test_a_state_that_is_gone_is_told(server, learner):
    learner.model.save("mine")
    server.states.clear()
    server.restart()
    with pytest.raises(ServiceError, match=r"could not be opened again .*there is no tinker://run/weights/mine"):
        learner.forward(Batch.of(rows()))


def test_a_server_that_never_answers_is_given_up(monkeypatch, server, learner):
    monkeypatch.setattr(model_module, "_POLL_S", 0.01)
    monkeypatch.setattr(model_module, "_GIVE_UP_S", 0.02)
    server.sessions[-1].holder = SimpleNamespace(_base_url="http://127.0.0.1:9")  # nobody listens there
    never: Future[None] = Future()
    with pytest.raises(ServiceError, match=r"session is lost.*127\.0\.0\.1:9.*it has saved no state yet"):
        learner.model.call(lambda client: never)


def test_a_mistake_of_ours_is_not_sent_again(server, learner):
    policy = TinkerPolicy(learner.model, 64)
    server.fails = [WRONG]
    with pytest.raises(RolloutError, match=r"the Tinker server refuses a request: no token 99$"):
        sampled(policy)
    assert server.log.count("session") == 1


def test_after_a_refusal_the_next_request_has_a_client_without_a_gap_in_its_numbers(server, learner):
    step(learner, rows())
    server.fails = [WRONG]
    with pytest.raises(ServiceError, match="no token 99"):
        learner.forward(Batch.of(rows()))
    server.log.clear()
    learner.forward(Batch.of(rows()))
    assert server.log == ["session", "create", "cross_entropy", "optim_step", "close interrupted"]


def test_a_key_that_is_not_accepted_is_named(server, learner):
    answer = httpx.Response(401, request=httpx.Request("POST", "http://fake"))
    server.fails = [tinker.AuthenticationError("no", response=answer, body={"detail": "unknown key"})]
    with pytest.raises(ServiceError, match="does not accept the key in TINKER_API_KEY: unknown key"):
        learner.forward(Batch.of(rows()))


def test_many_rollouts_open_one_new_session_together(server, learner):
    policy = TinkerPolicy(learner.model, 64)
    server.restart()

    async def main() -> list[Turn]:
        sessions = policy.fork(policy.open([1, 2]), 20)
        params = (SamplingParams(4, seed=seed) for seed in range(20))
        return list(await asyncio.gather(*map(policy.sample, sessions, params)))

    turns = asyncio.run(main())
    assert {len(turn.token_ids) for turn in turns} == {4}
    assert server.log.count("session") == 2


def test_a_policy_stays_at_its_version_until_it_is_given_the_next(server, learner):
    policy = TinkerPolicy(learner.model, 64)
    first = sampled(policy)
    step(learner, rows())
    server.restart()  # the older version is made again, not the newer one
    again = sampled(policy)
    assert again == first
    assert first.versions.tolist() == [0] * 6
    policy.update(learner.weights(7))
    assert sampled(policy).versions.tolist() == [7] * 6


def test_a_turn_ends_where_the_context_does_and_weights_from_elsewhere_are_refused(learner):
    policy = TinkerPolicy(learner.model, 8)
    session = policy.open([1, 2, 3])
    turn = asyncio.run(policy.sample(session, SamplingParams(20, seed=1)))
    assert (len(turn.token_ids), turn.finish) == (5, "length")
    empty = asyncio.run(policy.sample(session, SamplingParams(20, seed=1)))
    assert (len(empty.token_ids), empty.finish) == (0, "length")
    with pytest.raises(UnsupportedError, match="samples the weights it has trained"):
        policy.update(Weights(1, dict))


@pytest.mark.parametrize(
    ("params", "word"),
    [
        (SamplingParams(4, min_p=0.1), "min_p"),
        (SamplingParams(4, repetition_penalty=1.2), "repetition_penalty"),
        (SamplingParams(4, grammar="[]"), "grammar"),
        (SamplingParams(4, stop=("x",), stop_token_ids=(1,)), "stop strings beside stop tokens"),
    ],
)
def test_sampling_that_tinker_does_not_have_is_refused_by_name(params: SamplingParams, word: str) -> None:
    with pytest.raises(UnsupportedError, match=f"cannot sample with {word}"):
        sampling_params(params)
