"""Nothing arrives: after 30 s it says why, and while the environment fails it stops after the limit."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from palestra.core.errors import ServiceError
from palestra.extras.atropos import task
from palestra.extras.atropos.task import StallWatch, repeated_trouble
from palestra.servers.web import Tally

SAME = "WARNING:atroposlib.envs.base:Scores are the same in a group, skipping...\n"


class Wait:
    """A wait of which a test decides what happens meanwhile."""

    def __init__(self, log: Path, limit_s: float = 60.0, environments: int = 1) -> None:
        self.now, self.log, self.notes = 0.0, log, list[str]()
        self.api: dict[str, Any] = {"environments": environments, "groups_accepted": 0, "posts_refused": 0}
        self.inference, self.requests, note = Tally(), SimpleNamespace(groups=0), self.notes.append
        self.watch = StallWatch(self._status, self.inference, self.requests, log, note, limit_s, lambda: self.now)
        self.watch.begin()
        self.look_at(0.0)

    async def _status(self) -> dict[str, Any]:
        return self.api

    def look_at(self, now: float) -> None:
        self.now = now
        asyncio.run(self.watch.check())


@pytest.fixture
def wait(tmp_path) -> Wait:
    return Wait(tmp_path / "env.log")


def test_refused_posts_are_told_after_half_a_minute_and_end_the_run_after_the_limit(wait):
    wait.api |= {"posts_refused": 336, "last_refusal": "/scored_data: masks: sequence 0 has 657 entries"}
    wait.look_at(29)
    assert wait.notes == []
    wait.look_at(31)
    (note,) = wait.notes
    assert note.startswith("no group for 31 s")
    assert "336 posts were refused, the last because /scored_data: masks: sequence 0" in note
    with pytest.raises(ServiceError, match=r"336 posts were refused.*--wait-limit"):
        wait.look_at(61)


def test_a_group_starts_the_wait_anew_and_what_was_refused_before_does_not_count(wait):
    wait.api |= {"posts_refused": 9}
    wait.look_at(50)
    wait.api |= {"groups_accepted": 1}
    wait.look_at(59)
    wait.look_at(88)
    assert len(wait.notes) == 1
    wait.look_at(130)
    assert "refused" not in wait.notes[1]


@pytest.mark.parametrize(
    ("inference", "groups", "log", "words"),
    [
        ({"refused": 5, "reason": "/generate: the prompt has 9000 tokens"}, 0, "", "the prompt has 9000 tokens"),
        ({"answered": 64}, 64, "", "64 whole groups were sampled and none was posted"),
        ({}, 0, "installing\n" + 8 * SAME, r"8 times: .*Scores are the same.*ensure_scores_are_not_same.*env\.log"),
    ],
    ids=["refused requests", "dropped groups", "a repeated message"],
)
def test_certain_failures_end_the_run_after_the_limit(wait, inference, groups, log, words):
    for name, value in inference.items():
        setattr(wait.inference, name, value)
    wait.requests.groups = groups
    wait.log.write_text(log)
    with pytest.raises(ServiceError, match=words):
        wait.look_at(60)


@pytest.mark.parametrize(
    ("api", "limit_s", "now", "words"),
    [
        ({"environments": 0}, 60.0, 2000, "no environment has registered"),
        ({"posts_refused": 50}, 0, 5000, "50 posts were refused"),
        ({}, 60.0, 299, "asks for nothing"),
    ],
    ids=["no environment yet", "no limit", "preparations"],
)
def test_what_may_still_come_is_waited_for(tmp_path, api, limit_s, now, words):
    wait = Wait(tmp_path / "env.log", limit_s)
    wait.api |= api
    wait.look_at(now)
    assert words in wait.notes[0]


def test_a_slow_environment_is_waited_for(wait):
    wait.inference.answered, wait.inference.refused = 40, 5
    wait.log.write_text("    dump_failed_rollouts=False,\n")  # no trouble
    for now in range(2, 4000, 20):
        wait.look_at(now)
    assert 3 < len(wait.notes) < 10, "and the notes become rarer"
    assert "40 requests to the model were answered" in wait.notes[0]
    assert "dump_failed" not in wait.notes[0]


def test_an_environment_that_asks_for_nothing_ends_the_run_after_five_limits_unless_a_request_is_being_answered(wait):
    wait.inference.running = 1
    wait.look_at(2000)
    wait.inference.running = 0
    with pytest.raises(ServiceError, match=r"asks for nothing; are its prompts longer than --env.max_token_length"):
        wait.look_at(2010)


def test_the_wait_begins_when_an_environment_has_registered(tmp_path):
    wait = Wait(tmp_path / "env.log", environments=0)
    wait.look_at(1000)
    wait.api |= {"environments": 1}
    wait.look_at(1010)
    wait.look_at(1300)
    with pytest.raises(ServiceError, match="no group for 301 s"):
        wait.look_at(1311)


def test_an_environment_that_cannot_connect_is_not_asked_about_its_prompts(wait):
    wait.log.write_text(9 * "Error in collect_trajectories: RetryError[<Future raised ClientConnectorError>]\n")
    with pytest.raises(ServiceError, match=r"cannot connect.*--openai\.base_url") as raised:
        wait.look_at(60)
    assert "max_token_length" not in str(raised.value)


def test_what_the_log_says_of_each_answer_ends_the_run_only_after_two_limits(wait):
    wait.inference.answered = 13
    wait.log.write_text(16 * "Error: JSON parsing error: Expecting value\n")
    wait.look_at(119)
    assert "16 times: Error: JSON parsing error" in wait.notes[0]
    with pytest.raises(ServiceError, match="JSON parsing error"):
        wait.look_at(121)


def test_what_was_in_the_log_before_the_wait_does_not_count(tmp_path):
    (tmp_path / "env.log").write_text(20 * SAME)
    wait = Wait(tmp_path / "env.log")
    wait.look_at(100)
    assert "Scores" not in wait.notes[0]


def test_the_message_is_found_among_tracebacks_and_names_of_tasks():
    frames = 'Traceback (most recent call last):\n  File "error.py", line 3\n    raise ValueError("x")\n'
    log = "".join(f"{frames}ValueError: {i} is not prime\n" for i in range(12)) + "Error: once\n"
    assert repeated_trouble(log) == (12, "ValueError: 11 is not prime")
    assert repeated_trouble("all is well\n") == (0, "")
    log = "".join(f"10:00:0{i} - Task: {name} | mean 0.{i} (All failed)\n" for i, name in enumerate(("gcd", "lcm")))
    assert repeated_trouble(log) == (2, "10:00:01 - Task: lcm | mean 0.1 (All failed)")


def test_a_log_that_grows_too_large_keeps_its_end_and_its_writer_goes_on(wait, monkeypatch):
    monkeypatch.setattr(task, "_MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(task, "_LOG_TAIL_BYTES", 100)
    path = wait.log
    with path.open("a") as writer:
        writer.write("x" * 2000 + "\nlast\n")
        writer.flush()
        wait.watch.begin()
        writer.write("after\n")
    assert path.stat().st_size < 200
    assert path.read_text().startswith("(earlier lines were left out)\n")
    assert path.read_text().endswith("\nlast\nafter\n")
