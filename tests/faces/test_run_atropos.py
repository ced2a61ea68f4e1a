"""`palestra env run-atropos`: how the environment is started; and a real run where its venv is already made."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from palestra.core.errors import PalestraError
from palestra.core.files import cache_folder
from palestra.wire.atropos import EnvProcess, serve_command, write_tokenizer

DIGITS = Path(__file__).parents[2] / "benchmarks" / "atropos" / "digits_env.py"
VENV = cache_folder() / f"atropos-0.4.0-py{sys.version_info.major}.{sys.version_info.minor}"


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


def test_training_without_a_last_step_is_refused_before_anything_is_installed(cli):
    began = time.monotonic()
    answer = cli("env", "run-atropos", str(DIGITS))
    assert answer.code == 2
    assert "--train.max_steps" in answer.err
    assert time.monotonic() - began < 30


@pytest.mark.skipif(not (VENV / "ready.json").exists(), reason=f"atroposlib is not installed in {VENV}")
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_unmodified_environment_trains_and_the_logprobs_agree_on_every_token(kind, tmp_path):
    palestra = [sys.executable, "-c", "from palestra.faces.cli.main import main; main()"]
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
