"""The pages that `make test-foreign` and `make test-agents` write, and the stand-ins that environments train on."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import foreign
import foreign_data
import train_agents
from foreign import Outcome


def rows(page):
    return [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")][2:]


def test_the_page_is_about_every_environment_and_enough_of_atropos_train():
    listed = rows(foreign.PAGE)
    assert [(row[0].removeprefix("| "), row[1]) for row in listed] == list(foreign._all())
    trained = [row for row in listed if row[0] == "| atropos" and row[2].startswith("trained 3 steps")]
    assert len(trained) >= foreign.MIN_TRAINED


def test_a_partial_run_replaces_its_own_rows_and_keeps_the_others(tmp_path):
    page, names = tmp_path / "page.md", list(foreign._all())
    first, last = names[0], names[-1]
    foreign._write(page, [Outcome(*last, "ended: a \\| b", 3.0), Outcome(*first, "ended: once", 1.0)])
    foreign._write(page, [Outcome(*first, "trained 3 steps", 2.0)])
    assert [row[2] for row in rows(page)] == ["trained 3 steps", "ended: a \\| b"]


@pytest.mark.parametrize(
    ("code", "output", "result"),
    [
        (
            0,
            "step 1/3  reward 0.00 (-1 to 1)\nstep 3/3  reward 0.50 (0 to 2)\n",
            "trained 3 steps, rewards from -1 to 2",
        ),
        (2, "step 1/3  reward 0.00 (0 to 0)\nError: no group in /a/b/c.py\n", "ended: no group in …/c.py"),
        (None, "", f"**neither trained nor ended within {foreign.LIMIT_S:.0f} s**"),
        (1, "Traceback:\n  ValueError: x\n", "**ended without a reason** (status 1): ValueError: x"),
    ],
)
def test_a_result_is_three_steps_or_the_reason(code, output, result):
    assert foreign._result(code, output) == result


def test_a_project_without_a_source_tree_is_skipped_by_name_and_the_rest_must_pass(tmp_path):
    shop = foreign.Workshop(tmp_path / "work", tmp_path)
    (tmp_path / "openenv").mkdir()
    assert shop.source("openenv") == tmp_path / "openenv"
    skipped = foreign._try(shop, "atropos", foreign.ATROPOS[0])
    assert skipped.result.startswith(foreign.SKIPPED)
    assert "github.com/NousResearch/atropos" in skipped.result
    trained = [Outcome("atropos", name, "trained 3 steps", 1.0) for name in foreign.ATROPOS[: foreign.MIN_TRAINED]]
    ended = Outcome("openenv", "maze_env", "ended: no place", 1.0)
    assert foreign._problems([skipped, ended, *trained], is_all=True) == []
    assert foreign._problems([skipped], is_all=False) == []
    assert len(foreign._problems([skipped, ended, *trained[1:]], is_all=True)) == 1
    hung = Outcome("openenv", "echo_env", foreign._result(None, ""), 600.0)
    assert [problem.split(":")[0] for problem in foreign._problems([hung], is_all=False)] == ["openenv echo_env"]


def test_a_stand_in_has_the_answers_that_the_warm_model_guesses(tmp_path):
    foreign_data.write_data(tmp_path)
    card = (tmp_path / "gsm8k" / "README.md").read_text()
    assert "config_name: main" in card
    assert "path: test.jsonl" in card
    answers = {json.loads(line)["answer"] for line in (tmp_path / "gsm8k" / "train.jsonl").read_text().splitlines()}
    assert answers == {f"#### {number}" for number in range(1, 5)}


def test_the_page_of_agents_has_a_good_row_for_each_program():
    text = train_agents.PAGE.read_text()
    for section in (train_agents.SHORT, train_agents.LONG):
        part = text.partition(f"## {section}\n")[2].partition("\n## ")[0]
        assert train_agents.SETTINGS[section] in part
        rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")][2:]
        assert [row[0] for row in rows] == [p.file for p in train_agents.PROGRAMS if p.section == section]
        for row in rows:
            ended, _, attempts = row[2].partition(" of ")
            assert ended == attempts != ""
            assert row[6] == "0"  # re-tokenised turns
