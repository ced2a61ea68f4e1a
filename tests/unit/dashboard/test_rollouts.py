"""Rollouts in the dashboard: found, paged, searched, read whole, in groups and token by token."""

from __future__ import annotations

import json
import time

import make_runs
import numpy as np
import pytest
from dashboard_client import client_of

from palestra.core.files import filter_jsonl
from palestra.dashboard.rollout_index import RolloutIndex
from palestra.dashboard.rollout_query import match
from palestra.dashboard.transcripts import first_difference


def get(client, path: str, **params) -> dict:
    response = client.get(path, params=params)
    assert response.status_code == 200, response.text
    return response.json()


def test_pages_by_cursor_show_every_rollout_once_in_each_order(client, api) -> None:
    for sort in ("newest", "oldest", "reward", "-reward", "advantage", "-advantage", "tokens", "-tokens"):
        seen, cursor = [], None
        while True:
            page = get(client, f"{api}/rollouts", sort=sort, limit=10, **({"cursor": cursor} if cursor else {}))
            seen += [row["id"] for row in page["rollouts"]]
            cursor = page["next"]
            if cursor is None:
                break
        assert len(seen) == len(set(seen)) == page["count"] == 24, sort


def test_filters_find_what_the_file_says(client, api, run) -> None:
    records = list(run.rollouts())
    passed = sum(record["passed"] for record in records)
    assert get(client, f"{api}/rollouts", passed=1)["count"] == passed
    assert get(client, f"{api}/rollouts", passed=0)["count"] == 24 - passed
    assert get(client, f"{api}/rollouts", step=2)["count"] == 8
    assert get(client, f"{api}/rollouts", step_from=2)["count"] == 16
    assert get(client, f"{api}/rollouts", problem=records[0]["problem_id"], step=1)["count"] == 4
    called = [record for record in records if any(r["name"] == "multiply" for r in record["tool_results"])]
    assert get(client, f"{api}/rollouts", tool="multiply")["count"] == len(called)
    assert get(client, f"{api}/rollouts", measure="right_total", measure_passed=1)["count"] == passed
    assert get(client, f"{api}/rollouts", reward_min=0.5)["count"] == passed
    assert get(client, f"{api}/rollouts", error=1)["count"] == 0
    assert get(client, f"{api}/rollouts", stop="truncated")["count"] == 0


def test_search_finds_words_phrases_and_beginnings_with_a_snippet(client, api, run) -> None:
    first = next(run.rollouts())
    item = first["messages"][1]["text"]
    found = get(client, f"{api}/rollouts", q=f'"{item}"')
    assert found["count"] >= 4
    assert any(matched for _, matched in found["rollouts"][0]["snippet"])
    assert get(client, f"{api}/rollouts", q="shop* assist*")["count"] == 0  # assistant is a role, and no text
    assert get(client, f"{api}/rollouts", q="multipl*")["count"] > 0  # calls are searched, too
    assert get(client, f"{api}/rollouts", q='costs" OR 1=1 --')["count"] == 0


def test_what_people_type_is_never_a_syntax_error() -> None:
    assert match('git "rm -rf" clon*') == '"git" "rm -rf" "clon"*'
    assert match("  ") is None
    assert match('"') is None or '"' in str(match('"'))


@pytest.mark.parametrize("q", ['"', "*", "NEAR(", "a AND", "^", "col:x", "'", "(", "\x00", '""', "-x"])
def test_any_search_text_is_answered(client, api, q) -> None:
    assert client.get(f"{api}/rollouts", params={"q": q}).status_code in (200, 400)


def test_a_rollout_is_what_its_line_says(client, api, run) -> None:
    records = list(run.rollouts())
    rows = get(client, f"{api}/rollouts", sort="oldest")["rollouts"]
    whole = get(client, f"{api}/rollouts/{rows[5]['id']}")
    assert [m["text"] for m in whole["messages"]] == [m["text"] for m in records[5]["messages"]]
    assert whole["scores"] == records[5]["scores"]
    assert whole["previous"] == rows[4]["id"]
    assert whole["next_id"] == rows[6]["id"]
    assert whole["siblings"] == [row["id"] for row in rows[4:8]]


def test_a_group_is_sorted_by_advantage_and_says_where_its_siblings_part(client, api, run) -> None:
    rows = get(client, f"{api}/rollouts", sort="oldest")["rollouts"]
    group = get(client, f"{api}/groups/{rows[0]['group']}")
    advantages = [rollout["advantage"] for rollout in group["rollouts"]]
    assert advantages == sorted(advantages, reverse=True)
    assert len(group["rollouts"]) == 4
    tokens = [[t for turn in record["turns"] for t in turn["token_ids"]] for record in list(run.rollouts())[:4]]
    assert group["diverges_at"] == first_difference(tokens)
    with pytest.raises(AssertionError, match="404"):
        assert client.get(f"{api}/groups/9999").status_code == 200, "404"


def test_the_first_difference_of_sequences() -> None:
    assert first_difference([[1, 2, 3], [1, 2, 4]]) == 2
    assert first_difference([[1, 2], [1, 2, 3]]) == 2
    assert first_difference([[1, 2], [1, 2]]) is None
    assert first_difference([[1]]) is None


def test_tokens_are_those_of_the_line(client, api, run) -> None:
    record = next(run.rollouts())
    row = get(client, f"{api}/rollouts", sort="oldest")["rollouts"][0]
    tokens = get(client, f"{api}/rollouts/{row['id']}/tokens")
    assert tokens["ids"] == [t for turn in record["turns"] for t in turn["token_ids"]]
    assert tokens["maker"] == [turn["maker"] for turn in record["turns"] for _ in turn["token_ids"]]
    logprobs = [x for turn in record["turns"] for x in turn.get("logprobs", [None] * len(turn["token_ids"]))]
    assert tokens["logprob"] == logprobs
    lowest = min(x for x in logprobs if x is not None)
    assert tokens["worst"]["logprob"]["value"] == lowest
    assert logprobs[tokens["worst"]["logprob"]["index"]] == lowest
    part = get(client, f"{api}/rollouts/{row['id']}/tokens", start=60, limit=4)
    assert part["ids"] == tokens["ids"][60:64]
    assert part["worst"] == tokens["worst"]
    assert len(tokens["text"]) == tokens["total"]


def test_problems_show_their_visits_and_flips(client, tmp_path) -> None:
    import random

    rng = random.Random(1)
    verdicts = [(1, False), (2, True), (3, True), (4, False)]
    groups = [(step, [make_runs.make_rollout(rng, 7, passed=passed) for _ in range(3)]) for step, passed in verdicts]
    run = make_runs.write_run(tmp_path / "other", iter(groups))
    client = client_of(run.path, tmp_path / "home")
    api = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
    listed = get(client, f"{api}/problems")["problems"]
    assert [(row["problem_id"], row["flips"], row["groups"]) for row in listed] == [("suite-7", 2, 4)]
    one = get(client, f"{api}/problem", id="suite-7")
    assert [visit["step"] for visit in one["visits"]] == [1, 2, 3, 4]
    assert [visit["flip"] for visit in one["visits"]] == [None, "fixed", None, "broken"]


def test_a_held_out_problem_of_the_same_id_is_another_problem(tmp_path) -> None:
    from random import Random

    from palestra.core.group_codec import rollout_to_dict

    rng = Random(1)
    run = make_runs.write_run(tmp_path / "run", iter([(1, [make_runs.make_rollout(rng, 7, passed=False)])]))
    other = make_runs.make_rollout(rng, 8, passed=True)
    run.evals.mkdir()
    for when, rollout in (("before", make_runs.make_rollout(rng, 7, passed=True)), ("after", other)):
        row = {**rollout_to_dict(rollout), "problem_id": "suite-7"}
        run.eval_file(when).write_text(json.dumps(row) + "\n")
    client = client_of(run.path, tmp_path / "home")
    api = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
    get(client, f"{api}/rollouts")
    kinds = [visit["kind"] for visit in get(client, f"{api}/problem", id="suite-7")["visits"]]
    assert kinds == ["before", "train"], "the one after training asks something else"
    assert "after" in [v["kind"] for v in get(client, f"{api}/problem", id="suite-7", kind="after")["visits"]]


def test_a_parameter_that_nobody_knows_is_refused_by_name(client, api) -> None:
    answer = client.get(f"{api}/rollouts", params={"rewards_min": 1})
    assert answer.status_code == 400
    assert "rewards_min" in answer.json()["error"]["message"]


def test_new_lines_are_indexed_and_half_a_line_waits(client, api, run) -> None:
    assert get(client, f"{api}/rollouts")["count"] == 24
    line = json.dumps({**next(run.rollouts()), "step": 4})
    with run.rollouts_file.open("a") as file:
        file.write(line[:100])
    assert get(client, f"{api}/rollouts")["count"] == 24
    with run.rollouts_file.open("a") as file:
        file.write(line[100:] + "\n")
    assert get(client, f"{api}/rollouts", step=4)["count"] == 1


def test_records_that_a_resume_dropped_and_wrote_again_are_indexed_anew(client, api, run) -> None:
    before = get(client, f"{api}/rollouts", sort="oldest")["rollouts"]
    again = [{**record, "reward": 0.25} for record in run.rollouts() if record["step"] > 1]
    filter_jsonl(run.rollouts_file, lambda row: row["step"] <= 1)
    with run.rollouts_file.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in again)
    after = get(client, f"{api}/rollouts", sort="oldest")["rollouts"]
    assert [row["id"] for row in after[:8]] == [row["id"] for row in before[:8]]  # what stayed was not read again
    assert {row["reward"] for row in after[8:]} == {0.25}
    assert len(after) == 24


def test_a_damaged_index_is_made_again(client, api, run) -> None:
    assert get(client, f"{api}/rollouts")["count"] == 24
    for path in run.path.glob("dashboard.db*"):
        path.write_bytes(b"this is no database" * 100)
    assert get(client, f"{api}/rollouts")["count"] == 24


def test_two_groups_of_one_problem_in_a_step_stay_two(tmp_path) -> None:
    import random

    rng = random.Random(1)
    groups = [(1, [make_runs.make_rollout(rng, 7, passed=i % 2 == 0) for i in range(3)]) for _ in range(2)]
    index = RolloutIndex(make_runs.write_run(tmp_path / "run", iter(groups)))
    assert [row["group"] for row in index.rows_of("train")] == [1, 1, 1, 4, 4, 4]


def test_two_groups_of_one_problem_stay_two_where_a_batch_of_the_index_ends_between_them(tmp_path, monkeypatch) -> None:
    import random

    from palestra.dashboard import rollout_index

    monkeypatch.setattr(rollout_index, "_BATCH", 3)
    rng = random.Random(1)
    groups = [(1, [make_runs.make_rollout(rng, 7, passed=i % 2 == 0) for i in range(3)]) for _ in range(2)]
    index = RolloutIndex(make_runs.write_run(tmp_path / "run", iter(groups)))
    assert [row["group"] for row in index.rows_of("train")] == [1, 1, 1, 4, 4, 4]


def test_hostile_texts_are_answered_as_json_and_cut(tmp_path) -> None:
    run = make_runs.write_run(tmp_path / "run", make_runs.hostile_groups())
    with run.rollouts_file.open("ab") as file:
        file.write(b'{"step": 1, "problem_id": "broken", "messages": [{"role": "user", "text": "\xff\xfe\xc3("}]}\n')
        file.write(b'{"step": 1, "reward": NaN, "messages": [{"role": 5, "text": {"a": 1}}], "scores": 3}\n')
        file.write(b"[" * 100_000 + b"\n" + b"not json\n")
    client = client_of(run.path, tmp_path / "home")
    api = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
    rows = get(client, f"{api}/rollouts", limit=200)["rollouts"]
    assert len(rows) == 2 * len(make_runs.HOSTILE) + 2
    for row in rows[::2]:
        whole = get(client, f"{api}/rollouts/{row['id']}")
        assert all(len(message["text"]) <= 20_000 for message in whole["messages"])
        get(client, f"{api}/groups/{row['group']}")
        get(client, f"{api}/rollouts/{row['id']}/tokens")
    longest = max(rows, key=lambda row: row["id"] if "very long" in row["answer"] else 0)
    whole = get(client, f"{api}/rollouts/{longest['id']}")
    place = len(whole["messages"]) - 1
    assert whole["messages"][place]["cut"]
    assert whole["messages"][place]["chars"] == 10_000_000
    part = get(client, f"{api}/rollouts/{longest['id']}/messages/{place}", start=9_999_990, limit=100)
    assert part["text"] == (make_runs.HOSTILE[-1])[9_999_990:]


def test_an_exported_page_holds_no_markup_of_the_model(tmp_path) -> None:
    run = make_runs.write_run(tmp_path / "run", iter([next(make_runs.hostile_groups())]))
    client = client_of(run.path, tmp_path / "home")
    api = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
    row = get(client, f"{api}/rollouts")["rollouts"][0]
    for page in (f"{api}/rollouts/{row['id']}/export.html", f"{api}/groups/{row['group']}/export.html"):
        response = client.get(page)
        assert "<script" not in response.text
        assert "<img" not in response.text
        assert "&lt;script&gt;" in response.text
        assert "attachment" in response.headers["content-disposition"]
        assert "sandbox" in response.headers["content-security-policy"]


def test_a_large_run_answers_while_it_is_being_indexed(tmp_path) -> None:
    run = make_runs.write_run(tmp_path / "run", make_runs.plain_groups(600))
    client = client_of(run.path, tmp_path / "home")
    api = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
    until = time.monotonic() + 60
    while (page := get(client, f"{api}/rollouts", limit=1))["indexed"] < 1.0:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert page["count"] == 600


def test_evaluations_give_rates_and_flips(tmp_path) -> None:
    import random

    from palestra.core.files import write_jsonl
    from palestra.core.group_codec import rollout_to_dict

    rng = random.Random(0)
    run = make_runs.write_run(tmp_path / "run", make_runs.plain_groups(8))
    run.evals.mkdir()
    for name, verdicts in (("before", [0, 0, 0, 1, 1]), ("after", [1, 1, 1, 1, 0])):
        made = [make_runs.make_rollout(rng, i, passed=bool(passed)) for i, passed in enumerate(verdicts)]
        write_jsonl(run.eval_file(name), map(rollout_to_dict, made))
    client = client_of(run.path, tmp_path / "home")
    api = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
    found = get(client, f"{api}/evaluations")
    assert [one["pass_rate"]["passed"] for one in found["evaluations"]] == [2, 4]
    assert (found["flips"]["fixed"], found["flips"]["broken"], found["flips"]["same"]) == (3, 1, 1)
    assert found["flips"]["p_value"] == pytest.approx(0.625)
    assert found["flips"]["problems"][0]["direction"] == "broken"
    assert not np.isnan(found["evaluations"][0]["mean_reward"])


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


@pytest.mark.parametrize("change", MALFORMED, ids=lambda change: str(change)[:40])
def test_a_malformed_line_hides_no_other_rollout(client, api, run, change) -> None:
    lines = run.rollouts_file.read_text().splitlines()
    broken = json.dumps({**json.loads(lines[3]), **change})
    run.rollouts_file.write_text("\n".join([*lines[:3], broken, *lines[4:]]) + "\n")
    shown = client.get(f"{api}/rollouts?limit=200").json()
    assert shown["count"] in (len(lines) - 1, len(lines))
    for path in ("facets", "problems", "suspicion"):
        assert client.get(f"{api}/{path}").status_code == 200, path
    for row in shown["rollouts"]:
        for path in (f"rollouts/{row['id']}", f"rollouts/{row['id']}/tokens", f"groups/{row['group']}"):
            assert client.get(f"{api}/{path}").status_code == 200, (path, change)


@pytest.mark.parametrize(
    "query",
    [
        "step=99999999999999999999",
        "step_from=99999999999999999999",
        "step_to=-99999999999999999999",
        "cursor=[1,99999999999999999999999]",
        "cursor=[99999999999999999999999,1]",
        "cursor=[[1],2]",
        "cursor=[{},2]",
        "cursor=[true,2]",
        "cursor=[1,2.5]",
        "cursor=" + "[" * 5000,
        "reward_min=1e999",
    ],
)
def test_a_number_or_cursor_that_cannot_be_is_a_bad_request(client, api, query) -> None:
    assert client.get(f"{api}/rollouts?{query}").status_code == 400


def test_an_index_that_is_a_link_is_not_followed(client, api, run, tmp_path) -> None:
    import sqlite3

    run.dashboard_index.unlink(missing_ok=True)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE rollouts (mine TEXT)")
    before = other.read_bytes()
    run.dashboard_index.symlink_to(other)
    assert client.get(f"{api}/rollouts").json()["count"] == 24
    assert other.read_bytes() == before
