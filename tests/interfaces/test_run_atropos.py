"""`palestra env run-atropos`: how the environment is started; and a real run where its venv is already made."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.core.text import show_path
from palestra.extras.atropos.atropos import (
    PACKAGES,
    AtroposEnv,
    ensure_python,
    env_process_environment,
    serve_command,
    venv_folder,
    write_tokenizer,
)
from palestra.extras.atropos.runs import environment_request, new_wire_run, serve_environment
from palestra.runs.manager import RunManager, RunRequest
from palestra.runs.request import launch_token, process_environment

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


def test_environment_of_others_sees_no_key_of_ours_unless_it_is_passed_on_by_name(monkeypatch):
    secret = ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "PALESTRA_TOKEN", "WANDB_API_KEY")
    for name in secret:
        monkeypatch.setenv(name, "sesame")
    monkeypatch.setenv("PALESTRA_PASS_ENV", "WANDB_API_KEY")
    seen = env_process_environment({})
    assert set(secret) & seen.keys() == {"WANDB_API_KEY"}
    assert (seen["PATH"], seen["PYTHONUNBUFFERED"]) == (os.environ["PATH"], "1")


@pytest.fixture
def atropos(monkeypatch, tmp_path):
    """run-atropos without installing and training: a run that is started has ended at once, with one step."""
    requests = []

    def launch(manager, run_id, folder):
        request = RunRequest.load(folder.request_file)
        requests.append((request, folder))
        if not folder.has_begun:
            wire = replace(request, env_url="http://127.0.0.1:1")
            new_wire_run(wire, folder.path)
        folder.metrics_file.write_text('{"step": 1, "reward_mean": 0.5}\n')
        manager._index.move(run_id, ["pending"], "completed")

    monkeypatch.setattr(RunManager, "_launch", launch)
    monkeypatch.setattr(
        "palestra.extras.atropos.atropos.ensure_python", lambda folder, packages, note: folder / "bin/python"
    )
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    return requests


def served(monkeypatch, request, folder):
    """The command line that the environment's process is replaced by."""

    class Replaced(Exception):
        pass

    def execve(program, words, environ):
        raise Replaced(words)

    monkeypatch.setattr("palestra.extras.atropos.atropos.os.execve", execve)
    monkeypatch.setattr("palestra.extras.atropos.atropos.cached_tokenizer", lambda model: Path("/cache/tokenizer"))
    with pytest.raises(Replaced) as replaced:
        serve_environment(environment_request(replace(request, env_url="http://127.0.0.1:1"), folder), nullcontext)
    return replaced.value.args[0]


def value(words, name):
    return words[words.index(name) + 1]


@pytest.mark.parametrize(("more", "kind"), [((), "sglang"), (("--openai.server_type", "vllm"), "vllm")])
def test_the_server_type_that_gives_token_ids_is_passed_unless_another_is_named(cli, atropos, monkeypatch, more, kind):
    summary = cli.json("env", "run-atropos", str(DIGITS), "--train.max_steps", "3", *more)
    assert (summary["steps"], summary["reward_first"], Path(summary["run_dir"]).name[:5]) == (1, 0.5, "wire-")
    words = served(monkeypatch, *atropos[0])
    assert value(words, "--openai.server_type") == kind
    assert value(words, "--openai.base_url") == "http://127.0.0.1:9001/v1"


def test_a_stopped_run_is_resumed_with_its_file_its_packages_and_its_settings(cli, atropos, monkeypatch):
    first = ["--train.max_steps", "3", "--with", "sympy==1.13.1", "--env.max_token_length", "99"]
    assert cli("env", "run-atropos", str(DIGITS), *first).code == 0
    folder = atropos[0][1]
    cli.ok("env", "run-atropos", "--resume", str(folder.path), "--train.max_steps", "7")
    request, again = atropos[1]
    assert (again.path, again.config.train.max_steps) == (folder.path, 7)
    assert (request.environment, request.packages) == (str(DIGITS), ("sympy==1.13.1",))
    words = served(monkeypatch, request, again)
    assert value(words, "--env.total_steps") == "7"
    assert value(words, "--env.max_token_length") == "99"
    assert words[0] == str(venv_folder(["sympy==1.13.1"]) / "bin/python")
    assert f"palestra env run-atropos --resume {show_path(folder.path)}" in cli.error(
        "train", "--resume", str(folder.path)
    ).replace("\n", "")
    assert "leave them out" in cli("env", "run-atropos", str(DIGITS), "--resume", str(folder.path)).err
    assert "FILE, or --resume" in cli("env", "run-atropos").err


def test_a_run_of_an_older_version_is_resumed_by_its_record(cli, atropos, tmp_path):
    record = {"env_url": "", "atropos": {"file": str(DIGITS), "env": {"x": "1"}, "openai": {}, "packages": ["p"]}}
    config = RunConfig.build({"train.max_steps": 3})
    folder = RunFolder.create(tmp_path, "wire", config, record, at=tmp_path / "old")
    assert "--trust" in cli("env", "run-atropos", "--resume", str(folder.path)).err
    cli.ok("env", "run-atropos", "--resume", str(folder.path), "--trust")
    request = atropos[0][0]
    assert (request.environment, request.env_settings, request.packages) == (str(DIGITS), {"x": "1"}, ("p",))


def test_a_token_of_our_servers_is_not_asked_of_an_environment_that_cannot_know_it(atropos, tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_TOKEN", "sesame-sesame")
    request, folder = RunRequest(environment=str(DIGITS)), RunFolder(tmp_path)
    folder.wire.mkdir()
    assert launch_token(request, folder) is None
    for part in ("api", "trainer", "env"):
        assert "PALESTRA_TOKEN" not in process_environment(part, "r", request)


def test_all_environments_share_a_venv_unless_their_pins_contradict(tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))
    shared = venv_folder()
    assert venv_folder(["gymnasium==1.0.0"]) == shared
    shared.mkdir()
    (shared / "ready.json").write_text(json.dumps([*PACKAGES, "gymnasium==1.0.0", "gymnasium", "nltk"]))
    for agrees in (["Gymnasium == 1.0.0"], ["gymnasium"], ["nltk==3.9"], ["sympy"]):
        assert venv_folder(agrees) == shared, agrees
    others = {venv_folder(pins) for pins in (["gymnasium==1.1.1"], ["transformers==5.0"], ["a", "gymnasium>1"])}
    assert len(others) == 3
    assert shared not in others
    assert {folder.parent for folder in others} == {tmp_path}


def test_a_venv_is_extended_by_what_it_lacks_and_keeps_its_pins(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr("palestra.extras.atropos.atropos._run", lambda command, progress: commands.append(command))
    folder = tmp_path / "venv"
    folder.mkdir()
    for packages in ((), ("gymnasium==1.0.0",), ("gymnasium==1.0.0",), ("bs4",), ()):
        ensure_python(folder, packages)
    made, first, second, third = commands
    assert "--clear" in made
    assert first[-2:] == list(PACKAGES)
    assert second[-3:] == [*PACKAGES, "gymnasium==1.0.0"]
    assert third[-4:] == [*PACKAGES, "gymnasium==1.0.0", "bs4"]
    (folder / "ready.json").write_text('["atroposlib==0.3.0", "transformers==4.57.6", "bs4"]')  # of an older release
    ensure_python(folder)
    assert "--clear" in commands[-2]
    assert commands[-1][-2:] == list(PACKAGES)


LIBRARY = """
import json, sys
from types import SimpleNamespace


class APIServerConfig(SimpleNamespace):
    def model_dump(self):
        return vars(self)


def resolve_openai_configs(**_):
    raise SystemExit("the settings are ignored or rejected")


def run(servers):
    words = sys.argv[2:]
    flags = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2])}
    configs = resolve_openai_configs(
        default_server_configs=servers, openai_config_dict={}, yaml_config={}, cli_passed_flags=flags, logger=None
    )
    print(json.dumps([config.model_dump() for config in configs]))
"""
SERVERS = {
    "none": ("[]", [{}]),
    "one": ("APIServerConfig(timeout=7)", [{"timeout": 7}]),
    "list": ("[APIServerConfig(timeout=7)]", [{"timeout": 7}]),
    "two": ("[APIServerConfig(timeout=7), APIServerConfig(timeout=8)]", [{"timeout": 7}, {"timeout": 8}]),
}


@pytest.mark.parametrize("servers", SERVERS)
@pytest.mark.parametrize("imports", ["from .parts import run", "from parts import run", "from games.parts import run"])
def test_every_server_that_a_file_names_gets_our_address_and_its_imports_work(tmp_path, monkeypatch, servers, imports):
    for path, text in {
        "library/atroposlib/envs/base.py": LIBRARY,
        "games/parts.py": "from atroposlib.envs.base import run\n",
        "games/env.py": f"{imports}\nfrom atroposlib.envs.base import *\nrun({SERVERS[servers][0]})\n",
        "atroposlib/envs/base.py": "raise SystemExit('of the repository')\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "library"))
    command = serve_command(Path(sys.executable), tmp_path / "games/env.py", {"x": 1}, {"base_url": "http://here/v1"})
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{**own, "base_url": "http://here/v1"} for own in SERVERS[servers][1]]


def test_an_inference_test_allows_managed_servers_without_tokens_and_a_training_does_not(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("palestra.extras.atropos.atropos.os.execve", lambda *words: seen.append(words[2]))
    monkeypatch.setattr("palestra.extras.atropos.atropos.cached_tokenizer", lambda model: tmp_path)
    monkeypatch.setattr(AtroposEnv, "python", lambda self: Path("python"))
    env = AtroposEnv(DIGITS, {}, {"base_url": "http://127.0.0.1:1/v1", "model_name": "m"})
    env.process(RunConfig(), 1, tmp_path / "out.jsonl")
    env.serve(RunConfig(), "http://127.0.0.1:2")
    assert [environ.get("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER") for environ in seen] == ["1", None]


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
