"""reasoning-gym's scorers: in a process of their own, and never trusted with more than a number."""

import os
import threading
from pathlib import Path

import pytest

from palestra.core.errors import SettingError, UnsupportedError
from palestra.envs.child_process import ChildFailed, ChildProcess
from palestra.envs.discover import load_env
from palestra.extras.environments.reasoning_gym import scorer

pytest.importorskip("reasoning_gym")


def attempt(task, answer, **settings):
    env = load_env(f"reasoning_gym/{task}", {"train_size": 4, "held_out_size": 2, **settings})
    episode = env.open(env.problems("train")[0])
    said = episode.env.problem.expect if answer is None else answer
    return episode.env.score(said)


def tagged(text):
    return f"I think <answer>{text}</answer>"


def test_an_answer_that_is_code_runs_nothing_here_or_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in ("__import__('os').system('touch PWNED')", "open('PWNED', 'w')", "__import__('os').fork()"):
        score = attempt("countdown", tagged(code))
        assert score.value <= 0.01, "what the library gives for an attempt"
    assert os.listdir(tmp_path) == []


def test_an_answer_that_never_ends_scores_0_and_the_next_scorer_sees_no_key_either(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "sesame-sesame")
    attempt("countdown", tagged("1"))
    monkeypatch.setattr(scorer, "_timeout_s", 1.0)
    score = attempt("countdown", tagged("9**9**9**9"))
    assert (score.value, score.reason) == (0.0, "it cannot be scored: it took longer than 1 s")
    monkeypatch.setattr(scorer, "_timeout_s", 60.0)
    assert attempt("chain_sum", None, answer_tags=False).passed, "a new process scores the next one"
    assert b"sesame" not in Path(f"/proc/{scorer._child._process.pid}/environ").read_bytes()


@pytest.mark.parametrize("task", ["knights_knaves", "binary_matrix"])
def test_tuples_and_scalars_of_numpy_in_an_entry_reach_its_scorer(task):
    assert attempt(task, None, answer_tags=False).passed


def test_an_entry_that_cannot_be_sent_is_named_and_starts_no_process():
    child = ChildProcess(Path("functions.py"))
    with pytest.raises(ChildFailed, match=r"\['entry'\]\['guard'\] is a lock"):
        child.ask("score", 1.0, entry={"guard": threading.Lock()})
    assert not child.is_running


@pytest.mark.parametrize("task", ["prime_factorization", "boxnet"])
def test_a_scorer_that_raises_on_a_wrong_answer_scores_0(task):
    score = attempt(task, tagged("0" if task == "boxnet" else "xyzzy"))
    assert (score.value, score.passed) == (0.0, False)
    assert "Error" in score.reason


@pytest.mark.parametrize("task", ["game_of_life_halting", "coin_flip"])
def test_a_task_that_scores_wrong_answers_as_right_is_refused(task):
    with pytest.raises(UnsupportedError, match=f"scorer of {task} is wrong"):
        attempt(task, "1")


def test_the_right_answer_without_the_tags_that_were_asked_for_is_no_answer():
    assert attempt("chain_sum", None).reason == "there is no answer in <answer> tags"
    assert attempt("chain_sum", None, answer_tags=False).passed


def test_a_task_without_one_right_answer_shows_no_solved_examples():
    with pytest.raises(SettingError, match=r"set env\.shots to 0"):
        attempt("graph_color", "1", shots=1)
