"""`palestra env run-atropos`: how the environment is started; and a real run where its venv is already made."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from palestra.cli import run_atropos
from palestra.cli.run_atropos import trajectory_process
from palestra.core import children
from palestra.core.errors import PalestraError
from palestra.sources.wire.atropos import EnvProcess, ensure_python, serve_command, venv_folder, write_tokenizer

DIGITS = Path(__file__).parents[2] / "benchmarks" / "atropos" / "digits_env.py"
VENV = venv_folder()


def test_settings_become_the_words_that_atroposlib_reads():
    words = serve_command(Path("py"), Path("e.py"), {"use_wandb": False, "group_size": 4}, {"server_type": "vllm"})
    assert words[0] == "py"
    assert words[-7:] == [
        "serve", "--env.use_wandb", "false", "--env.group_size", "4", "--openai.server_type", "vllm",
    ]  # fmt: skip


def test_written_tokenizer_gives_the_same_ids_and_names_no_class_that_older_versions_lack(tiny_tokenizer, tmp_path):
    from transformers import PreTrainedTokenizerFast

    folder = write_tokenizer(tiny_tokenizer, tmp_path / "tokenizer")
    about = json.loads((folder / "tokenizer_config.json").read_text())
    assert about["tokenizer_class"] == "PreTrainedTokenizerFast"
    again = PreTrainedTokenizerFast.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is 3 + 4?"}]
    assert again.apply_chat_template(chat, tokenize=False) == tiny_tokenizer.apply_chat_template(chat, tokenize=False)
    text = "<|im_start|>user\nWhat is 3 + 4?<|im_end|>"
    assert again(text)["input_ids"] == tiny_tokenizer(text)["input_ids"]
    assert again.eos_token_id == tiny_tokenizer.eos_token_id


def test_environment_that_fails_is_told_with_the_end_of_its_log(tmp_path):
    process = EnvProcess([sys.executable, "-c", "raise SystemExit('no data here')"], tmp_path / "log")
    process.process.wait(20)
    with pytest.raises(PalestraError, match="no data here"):
        process.check()


def test_a_file_that_does_nothing_when_it_is_run_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr("palestra.sources.wire.atropos._LAST_POSTS_S", 0.0)
    process = EnvProcess([sys.executable, "-c", "pass"], tmp_path / "log")
    process.process.wait(20)
    with pytest.raises(PalestraError, match=r"status 0.*\n.*\nDoes its file call its class's cli\(\)"):
        process.check()


def test_environment_that_goes_on_is_ended(tmp_path):
    process = EnvProcess([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    process.check()
    process.stop()
    assert process.process.returncode is not None


def test_environment_of_others_sees_no_key_of_ours_unless_it_is_passed_on_by_name(tmp_path, monkeypatch):
    secret = ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "PALESTRA_TOKEN", "WANDB_API_KEY")
    for name in secret:
        monkeypatch.setenv(name, "sesame")
    monkeypatch.setenv("PALESTRA_PASS_ENV", "WANDB_API_KEY")
    process = EnvProcess([sys.executable, "-c", "import os; print(dict(os.environ))"], tmp_path / "log")
    assert process.process.wait(20) == 0
    seen = ast.literal_eval((tmp_path / "log").read_text())
    assert set(secret) & seen.keys() == {"WANDB_API_KEY"}
    assert seen["PATH"] == os.environ["PATH"]
    assert seen["PYTHONUNBUFFERED"] == "1"


@pytest.fixture
def atropos(monkeypatch, tmp_path):
    """run-atropos without installing, serving or training: `trainings` has what it was asked to train."""
    trainings = []

    @contextlib.contextmanager
    def trajectory_process(run):
        yield "http://127.0.0.1:1"

    def run_on_wire(run, url, port, console, *, served, **options):
        with monkeypatch.context() as patched:
            patched.setattr(run_atropos, "write_tokenizer", lambda tokenizer, folder: folder)
            environment = SimpleNamespace(words=[])
            patched.setattr(run_atropos, "EnvProcess", lambda command, log, env: started(environment, command))
            served("http://127.0.0.1:2", None)
        trainings.append(SimpleNamespace(run=run, words=environment.words, **options))

    def started(environment, command):
        environment.words = command
        return SimpleNamespace(stop=lambda: None, check=lambda: None)

    def install(folder, packages, note):
        return folder / "bin/python"

    for name, stand_in in {
        "trajectory_process": trajectory_process, "run_on_wire": run_on_wire, "ensure_python": install,
        "present": lambda *_: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(run_atropos, name, stand_in)
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    return trainings


def value(words, name):
    return words[words.index(name) + 1]


def test_the_server_type_that_gives_token_ids_is_passed_unless_another_is_named(cli, atropos):
    for more in ([], ["--openai.server_type", "vllm"]):
        assert cli("env", "run-atropos", str(DIGITS), "--train.max_steps", "3", *more).code == 0
    assert [value(t.words, "--openai.server_type") for t in atropos] == ["sglang", "vllm"]


def test_a_stopped_run_is_resumed_with_its_file_its_packages_and_its_settings(cli, atropos):
    first = ["--train.max_steps", "3", "--with", "sympy==1.13.1", "--env.max_token_length", "99"]
    assert cli("env", "run-atropos", str(DIGITS), *first).code == 0
    folder = str(atropos[0].run.path)
    answer = cli("env", "run-atropos", "--resume", folder, "--train.max_steps", "7", "--trust")
    assert answer.code == 0, answer.err
    again = atropos[1]
    assert (again.resume.folder.resolve(), again.resume.max_steps) == (atropos[0].run.path.resolve(), 7)
    assert again.continued_by == "palestra env run-atropos"
    assert value(again.words, "--env.total_steps") == "7"
    assert again.words[0] == atropos[0].words[0], "the same Python"
    assert str(DIGITS) in again.words
    assert value(again.words, "--env.max_token_length") == "99"
    answer = cli("train", "--resume", folder, "--trust")
    assert answer.code == 2
    assert f"palestra env run-atropos --resume {folder}" in answer.err.replace("\n", "")
    assert "leave them out" in cli("env", "run-atropos", str(DIGITS), "--resume", folder, "--trust").err
    assert "FILE, or --resume" in cli("env", "run-atropos").err


def test_a_token_of_our_servers_is_not_asked_of_an_environment_that_cannot_know_it(cli, atropos, monkeypatch):
    monkeypatch.setenv("PALESTRA_TOKEN", "sesame-sesame")
    assert cli("env", "run-atropos", str(DIGITS), "--train.max_steps", "3").code == 0
    assert atropos[0].token is None
    seen = []
    monkeypatch.setattr(children, "start", lambda command, env, stderr: seen.append(env) or OneLine())
    monkeypatch.setattr(children, "end", lambda *_: None)
    with trajectory_process(atropos[0].run) as url:
        assert url == "http://127.0.0.1:3"
    assert "PALESTRA_TOKEN" not in seen[0]


class OneLine:
    stdout = io.StringIO("the trajectory API is at http://127.0.0.1:3")


def test_a_secret_among_the_settings_is_refused_before_it_is_written_to_disk(cli, atropos, tmp_path):
    answer = cli("env", "run-atropos", str(DIGITS), "--train.max_steps", "3", "--openai.api_key", "sk-123")
    assert answer.code == 2
    assert not (tmp_path / "runs").exists()


def test_each_set_of_pins_has_a_venv_of_its_own_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))
    pins = [(), ("gymnasium==1.0.0",), ("gymnasium==1.1.1",), ("b", "a"), ("a", "b")]
    folders = [venv_folder(packages) for packages in pins]
    assert len(set(folders)) == 4
    assert folders[3] == folders[4]
    assert {folder.parent for folder in folders} == {tmp_path}


def test_a_venv_with_other_packages_than_its_pins_is_made_anew(tmp_path, monkeypatch):
    installed = []
    monkeypatch.setattr("palestra.sources.wire.atropos._run", installed.append)
    folder = tmp_path / "venv"
    folder.mkdir()
    (folder / "ready.json").write_text('["atroposlib==0.4.0", "transformers==4.57.6", "gymnasium==1.1.1"]')
    for _ in range(2):
        ensure_python(folder, ("gymnasium==1.0.0",))
    (made, install) = installed
    assert "--clear" in made
    assert install[-1] == "gymnasium==1.0.0"


def test_training_without_a_last_step_is_refused_before_anything_is_installed(cli):
    answer = cli("env", "run-atropos", str(DIGITS))
    assert answer.code == 2
    assert "--train.max_steps" in answer.err


@pytest.mark.skipif(not (VENV / "ready.json").exists(), reason=f"atroposlib is not installed in {VENV}")
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_unmodified_environment_trains_and_the_logprobs_agree_on_every_token(kind, tmp_path):
    palestra = [sys.executable, "-c", "from palestra.cli.main import main; main()"]
    small = ["--model.name", "palestra/tiny", "--rollout.group_size", "4", "--train.problems_per_step", "2"]
    still = ["--train.max_steps", "2", "--train.learning_rate", "1e-12", "--openai.server_type", kind]
    done = subprocess.run(
        [*palestra, "env", "run-atropos", str(DIGITS), *small, *still, "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = tmp_path / json.loads(done.stdout.splitlines()[-1])["run_dir"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert all(row["sampler_gap_max"] < 1e-4 for row in rows)
