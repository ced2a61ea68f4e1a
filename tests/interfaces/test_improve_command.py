"""`palestra improve`, with a stub reflector over HTTP and the embedded model as the agent."""

import json
from pathlib import Path

import pytest
from tests.support.judge_server import stub_model

from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder

# What instructions do to a model of this size is chance; so the measure reads them itself.
FILE = '''
from palestra import Agent, EvalSuite, fail_reason, function_tool, measure, pass_reason


@function_tool
def price(item: str) -> int:
    """Look up a price."""
    return 3


@measure
def polite(ctx):
    rule = "Say please" if len(ctx.messages[1].text) % 2 else "Say thanks"
    found = rule in ctx.messages[0].text
    return pass_reason("good manners") if found else fail_reason(f"the assistant does not know the rule: {rule}")


agent = Agent("clerk", "palestra/tiny", "You are a clerk.", [price])
suite = EvalSuite.from_records([{"input": "What does it cost" + "?" * i} for i in range(1, 21)], measures=[polite])
config = {"rollout.max_new_tokens": 4, "eval.cases": 4, "rollout.group_size": 2, "train.problems_per_step": 2}
'''


def reflector(question: str) -> str:
    """Adds the rules that the feedback names to the instructions, and says nothing about tools."""
    current = question.split("```")[1].strip()
    if not current.startswith("You are"):
        return "no idea"
    rules = [rule for rule in ("Say please", "Say thanks") if f"the rule: {rule}" in question and rule not in current]
    return "Here it is:\n```\n" + "\n".join([current, *(f"{rule}." for rule in rules)]) + "\n```"


@pytest.fixture
def agent_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "clerk.py"
    path.write_text(FILE)
    return path


SEARCH = ["--budget", "60", "--pareto-cases", "6", "--minibatch", "3", "--only", "instructions"]


def test_it_improves_writes_the_texts_and_leaves_the_file_alone(cli, agent_file: Path) -> None:
    with stub_model(reflector) as stub:
        done = cli("improve", str(agent_file), "--reflect", "m", "--reflect-url", stub.base_url, *SEARCH, "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert (report["before"]["rate"], report["after"]["rate"]) == (0.0, 1.0)
    assert report["before"]["low"] < report["after"]["low"] < 1.0  # with intervals
    assert report["split"] == "held_out"
    assert report["attempts"] <= 60
    assert report["reflections"]["calls"] == len(stub.bodies) > 0
    assert "## Feedback\npolite: 0, the assistant does not know the rule" in stub.questions[0]
    folder = Path(report["folder"])
    texts = json.loads((folder / "improved.json").read_text())["texts"]
    assert "Say please." in texts["instructions"]
    assert "Say thanks." in texts["instructions"]
    assert texts["tool price"] == "Look up a price.\nitem:"
    assert (
        '-agent = Agent("clerk", "palestra/tiny", "You are a clerk.", [price])'
        in (folder / "improved.diff").read_text()
    )
    assert agent_file.read_text() == FILE
    scored = cli.json("eval", str(agent_file), "--improved", str(folder / "improved.json"))
    assert scored["pass_rate"] == 1.0


def test_write_changes_the_file_and_then_train_trains_the_improved_agent(cli, agent_file: Path) -> None:
    with stub_model(reflector) as stub:
        where = ["--reflect", "m", "--reflect-url", stub.base_url, "--out", "better", "--write", "--then-train"]
        done = cli("improve", str(agent_file), *where, *SEARCH, "--train.max_steps", "1", "--json")
    assert done.code == 0, done.err
    improved, trained = map(json.loads, done.out.strip().splitlines())
    assert improved["folder"] == "better"
    assert "Say please." in agent_file.read_text()
    run = RunFolder.open(Path(trained["run_dir"]))
    assert "Say please." in run.record["instructions"]
    assert run.record["agent_options"]["improved"] == str(agent_file.parent / "better" / "improved.json")
    cli.ok("train", "--resume", str(run.path), "--train.max_steps", "2", "--trust")


def test_the_model_itself_may_reflect_and_a_search_without_success_changes_nothing(cli, agent_file: Path) -> None:
    report = cli.json("improve", str(agent_file), "--budget", "20", "--pareto-cases", "4", "--minibatch", "2")
    assert report["reflections"]["calls"] > 0
    assert report["reflections"]["tokens"] > 0


def test_a_reflector_that_fails_does_not_end_the_search(cli, agent_file: Path) -> None:
    with stub_model(lambda question: 400) as stub:
        done = cli("improve", str(agent_file), "--reflect", "m", "--reflect-url", stub.base_url, *SEARCH, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["changed"] == []


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--only", "tool prize"], "tool price"),
        (["--budget", "5"], "at least"),
        (["--reflect", "gpt-5-mini"], "OPENAI_API_KEY"),
        (["--merges", "3"], "merges was removed"),
    ],
)
def test_wrong_options_are_explained(cli, agent_file: Path, monkeypatch, options: list[str], word: str) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert word in cli.error("improve", str(agent_file), *options)


def test_the_agents_model_may_be_at_an_endpoint_and_reflects_by_itself(cli, agent_file: Path) -> None:
    def model(question: str) -> str:
        return reflector(question) if "# Current text" in question else "3"

    RunFolder.create(Path("runs"), "hoster", RunConfig(), {}, at=Path("runs/hoster"))  # a similar name
    with stub_model(model) as stub:
        where = ["--agent-url", stub.base_url, "--model.name", "hosted"]
        done = cli("improve", str(agent_file), *where, *SEARCH, "--json")
        refused = cli("improve", str(agent_file), *where, "--then-train")
    assert done.code == 0, done.err
    assert json.loads(done.out)["after"]["rate"] == 1.0
    assert {body["model"] for body in stub.bodies} == {"hosted"}
    assert refused.code == 2


def test_where_no_attempt_earns_anything_it_says_what_to_do(cli, agent_file: Path) -> None:
    with stub_model(lambda question: "no idea") as stub:
        done = cli("improve", str(agent_file), "--reflect", "m", "--reflect-url", stub.base_url, *SEARCH)
    assert done.code == 0, done.err
    assert "no attempt earned a reward" in done.out
    assert "--warm-start auto" in done.out
