"""Mistakes in a user's own file: each is told in one message that names the remedy, before anything heavy loads."""

import pytest

TOOL = '''def price(item: str) -> int:
    """Look up the price of one item."""'''


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('    return PRICES[item]', "    return PRICES[item", ("my_agent.py, line 10", "SyntaxError")),
        ("from palestra import Agent,", "import nowhere_to_be_found\nfrom palestra import Agent,", (
            "my_agent.py, line 2", "ModuleNotFoundError", "nowhere_to_be_found")),
        ("def right_price(ctx):", "def right_price(ctx: Missing):", ("my_agent.py, line 14", "NameError")),
        (TOOL, TOOL.replace("item: str", "item"), ("my_agent.py, line", "price", "item", "type")),
        (TOOL, TOOL.split("\n")[0], ("my_agent.py, line", "price", "docstring")),
        ("in PRICES.items()]", "in {}.items()]", ("my_agent.py, line", "no cases")),
        ("agent = Agent(", "agnet = Agent(", ("defines no `agent`", "agent = Agent(…)")),
        ("suite = EvalSuite", "suit = EvalSuite", ("defines no `suite`", "suite = EvalSuite")),
        ("measures=[right_price]", "measures=[]", ("no measures", "@measure")),
        ('"Use the tools to answer."', "lambda *_: 'Use the tools.'", ("'clerk'", "function", "string")),
        ('"palestra/tiny"', "None", ("'clerk'", "no model")),
        ('"rollout.group_size": 2', '"rollout.group_size": 1', ("group_size", "use 2 or more")),
        ('"rollout.group_size": 2', '"rollout.groop_size": 2', ("'rollout.groop_size'", "'rollout.group_size'")),
        ("config = {", "config = 5, {", ("`config`", "tuple", "dict")),
        ("agent = Agent(", "held_out = 3\nagent = Agent(", ("held_out", "int")),
    ],
    ids=[
        "syntax error", "import error", "name error", "tool without type hints", "tool without docstring",
        "empty suite", "no agent", "no suite", "no measures", "callable instructions", "no model", "group of one",
        "misspelt setting", "wrong kind of config", "wrong kind of held_out",
    ],
)  # fmt: skip
def test_mistake_is_told_with_its_remedy(cli, agent_file, old, new, words):
    answer = cli("train", str(agent_file((old, new))))
    assert answer.code == 2
    assert all(word in answer.err for word in words), answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("my_agnet.py", ("no agent file my_agnet.py", "Did you mean 'my_agent.py'?")),
        ("agent.txt", ("ends in .py",)),
        (".", ("is a folder; give a Python file",)),
        ("program.py", ("line 2: JSONDecodeError", "--agent-cmd 'python ")),
    ],
)
def test_an_argument_that_is_no_agent_file_is_rejected_with_the_remedy(cli, agent_file, tmp_path, argument, words):
    agent_file()
    (tmp_path / "agent.txt").write_text("agent")
    (tmp_path / "program.py").write_text("import json, sys\njson.loads('')\n")
    answer = cli.error("train", argument)
    assert all(word in answer for word in words), answer


def test_file_may_import_its_neighbours(cli, agent_file, tmp_path):
    (tmp_path / "my_prices_for_the_test.py").write_text("PRICES = {'red lamp': 1, 'blue mug': 2}")
    path = agent_file(more="import my_prices_for_the_test")
    assert cli("config", str(path)).code == 0


@pytest.mark.parametrize("call", ["train_grpo(agent, suite)", "suite.evaluate(agent)"])
def test_a_file_that_trains_by_itself_is_refused_before_it_does(cli, agent_file, tmp_path, call):
    file = agent_file()
    file.write_text(f"{file.read_text()}\nfrom palestra import train_grpo\n{call}\n")
    assert 'is read. Put the call below `if __name__ == "__main__":`' in cli.error("eval", str(file))
    assert not (tmp_path / "runs").exists()
