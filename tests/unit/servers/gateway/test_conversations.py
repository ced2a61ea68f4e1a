"""Random conversations in all dialects: what is trained is what was sampled, id for id.

`PALESTRA_CONVERSATIONS=10000` runs as many of each kind; `make test` 150 in all.
"""

import asyncio
import copy
import json
import os
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from scripted_model import END, TOOL, BranchingPolicy, ScriptedPolicy, attempt, completer

from palestra.servers.gateway.anthropic_messages import MessagesBody
from palestra.servers.gateway.chat_completions import ChatCompletionBody
from palestra.servers.gateway.responses import ResponseBody

CONVERSATIONS = int(os.environ.get("PALESTRA_CONVERSATIONS", "25"))
several = settings(
    max_examples=CONVERSATIONS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=[Phase.generate],  # conversations are short as they are
)

# without the text of special tokens, which clients could not send as text
texts = st.text(
    st.sampled_from(list('ab 4.,:\n\t<>/|éé日🍵{}"\\')) | st.characters(exclude_categories=["Cs"]), max_size=20
).filter(lambda text: "<|" not in text)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
arguments = st.dictionaries(texts, json_values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(["add", "say"]), arguments), max_size=3)
replies = st.tuples(st.booleans(), texts, calls, st.sampled_from(["", " ", "\n"]))
replies |= st.tuples(st.just(False), st.sampled_from(['<tool_call>{"name": ', "a</think>b", "<think>never ends"]))


def written(reply) -> str:
    """What the model says."""
    if len(reply) == 2:
        return reply[1] + END
    thinks, text, calls, space = reply
    dumped = [json.dumps({"name": name, "arguments": args}, ensure_ascii=space == " ") for name, args in calls]
    tagged = [f"<tool_call>\n{each}\n</tool_call>" for each in dumped]
    return ("<think>hm</think>" if thinks else "") + space.join([text, *tagged]) + space + END


class ChatClient:
    """Talks Chat Completions, and changes what a client may change when it sends the history again."""

    def __init__(self, model, one, rng) -> None:
        self.model, self.one, self.rng = model, one, rng

    def opening(self, text):
        return [{"role": "system", "content": "Use tools."}, {"role": "user", "content": text}]

    def ask(self, history, n=1):
        body = ChatCompletionBody.read({"messages": history, "tools": [TOOL], "n": n})
        answers = asyncio.run(self.one.answer(body.request(self.model)))
        return [[c["message"]] for c in body.response(answers, self.model)["choices"]]

    def said_again(self, reply):
        (message,) = copy.deepcopy(reply)
        if self.rng.random() < 0.5:
            message["content"] = (message["content"] or "") + self.rng.choice(["", " ", "\n"])
        if self.rng.random() < 0.3 and message.get("reasoning_content"):
            message["content"] = f"<think>{message.pop('reasoning_content')}</think>{message['content'] or ''}"
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = self.serialised_again(call["function"]["arguments"])
        return [message]

    def serialised_again(self, text):
        """As another language would write it: other order, other spacing, numbers as doubles."""
        as_doubles = {"parse_int": float} if self.rng.random() < 0.3 else {}
        pairs = list(json.loads(text, **as_doubles).items())
        self.rng.shuffle(pairs)
        separators = self.rng.choice([(",", ":"), (", ", ": "), (" ,\n", ":")])
        return json.dumps(dict(pairs), ensure_ascii=self.rng.random() < 0.5, separators=separators)

    def answered(self, reply, texts):
        """Results of all calls, or what the user says next."""
        calls = reply[0].get("tool_calls") or ()
        if not calls:
            return [{"role": "user", "content": texts[0]}]
        return [
            {"role": "tool", "tool_call_id": c["id"], "content": texts[i % len(texts)]} for i, c in enumerate(calls)
        ]


class ResponsesClient(ChatClient):
    def opening(self, text):
        return [{"role": "user", "content": [{"type": "input_text", "text": text}]}]

    def ask(self, history, n=1):
        tool = {"type": "function", **TOOL["function"]}
        body = ResponseBody.read({"input": history, "instructions": "Use tools.", "tools": [tool]}, self.one.stored)
        answers = asyncio.run(self.one.answer(body.request(self.model)))
        return [body.response(answers, self.model)["output"]] * n

    def said_again(self, reply):
        items = [i for i in copy.deepcopy(reply) if i["type"] != "reasoning" or self.rng.random() < 0.5]
        for item in items:
            if item["type"] == "function_call":
                item["arguments"] = self.serialised_again(item["arguments"])
        return items

    def answered(self, reply, texts):
        calls = [item for item in reply if item["type"] == "function_call"]
        if not calls:
            return self.opening(texts[0])
        return [
            {"type": "function_call_output", "call_id": c["call_id"], "output": texts[i % len(texts)]}
            for i, c in enumerate(calls)
        ]


class AnthropicClient(ChatClient):
    def opening(self, text):
        return [{"role": "user", "content": text}]

    def ask(self, history, n=1):
        tool = {"name": "add", "input_schema": TOOL["function"]["parameters"]}
        fields = {"model": "any", "max_tokens": 10_000, "system": "Use tools.", "thinking": {"type": "enabled"}}
        body = MessagesBody.read({"messages": history, "tools": [tool], **fields})
        answers = asyncio.run(self.one.answer(body.request(self.model)))
        return [[{"role": "assistant", "content": body.response(answers, self.model)["content"]}]] * n

    def said_again(self, reply):
        (message,) = copy.deepcopy(reply)
        blocks = [b for b in message["content"] if b["type"] != "thinking" or self.rng.random() < 0.5]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(self.serialised_again(json.dumps(block["input"])))
        return [{"role": "assistant", "content": blocks}]

    def answered(self, reply, texts):
        uses = [block for block in reply[0]["content"] if block["type"] == "tool_use"]
        if not uses:
            return self.opening(texts[0])
        blocks = [
            {"type": "tool_result", "tool_use_id": b["id"], "content": texts[i % len(texts)]}
            for i, b in enumerate(uses)
        ]
        return [{"role": "user", "content": blocks}]


CLIENTS = {"chat": ChatClient, "responses": ResponsesClient, "anthropic": AnthropicClient}


def check_rows(model, one):
    """Every turn but the discarded ones is trained once, with the very tokens before it that it was sampled behind."""
    rows, kept = asyncio.run(one.finish()).conversations, one.tree.trained_nodes()
    trained = []
    for row in rows:
        before: list[int] = []
        for turn in row.turns:
            ids = turn.token_ids.tolist()
            if turn.maker == "model":
                trained.append((tuple(before), tuple(ids)))
            before += ids
    sampled = list(zip(map(tuple, model.policy.prompts), map(tuple, model.policy.sampled), strict=True))
    assert len(trained) == len(kept) == len(sampled) - one.counts.discarded_turns
    assert not Counter(trained) - Counter(sampled)
    assert all(session.closed for session in model.policy.sessions)
    return rows


@pytest.mark.parametrize("client", CLIENTS)
def test_a_linear_conversation_is_one_row_without_anything_tokenised_again(tiny_tokenizer, client):
    @several
    @given(st.lists(replies, min_size=1, max_size=5), st.lists(texts, min_size=2, max_size=4), st.integers(0, 2**30))
    def check(script, said, seed):
        model = completer(tiny_tokenizer, [written(reply) for reply in script])
        one = attempt(model)
        talk = CLIENTS[client](model, one, random.Random(seed))
        history = talk.opening(said[0])
        for i in range(len(script)):
            (reply,) = talk.ask(history)
            history = [*history, *talk.said_again(reply), *talk.answered(reply, said[i % 2 :])]
        rows = check_rows(model, one)
        assert len(rows) == one.counts.lineages == 1
        assert (one.counts.recomputed_tokens, one.counts.retokenised_turns) == (0, 0)

    check()


@pytest.mark.parametrize("client", CLIENTS)
def test_edits_branches_and_choices_are_trained_once_each_or_discarded(tiny_tokenizer, client):
    """Steps go on from any state so far: the same twice, with a message changed, or with several choices."""
    steps = st.tuples(st.integers(0, 100), st.sampled_from(["go on", "again", "edit", "choices", "compact"]), texts)

    @several
    @given(st.lists(steps, min_size=1, max_size=6), st.lists(replies, min_size=3, max_size=3), st.integers(0, 2**30))
    def check(plan, script, seed):
        policy = BranchingPolicy if seed % 2 else ScriptedPolicy
        model = completer(tiny_tokenizer, lambda i: written(script[i % len(script)]), kind=policy)
        one = attempt(model)
        rng = random.Random(seed)
        talk = CLIENTS[client](model, one, rng)
        states = [talk.opening("What is 2 + 3?")]
        for at, kind, text in plan:
            history = copy.deepcopy(states[at % len(states)])
            if kind == "edit":
                history[0] = talk.opening(f"{text}!")[0]
            elif kind == "compact":
                history = [*talk.opening(f"So far: {text}"), *history[-1:]] if len(history) < 3 else talk.opening(text)
            for reply in talk.ask(history, 3 if kind == "choices" else 1):
                states.append([*history, *talk.said_again(reply), *talk.answered(reply, [text, "more"])])
        rows = check_rows(model, one)
        assert len(rows) == one.counts.lineages
        assert policy is ScriptedPolicy or one.counts.recomputed_tokens == 0

    check()
