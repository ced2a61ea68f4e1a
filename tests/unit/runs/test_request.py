"""What is asked of the manager is checked, kept, and holds no secret."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from served import json_app

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, UnreadableFileError
from palestra.core.run_folder import Resume, RunFolder
from palestra.extras.atropos.runs import environment_request
from palestra.runs.request import RunRequest, has_all_batches, launch_steps, launch_token, process_environment


def test_a_request_comes_back_from_its_file_with_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = RunRequest(environment="my_env.py:Mine", settings={"train.max_steps": 3}, env_settings={"seed": 1})
    request.save(RunFolder(tmp_path))
    again = RunRequest.load(tmp_path / "request.json")
    assert again == replace(request, environment=f"{tmp_path}/my_env.py:Mine", cwd=str(tmp_path))
    assert json.loads((tmp_path / "request.json").read_text())["settings"] == {"train.max_steps": 3}


def test_a_request_of_an_older_version_is_read(tmp_path):
    words = ["--agent-cmd", "python a.py", "--measure", "s.py:f", "--measure", "s.py:g", "--agent-port", "7"]
    (tmp_path / "request.json").write_text(json.dumps({"agent_arguments": words, "name": "old", "cwd": "/"}))
    options = {"agent_cmd": "python a.py", "measure": ["s.py:f", "s.py:g"], "agent_port": 7}
    assert RunRequest.load(tmp_path / "request.json") == RunRequest(agent=options, name="old", cwd="/")


@pytest.mark.parametrize("content", ["", "[]", "7", '{"nonsense": 1}', "[" * 100_000])
def test_a_file_that_holds_no_request_is_rejected(tmp_path, content):
    (tmp_path / "request.json").write_text(content)
    with pytest.raises(UnreadableFileError, match=r"request\.json"):
        RunRequest.load(tmp_path / "request.json")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (RunRequest(environment="a", agent_file="b.py"), "not on both"),
        (RunRequest(settings={"train.max_stepz": 3}), "Did you mean 'train.max_steps'"),
        (RunRequest(settings={"train.max_steps": "many"}), "valid integer"),
        (RunRequest(backend="cloud"), "backend: Input should be 'local', 'ray' or 'tinker'"),
        (RunRequest(agent_file="a.py", wire=True), "only an environment"),
        (RunRequest(environment="calculator", wire=True, nproc=2), "--nproc 2 shares problems among ranks"),
        (RunRequest(environment="a", env_settings={"api_key": "sk-123"}), "environment variable"),
        (RunRequest(environment="a", server_settings={"note": "my hunter2hunter2"}), "environment variable"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_made(request_, words, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "hunter2hunter2")
    with pytest.raises(PalestraError, match=words):
        request_.check()


def test_every_process_of_a_run_is_started_with_the_request_file(tmp_path):
    folder, file = RunFolder(tmp_path), str(tmp_path / "request.json")
    [step] = launch_steps(RunRequest(agent_file="a.py", nproc=3), folder, lambda part: 0)
    assert step.command()[1:] == ["-P", "-m", "palestra.run", file, "trainer"]
    folder.wire.mkdir()
    ports = {"api": 20001, "trainer": 20002}
    steps = launch_steps(RunRequest(environment="calculator", wire=True), folder, ports.__getitem__)
    assert [step.command()[-3:] for step in steps] == [["palestra.run", file, p] for p in ("api", "trainer", "env")]
    saved = RunRequest.load(folder.request_file)
    assert (saved.env_url, saved.api_port, saved.serve_port) == ("http://127.0.0.1:20001", 20001, 20002)


def test_a_request_for_tinker_says_so_in_its_settings() -> None:
    locked = {"lora.r": 32, "train.tokens_per_micro_batch": 9000}
    request = RunRequest(environment="calculator", settings=locked, backend="tinker")
    assert request.run_settings == {"backend": "tinker", "lora.r": 32}
    assert request.check().backend == "tinker"


def test_the_subject_is_the_environment_the_file_or_the_demo_and_words_like_token_are_no_secrets():
    assert RunRequest(environment="sql").subject == "sql"
    assert RunRequest(agent_file="/x/my_agent.py").subject == "my_agent"
    assert RunRequest().subject == "demo"
    RunRequest(settings={"rollout.max_new_tokens": "40"}, env_settings={"stop_token": "</s>"}).check()
    RunRequest(environment="a", server_settings={"api_key": "none"}).check()


def test_an_environment_that_counts_steps_counts_those_of_a_run_that_was_made_longer(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "run", RunConfig.build({"train": {"max_steps": 100}}), {})
    request = RunRequest(environment="their_env.py", env_settings={"total_steps": 100, "level": 2})
    assert environment_request(request, run).env_settings == {"total_steps": 100, "level": 2}
    Resume(run.path, max_steps=200).config(run.config, done=100).save(run.config_file)
    assert environment_request(request, run).env_settings == {"total_steps": 200, "level": 2}


def test_the_processes_of_a_run_over_the_wire_share_a_token_of_their_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PALESTRA_TOKEN", "the token of the server that starts runs")
    folder, request = RunFolder(tmp_path), RunRequest(environment="calculator", wire=True)
    assert launch_token(request, folder) is None, "in one process"
    folder.wire.mkdir()
    tokens = {launch_token(request, folder) for _ in range(2)}
    assert len(tokens) == 2
    token = tokens.pop()
    assert all(
        process_environment(part, "r", request, token)["PALESTRA_TOKEN"] == token for part in ("api", "trainer", "env")
    )
    assert "PALESTRA_TOKEN" not in process_environment("trainer", "r", request)
    theirs = tmp_path / "theirs.py"
    theirs.write_text("from atroposlib.envs.base import BaseEnv\nclass Theirs(BaseEnv):\n    pass\n")
    assert launch_token(RunRequest(environment=str(theirs)), folder) is None, "their clients send none to the API"


@pytest.mark.parametrize(
    ("taken", "waiting", "enough"), [(3, 0, True), (1, 4, True), (1, 3, False), (2, 1, False), (0, 0, False)]
)
def test_an_environment_may_end_when_all_remaining_batches_are_taken_or_wait(tmp_path, serve, taken, waiting, enough):
    async def status(request):
        return {"current_step": taken, "queue_size": waiting}

    config = RunConfig.build({"train.max_steps": 3, "train.problems_per_step": 2})
    folder = RunFolder.create(tmp_path, "wire", config, {})
    port = int(serve(json_app(status)).rpartition(":")[2])
    assert has_all_batches(folder, port) is enough
