"""Wrong command lines end with exit code 2 and a message that names the mistake, without a traceback."""

from pathlib import Path

import pytest

ENV = str(Path(__file__).parents[2] / "examples" / "my_first_env.py")
DIGITS = str(Path(__file__).parents[2] / "benchmarks" / "atropos" / "digits_env.py")

# command line -> words of the message
COMMANDS = {
    "trian": "Did you mean 'train'?",
    "my_agent.py": "palestra train my_agent.py",
    "train --train.lerning_rate 1e-4": "Did you mean --train.learning_rate",
    "eval --train.lerning_rate 1e-4": "Did you mean --train.learning_rate",
    "config --train.lerning_rate 1e-4": "Did you mean --train.learning_rate",
    "config --train.learning_rate fast": "train.learning_rate valid number 'fast'",
    "config --train.loss ppo": "train.loss 'grpo' 'ppo'",
    "config --rollout.group_size 1": "group_size 2",
    "config --seed -1": "seed greater",
    "train --config nope.yaml": "nope.yaml",
    "train --resume runs/none": "palestra train",
    "train --resume runs/none --train.learning_rate 1 --seed 2": "--seed, --train.learning_rate",
    "train --resume runs/none --train.max_steps none": "--train.max_steps",
    "train --from-checkpoint 5": "--resume",
    "train --detach --resume x": "palestra runs resume",
    "train nosuch.py --detach": "no agent file nosuch.py",
    "train agent.py --env calculator": "not on both",
    "train agent.py --env-url http://x": "not on both",
    "train --dry-run --folder x": "--dry-run",
    "train --held-out 0.1": "--held-out --cases",
    "train --held-out 1.5 --cases c.jsonl --agent-cmd x --measure m.py:m": "1.5 share",
    "train --cases cases.jsonl": "measure",
    "train --env-url http://127.0.0.1:9": "--train.max_steps",
    "train --train.replay 0": "--train.replay removed rft",
    f"env process {ENV} --env.sise 3": "'env.sise'",
    f"env process {ENV} --env.train_size": "requires an argument",
    f"env process {ENV} --rolout.group_size 3": "No such option",
    f"env evaluate {ENV} --openai.api_key k": "openai.api_key_env",
    f"env evaluate {ENV} --openai.model k": "unknown setting 'model'",
    f"env evaluate {ENV} --env.held_out_size 1 --openai.model_name m --openai.base_url http://127.0.0.1:9/v1": "asked",
    "env process calculater": "Did you mean 'calculator'?",
    "env run-atropos": "FILE, or --resume",
    f"env run-atropos {DIGITS}": "--train.max_steps",
    f"env run-atropos {DIGITS} --train.max_steps 3 --openai.api_key sk-123": "secret",
    "envs --path nope": "nope",
    "runs show nosuch": "'nosuch' palestra runs list",
    "runs compare one": "two or more",
    "chat ./nothing/here": "no folder",
    "export palestra/tiny --to gguf --type q9": "'q9'",
    "export missing.gguf --to gguf": "missing.gguf",
    "export runs/none/model --to gguf": "runs/none/model",
    "export palestra/tiny --to exe": "'exe' 'hf', 'gguf', 'ollama'",
    "chat palestra/nope": "'palestra/nope'",
    "chat nobody/nothing": "could not be loaded",
    "chat ./no/folder": "local folder",
    "runs compare a b --plot bench.png": "--plot .svg",
    "runs compare a b --plot nowhere/bench.svg": "no folder nowhere",
    "plan --model qwen3-5b": "Did you mean 'qwen3-8b'",
    "plan --model qwen3-8b --gpu voodoo": "'voodoo'",
    "plan --model qwen3-8b --context many": "no number of tokens",
    "plan --model qwen3-8b --context 64k": "40960 --context",
    "plan --model qwen3-8b --context 1k --new-tokens 1k": "1024 sampled tokens",
    "plan --model qwen3-8b --group 1": "2 or more",
    "plan --model qwen3-8b --gpus 0": "gpus=0",
    "plan --model qwen3-8b --signal 0": "signal=0.0",
    "plan --model qwen3-8b --gpus 2 --method qlora": "4 bits",
    "plan --model ./nowhere": "not known",
}

# run.yaml -> words of the message
YAML = {
    "train: {lerning_rate: 1}": "run.yaml 'train.lerning_rate' 'train.learning_rate'?",
    "rl: {training: {max_step: 1}}": "'rl.training.max_step' 'rl.training.max_steps'?",
    "train: {max_steps: 1}\nrl: {training: {max_steps: 2}}": "train.max_steps rl.training.max_steps",
    "train: &base {max_steps: 3}\nrl: {training: {<<: *base, num_train_epochs: 2}}\n": "rl.training.max_steps",
    "wandb: {enabled: maybe}": "wandb.enabled true or false",
    "train: [1": "run.yaml not valid YAML",
    "train: {replay: 0.0}": "run.yaml train.replay removed rft",
    "- 1": "run.yaml list expected sections",
    "train: 5": "'train' is 5",
    "train: {max_steps: 1}\nlora: {r: 8}\ntrain: {epochs: 2}": "'train' twice, in lines 1 and 3",
    "train:\n  max_steps: 1\n  max_steps: 2": "'max_steps' twice, in lines 2 and 3",
    "train: {max_steps: 1}\ntrain.max_steps: 2": "train.max_steps twice",
}


@pytest.fixture(autouse=True)
def no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PALESTRA_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_command_line_is_rejected_and_leaves_nothing(cli, tmp_path, command):
    answer = cli(*command.split())
    assert_rejected(answer, COMMANDS[command])
    assert not [path for path in tmp_path.iterdir() if path.name not in ("home", "cache")]


@pytest.mark.parametrize("text", YAML)
@pytest.mark.parametrize("command", ["config", "train --detach"])
def test_a_wrong_yaml_file_is_rejected(cli, tmp_path, command, text):
    Path(tmp_path / "run.yaml").write_text(text)
    assert_rejected(cli(*command.split(), "--config", "run.yaml"), YAML[text])


def assert_rejected(answer, words: str) -> None:
    assert answer.code == 2
    assert "Traceback" not in answer.err
    said = " ".join(answer.err.split())
    assert all(word in said for word in words.split()), answer.err
