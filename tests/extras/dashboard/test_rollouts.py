"""Rollouts in the dashboard: found, paged, searched, read whole, in groups and token by token."""

import json
import sqlite3
from dataclasses import replace
from random import Random

import make_runs
import numpy as np
import pytest
from builders import wait_until
from dashboard_client import api_of

from palestra.core.files import filter_jsonl, write_jsonl
from palestra.core.group_codec import rollout_to_dict
from palestra.core.run_folder import MANIFEST, STATE
from palestra.core.types import Message, ToolCall, ToolResult
from palestra.extras.dashboard import rollout_index
from palestra.extras.dashboard.rollout_index import RolloutIndex
from palestra.extras.dashboard.rollout_routes import match
from palestra.extras.dashboard.transcripts import first_difference


def write_run(folder, verdicts):
    """A run with a group of problem 7 for each (step, verdicts of its rollouts)."""
    rng = Random(1)
    groups = [(step, [make_runs.make_rollout(rng, 7, passed=p) for p in passed]) for step, passed in verdicts]
    return make_runs.write_run(folder / "other", iter(groups))


def test_each_tool_message_has_the_result_of_its_own_turn_where_call_ids_repeat(tmp_path) -> None:
    call, messages, results = ToolCall("call_0", "price", {}), [Message("user", "?")], []
    for text, ok in (("Error: no such item", False), ("12", True)):
        messages += [Message("assistant", "", (call,)), Message("tool", text, tool_call_id="call_0", name="price")]
        results.append(ToolResult(call, text, ok, 0.5))
    made = make_runs.make_rollout(Random(1), 7, passed=True)
    made = replace(made, messages=tuple(messages), tool_results=tuple(results))
    api = api_of(make_runs.write_run(tmp_path / "run", iter([(1, [made])])), tmp_path / "home")
    rollout = api(f"rollouts/{api.rows()[0]['id']}")
    assert [m["result"] and m["result"]["ok"] for m in rollout["messages"]] == [None, None, False, None, True]
    page = api.client.get(f"{api.path}/rollouts/{rollout['id']}/export.html").text
    assert page.count(">error<") == 1


def write_evals(run, **rollouts) -> None:
    run.evals.mkdir()
    for name, made in rollouts.items():
        write_jsonl(run.eval_file(name), made)


@pytest.mark.parametrize("column", ["newest", "oldest", "reward", "advantage", "tokens", "-reward", "-advantage"])
def test_pages_by_cursor_show_every_rollout_once_in_each_order(api, column) -> None:
    seen, cursor = [], None
    while True:
        page = api("rollouts", sort=column, limit=10, **({"cursor": cursor} if cursor else {}))
        seen += [row["id"] for row in page["rollouts"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert len(seen) == len(set(seen)) == page["count"] == 24


def test_filters_and_searches_find_what_the_file_says(api, run) -> None:
    records = list(run.rollouts())
    passed = sum(record["passed"] for record in records)
    called = [record for record in records if any(r["name"] == "multiply" for r in record["tool_results"])]
    for expected, query in (
        (passed, {"passed": 1}),
        (24 - passed, {"passed": 0}),
        (8, {"step": 2}),
        (16, {"step_from": 2}),
        (4, {"problem": records[0]["problem_id"], "step": 1}),
        (len(called), {"tool": "multiply"}),
        (passed, {"measure": "right_total", "measure_passed": 1}),
        (passed, {"reward_min": 0.5}),
        (0, {"error": 1}),
        (0, {"stop": "truncated"}),
        (0, {"q": "shop* assist*"}),  # assistant is a role, and no text
        (0, {"q": 'costs" OR 1=1 --'}),
    ):
        assert api("rollouts", **query)["count"] == expected, query
    assert api("rollouts", q="multipl*")["count"] > 0  # calls are searched, too
    found = api("rollouts", q=f'"{records[0]["messages"][1]["text"]}"')
    assert found["count"] >= 4
    assert any(matched for _, matched in found["rollouts"][0]["snippet"])


def test_any_search_text_is_answered_and_an_impossible_parameter_is_a_bad_request(client, api) -> None:
    assert match("  ") is None
    for q in ('"', "*", "NEAR(", "a AND", "^", "col:x", "'", "(", "\x00", '""', "-x"):
        assert client.get(f"{api.path}/rollouts", params={"q": q}).status_code in (200, 400), q
    for query in BAD_QUERIES:
        response = client.get(f"{api.path}/rollouts?{query}")
        assert response.status_code == 400, query
        assert query.partition("=")[0] in response.json()["error"]["message"]


BAD_QUERIES = [
    "rewards_min=1", "reward_min=1e999", "step=99999999999999999999", "step_from=99999999999999999999",
    "step_to=-99999999999999999999", "cursor=[1,99999999999999999999999]", "cursor=[99999999999999999999999,1]",
    "cursor=[[1],2]", "cursor=[{},2]", "cursor=[true,2]", "cursor=[1,2.5]", "cursor=" + "[" * 5000,
]  # fmt: skip


def test_a_rollout_is_what_its_line_says(api, run) -> None:
    records, rows = list(run.rollouts()), api.rows()
    whole = api(f"rollouts/{rows[5]['id']}")
    assert [m["text"] for m in whole["messages"]] == [m["text"] for m in records[5]["messages"]]
    assert whole["scores"] == records[5]["scores"]
    assert (whole["previous"], whole["next_id"]) == (rows[4]["id"], rows[6]["id"])
    assert whole["siblings"] == [row["id"] for row in rows[4:8]]


def test_a_group_is_sorted_by_advantage_and_says_where_its_siblings_part(api, run) -> None:
    group = api(f"groups/{api.rows()[0]['group']}")
    advantages = [rollout["advantage"] for rollout in group["rollouts"]]
    assert advantages == sorted(advantages, reverse=True)
    assert len(group["rollouts"]) == 4
    tokens = [[t for turn in record["turns"] for t in turn["token_ids"]] for record in list(run.rollouts())[:4]]
    assert group["diverges_at"] == first_difference(tokens)
    api("groups/9999", status=404)
    assert first_difference([[1, 2], [1, 2]]) is first_difference([[1]]) is None


def test_tokens_are_those_of_the_line(api, run) -> None:
    record, row = next(run.rollouts()), api.rows()[0]
    tokens = api(f"rollouts/{row['id']}/tokens")
    assert tokens["ids"] == [t for turn in record["turns"] for t in turn["token_ids"]]
    assert tokens["maker"] == [turn["maker"] for turn in record["turns"] for _ in turn["token_ids"]]
    logprobs = [x for turn in record["turns"] for x in turn.get("logprobs", [None] * len(turn["token_ids"]))]
    assert tokens["logprob"] == logprobs
    lowest = min(x for x in logprobs if x is not None)
    assert tokens["worst"]["logprob"] == {"index": logprobs.index(lowest), "value": lowest}
    part = api(f"rollouts/{row['id']}/tokens", start=60, limit=4)
    assert part["ids"] == tokens["ids"][60:64]
    assert part["worst"] == tokens["worst"]
    assert len(tokens["text"]) == tokens["total"]


def test_problems_show_their_visits_and_flips_and_what_learnable_sampling_knows_of_them(tmp_path) -> None:
    verdicts = [(step, [passed] * 3) for step, passed in ((1, False), (2, True), (3, True), (4, False))]
    run = write_run(tmp_path, verdicts)
    api = api_of(run, tmp_path / "home")
    listed = api("problems")["problems"]
    assert [(row["problem_id"], row["flips"], row["groups"]) for row in listed] == [("suite-7", 2, 4)]
    visits = api("problem", id="suite-7")["visits"]
    assert [visit["step"] for visit in visits] == [1, 2, 3, 4]
    assert [visit["flip"] for visit in visits] == [None, "fixed", None, "broken"]
    assert listed[0]["sampling"] is None
    run.config.with_settings({"train.sampling": "learnable", "rollout.group_size": 8}).save(run.config_file)
    checkpoint = run.checkpoints / "step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / STATE).write_text(json.dumps({"format": 2, "step": 1, "cases": {"suite-7": [7, 0.0, 8.0, 1]}}))
    (checkpoint / MANIFEST).write_text("{}")
    assert api("problems")["problems"][0]["sampling"] == "hopeless"
    for hostile in ("[" * 100_000, '{"step": 1, "cases": {"a": [0, 1, 1, 1e9]}}', '{"step": 1, "cases": [1]}'):
        (checkpoint / STATE).write_text(hostile)
        assert api("problems")["problems"][0]["sampling"] is None, "a file from elsewhere may hold anything"


def test_a_held_out_problem_of_the_same_id_is_another_problem(tmp_path) -> None:
    run, rng = write_run(tmp_path, [(1, [False])]), Random(2)
    made = {name: make_runs.make_rollout(rng, n, passed=True) for name, n in (("before", 7), ("after", 8))}
    write_evals(run, **{k: [{**rollout_to_dict(r), "problem_id": "suite-7"}] for k, r in made.items()})
    api = api_of(run, tmp_path / "home")
    api.rows()
    kinds = [visit["kind"] for visit in api("problem", id="suite-7")["visits"]]
    assert kinds == ["before", "train"], "the one after training asks something else"
    assert "after" in [v["kind"] for v in api("problem", id="suite-7", kind="after")["visits"]]


def test_evaluations_give_rates_and_flips(run, api) -> None:
    rng, verdicts = Random(0), {"before": [0, 0, 0, 1, 1], "after": [1, 1, 1, 1, 0]}
    made = {k: [make_runs.make_rollout(rng, i, passed=bool(p)) for i, p in enumerate(v)] for k, v in verdicts.items()}
    write_evals(run, **{name: map(rollout_to_dict, rollouts) for name, rollouts in made.items()})
    found = api("evaluations")
    assert [one["pass_rate"]["passed"] for one in found["evaluations"]] == [2, 4]
    assert (found["flips"]["fixed"], found["flips"]["broken"], found["flips"]["same"]) == (3, 1, 1)
    assert found["flips"]["p_value"] == pytest.approx(0.625)
    assert found["flips"]["problems"][0]["direction"] == "broken"
    assert not np.isnan(found["evaluations"][0]["mean_reward"])


def test_new_lines_are_indexed_and_half_a_line_waits(api, run) -> None:
    line = json.dumps({**next(run.rollouts()), "step": 4})
    for text, count in (("", 24), (line[:100], 24), (line[100:] + "\n", 25)):
        with run.rollouts_file.open("a") as file:
            file.write(text)
        assert api("rollouts")["count"] == count


def test_records_that_a_resume_dropped_and_wrote_again_are_indexed_again(api, run) -> None:
    before = api.rows()
    again = [{**record, "reward": 0.25} for record in run.rollouts() if record["step"] > 1]
    filter_jsonl(run.rollouts_file, lambda row: row["step"] <= 1)
    with run.rollouts_file.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in again)
    after = api.rows()
    assert [row["id"] for row in after[:8]] == [row["id"] for row in before[:8]]  # unchanged lines were not read again
    assert {row["reward"] for row in after[8:]} == {0.25}
    assert len(after) == 24


def test_a_damaged_index_is_made_again_and_one_that_is_a_link_is_not_followed(api, run, tmp_path) -> None:
    assert api("rollouts")["count"] == 24
    for path in run.path.glob("dashboard.db*"):
        path.write_bytes(b"this is no database" * 100)
    assert api("rollouts")["count"] == 24
    run.dashboard_index.unlink(missing_ok=True)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE rollouts (mine TEXT)")
    before = other.read_bytes()
    run.dashboard_index.symlink_to(other)
    assert api("rollouts")["count"] == 24
    assert other.read_bytes() == before


@pytest.mark.parametrize("batch", [200, 3], ids=["one batch", "a batch ends between them"])
def test_two_groups_of_one_problem_in_a_step_stay_two(tmp_path, monkeypatch, batch) -> None:
    monkeypatch.setattr(rollout_index, "_BATCH", batch)
    index = RolloutIndex(write_run(tmp_path, [(1, [True, False, True])] * 2))
    assert [row["group"] for row in index.rows_of("train")] == [1, 1, 1, 4, 4, 4]


def test_hostile_texts_are_answered_as_json_and_cut(tmp_path) -> None:
    run = make_runs.write_run(tmp_path / "run", make_runs.hostile_groups())
    with run.rollouts_file.open("ab") as file:
        file.write(b'{"step": 1, "problem_id": "broken", "messages": [{"role": "user", "text": "\xff\xfe\xc3("}]}\n')
        file.write(b'{"step": 1, "reward": NaN, "messages": [{"role": 5, "text": {"a": 1}}], "scores": 3}\n')
        file.write(b"[" * 100_000 + b"\n" + b"not json\n")
    api = api_of(run, tmp_path / "home")
    rows = api.rows()
    assert len(rows) == 2 * len(make_runs.HOSTILE) + 2
    for row in rows[::2]:
        whole = api(f"rollouts/{row['id']}")
        assert all(len(message["text"]) <= 20_000 for message in whole["messages"])
        api(f"groups/{row['group']}")
        api(f"rollouts/{row['id']}/tokens")
    longest = max(rows, key=lambda row: row["id"] if "very long" in row["answer"] else 0)
    *_, last = api(f"rollouts/{longest['id']}")["messages"]
    assert (last["cut"], last["chars"]) == (True, 10_000_000)
    place = len(api(f"rollouts/{longest['id']}")["messages"]) - 1
    part = api(f"rollouts/{longest['id']}/messages/{place}", start=9_999_990, limit=100)
    assert part["text"] == make_runs.HOSTILE[-1][9_999_990:]


def test_an_exported_page_holds_no_markup_of_the_model(tmp_path) -> None:
    api = api_of(make_runs.write_run(tmp_path / "run", iter([next(make_runs.hostile_groups())])), tmp_path / "home")
    row = api.rows()[0]
    for page in (f"rollouts/{row['id']}/export.html", f"groups/{row['group']}/export.html", "export.html"):
        response = api.client.get(f"{api.path}/{page}")
        assert "<script" not in response.text
        assert "<img" not in response.text
        assert "&lt;script&gt;" in response.text
        assert "attachment" in response.headers["content-disposition"]
        assert "sandbox" in response.headers["content-security-policy"]


def test_the_page_of_a_run_has_groups_of_all_its_steps_with_signal_where_there_is_some(tmp_path) -> None:
    run = make_runs.write_run(tmp_path / "run", make_runs.plain_groups(96))
    api = api_of(run, tmp_path / "home")
    groups = {row["group"]: set() for row in api.rows(limit=200)}
    for row in api.rows(limit=200):
        groups[row["group"]].add(row["reward"])
    page = api.client.get(f"{api.path}/export.html", params={"groups": 3}).text
    assert page.count("<details") == 3
    assert f"3 of {len(groups)} groups" in page
    assert any(len(rewards) > 1 for rewards in groups.values())
    shown = [set(line.split("rewards ")[1].split("<")[0].split()) for line in page.splitlines() if "rewards " in line]
    assert all(len(rewards) > 1 for rewards in shown)
    assert "<svg" in page
    assert "http" not in page.replace("http-equiv", "").replace('xmlns="http://www.w3.org/2000/svg"', "")


def test_a_large_run_answers_while_it_is_being_indexed(tmp_path) -> None:
    api = api_of(make_runs.write_run(tmp_path / "run", make_runs.plain_groups(600)), tmp_path / "home")
    wait_until(lambda: api("rollouts", limit=1)["indexed"] == 1.0)
    assert api("rollouts", limit=1)["count"] == 600


HUGE = 10**400
MALFORMED = [
    {"reward": HUGE}, {"seconds": HUGE}, {"advantage": HUGE}, {"advantage": -HUGE},
    {"scores": {"m": {"value": HUGE}}}, {"scores": 7}, {"scores": {"m": 7}}, {"scores": [1]},
    {"step": float("inf")}, {"step": float("nan")}, {"step": 10**30}, {"step": "x"}, {"group": 10**30}, {"group": [1]},
    {"turns": 7}, {"turns": "text"}, {"turns": [7]}, {"turns": [{"maker": "model", "token_ids": 7}]},
    {"turns": [{"maker": "model", "token_ids": "text"}]}, {"turns": [{"maker": "model", "token_ids": ["a"]}]},
    {"turns": [{"maker": "model", "token_ids": [HUGE]}]}, {"turns": [{"token_ids": [1]}]},
    {"turns": [{"maker": "model", "token_ids": [1], "logprobs": "x"}]},
    {"turns": [{"maker": "model", "token_ids": [1], "logprobs": [HUGE]}]},
    {"turns": [{"maker": "model", "token_ids": [1], "logprobs": ["a"]}]},
    {"turns": [{"maker": "model", "token_ids": [1], "policy_version": "x"}]},
    {"turns": [{"maker": "model", "token_ids": [1], "policy_version": HUGE}]},
    {"lineages": 7}, {"lineages": "text"}, {"lineages": [{"turns": 7}]}, {"lineages": [{"messages": 7}]},
    {"messages": [{"tool_calls": 7}]}, {"messages": [{"tool_calls": "text"}]}, {"messages": 7}, {"messages": [7]},
    {"problem_id": {}}, {"stop": []}, {"error": {}}, {"tool_results": 7}, {"tool_seconds": HUGE}, {"passed": []},
]  # fmt: skip


def test_a_malformed_line_hides_no_other_rollout(api, run) -> None:
    """Each malformed line follows a good one; of those that are listed, every page can be opened."""
    good = list(run.rollouts())
    with run.rollouts_file.open("w") as file:
        for number, change in enumerate(MALFORMED):
            marked = {**good[number % 24], "problem_id": f"good-{number}"}
            file.write(json.dumps(marked) + "\n" + json.dumps({**good[number % 24], **change}) + "\n")
    for path in ("facets", "problems", "suspicion"):
        api(path)
    rows = api.rows()
    assert {row["problem_id"] for row in rows} >= {f"good-{number}" for number in range(len(MALFORMED))}
    for row in (row for row in rows if not row["problem_id"].startswith("good")):
        for path in (f"rollouts/{row['id']}", f"rollouts/{row['id']}/tokens", f"groups/{row['group']}"):
            api(path)
