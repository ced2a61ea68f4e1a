"""Turns that are sampled with a grammar: by both samplers, whoever else is in the batch."""

import asyncio
import json
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from palestra import function_tool
from palestra.agents.tools.run import read_arguments
from palestra.core.types import Message, Problem, Rollout, SamplingParams, Turn
from palestra.engine.sampler import SamplingRow, sample
from palestra.models.chat.grammars import GrammarText
from palestra.models.chat.template import ChatFormat
from palestra.policy.local import LocalPolicy
from palestra.policy.naive import NaivePolicy
from palestra.rollout.agent_loop import AttemptLimits, run_attempt, token_speakers
from palestra.rollout.converse import Conversation

OPEN = "<tool_call>"


@function_tool
def order(item: Literal["lamp", "vase"], count: int, gift: bool = False) -> str:
    """Order.

    Args:
        item: What.
        count: How many.
        gift: Wrapped or not.
    """
    return f"{count} {item}"


@function_tool
def now() -> str:
    """The time."""
    return "noon"


TOOLS = {"order": order, "now": now}


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    """It knows nothing, and opens a call now and then."""
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=1288, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=512,
                         tie_word_embeddings=False)  # more tokens than the tokenizer's # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def chat(_loaded_tiny: Any) -> ChatFormat:
    return ChatFormat(_loaded_tiny.tokenizer)


GRAMMAR = json.dumps([tool.schema for tool in TOOLS.values()])


def turns(policy: Any, chat: ChatFormat, grammars: list[str | None], first_seed: int = 0) -> list[Turn]:
    async def main() -> list[Turn]:
        sessions = policy.fork(policy.open([5, 9, 33]), len(grammars))
        params = [
            SamplingParams(120, stop_token_ids=chat.stop_token_ids, seed=first_seed + i, grammar=g)
            for i, g in enumerate(grammars)
        ]
        return await asyncio.gather(*(policy.sample(s, p) for s, p in zip(sessions, params, strict=True)))

    return asyncio.run(main())


@pytest.fixture(params=["paged", "naive"])
def policy(request: pytest.FixtureRequest, model: Qwen3ForCausalLM, tiny_tokenizer: Any) -> Any:
    if request.param == "paged":
        return LocalPolicy(model, tiny_tokenizer, kv_memory_gib=0.05, self_check=False)
    return NaivePolicy(model, tiny_tokenizer)


def test_every_call_of_a_random_model_names_a_tool_and_fits_its_schema(policy, chat, tiny_tokenizer) -> None:
    calls = 0
    for turn in turns(policy, chat, [GRAMMAR] * 100):
        text = tiny_tokenizer.decode(turn.token_ids)
        found = chat.read(turn.token_ids.tolist()).tool_calls
        if text.rfind(OPEN) > text.rfind("</tool_call>"):
            assert turn.finish == "length"  # the budget ended inside of the call
            found = found[:-1]
        for call in found:
            assert call.error is None
            read_arguments(TOOLS[call.name], call.arguments)
            calls += 1
    assert calls >= 5


def test_text_is_sampled_as_without_a_grammar(policy: Any, chat: ChatFormat, tiny_tokenizer: Any) -> None:
    opening = tiny_tokenizer.convert_tokens_to_ids(OPEN)
    free, held = turns(policy, chat, [None] * 40), turns(policy, chat, [GRAMMAR] * 40)
    whole = 0
    for one, other in zip(free, held, strict=True):
        if opening not in one.token_ids:
            assert one == other
            whole += 1
        else:
            end = one.token_ids.tolist().index(opening) + 1
            assert one.token_ids[:end].tolist() == other.token_ids[:end].tolist()
            assert one.logprobs[:end].tolist() == other.logprobs[:end].tolist()
            assert one.token_ids.tolist() != other.token_ids.tolist()
    assert 0 < whole < 40


def test_a_turn_does_not_depend_on_the_others_of_its_batch(policy: Any, chat: ChatFormat, tiny_tokenizer: Any) -> None:
    mixed = turns(policy, chat, [GRAMMAR, None] * 20)
    opening = tiny_tokenizer.convert_tokens_to_ids(OPEN)
    chosen = [*[i for i in range(0, 40, 2) if opening in mixed[i].token_ids][:2], 1]
    assert len(chosen) == 3
    for i in chosen:
        [alone] = turns(policy, chat, [GRAMMAR if i % 2 == 0 else None], first_seed=i)
        assert alone.token_ids.tolist() == mixed[i].token_ids.tolist()
        assert alone.logprobs == pytest.approx(mixed[i].logprobs, abs=1e-5)


class Only:
    """Allows the same tokens always."""

    def __init__(self, *token_ids: int, size: int = 16) -> None:
        self.bits = np.packbits(np.isin(np.arange(size), token_ids), bitorder="little").tobytes()

    def allowed(self) -> bytes:
        return self.bits

    def accept(self, token_id: int) -> None: ...


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_logprob_is_that_of_the_allowed_tokens_and_other_rows_stay(temperature: float) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1)) * 3
    params = SamplingParams(1, temperature, seed=4)
    rows = [SamplingRow(params, 7, []) for _ in range(3)]
    tokens, logprobs = sample(logits, [rows[0], rows[1]._replace(matching=Only(2, 11)), rows[2]])
    plain_tokens, plain_logprobs = sample(logits, rows)
    assert all(tokens[i] == plain_tokens[i] and logprobs[i] == plain_logprobs[i] for i in (0, 2))
    assert tokens[1] in (2, 11)
    kept = (logits[1, [2, 11]] / (temperature or 1.0)).log_softmax(-1)
    assert logprobs[1] == pytest.approx(float(kept[0 if tokens[1] == 2 else 1]), abs=1e-5)


def test_masks_may_be_shorter_or_longer_than_the_vocabulary_and_top_k_counts_allowed_tokens() -> None:
    held = [Only(3, size=8), Only(19, size=20), Only(19, 30, size=64)]
    rows = [SamplingRow(SamplingParams(1, seed=i), 0, [], matching) for i, matching in enumerate(held)]
    rows.append(SamplingRow(SamplingParams(1, top_k=1), 0, [], Only(3, 5)))
    tokens, logprobs = sample(torch.stack([*torch.zeros(3, 20), torch.arange(20.0)]), rows)
    assert tokens.tolist() == [3, 19, 19, 5]
    assert logprobs.tolist() == [0.0] * 4


def test_an_attempt_with_a_forced_call_begins_with_one_call_and_goes_on_freely(model: Any, chat: ChatFormat) -> None:
    limits = AttemptLimits(
        SamplingParams(200, stop_token_ids=chat.stop_token_ids),
        max_tool_rounds=1,
        forced_calls=1,
        call=GrammarText(chat.stop_token_ids, one_call=True),
    )
    policy = LocalPolicy(model, chat.tokenizer, kv_memory_gib=0.05, self_check=False)

    async def attempts() -> list[Rollout]:
        shops: list[Any] = [Conversation((Message("user", "Two lamps, please."),), (order, now)) for _ in range(6)]
        speakers = token_speakers(policy, chat)(shops)
        pairs = enumerate(zip(speakers, shops, strict=True))
        return [await run_attempt(speaker, shop, Problem("p", ""), limits, seed) for seed, (speaker, shop) in pairs]

    replies = [[m for m in rollout.messages if m.role == "assistant"] for rollout in asyncio.run(attempts())]
    whole = [said for said in replies if len(said) > 1]  # the others ran out of tokens in their call
    assert whole
    assert all(len(said[0].tool_calls) == 1 for said in whole)
    assert not any(said[1].tool_calls for said in whole)
