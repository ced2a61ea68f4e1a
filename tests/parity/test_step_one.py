"""One seed, the same problems: the first step is the same by every entry point.

They sample the very same tokens, since a turn's seed is seed_of(f"{seed}/{number of the draw}/{sibling}") plus
the number of the turn in all of them. What the learner makes of them may differ in its last bits, by the order in
which groups arrive and are summed up; hence the relative tolerance of 1e-5 for its numbers, and none for the samples'.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served import served
from transformers import AutoModelForCausalLM

from palestra import Agent, Env, EvalSuite, measure, train_grpo
from palestra.core.config import RunConfig
from palestra.core.messages import from_dict
from palestra.core.run_folder import RunFolder
from palestra.core.types import Problem, SamplingParams, Turn
from palestra.env_api import train_env
from palestra.envs.discover import load_env
from palestra.envs.running import RunningEnv
from palestra.extras.atropos.protocol import WireClient
from palestra.extras.atropos.runs import serve_env, train_wire
from palestra.extras.atropos.server import trajectory_app
from palestra.extras.atropos.task import Address
from palestra.models.chat.template import ChatFormat
from palestra.models.loading import load_model
from palestra.policy.local import LocalPolicy
from palestra.policy.remote import RemotePolicy
from palestra.rollout.collect import seed_of
from palestra.train import StepTrainer
from palestra.train.group_source import draw

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_first_env.py"
SEED, PROBLEMS, SIBLINGS, TOKENS = 11, 2, 4, 12
INSTRUCTIONS = "Answer in a word."
CASES = [("Say something.", "a"), ("Count to three.", "o"), ("Who are you?", "s"), ("What is this?", "n")]
SAMPLED = ("rollouts", "sampled_tokens", "completion_length_max", "truncation_rate", "reward_mean", "reward_std")
LEARNED = ("loss", "grad_norm", "entropy", "tokens_trained", "advantage_max")


def reward(text: str, letter: str) -> float:
    return min(text.count(letter) / 4, 1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded model's shape with fresh weights: it says anything, so every reward has variance."""
    folder = tmp_path_factory.mktemp("model")
    tiny = load_model("palestra/tiny")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny.model.config).save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return str(folder)


def settings(model: str, folder: Path) -> RunConfig:
    return RunConfig.build(
        {
            "seed": SEED,
            "output_dir": str(folder),
            "model": {"name": model, "kv_memory_gib": 0.05},
            # cispo's loss has the log-probabilities themselves in it, so it depends on every sampled token
            "train": {"loss": "cispo", "max_steps": 1, "problems_per_step": PROBLEMS, "learning_rate": 1e-3},
            "rollout": {"group_size": SIBLINGS, "max_new_tokens": TOKENS, "temperature": 1.0, "max_tool_rounds": 0},
            "eval": {"cases": 1},
        },
        {"train": {"mask_truncated": False, "filter_equal_groups": False}},
    )


@measure
def letters(ctx: Any) -> float:
    return reward(ctx.final_assistant_message.text, ctx.expect)


def by_suite(model: str, folder: Path, **options: Any) -> dict[str, float]:
    cases = EvalSuite.from_records([{"input": text, "expect": letter} for text, letter in CASES], measures=[letters])
    agent = Agent("speaker", model, INSTRUCTIONS)
    return train_grpo(agent, cases, config=settings(model, folder), held_out=cases, **options).metrics[0]


class Letters(Env):
    """Say a letter often."""

    instructions = INSTRUCTIONS

    def problems(self, split: str) -> list[tuple[str, str]]:
        return CASES

    def score(self, answer: str) -> float:
        return reward(answer, self.problem.expect)


@pytest.fixture(scope="module")
def expected(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The first step of `train_grpo` on a suite."""
    metrics = by_suite(model, tmp_path_factory.mktemp("runs"))
    assert metrics["rollouts"] == PROBLEMS * SIBLINGS
    assert metrics["reward_std"] > 0
    assert abs(metrics["loss"]) > 1e-2
    return metrics


def assert_same_step(metrics: dict[str, float], expected: dict[str, float], learned: tuple[str, ...] = LEARNED) -> None:
    assert {name: metrics[name] for name in SAMPLED} == {name: expected[name] for name in SAMPLED}
    for name in learned:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5), name
    assert metrics["kl_sampler"] < 1e-8
    assert metrics["ratio_max"] == 1.0
    assert metrics["staleness_max"] == 0


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": text}]


def make_step_trainer(model: str, folder: Path) -> StepTrainer:
    loaded, config = load_model(model), settings(model, folder)
    return StepTrainer(loaded.model, loaded.tokenizer, reward, config)


def test_another_seed_gives_another_step(model: str, tmp_path: Path, expected: dict[str, float]) -> None:
    config = RunConfig.build(settings(model, tmp_path).model_dump(), {"seed": SEED + 1})
    metrics = train_env(RunningEnv(Letters()), config).metrics[0]
    assert metrics["loss"] != pytest.approx(expected["loss"], rel=1e-3)


def test_an_environment(model: str, tmp_path: Path, expected: dict[str, float]) -> None:
    result = train_env(RunningEnv(Letters()), settings(model, tmp_path))
    assert_same_step(result.metrics[0], expected)


def test_the_step_trainer_on_a_dataset(model: str, tmp_path: Path, expected: dict[str, float]) -> None:
    rows = [{"prompt": messages(text), "expected_answer": letter} for text, letter in CASES]
    assert_same_step(make_step_trainer(model, tmp_path).train(rows)["rows"][0], expected)


def test_the_step_trainer_by_hand(model: str, tmp_path: Path, expected: dict[str, float]) -> None:
    problems = [
        Problem(str(i), tuple(map(from_dict, messages(text))), letter) for i, (text, letter) in enumerate(CASES)
    ]
    drawn = draw(problems, 0, PROBLEMS, SEED)
    assert_same_step(make_step_trainer(model, tmp_path).train_batch(drawn), expected)


def test_a_rollout_func_that_keeps_to_the_seed_rule(model: str, tmp_path: Path, expected: dict[str, float]) -> None:
    def rollouts(prompts: list[list[dict[str, Any]]], trainer: Any) -> dict[str, list[Any]]:
        """With a sampler of its own; all prompts of a step come in one call, each as often as it has siblings."""
        chat = ChatFormat(trainer.tokenizer)
        policy = LocalPolicy(trainer.model, trainer.tokenizer, kv_memory_gib=0.05)
        ids = [chat.prompt([from_dict(m) for m in prompt]).token_ids.tolist() for prompt in prompts]

        async def sample(i: int) -> Turn:
            seed = seed_of(f"{SEED}/{i // SIBLINGS}/{i % SIBLINGS}")
            params = SamplingParams(TOKENS, temperature=1.0, stop_token_ids=chat.stop_token_ids, seed=seed)
            return await policy.sample(policy.open(ids[i]), params)

        async def sample_all() -> list[Turn]:
            return list(await asyncio.gather(*map(sample, range(len(ids)))))

        turns = asyncio.run(sample_all())
        return {
            "prompt_ids": ids,
            "completion_ids": [turn.token_ids.tolist() for turn in turns],
            "logprobs": [turn.logprobs.tolist() for turn in turns],
        }

    metrics = by_suite(model, tmp_path, rollout_func=rollouts)
    # a function does not say why its turns ended
    assert_same_step(metrics | {"truncation_rate": expected["truncation_rate"]}, expected)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[str]:
    """A trajectory API on loopback."""
    with served(trajectory_app(tmp_path / "api")) as url:
        yield url


def by_wire(env: RunningEnv, config: RunConfig, api: str, folder: Path) -> dict[str, float]:
    """The first step of a trainer that is fed by an environment with a client and a remote policy of its own."""
    run = RunFolder.create(folder, "wire", config, {})
    feeds: list[threading.Thread] = []

    def served(url: str, tokenizer: Any) -> None:
        def feed() -> None:
            serve_env(env, config, WireClient(api), RemotePolicy(url), model_name=config.model.name)

        feeds.append(threading.Thread(target=feed, daemon=True))
        feeds[-1].start()

    outcome = train_wire(run, WireClient(api), Address(port=0), served=served)
    feeds[0].join(20)
    assert not feeds[0].is_alive()
    return outcome.metrics[0]


def test_an_environment_over_the_wire(model: str, tmp_path: Path, api: str, expected: dict[str, float]) -> None:
    metrics = by_wire(RunningEnv(Letters()), settings(model, tmp_path), api, tmp_path)
    assert_same_step(metrics, expected)


def test_attempts_of_several_turns_with_tools_over_the_wire(tmp_path: Path, api: str) -> None:
    turns = {"rollout": {"max_tool_rounds": 3, "max_new_tokens": 64}}
    config = RunConfig.build(settings("palestra/tiny", tmp_path).model_dump(), turns)
    here = train_env(load_env(str(EXAMPLE), {}), config).metrics[0]
    there = by_wire(load_env(str(EXAMPLE), {}), config, api, tmp_path)
    assert here["tool_calls_mean"] > 1
    assert there["tool_calls_mean"] == here["tool_calls_mean"]
    assert_same_step(there, here)


@pytest.fixture(scope="module")
def tinker_url(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`palestra tinker` on loopback, with the model of these tests."""
    pytest.importorskip("tinker")
    from tinker_server import serving

    from palestra.extras.tinker.server.base_model import BaseModel
    from palestra.extras.tinker.server.service import Service

    service = Service([BaseModel.load(model, device="cpu")], tmp_path_factory.mktemp("tinker"))
    with pytest.MonkeyPatch.context() as patch, serving(service) as running:
        patch.setenv("TINKER_API_KEY", "tml-test")
        yield running.url


def on_tinker(model: str, folder: Path, url: str) -> RunConfig:
    backend = {"backend": "tinker", "tinker": {"base_url": url}, "model": {"kv_memory_gib": None}}
    return RunConfig.build(settings(model, folder).model_dump(), backend)


KNOWN_THERE = tuple(name for name in LEARNED if name != "entropy")


def test_a_tinker_server(model: str, tmp_path: Path, tinker_url: str, expected: dict[str, float]) -> None:
    result = train_env(RunningEnv(Letters()), on_tinker(model, tmp_path, tinker_url))
    assert_same_step(result.metrics[0], expected, KNOWN_THERE)
    assert result.outcome.model is None
    trained, begun = result.model.state_dict(), load_model(model).model.state_dict()  # downloaded, and loaded here
    assert any(not torch.equal(trained[name], begun[name]) for name in begun)
    copied = result.save_model(tmp_path / "copy")
    assert (copied / "model.safetensors").read_bytes() == (result.model_path / "model.safetensors").read_bytes()


def test_an_environment_over_the_wire_with_a_tinker_server(
    model: str, tmp_path: Path, api: str, tinker_url: str, expected: dict[str, float]
) -> None:
    metrics = by_wire(RunningEnv(Letters()), on_tinker(model, tmp_path, tinker_url), api, tmp_path)
    assert_same_step(metrics, expected, KNOWN_THERE)
