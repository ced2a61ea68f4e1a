"""One function finds a run by its id, name or folder; every command that takes a run or a model uses it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from listed_runs import ended_run

from palestra.cli.find_run import find_run, model_of, require_run, require_run_id, with_model_of_run
from palestra.core.config import RunConfig
from palestra.core.errors import InputError, NotFoundError, SettingError
from palestra.core.run_folder import FORMAT, Resume, RunFolder

AddRun = Callable[..., RunFolder]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PALESTRA_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def add_run(home: Path, tmp_path: Path) -> AddRun:
    """A run in the index whose folder is not in ./runs."""

    def add(run_id: str, name: str, folder: str, model: bool = True) -> RunFolder:
        run = ended_run(home, tmp_path / "elsewhere" / folder, run_id, name, kind="foreground")
        if model:
            run.model.mkdir()
        return run

    return add


def test_a_run_is_found_by_id_beginning_name_folder_and_model(add_run: AddRun, tmp_path: Path) -> None:
    run = add_run("k3f9aaaa", "clerk", "clerk-20260131-101500")
    add_run("p2x7bbbb", "other", "other-20260131-101500")
    words = ["k3f9aaaa", "k3f9", "clerk", "clerk-20260131-101500", str(run.path), f"{run.path}/", str(run.model)]
    words.append(str(run.path.relative_to(tmp_path)))
    for word in words:
        found = find_run(word)
        assert found is not None, word
        assert found.folder.path.resolve() == run.path, word
        assert require_run_id(word) == found.run_id == "k3f9aaaa", word
        assert require_run(word).path.resolve() == run.path, word
        model, export = model_of(word)
        assert (Path(model).resolve(), export.resolve()) == (run.model, run.export), word


def test_a_folder_in_runs_is_found_by_its_name_without_an_index(home: Path, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "runs", "clerk", RunConfig(), {})
    found = find_run(run.path.name)
    assert found is not None
    assert (found.folder.path, found.run_id) == (Path("runs") / run.path.name, None)
    with pytest.raises(NotFoundError, match="not in the index of runs; `palestra train --resume"):
        require_run_id(run.path.name)
    assert not home.exists()


@pytest.mark.parametrize("word", ["palestra/tiny", "Qwen/Qwen3-0.6B", "gpt2", "some/clerk", "nosuch", ""])
def test_other_words_mean_models(add_run: AddRun, word: str) -> None:
    add_run("k3f9aaaa", "clerk", "clerk-20260131-101500")
    assert find_run(word) is None
    assert model_of(word) == (word, Path("export"))


def test_an_existing_model_folder_wins_over_a_run_of_the_same_name(add_run: AddRun, tmp_path: Path) -> None:
    run = add_run("k3f9aaaa", "broken", "broken-20260131-101500")
    (tmp_path / "broken").mkdir()
    assert model_of("broken") == ("broken", Path("export"))
    assert require_run("broken").path == run.path  # commands that take a run alone


def test_a_name_that_several_runs_have_is_refused_with_their_ids(add_run: AddRun) -> None:
    add_run("k3f9aaaa", "clerk", "clerk-1")
    add_run("k3x7bbbb", "clerk", "clerk-2")
    for word in ("clerk", "k3"):
        with pytest.raises(SettingError, match=f"2 runs match '{word}'; give one id: k3x7bbbb, k3f9aaaa"):
            find_run(word)


def test_a_checkpoint_is_a_model_by_step_by_name_and_by_folder(add_run: AddRun, capsys: Any) -> None:
    run = add_run("k3f9aaaa", "clerk", "clerk-1", model=False)
    for step in (50, 100):
        run.step_folder(step).mkdir(parents=True)
        (run.step_folder(step) / "manifest.json").write_text("{}")
    (run.step_folder(100) / "state.json").write_text(json.dumps({"best_step": 50}))
    for word in ("k3f9@50", "clerk@best", f"{run.path}@step-000050", str(run.step_folder(50))):
        assert Path(model_of(word)[0]) == run.step_folder(50), word
        assert model_of(word)[1] == run.export
        assert require_run_id(word) == "k3f9aaaa"
        roles = {"critic": word, "rival": "start", "judge": "http://host/v1#m"}
        models = with_model_of_run({"agent.roles": roles})["agent.roles"]
        assert models == roles | {"critic": str(run.step_folder(50))}
    assert capsys.readouterr().err == ""
    assert Path(model_of("k3f9")[0]) == run.step_folder(100)
    assert "was not finished; this is its checkpoint of step 100" in capsys.readouterr().err
    with pytest.raises(NotFoundError, match="no checkpoint '7'; it has 50, 100, best, last"):
        model_of("k3f9@7")


@pytest.mark.parametrize(
    "command",
    ["serve {}", "chat {}", "export {} --to hf", "eval --model.name {}", "train --model.name {}"]
    + [f"env evaluate calculator {option} {{}}" for option in ("--model", "--model.name")],
)
def test_every_command_with_a_model_takes_a_run(cli: Any, add_run: AddRun, command: str) -> None:
    run = add_run("k3f9aaaa", "clerk", "clerk-1", model=False)
    for word in ("k3f9", "clerk", str(run.path)):
        said = cli.error(*command.format(word).split())
        assert f"{run.path} has no trained model and no checkpoint yet" in said
        assert f"palestra train --resume {run.path}" in said  # a name with blanks would be quoted


def test_a_newer_run_folder_is_refused_by_every_command(cli: Any, add_run: AddRun) -> None:
    run = add_run("k3f9aaaa", "clerk", "clerk-1")
    run.record_file.write_text(json.dumps({"format": FORMAT + 1, "name": "clerk"}))
    for arguments in (("train", "--resume"), ("serve",), ("chat",)):
        assert f"format {FORMAT + 1}, and this Palestra reads formats up to {FORMAT}" in cli(*arguments, "k3f9").err


class Asked(Exception):
    """With what a run would have been resumed."""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("runs", "finish", "k3f9"), {"finish": True}),
        (("runs", "finish", "k3f9", "--from-checkpoint", "best"), {"finish": True, "checkpoint": "best"}),
        (("train", "--resume", "k3f9", "--from-checkpoint", "50"), {"checkpoint": "50"}),
        (("train", "--resume", "clerk", "--train.max_steps", "60"), {"max_steps": 60}),
    ],
)
def test_a_run_is_finished_or_resumed_as_asked(cli, add_run, monkeypatch, arguments, expected):
    run = add_run("k3f9aaaa", "clerk", "clerk-1", model=False)
    run.step_folder(50).mkdir(parents=True)
    (run.step_folder(50) / "manifest.json").write_text("{}")

    def resume(how: Resume, *_: Any) -> None:
        raise Asked(how)

    monkeypatch.setattr("palestra.run.resume", resume)
    with pytest.raises(Asked) as asked:
        cli(*arguments)
    assert asked.value.args == (Resume(run.path, **expected),)


def test_what_cannot_be_finished_or_resumed_is_told(cli: Any, add_run: AddRun) -> None:
    run = add_run("k3f9aaaa", "clerk", "clerk-1", model=False)
    assert f"{run.path} has no checkpoint, so there is nothing to score" in cli("runs", "finish", "k3f9").err
    assert "name the run with --resume" in cli("train", "--from-checkpoint", "5").err
    assert f"{run.path} was started from Python" in cli("train", "--resume", "k3f9").err


def test_a_mistyped_run_is_answered_with_the_one_that_was_meant(add_run: AddRun, capsys: Any) -> None:
    add_run("k3f9aaaa", "stock-clerk", "stock-clerk-20260131-101500")
    with pytest.raises(NotFoundError, match=r"there is no run 'stok-clerk'\. Did you mean 'stock-clerk'\?"):
        model_of("stok-clerk")
    with pytest.raises(InputError, match=r"my_agent\.py is a Python file, no run and no model; `palestra train my_"):
        model_of("my_agent.py")
    assert model_of("gpt2") == ("gpt2", Path("export"))
    assert "there is no run 'gpt2'; looking for a model of this name" in capsys.readouterr().err
