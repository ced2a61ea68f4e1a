"""`palestra envs`, `palestra env process|evaluate`, `palestra train --env`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from served import json_app

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "my_first_env.py")
SMALL = ("--rollout.group_size", "2", "--rollout.max_new_tokens", "40", "--env.train_size", "20")


def test_the_example_is_at_most_40_lines():
    assert len(Path(EXAMPLE).read_text().splitlines()) <= 40


def test_environments_are_listed_and_broken_files_reported(cli, tmp_path):
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / "mine.py").write_text('from palestra import Env\nclass Mine(Env):\n    """My own."""')
    (tmp_path / "environments" / "bad.py").write_text("def")
    plain, data = cli("envs"), cli("envs", "--json")
    assert plain.code == data.code == 0
    assert "mine" in plain.out
    assert "My own." in plain.out
    assert "bad.py cannot be read: line 1" in plain.err
    listing = json.loads(data.out)
    assert {"name": "mine", "class_name": "Mine", "description": "My own."}.items() <= listing["environments"][
        -1
    ].items()
    assert listing["count"] == len(listing["environments"])


def test_process_writes_one_group_a_line_and_a_page(cli, tmp_path):
    summary = cli.json("env", "process", EXAMPLE, "--groups", "3", "--out", "out.jsonl", *SMALL)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(records) == summary["groups"] == 3
    for record in records:
        assert len(record["scores"]) == len(record["tokens"]) == 2
        for tokens, masks, logprobs in zip(
            record["tokens"], record["masks"], record["inference_logprobs"], strict=True
        ):
            assert len(tokens) == len(masks) == len(logprobs)
            assert all(mask in (-100, token) for token, mask in zip(tokens, masks, strict=True))
            assert any(mask != -100 for mask in masks)
    page = (tmp_path / "out.html").read_text()
    assert records[0]["input"] in page
    assert "score 0.00" in page


def test_the_folder_of_out_is_made_and_a_path_that_cannot_be_written_is_refused_first(cli, tmp_path):
    cli.ok("env", "process", EXAMPLE, "--groups", "1", "--out", "new ü/out.jsonl", *SMALL)
    assert (tmp_path / "new ü" / "out.html").is_file()
    for command in (("env", "process", EXAMPLE), ("gateway", "palestra/tiny"), ("record",)):
        for out, why in (("new ü", "it is a folder"), ("new ü/out.html/x.jsonl", "--out new ü/out.html/x.jsonl")):
            assert why in cli.error(*command, "--out", out)


def test_evaluate_scores_the_held_out_problems(cli):
    assert cli.json("env", "evaluate", EXAMPLE, "--env.held_out_size=4", *SMALL)["pass_rate"]["n"] == 4


def test_train_on_an_environment_and_resume(cli, tmp_path):
    arguments = ("--env.held_out_size", "2", "--train.max_steps", "1", "--train.problems_per_step", "2", *SMALL)
    answer = cli.ok("train", "--env", EXAMPLE, "--json", *arguments)
    assert "palestra env evaluate" in answer.err
    run = Path(json.loads(answer.out)["run_dir"])
    record = json.loads((run / "run.json").read_text())
    assert record["environment"] == {"name": EXAMPLE, "settings": {"held_out_size": "2", "train_size": "20"}}
    assert record["name"] == "stock"
    cli.ok("train", "--resume", str(run), "--json")


async def complete(request):
    """Look up both items at once, then add, then answer: what a good model would do."""
    messages = (await request.json())["messages"]
    results = [m["content"] for m in messages if m["role"] == "tool"]
    if len(results) == 3:
        calls, content = [], f"There are {results[2]}."
    elif results:
        calls, content = [("add", {"a": int(results[0]), "b": int(results[1])})], None
    else:
        words = messages[1]["content"].removeprefix("How many ").removesuffix(" are there together?")
        calls, content = [("stock", {"item": item}) for item in words.split(" and ")], None
    tool_calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content} | ({"tool_calls": tool_calls} if calls else {})
    return {"choices": [{"message": message, "finish_reason": "stop"}]}


@pytest.fixture(scope="module")
def endpoint(serve):
    return serve(json_app(complete)) + "/v1"


def test_an_openai_style_endpoint_is_scored_through_the_same_environment(cli, endpoint):
    where = ("--openai.model_name", "m", "--openai.base_url", endpoint)
    assert cli.json("env", "evaluate", EXAMPLE, "--env.held_out_size", "3", *where)["pass_rate"]["rate"] == 1.0


def test_an_endpoint_is_asked_without_loading_torch(endpoint, tmp_path):
    arguments = ["env", "process", EXAMPLE, "--groups", "1", "--rollout.group_size", "2", "--openai.model_name", "m"]
    arguments += ["--openai.base_url", endpoint, "--out", str(tmp_path / "groups.jsonl")]
    code = f"import sys; from palestra.cli.main import run; assert run({arguments!r}) == 0"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)
    assert len((tmp_path / "groups.jsonl").read_text().splitlines()) == 1
