"""How a request finds its conversation, and what is trained of it."""

import asyncio
import json

import pytest
from scripted_model import END, PROBLEM, QUESTION, TOOL, BranchingPolicy, attempt, call, completer

from palestra.core.errors import PalestraError
from palestra.core.types import CUT_OFF, Group, Message, SamplingParams
from palestra.servers.gateway.chat_completions import ChatCompletionBody
from palestra.servers.gateway.shared_prompts import SharedPrompts
from palestra.train.batch import to_batch

SYSTEM = {"role": "system", "content": "Use tools."}
CALL = call('{"a": 2,   "b": 3}')


def ask(one, model, messages, **fields):
    """The answers to a chat completion as a client gets them."""
    body = ChatCompletionBody.read({"messages": messages, "tools": [TOOL], **fields})
    answers = asyncio.run(one.answer(body.request(model)))
    return [choice["message"] for choice in body.response(answers, model)["choices"]]


def finish(one):
    """The conversations of the attempt, by the order of their last turns."""
    rollout = asyncio.run(one.finish())
    return [*rollout.lineages, rollout] if rollout.turns else []


def result(message, text="5", index=0):
    return {"role": "tool", "tool_call_id": message["tool_calls"][index]["id"], "content": text}


def sampled_ids(rollout):
    return [turn.token_ids.tolist() for turn in rollout.turns if turn.maker == "model"]


def test_a_linear_agent_is_one_row_of_the_very_tokens_that_were_sampled(tiny_tokenizer):
    model = completer(tiny_tokenizer, [f"Let me see. {CALL}{END}", f"It is 5.{END}"])
    one = attempt(model)
    (first,) = ask(one, model, [SYSTEM, QUESTION])
    assert json.loads(first["tool_calls"][0]["function"]["arguments"]) == {"a": 2, "b": 3}
    (second,) = ask(one, model, [SYSTEM, QUESTION, first, result(first)])
    assert second["content"] == "It is 5."
    (rollout,) = finish(one)
    assert sampled_ids(rollout) == model.policy.sampled
    assert rollout.problem_id == PROBLEM.id
    assert rollout.stop == "answered"
    assert [m.role for m in rollout.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [r.content for r in rollout.tool_results] == ["5"]
    assert one.counts.lineages == 1
    assert one.counts.recomputed_tokens == one.counts.retokenised_turns == 0
    assert all(session.closed for session in model.policy.sessions)
    whole = [i for turn in rollout.turns for i in turn.token_ids.tolist()]
    assert model.policy.computed + sum(map(len, model.policy.sampled)) == len(whole)


def test_the_tokens_are_those_of_the_agent_loop(tiny_tokenizer):
    """Opening, tool result and all: as `ChatFormat` writes them for our own loop."""
    model = completer(tiny_tokenizer, [f"{CALL}{END}", f"It is 5.{END}"])
    one = attempt(model)
    (first,) = ask(one, model, [SYSTEM, QUESTION])
    ask(one, model, [SYSTEM, QUESTION, first, result(first)])
    (rollout,) = finish(one)
    opening = model.chat.prompt([Message("system", "Use tools."), Message("user", "What is 2 + 3?")], [TOOL])
    heard = model.chat.continuation([Message("tool", "5", tool_call_id="call_0", name="add")])
    assert rollout.turns[0] == opening
    assert rollout.turns[2:-1] == heard
    assert [p.seed for p in model.policy.params] == [7, 8]


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
    script = [f"<think>hm</think>Let me see. {CALL}{END}", f"It is 5.{END}", f"Bye.{END}"]
    model = completer(tiny_tokenizer, script)
    one = attempt(model)
    (first,) = ask(one, model, [SYSTEM, QUESTION])
    assert first["content"] == "Let me see."
    assert first["reasoning_content"] == "hm"
    change(first)
    history = [SYSTEM, {"role": "user", "content": "What is 2 + 3? \n"}, first, result(first, '{"sum": 5, "of": 2}')]
    (second,) = ask(one, model, history)
    history[-1] = result(first, '{"of":2,"sum":5}')
    ask(one, model, [*history, second, {"role": "user", "content": "Thanks."}])
    (rollout,) = finish(one)
    assert sampled_ids(rollout) == model.policy.sampled
    assert (one.counts.recomputed_tokens, one.counts.retokenised_turns) == (0, 0)


def test_an_edit_in_the_middle_opens_a_lineage_that_shares_what_was_before(tiny_tokenizer):
    model = completer(tiny_tokenizer, [f"One.{END}", f"Two.{END}", f"Three.{END}"])
    one = attempt(model)
    (first,) = ask(one, model, [QUESTION])
    history = [QUESTION, first, {"role": "user", "content": "And?"}]
    (second,) = ask(one, model, history)
    edited = [QUESTION, first, {"role": "user", "content": "And then?"}, second, {"role": "user", "content": "So?"}]
    ask(one, model, edited)
    rows = finish(one)
    assert len(rows) == one.counts.lineages == 2
    assert [sampled_ids(row) for row in rows] == [model.policy.sampled[:2], model.policy.sampled[2:]]
    shared = sum(len(turn.token_ids) for turn in rows[0].turns[:2])
    flat = [[i for turn in row.turns for i in turn.token_ids.tolist()] for row in rows]
    assert flat[0][:shared] == flat[1][:shared]
    assert one.counts.recomputed_tokens == shared
    assert one.counts.retokenised_turns == 1
    last = [message.text for message in one.tree.nodes[-1].messages]
    assert last == ["What is 2 + 3?", "One.", "And then?", "Two.", "So?", "Three."]


def test_of_several_choices_the_one_that_goes_on_is_trained(tiny_tokenizer):
    model = completer(tiny_tokenizer, [f"{w}.{END}" for w in ("One", "Two", "Three", "Four")])
    one = attempt(model)
    choices = ask(one, model, [QUESTION], n=3)
    assert [c["content"] for c in choices] == ["One.", "Two.", "Three."]
    ask(one, model, [QUESTION, choices[1], {"role": "user", "content": "And?"}])
    rows = finish(one)
    assert sorted(map(sampled_ids, rows)) == [[], [], [model.policy.sampled[1], model.policy.sampled[3]]]
    assert one.counts.discarded_turns == 2
    assert one.counts.recomputed_tokens == 0
    assert len({p.seed for p in model.policy.params}) == 4


def test_a_turn_cut_off_by_the_client_goes_on_behind_a_stop_token(tiny_tokenizer):
    model = completer(tiny_tokenizer, [f"One two three four.{END}", f"Five.{END}"])
    one = attempt(model)
    (first,) = ask(one, model, [QUESTION], max_tokens=2)
    ask(one, model, [QUESTION, first, {"role": "user", "content": "And?"}])
    (rollout,) = finish(one)
    behind = rollout.turns[2].token_ids.tolist()
    assert tiny_tokenizer.decode(behind).startswith(f"{END}\n<|im_start|>user\n")
    assert sampled_ids(rollout) == model.policy.sampled


def test_new_tokens_are_counted_over_the_turns_of_a_lineage(tiny_tokenizer):
    model = completer(tiny_tokenizer, [f"One.{END}"] * 3)
    size = len(tiny_tokenizer.encode(f"One.{END}", add_special_tokens=False))
    one = attempt(model, sampling=SamplingParams(max_new_tokens=size))
    (first,) = ask(one, model, [QUESTION])
    with pytest.raises(PalestraError, match=r"used up its .* new tokens"):
        ask(one, model, [QUESTION, first, {"role": "user", "content": "And?"}])
    (rollout,) = finish(one)
    assert rollout.stop == "truncated"
    assert all(session.closed for session in model.policy.sessions)


def test_the_run_samples_unless_clients_may(tiny_tokenizer):
    for client_sampling, expected in ((False, 1.0), (True, 0.5)):
        model = completer(tiny_tokenizer, [f"One.{END}"])
        one = attempt(model, client_sampling=client_sampling)
        ask(one, model, [QUESTION], temperature=0.5)
        assert model.policy.params[0].temperature == expected


def test_after_its_end_an_attempt_answers_nobody(tiny_tokenizer):
    model = completer(tiny_tokenizer, [f"One.{END}"])
    one = attempt(model)
    assert finish(one) == []
    with pytest.raises(PalestraError, match="has ended"):
        ask(one, model, [QUESTION])


def test_siblings_compute_the_prompt_that_they_share_once(tiny_tokenizer):
    model = completer(tiny_tokenizer, [f"One.{END}"] * 4)
    shared = SharedPrompts(model.policy, 4)
    siblings = [attempt(model, shared_prompts=shared) for _ in range(3)]
    for one in siblings:
        ask(one, model, [QUESTION])
    size = len(model.policy.prompts[0])
    assert model.policy.prompts == [model.policy.prompts[0]] * 3
    assert model.policy.computed == size
    ask(siblings[0], model, [{"role": "user", "content": "Something else."}])
    assert model.policy.computed == size + len(model.policy.prompts[-1])
    for one in siblings:
        finish(one)
    shared.close()
    assert all(session.closed for session in model.policy.sessions)


def first_difference(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_changed_history_goes_on_from_where_it_differs(tiny_tokenizer):
    model = completer(tiny_tokenizer, [f"{w}.{END}" for w in ("One", "Two", "Three")], kind=BranchingPolicy)
    policy, one = model.policy, attempt(model)
    (first,) = ask(one, model, [SYSTEM, QUESTION])
    ask(one, model, [SYSTEM, QUESTION, first, {"role": "user", "content": "And?"}])
    known, before = list(policy.sessions[0].token_ids), policy.computed
    ask(one, model, [SYSTEM, QUESTION, first, {"role": "user", "content": "And then, what else?"}])
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
    ask(siblings[0], model, [SYSTEM, QUESTION])
    for one in siblings:  # of a sibling's session, too
        before = policy.computed
        ask(one, model, [SYSTEM, {"role": "user", "content": f"Look {len(policy.prompts)} up."}])
        differs = first_difference(policy.prompts[0], policy.prompts[-1])
        assert 0 < policy.computed - before <= len(policy.prompts[-1]) - differs
    for one in siblings:
        finish(one)
    shared.close()
    assert all(session.closed for session in policy.sessions)


FENCED = f'I add.\n```json\n{{"name": "add", "arguments": {{"a": 2, "b": 3}}}}\n```{END}'


def test_a_call_in_an_unexpected_format_is_a_call_for_the_agent_and_named_in_the_record(tiny_tokenizer):
    model = completer(tiny_tokenizer, [FENCED, f"It is 5.{END}"])
    one = attempt(model)
    (first,) = ask(one, model, [SYSTEM, QUESTION])
    assert (first["content"], first["tool_calls"][0]["function"]["name"]) == ("I add.", "add")
    assert "format" not in first["tool_calls"][0]
    ask(one, model, [SYSTEM, QUESTION, first, result(first, "5")])
    (rollout,) = finish(one)
    assert [result.call.format for result in rollout.tool_results] == ["json"]
    assert (one.counts.recomputed_tokens, one.counts.retokenised_turns) == (0, 0)


def test_with_error_a_call_in_an_unexpected_format_stays_text(tiny_tokenizer):
    model = completer(tiny_tokenizer, [FENCED])
    model.unexpected_calls = "error"
    (first,) = ask(attempt(model), model, [SYSTEM, QUESTION])
    assert first["content"] == FENCED.removesuffix(END)
    assert "tool_calls" not in first


def said(text):
    return {"role": "user", "content": text}


def test_turns_before_a_truncated_side_request_are_trained(tiny_tokenizer):
    """Rows that were cut off are masked (`train.mask_truncated`)."""
    model = completer(tiny_tokenizer, [f"One.{END}", "A title that is too long", f"Two.{END}"])
    one = attempt(model)
    (first,) = ask(one, model, [QUESTION])
    ask(one, model, [QUESTION, first, said("Give it a title.")], max_tokens=1)
    ask(one, model, [QUESTION, first, said("And?")])
    trained = [ids for row in finish(one) if row.stop not in CUT_OFF for ids in sampled_ids(row)]
    assert trained == [model.policy.sampled[0], model.policy.sampled[2]]


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
    model = completer(tiny_tokenizer, [f"Answer number {i}.{END}" for i in range(len(requests))])
    one, replies = attempt(model), []
    for request in requests:
        texts = [reply["content"] for reply in replies]
        messages = [replies[part] if isinstance(part, int) else said(part.format(*texts)) for part in request]
        replies += ask(one, model, messages)
    rows = finish(one)
    assert [ids for row in rows for ids in sampled_ids(row)] == [model.policy.sampled[i] for i in trained]
    assert one.counts.discarded_turns == len(requests) - len(trained)


def test_a_tool_result_is_predicted_in_one_row_alone(tiny_tokenizer):
    model = completer(tiny_tokenizer, [f"{CALL}{END}"] + [f"{word}.{END}" for word in ("Two", "Three", "Four", "Five")])
    one = attempt(model)
    (first,) = ask(one, model, [QUESTION])
    (second,) = ask(one, model, [QUESTION, first, result(first, "the sum is five")])
    for text in ("And?", "So?", "What?"):
        ask(one, model, [QUESTION, first, result(first, "the sum is five"), second, said(text)])
    heard = [t.token_ids.tolist() for row in finish(one) for t in row.turns if t.maker == "environment"]
    texts = [tiny_tokenizer.decode(ids) for ids in heard]
    assert sum("the sum is five" in text for text in texts) == 1


def test_rows_of_discarded_turns_are_no_samples(tiny_tokenizer):
    model = completer(tiny_tokenizer, [f"{word}.{END}" for word in ("One", "Two", "Three", "Four")])
    one = attempt(model)
    choices = ask(one, model, [QUESTION], n=3)
    ask(one, model, [QUESTION, choices[1], said("And?")])
    rollout = asyncio.run(one.finish())
    assert len(rollout.conversations) == 3
    (sample,) = to_batch([Group(PROBLEM.id, (rollout,))], [[1.0]], mask_truncated=True).samples()
    assert int(sample.policy_mask.sum()) == len(model.policy.sampled[1]) + len(model.policy.sampled[3])


def test_finding_a_conversation_takes_one_look_for_each_of_its_turns(tiny_tokenizer):
    turns = 60
    model = completer(tiny_tokenizer, lambda i: f"{i}.{END}", context=100_000)
    one, history = attempt(model, sampling=SamplingParams(max_new_tokens=100_000)), [QUESTION]
    for _ in range(turns):
        (reply,) = ask(one, model, history)
        history += [reply, said("And?")]
    looks = 0

    class Counting(dict):
        def get(self, *args):
            nonlocal looks
            looks += 1
            return super().get(*args)

    one.tree._by_reply = Counting(one.tree._by_reply)
    ask(one, model, history)
    assert looks <= turns + 1
    assert one.counts.lineages == 1
