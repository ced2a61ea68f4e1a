"""How a request finds its conversation, and what is trained of it."""

import asyncio
import json

import pytest
from builders import samples_of
from scripted_model import END, PROBLEM, QUESTION, TOOL, BranchingPolicy, ScriptedPolicy, attempt, call, completer

from palestra.core.errors import ContextLengthError, StateError
from palestra.core.types import CUT_OFF, Group, Message, SamplingParams
from palestra.servers.gateway.chat_completions import ChatCompletionBody
from palestra.servers.gateway.conversation_tree import SharedPrompts
from palestra.train.batch import to_batch

SYSTEM = {"role": "system", "content": "Use tools."}
CALL = call('{"a": 2,   "b": 3}')


def talk(tokenizer, script, kind=ScriptedPolicy, **options):
    """An attempt whose model says these words, and its policy."""
    one = attempt(completer(tokenizer, [f"{words}{END}" for words in script], kind=kind), **options)
    return one, one.model.policy


def ask(one, messages, **fields):
    """The answers to a chat completion as a client gets them."""
    body = ChatCompletionBody.read({"messages": messages, "tools": [TOOL], **fields})
    answers = asyncio.run(one.answer(body.request(one.model)))
    return [choice["message"] for choice in body.response(answers, one.model)["choices"]]


def finish(one):
    """The conversations of the attempt, by the order of their last turns."""
    rollout = asyncio.run(one.finish())
    return [*rollout.lineages, rollout] if rollout.turns else []


def result(message, text="5"):
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


def said(text):
    return {"role": "user", "content": text}


def sampled_ids(rollout):
    return [turn.token_ids.tolist() for turn in rollout.turns if turn.maker == "model"]


def test_a_linear_agent_is_one_row_of_the_very_tokens_that_were_sampled(tiny_tokenizer):
    one, policy = talk(tiny_tokenizer, [f"Let me see. {CALL}", "It is 5."])
    (first,) = ask(one, [SYSTEM, QUESTION])
    assert json.loads(first["tool_calls"][0]["function"]["arguments"]) == {"a": 2, "b": 3}
    (second,) = ask(one, [SYSTEM, QUESTION, first, result(first)])
    assert second["content"] == "It is 5."
    (rollout,) = finish(one)
    assert sampled_ids(rollout) == policy.sampled
    assert rollout.problem_id == PROBLEM.id
    assert rollout.stop == "answered"
    assert [m.role for m in rollout.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [r.content for r in rollout.tool_results] == ["5"]
    assert one.counts.lineages == 1
    assert one.counts.recomputed_tokens == one.counts.retokenised_turns == 0
    assert all(session.closed for session in policy.sessions)
    whole = [i for turn in rollout.turns for i in turn.token_ids.tolist()]
    assert policy.computed + sum(map(len, policy.sampled)) == len(whole)
    # opening and tool result are what `ChatFormat` writes for our own agent loop
    opening = one.model.chat.prompt([Message("system", "Use tools."), Message("user", "What is 2 + 3?")], [TOOL])
    heard = one.model.chat.continuation([Message("tool", "5", tool_call_id="call_0", name="add")])
    assert rollout.turns[0] == opening
    assert rollout.turns[2:-1] == heard
    assert [p.seed for p in policy.params] == [7, 8]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["tool_calls"][0]["function"].update(arguments='{"b":3.0,"a":2}'),
        lambda m: m["tool_calls"][0].update(id="renamed"),
        lambda m: m.update(content="<think>other</think>Let me see. \n"),
        lambda m: m.update(content=None),
        lambda m: m.update(name="agent", refusal=None, annotations=[]),
    ],
    ids=["JSON", "call id", "thinking and whitespace", "text beside calls", "other fields"],
)
def test_a_history_that_came_back_in_other_words_goes_on(tiny_tokenizer, change):
    one, policy = talk(tiny_tokenizer, [f"<think>hm</think>Let me see. {CALL}", "It is 5.", "Bye."])
    (first,) = ask(one, [SYSTEM, QUESTION])
    assert first["content"] == "Let me see."
    assert first["reasoning_content"] == "hm"
    change(first)
    history = [SYSTEM, said("What is 2 + 3? \n"), first, result(first, '{"sum": 5, "of": 2}')]
    (second,) = ask(one, history)
    history[-1] = result(first, '{"of":2,"sum":5}')
    ask(one, [*history, second, said("Thanks.")])
    (rollout,) = finish(one)
    assert sampled_ids(rollout) == policy.sampled
    assert (one.counts.recomputed_tokens, one.counts.retokenised_turns) == (0, 0)


def test_an_edit_in_the_middle_opens_a_lineage_that_shares_what_was_before(tiny_tokenizer):
    one, policy = talk(tiny_tokenizer, ["One.", "Two.", "Three."])
    (first,) = ask(one, [QUESTION])
    history = [QUESTION, first, said("And?")]
    (second,) = ask(one, history)
    edited = [QUESTION, first, said("And then?"), second, said("So?")]
    ask(one, edited)
    rows = finish(one)
    assert len(rows) == one.counts.lineages == 2
    assert [sampled_ids(row) for row in rows] == [policy.sampled[:2], policy.sampled[2:]]
    shared = sum(len(turn.token_ids) for turn in rows[0].turns[:2])
    flat = [[i for turn in row.turns for i in turn.token_ids.tolist()] for row in rows]
    assert flat[0][:shared] == flat[1][:shared]
    assert one.counts.recomputed_tokens == shared
    assert one.counts.retokenised_turns == 1
    last = [message.text for message in one.tree.nodes[-1].messages]
    assert last == ["What is 2 + 3?", "One.", "And then?", "Two.", "So?", "Three."]


def test_of_several_choices_the_one_that_goes_on_is_trained(tiny_tokenizer):
    one, policy = talk(tiny_tokenizer, ["One.", "Two.", "Three.", "Four."])
    choices = ask(one, [QUESTION], n=3)
    assert [c["content"] for c in choices] == ["One.", "Two.", "Three."]
    ask(one, [QUESTION, choices[1], said("And?")])
    rows = finish(one)
    assert sorted(map(sampled_ids, rows)) == [[], [], [policy.sampled[1], policy.sampled[3]]]
    assert one.counts.discarded_turns == 2
    assert one.counts.recomputed_tokens == 0
    assert len({p.seed for p in policy.params}) == 4


def test_a_turn_cut_off_by_the_client_goes_on_behind_a_stop_token(tiny_tokenizer):
    one, policy = talk(tiny_tokenizer, ["One two three four.", "Five."])
    (first,) = ask(one, [QUESTION], max_tokens=2)
    ask(one, [QUESTION, first, said("And?")])
    (rollout,) = finish(one)
    behind = rollout.turns[2].token_ids.tolist()
    assert tiny_tokenizer.decode(behind).startswith(f"{END}\n<|im_start|>user\n")
    assert sampled_ids(rollout) == policy.sampled


def test_new_tokens_are_counted_over_the_turns_of_a_lineage(tiny_tokenizer):
    size = len(tiny_tokenizer.encode(f"One.{END}", add_special_tokens=False))
    one, policy = talk(tiny_tokenizer, ["One."] * 3, sampling=SamplingParams(max_new_tokens=size))
    (first,) = ask(one, [QUESTION])
    with pytest.raises(ContextLengthError, match=r"used up its .* new tokens"):
        ask(one, [QUESTION, first, said("And?")])
    (rollout,) = finish(one)
    assert rollout.stop == "truncated"
    assert all(session.closed for session in policy.sessions)


def test_the_run_samples_unless_clients_may(tiny_tokenizer):
    for client_sampling, expected in ((False, 1.0), (True, 0.5)):
        one, policy = talk(tiny_tokenizer, ["One."], client_sampling=client_sampling)
        ask(one, [QUESTION], temperature=0.5)
        assert policy.params[0].temperature == expected


def test_after_its_end_an_attempt_answers_nobody(tiny_tokenizer):
    one, _ = talk(tiny_tokenizer, ["One."])
    assert finish(one) == []
    with pytest.raises(StateError, match="has ended"):
        ask(one, [QUESTION])


def test_siblings_compute_the_prompt_that_they_share_once(tiny_tokenizer):
    model = completer(tiny_tokenizer, [f"One.{END}"] * 4)
    policy, shared = model.policy, SharedPrompts(model.policy, 4)
    siblings = [attempt(model, shared_prompts=shared) for _ in range(3)]
    for one in siblings:
        ask(one, [QUESTION])
    size = len(policy.prompts[0])
    assert policy.prompts == [policy.prompts[0]] * 3
    assert policy.computed == size
    ask(siblings[0], [said("Something else.")])
    assert policy.computed == size + len(policy.prompts[-1])
    for one in siblings:
        finish(one)
    shared.close()
    assert all(session.closed for session in policy.sessions)


def first_difference(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_changed_history_goes_on_from_where_it_differs(tiny_tokenizer):
    one, policy = talk(tiny_tokenizer, ["One.", "Two.", "Three."], kind=BranchingPolicy)
    (first,) = ask(one, [SYSTEM, QUESTION])
    ask(one, [SYSTEM, QUESTION, first, said("And?")])
    known, before = list(policy.sessions[0].token_ids), policy.computed
    ask(one, [SYSTEM, QUESTION, first, said("And then, what else?")])
    shared = first_difference(known, policy.prompts[2])
    assert shared > len(policy.prompts[0]) + len(policy.sampled[0])  # the question, the answer, and more
    assert policy.computed - before == len(policy.prompts[2]) - shared
    assert one.counts.recomputed_tokens == 0
    rows = finish(one)
    flat = [[i for turn in row.turns for i in turn.token_ids.tolist()] for row in rows]
    assert sorted(flat) == sorted(p + s for p, s in zip(policy.prompts[1:], policy.sampled[1:], strict=True))
    assert all(session.closed for session in policy.sessions)


def test_a_subagent_with_the_same_instructions_computes_its_own_question_alone(tiny_tokenizer):
    model = completer(tiny_tokenizer, [f"{w}.{END}" for w in ("One", "Two", "Three")], kind=BranchingPolicy)
    policy, shared = model.policy, SharedPrompts(model.policy, 2)
    siblings = [attempt(model, shared_prompts=shared) for _ in range(2)]
    ask(siblings[0], [SYSTEM, QUESTION])
    for one in siblings:  # of a sibling's session, too
        before = policy.computed
        ask(one, [SYSTEM, {"role": "user", "content": f"Look {len(policy.prompts)} up."}])
        differs = first_difference(policy.prompts[0], policy.prompts[-1])
        assert 0 < policy.computed - before <= len(policy.prompts[-1]) - differs
    for one in siblings:
        finish(one)
    shared.close()
    assert all(session.closed for session in policy.sessions)


FENCED = 'I add.\n```json\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n```'


def test_a_call_in_an_unexpected_format_is_a_call_for_the_agent_and_named_in_the_record(tiny_tokenizer):
    one, _ = talk(tiny_tokenizer, [FENCED, "It is 5.", FENCED])
    (first,) = ask(one, [SYSTEM, QUESTION])
    assert (first["content"], first["tool_calls"][0]["function"]["name"]) == ("I add.", "add")
    assert "format" not in first["tool_calls"][0]
    ask(one, [SYSTEM, QUESTION, first, result(first, "5")])
    (rollout,) = finish(one)
    assert [result.call.format for result in rollout.tool_results] == ["json"]
    assert (one.counts.recomputed_tokens, one.counts.retokenised_turns) == (0, 0)
    one.model.unexpected_calls = "error"
    (last,) = ask(attempt(one.model), [SYSTEM, QUESTION])
    assert (last["content"], "tool_calls" in last) == (FENCED, False), "it stays text"


def test_turns_before_a_truncated_side_request_are_trained(tiny_tokenizer):
    """Rows that were cut off are masked (`train.mask_truncated`)."""
    one, policy = talk(tiny_tokenizer, ["One.", "A title that is too long", "Two."])
    (first,) = ask(one, [QUESTION])
    ask(one, [QUESTION, first, said("Give it a title.")], max_tokens=1)
    ask(one, [QUESTION, first, said("And?")])
    trained = [ids for row in finish(one) if row.stop not in CUT_OFF for ids in sampled_ids(row)]
    assert trained == [policy.sampled[0], policy.sampled[2]]


# Requests as texts of the user and numbers of earlier replies; {0} quotes a reply. Then the turns that are trained.
TRAINED = {
    "no side call, and of repeated requests the one that is continued": (
        [["Name it."], ["2 + 3?"], ["2 + 3?"], ["2 + 3?", 2, "And?"]],
        [2, 3],
    ),
    "an answer that a later request quotes": (
        [["Lamps?"], ["Chairs?"], ["2 + 3?", "It says: {0}"], ["2 + 3?", "It says: {0}", 2, "And three?"]],
        [0, 2, 3],
    ),
    "of single requests the last answer to each": ([["First?"], ["Second?"], ["Second?"], ["Third?"]], [0, 2, 3]),
    "the answer before a side call": ([["2 + 3?"], ["2 + 3?", 0, "So?"], ["Name it."]], [0, 1, 2]),
}


@pytest.mark.parametrize("case", TRAINED)
def test_turns_that_a_later_request_contains_and_final_ones_are_trained(tiny_tokenizer, case):
    requests, trained = TRAINED[case]
    one, policy = talk(tiny_tokenizer, [f"Answer number {i}." for i in range(len(requests))])
    replies = []
    for request in requests:
        texts = [reply["content"] for reply in replies]
        messages = [replies[part] if isinstance(part, int) else said(part.format(*texts)) for part in request]
        replies += ask(one, messages)
    rows = finish(one)
    assert [ids for row in rows for ids in sampled_ids(row)] == [policy.sampled[i] for i in trained]
    assert one.counts.discarded_turns == len(requests) - len(trained)


def test_a_tool_result_is_predicted_in_one_row_alone(tiny_tokenizer):
    one, _ = talk(tiny_tokenizer, [CALL, "Two.", "Three.", "Four.", "Five."])
    (first,) = ask(one, [QUESTION])
    (second,) = ask(one, [QUESTION, first, result(first, "the sum is five")])
    for text in ("And?", "So?", "What?"):
        ask(one, [QUESTION, first, result(first, "the sum is five"), second, said(text)])
    heard = [t.token_ids.tolist() for row in finish(one) for t in row.turns if t.maker == "environment"]
    texts = [tiny_tokenizer.decode(ids) for ids in heard]
    assert sum("the sum is five" in text for text in texts) == 1


def test_rows_of_discarded_turns_are_no_samples(tiny_tokenizer):
    one, policy = talk(tiny_tokenizer, ["One.", "Two.", "Three.", "Four."])
    choices = ask(one, [QUESTION], n=3)
    ask(one, [QUESTION, choices[1], said("And?")])
    rollout = asyncio.run(one.finish())
    assert len(rollout.conversations) == 3
    (sample,) = samples_of(to_batch([Group(PROBLEM.id, (rollout,))], [[1.0]], mask_truncated=True))
    assert int(sample.policy_mask.sum()) == len(policy.sampled[1]) + len(policy.sampled[3])


def test_finding_a_conversation_takes_one_look_for_each_of_its_turns(tiny_tokenizer):
    turns = 60
    model = completer(tiny_tokenizer, lambda i: f"{i}.{END}", context=100_000)
    one, history = attempt(model, sampling=SamplingParams(max_new_tokens=100_000)), [QUESTION]
    for _ in range(turns):
        (reply,) = ask(one, history)
        history += [reply, said("And?")]
    looks = 0

    class Counting(dict):
        def get(self, *args):
            nonlocal looks
            looks += 1
            return super().get(*args)

    one.tree._by_reply = Counting(one.tree._by_reply)
    ask(one, history)
    assert looks <= turns + 1
    assert one.counts.lineages == 1
