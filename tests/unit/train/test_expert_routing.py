"""Whole runs of a tiny mixture of experts that compare or replay the sampler's experts, and their settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from builders import suite
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from palestra import demo, measure, train_grpo
from palestra.agents.programs import function_agent
from palestra.core.codec import decode, encode
from palestra.core.config import RunConfig
from palestra.core.errors import InputError, SettingError, UnsupportedModel
from palestra.core.group_codec import rollout_to_dict
from palestra.core.run_folder import Resume
from palestra.core.types import Group, Lineage, Rollout, Turn
from palestra.extras.atropos.task import WireTask
from palestra.extras.step_trainer.trainer import StepTrainer
from palestra.train.batch import routing_column, to_batch

TIMED = ("seconds", "per_second", "per_s", "memory")


@pytest.fixture
def moe_model(tiny: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=tiny.model.config.vocab_size, hidden_size=32, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, max_position_embeddings=1024, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3.0)
    return model


@pytest.fixture
def moe_folder(moe_model: Any, tiny: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "moe"
    moe_model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return folder


def config_of(folder: Path, mode: str, **settings: Any) -> dict[str, Any]:
    """An entropy bonus, since a random model earns nothing."""
    return {
        "model.name": str(folder), "train.expert_routing": mode, "train.max_steps": 3, "train.problems_per_step": 2,
        "rollout.group_size": 2, "rollout.max_new_tokens": 12, "rollout.temperature": 1.0, "eval.cases": 1,
        "checkpoint.every": 1, "train.filter_equal_groups": False, "train.mask_truncated": False,
        "train.entropy_coefficient": 0.1, "train.learning_rate": 1e-2, "train.minibatches": 2, **settings,
    }  # fmt: skip


def run(config: dict[str, Any] | None = None, **options: Any) -> list[dict[str, float]]:
    """The metrics of the steps of the demo with this model, without times."""
    agent = demo.agent if config is None else replace(demo.agent, model=config.pop("model.name"))
    options |= {} if config is None else {"config": config}
    found = train_grpo(agent, demo.suite, held_out=demo.held_out, progress=False, **options)
    return untimed(found.metrics)


def untimed(rows: Any) -> list[dict[str, float]]:
    steps = [row for row in rows if "routing_mismatch" in row]
    return [{name: v for name, v in row.items() if not any(word in name for word in TIMED)} for row in steps]


def test_resumed_run_with_replay_equals_one_that_was_left_alone(moe_folder: Path, tmp_path: Path) -> None:
    straight = run(config_of(moe_folder, "replay"), folder=tmp_path / "straight")
    run(config_of(moe_folder, "replay", **{"train.max_steps": 1}), folder=tmp_path / "broken")
    assert len(straight) == 3
    assert run(resume=Resume(tmp_path / "broken", max_steps=3)) == straight
    assert straight[0]["sampler_gap_max"] < 1e-3
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("straight", "broken"))
    assert all(weight.equal(other[name]) for name, weight in one.items())


def test_run_that_samples_ahead_reads_the_experts_back_from_its_journal(moe_folder: Path, tmp_path: Path) -> None:
    config = config_of(moe_folder, "compare", **{"rollout.max_staleness": 1, "train.max_steps": 2})
    assert len(run(config, folder=tmp_path / "run")) == 2
    assert len(run(resume=Resume(tmp_path / "run", max_steps=3))) == 3


def test_group_keeps_its_experts_in_a_journal_and_not_in_files_for_people() -> None:
    routing = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    turns = (Turn("template", (1, 2)), Turn("model", (3, 4, 5), (-1.0,) * 3, 1, "stop", routing))  # type: ignore[arg-type]
    context = (Turn("template", (1, 2, 3, 4, 5), routing=routing), Turn("model", (6,), (-1.0,), 1))  # type: ignore[arg-type]
    group = Group("p", (Rollout("p", turns, (), "answered", lineages=(Lineage(context, (), "answered"),)),))
    again = decode(encode(group), Group)
    assert again.rollouts[0].turns == turns
    assert again.rollouts[0].lineages[0].turns == context
    assert "routing" not in json.dumps(rollout_to_dict(group.rollouts[0], exact=True))


def test_tokens_that_were_never_computed_have_unknown_experts() -> None:
    first = np.full((4, 1, 2), 1, np.uint8)
    second = np.full((2, 1, 2), 2, np.uint8)
    second[0] = 255  # not recorded, so that an earlier entry stays
    turns = [
        Turn("template", (1, 2)),  # type: ignore[arg-type]
        Turn("model", (3, 4, 5), (-1.0,) * 3, 1, "stop", first),  # type: ignore[arg-type]
        Turn("environment", (6,)),  # type: ignore[arg-type]
        Turn("model", (7,), (-1.0,), 1, "stop", second),  # type: ignore[arg-type]
    ]
    column = routing_column([turns, turns[:1]])
    assert column is not None
    assert column[:, 0, 0].tolist() == [1, 1, 1, 1, 255, 2, 255, 255, 255]
    assert routing_column([turns[:1]]) is None
    with pytest.raises(InputError, match="experts"):
        routing_column([turns[1:]])


@measure
def long_answer(output: Any) -> bool:
    return len(str(output)) > 20


async def two_chats(case: Any, base_url: str, api_key: str) -> str:
    """Asks, asks on, and asks another question behind the first answer: two lineages."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=60) as client:

        async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
            body = {"model": "m", "messages": messages, "max_tokens": 4}
            answer = await client.post(f"{base_url}/chat/completions", json=body)
            answer.raise_for_status()
            message: dict[str, Any] = answer.json()["choices"][0]["message"]
            return message

        opening = [{"role": "user", "content": case["input"]}]
        first = await ask(opening)
        for question in ("And now?", "Why?"):
            last = await ask([*opening, first, {"role": "user", "content": question}])
    return str(last["content"])


def test_conversations_of_a_program_have_the_experts_of_all_computed_tokens(moe_folder, tmp_path, monkeypatch) -> None:
    seen: list[Group] = []

    def noted(groups: Any, *args: Any, **options: Any) -> Any:
        seen.extend(groups)
        return to_batch(groups, *args, **options)

    monkeypatch.setattr("palestra.train.batch.to_batch", noted)
    config = config_of(moe_folder, "replay", **{"train.max_steps": 1})
    program = function_agent(two_chats, model=str(moe_folder))
    cases = suite(*({"input": f"Count to {n}."} for n in range(4)), measures=[long_answer])
    found = train_grpo(program, cases, config=config, folder=tmp_path / "run", progress=False)
    assert untimed(found.metrics)[0]["routing_mismatch"] < 0.05
    assert untimed(found.metrics)[0]["sampler_gap_max"] < 1e-3
    assert all(turn.routing is None for r in found.after.rollouts for turn in r.all_turns)
    rows = [conversation.turns for group in seen for r in group.rollouts for conversation in r.conversations]
    assert len(rows) > len([r for group in seen for r in group.rollouts])
    for turns in rows:
        column = routing_column([turns])
        assert column is not None
        assert (column[:-1] < 4).all()
        assert (column[-1] == 255).all()


def test_step_trainer_compares_experts(moe_model: Any, tiny: Any, tmp_path: Path) -> None:
    settings = {"output_dir": str(tmp_path), "train.expert_routing": "compare", "rollout.group_size": 4}
    settings |= {"rollout.max_new_tokens": 6, "rollout.temperature": 1.0, "train.mask_truncated": False}
    trainer = StepTrainer(moe_model, tiny.tokenizer, lambda o, e: float(len(str(o))), RunConfig.build(settings))
    assert trainer.train_step("Say something.", "e")["routing_mismatch"] == 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "tinker"},
        {"backend": "ray"},
        {"vllm.mode": "server"},
        {"rollout.policy_url": "http://127.0.0.1:1"},
        {"model.engine": "plain"},
        {"stages.plan": "rft"},
        {"distill.only": True, "distill.coefficient": 1.0},
    ],
)
def test_setting_is_rejected_where_no_experts_are_recorded(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"train\.expert_routing = replay"):
        RunConfig.build({"train.expert_routing": "replay"}, settings)


def test_dense_model_and_rollout_func_reject_the_setting(moe_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no experts.*train\.expert_routing"):
        run(config_of(moe_folder, "compare", **{"model.name": "palestra/tiny"}), folder=tmp_path / "dense")
    with pytest.raises(SettingError, match=r"train\.expert_routing.*rollout_func"):
        run(config_of(moe_folder, "compare"), folder=tmp_path / "function", rollout_func=lambda prompts, trainer: {})


def test_environments_over_the_wire_reject_the_setting() -> None:
    parts: Any = SimpleNamespace(config=RunConfig.build({"train.expert_routing": "compare"}))
    with pytest.raises(SettingError, match=r"train\.expert_routing.*wire"):
        WireTask(None, None, None, None).source(parts)  # type: ignore[arg-type]
