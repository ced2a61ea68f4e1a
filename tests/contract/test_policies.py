"""What every policy promises, wherever it samples. A new policy is one more entry in `POLICIES`."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "extras" / "vllm"))

from fake_vllm import FakeVllm
from served import served
from small_engine import small_model

from palestra import function_tool
from palestra.agents.tools.run import read_arguments
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, SettingError, StateError, UnsupportedError
from palestra.core.types import SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.extras.vllm.server import VllmServerPolicy
from palestra.models.chat.template import ChatFormat
from palestra.policy.base import Policy
from palestra.policy.local import LocalPolicy
from palestra.policy.naive import NaivePolicy
from palestra.policy.remote import RemotePolicy

CONTEXT = 512
PROMPT = [5, 9, 33, 21, 60, 2, 8, 14, 77, 30]
AnyPolicy = Policy[Any]


@function_tool
def order(item: Literal["lamp", "vase"], count: int) -> str:
    """Order.

    Args:
        item: What.
        count: How many.
    """
    return f"{count} {item}"


def random_model(seed: int = 0) -> Any:
    """It knows nothing, and opens a tool call now and then."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return small_model(1288, CONTEXT, seed, **sizes, tie_word_embeddings=False)  # more tokens than the tokenizer has


@contextmanager
def local(model: Any, tokenizer: Any, folder: Path) -> Iterator[AnyPolicy]:
    yield LocalPolicy(model, tokenizer, kv_memory_gib=0.05, self_check=False)


@contextmanager
def naive(model: Any, tokenizer: Any, folder: Path) -> Iterator[AnyPolicy]:
    yield NaivePolicy(model, tokenizer)


@contextmanager
def remote(model: Any, tokenizer: Any, folder: Path) -> Iterator[AnyPolicy]:
    """Against our own inference server, in a thread."""
    from palestra.servers.openai.completer import Completer
    from palestra.servers.openai.inference import inference_app

    completer = Completer(
        LocalPolicy(model, tokenizer, kv_memory_gib=0.05, self_check=False), tokenizer, "random", CONTEXT
    )
    with served(inference_app(completer, weights_folder=folder)) as url:
        yield RemotePolicy(url, weights_folder=folder)


@contextmanager
def vllm(model: Any, tokenizer: Any, folder: Path) -> Iterator[AnyPolicy]:
    """Against a server that answers as vLLM does; `make test-vllm` has the real one."""
    fake = FakeVllm(LocalPolicy(model, tokenizer, kv_memory_gib=0.05, self_check=False), tokenizer, CONTEXT)
    with served(fake.app()) as url:
        yield VllmServerPolicy(url, tokenizer, weights_folder=folder, temperature=1.0)


@contextmanager
def tinker(model: Any, tokenizer: Any, folder: Path) -> Iterator[AnyPolicy]:
    """Against our own Tinker server, in a thread, by the official SDK."""
    pytest.importorskip("tinker")
    from tinker_server import base_model, tinker_server

    from palestra.extras.tinker.client.backend import open_model
    from palestra.extras.tinker.client.learner import TinkerPolicy

    with tinker_server([base_model(model, tokenizer, "random")], folder) as running:
        settings = {"backend": "tinker", "tinker": {"base_url": running.url}, "model": {"name": "random"}}
        opened = open_model(RunConfig.build(settings, {"lora.r": 2}))
        yield TinkerPolicy(opened, CONTEXT)
        opened.close(good=True)


@dataclass(frozen=True)
class Kind:
    """How a policy is built; whether it notices that a closed session is used (a server keeps no sessions), samples
    by grammars, knows of each token of a turn by which version it was sampled, and takes weights from elsewhere."""

    build: Callable[[Any, Any, Path], AbstractContextManager[AnyPolicy]]
    knows_sessions: bool = True
    has_grammars: bool = True
    versions_each: bool = True
    takes_weights: bool = True


POLICIES = {
    "local": Kind(local),
    "naive": Kind(naive),
    "remote": Kind(remote, knows_sessions=False),
    "vllm": Kind(vllm, knows_sessions=False, has_grammars=False, versions_each=False),
}
if os.environ.get("PALESTRA_TEST_SLOW"):  # make test-tinker: a server for each test
    POLICIES["tinker"] = Kind(tinker, knows_sessions=False, has_grammars=False, takes_weights=False)
TAKES_WEIGHTS = [name for name, kind in POLICIES.items() if kind.takes_weights]


@dataclass(frozen=True)
class Case:
    policy: AnyPolicy
    model: Any  # the weights that the policy began with
    kind: Kind
    tokenizer: Any

    def turns(self, *params: SamplingParams, prompt: list[int] = PROMPT) -> list[Turn]:
        """One turn for each, side by side, all from one prompt."""

        async def main() -> list[Turn]:
            sessions = self.policy.fork(self.policy.open(prompt), len(params))
            return list(await asyncio.gather(*map(self.policy.sample, sessions, params)))

        return asyncio.run(main())


@pytest.fixture(params=POLICIES)
def case(request: pytest.FixtureRequest, tiny_tokenizer: Any, tmp_path: Path) -> Iterator[Case]:
    kind = POLICIES[request.param]
    with kind.build(random_model(), tiny_tokenizer, tmp_path) as policy:
        yield Case(policy, random_model(), kind, tiny_tokenizer)


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(main())  # type: ignore[arg-type]


def own_logprobs(model: Any, prompt: list[int], turn: Turn, temperature: float = 1.0) -> np.ndarray[Any, Any]:
    """What the model's own forward says of a turn's tokens."""
    ids = torch.tensor([[*prompt, *turn.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()  # type: ignore[no-any-return]


def test_session_holds_exactly_the_tokens_of_its_turns(case: Case) -> None:
    async def main() -> None:
        policy = case.policy
        session = policy.open(PROMPT)
        expected = list(PROMPT)
        assert list(session.token_ids) == expected
        for seed, result in enumerate(([4, 5, 6], np.array([7], dtype=np.int32), [])):
            turn = await policy.sample(session, SamplingParams(9, seed=seed))
            expected += turn.token_ids.tolist()
            assert list(session.token_ids) == expected
            policy.append(session, result)
            expected += [int(i) for i in result]
            assert list(session.token_ids) == expected
        policy.close(session)

    run(main)


def test_forks_go_on_apart_from_a_shared_prompt(case: Case) -> None:
    async def main() -> None:
        policy = case.policy
        first, second, third = policy.fork(policy.open(PROMPT), 3)
        one, other = await asyncio.gather(
            policy.sample(first, SamplingParams(8, seed=1)), policy.sample(second, SamplingParams(8, seed=2))
        )
        policy.append(first, [3, 3])
        assert list(first.token_ids) == [*PROMPT, *one.token_ids.tolist(), 3, 3]
        assert list(second.token_ids) == [*PROMPT, *other.token_ids.tolist()]
        assert list(third.token_ids) == PROMPT
        assert one.token_ids.tolist() != other.token_ids.tolist()
        [again] = policy.fork(second, 1)  # also in the middle of a conversation
        assert list(again.token_ids) == [*PROMPT, *other.token_ids.tolist()]
        assert len((await policy.sample(again, SamplingParams(4))).token_ids) <= 4

    run(main)


def test_a_branch_goes_on_from_the_middle_and_leaves_the_session_as_it_is(case: Case) -> None:
    if not case.policy.can_branch:
        pytest.skip("the gateway opens a new session of this policy instead")
    policy = case.policy

    async def main() -> None:
        session = policy.open(PROMPT)
        await policy.sample(session, SamplingParams(8, seed=1))
        before = list(session.token_ids)
        branch = policy.branch(session, len(PROMPT) + 3)
        policy.append(branch, [3, 3])
        prompt = [*before[: len(PROMPT) + 3], 3, 3]
        assert list(branch.token_ids) == prompt
        turn, _ = await asyncio.gather(
            policy.sample(branch, SamplingParams(8, seed=2)), policy.sample(session, SamplingParams(4))
        )
        assert turn.logprobs == pytest.approx(own_logprobs(case.model, prompt, turn), abs=1e-5)
        assert list(session.token_ids)[: len(before)] == before
        policy.close(session)
        assert len((await policy.sample(branch, SamplingParams(2, seed=3))).token_ids) == 2
        policy.close(branch)

    run(main)


def test_closed_and_forked_sessions_are_refused(case: Case) -> None:
    if not case.kind.knows_sessions:
        pytest.skip("this policy keeps no sessions")

    async def main() -> None:
        policy = case.policy
        closed, forked = policy.open(PROMPT), policy.open(PROMPT)
        policy.close(closed)
        policy.close(closed)  # harmless
        policy.fork(forked, 2)
        for session in (closed, forked):
            with pytest.raises(StateError, match="closed"):
                await policy.sample(session, SamplingParams(3))
            with pytest.raises(StateError, match="closed"):
                policy.append(session, [1])
            with pytest.raises(StateError, match="closed"):
                policy.fork(session, 2)
        with pytest.raises(SettingError, match="n=0"):
            policy.fork(policy.open(PROMPT), 0)

    run(main)


def test_a_prompt_without_tokens_is_refused(case: Case) -> None:
    async def main() -> None:
        await case.policy.sample(case.policy.open([]), SamplingParams(3))

    with pytest.raises(PalestraError):
        run(main)


def test_a_seed_gives_the_same_turn_whatever_else_is_in_the_batch(case: Case) -> None:
    params = SamplingParams(20, seed=42)
    [alone] = case.turns(params)
    company = [SamplingParams(5 + i, temperature=0.5 + 0.1 * i, seed=i) for i in range(9)]
    for same in (case.turns(*company, params)[-1], case.turns(params, *company)[0]):
        assert same.token_ids.tolist() == alone.token_ids.tolist()
        assert same.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        assert same.finish == alone.finish
    [other] = case.turns(SamplingParams(20, seed=43))
    assert other.token_ids.tolist() != alone.token_ids.tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_models_own(case: Case, temperature: float) -> None:
    for turn in case.turns(*(SamplingParams(16, temperature=temperature, seed=i) for i in range(4))):
        assert turn.maker == "model"
        assert turn.logprobs == pytest.approx(own_logprobs(case.model, PROMPT, turn, temperature), abs=1e-5)


def test_greedy_takes_the_most_likely_token_each_time(case: Case) -> None:
    [turn] = case.turns(SamplingParams(10, temperature=0.0))
    ids = torch.tensor([[*PROMPT, *turn.token_ids.tolist()]])
    with torch.no_grad():
        best = case.model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert turn.token_ids.tolist() == best.tolist()


def test_a_turn_ends_at_a_stop_token_or_at_its_limit(case: Case) -> None:
    [free] = case.turns(SamplingParams(12, seed=3))
    assert (free.finish, len(free.token_ids)) == ("length", 12)
    stop = int(free.token_ids[6])
    [stopped] = case.turns(SamplingParams(12, seed=3, stop_token_ids=(stop,)))
    assert stopped.finish == "stop"
    assert stopped.token_ids.tolist() == free.token_ids.tolist()[: free.token_ids.tolist().index(stop) + 1]


@pytest.mark.parametrize("case", TAKES_WEIGHTS, indirect=True)
def test_an_update_changes_what_is_sampled_and_its_version(case: Case) -> None:
    params = [SamplingParams(12, seed=i) for i in range(3)]
    before = case.turns(*params)
    assert case.policy.version == 0
    assert all(turn.versions.tolist() == [0] * len(turn.token_ids) for turn in before)
    newer = random_model(seed=1)
    case.policy.update(Weights(4, lambda: {name: p.detach() for name, p in newer.named_parameters()}))
    assert case.policy.version == 4
    after = case.turns(*params)
    assert all(turn.versions.tolist() == [4] * len(turn.token_ids) for turn in after)
    assert [turn.token_ids.tolist() for turn in after] != [turn.token_ids.tolist() for turn in before]
    for turn in after:
        assert turn.logprobs == pytest.approx(own_logprobs(newer, PROMPT, turn), abs=1e-5)


@pytest.mark.parametrize("case", TAKES_WEIGHTS, indirect=True)
def test_an_update_is_seen_by_the_next_turn_of_an_open_session(case: Case) -> None:
    newer = random_model(seed=1)

    async def main() -> None:
        session = case.policy.open(PROMPT)
        first = await case.policy.sample(session, SamplingParams(6, seed=1))
        weights = Weights(1, lambda: {name: p.detach() for name, p in newer.named_parameters()})
        await asyncio.to_thread(case.policy.update, weights)
        before = list(session.token_ids)
        second = await case.policy.sample(session, SamplingParams(6, seed=1))
        assert (first.versions.tolist(), second.versions.tolist()) == ([0] * 6, [1] * 6)
        assert second.logprobs == pytest.approx(own_logprobs(newer, before, second), abs=1e-5)

    run(main)


@pytest.mark.parametrize("case", TAKES_WEIGHTS, indirect=True)
def test_a_turn_that_meets_an_update_says_which_version_made_each_token(case: Case) -> None:
    newer = random_model(seed=1)
    weights = Weights(1, lambda: {name: p.detach() for name, p in newer.named_parameters()})

    async def main() -> Turn:
        turn = asyncio.create_task(case.policy.sample(case.policy.open(PROMPT), SamplingParams(450, seed=1)))
        await asyncio.sleep(0.05)
        case.policy.update(weights)
        return await turn

    turn: Turn = run(main)
    if not case.kind.versions_each:  # then it counts as of the oldest
        assert turn.versions.tolist() == [0] * 450
        return
    switch = int(np.searchsorted(turn.versions, 1))
    assert turn.versions.tolist() == [0] * switch + [1] * (450 - switch)
    for model, part in ((case.model, slice(0, switch)), (newer, slice(switch, 450))):
        expected = own_logprobs(model, PROMPT, turn)
        assert turn.logprobs[part] == pytest.approx(expected[part], abs=1e-5)


@pytest.mark.parametrize("case", TAKES_WEIGHTS, indirect=True)
def test_weights_of_another_model_are_refused(case: Case) -> None:
    with pytest.raises(PalestraError, match="unheard_of"):
        case.policy.update(Weights(1, lambda: {"unheard_of.weight": torch.zeros(3)}))
    assert case.policy.version == 0
    [turn] = case.turns(SamplingParams(4, seed=2))
    assert turn.versions.tolist() == [0] * 4


def test_sessions_survive_a_sleep(case: Case) -> None:
    def two_turns(sleeps: bool) -> list[list[int]]:
        async def main() -> list[list[int]]:
            policy = case.policy
            group = policy.fork(policy.open(PROMPT), 2)
            found = []
            for number in range(2):
                turns = await asyncio.gather(*(policy.sample(s, SamplingParams(8, seed=number)) for s in group))
                found += [turn.token_ids.tolist() for turn in turns]
                if sleeps:
                    policy.sleep()
                    policy.wake()
                for session in group:
                    policy.append(session, [4, 4])
            for session in group:
                policy.close(session)
            return found

        return run(main)  # type: ignore[no-any-return]

    assert two_turns(sleeps=True) == two_turns(sleeps=False)


def test_a_grammar_as_text_constrains_tool_calls(case: Case) -> None:
    if not case.kind.has_grammars:
        with pytest.raises(UnsupportedError, match=r"without our grammars|cannot sample with grammar"):
            case.turns(SamplingParams(4, grammar="[]"))
        return
    pytest.importorskip("llguidance")
    chat, calls = ChatFormat(case.tokenizer), 0
    grammar = json.dumps([order.schema])
    stops = chat.stop_token_ids
    for turn in case.turns(*(SamplingParams(120, stop_token_ids=stops, seed=i, grammar=grammar) for i in range(24))):
        found = chat.read(turn.token_ids.tolist()).tool_calls
        text = case.tokenizer.decode(turn.token_ids)
        if text.count("<tool_call>") > text.count("</tool_call>"):  # the limit came inside of a call
            assert turn.finish == "length"
            found = found[:-1]
        for call in found:
            assert (call.name, call.error) == ("order", None)
            read_arguments(order, call.arguments)
            calls += 1
    assert calls >= 1
