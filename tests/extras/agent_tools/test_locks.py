"""Locked settings, limits, and the site file that changes them."""

from pathlib import Path

import pytest

from palestra.core.config import RunConfig
from palestra.core.errors import NotAllowedError, NotFoundError, PalestraError
from palestra.extras.agent_tools.locks import (
    KEYS_OF_ADDRESSES,
    SETTING_CLASSES,
    Site,
    load_site,
    locked_settings,
    locks_of,
    refuse_keys_for_unknown_hosts,
)
from palestra.runs.request import RunRequest

# what an agent may edit
AGENT_SETTINGS = (
    "seed", "model.chat_template_kwargs", "model.dtype", "model.device", "model.gpus", "model.threads",
    "model.gradient_checkpointing", "model.sleep_mode", "model.master_weights", "model.engine", "model.exact",
    "model.kv_memory_gib", "train.learning_rate", "train.epochs", "train.max_steps", "train.problems_per_step",
    "train.loss", "train.ratio", "train.epsilon", "train.epsilon_high", "train.delta", "train.sapo_temperature_pos",
    "train.sapo_temperature_neg", "train.beta", "train.kl_bias_correction", "train.importance_correction",
    "train.importance_cap", "train.importance_floor", "train.expert_routing", "train.off_policy_mask_threshold",
    "train.advantage_scale", "train.leave_one_out", "train.combine", "train.credit", "train.discount",
    "train.step_weight", "train.sampling", "train.sampling_half_life", "train.entropy_coefficient",
    "train.target_entropy", "train.iterations", "train.minibatches", "train.mask_truncated",
    "train.filter_equal_groups", "train.signal_share", "train.stop_when_solved", "train.max_sampled_tokens",
    "train.refill_limit", "train.full_update_share", "train.max_rollbacks", "train.max_grad_norm",
    "train.weight_decay", "train.adam_beta1", "train.adam_beta2", "train.scheduler", "train.warmup_steps",
    "train.tokens_per_micro_batch", "train.share_prefix", "train.deterministic", "rollout.group_size",
    "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p", "rollout.repetition_penalty",
    "rollout.max_new_tokens", "rollout.max_tool_rounds", "rollout.tool_timeout_s", "rollout.max_tool_result_chars",
    "rollout.max_open_episodes", "rollout.constrain_tool_calls", "rollout.unexpected_call_format",
    "rollout.compact_at", "rollout.keep_reasoning", "rollout.workers", "rollout.max_staleness", "agent.timeout_s",
    "agent.max_at_once", "agent.max_output_bytes", "agent.gateway_workers",
    "lora.r", "lora.alpha", "lora.dropout", "lora.target_modules", "lora.load_in_4bit", "vllm.timeout_s",
    "vllm.gpu_memory_utilization", "vllm.max_model_len", "vllm.tensor_parallel_size", "ray.actors",
    "ray.cpus_per_actor", "ray.gpus_per_actor", "ray.timeout_s", "ranks.timeout_s", "echo.coefficient",
    "echo.normalization", "echo.schedule", "echo.final_coefficient", "echo.step_every", "stages.plan",
    "stages.teacher_model", "stages.teacher_attempts", "stages.teacher_cases", "stages.sft_epochs",
    "stages.sft_batch", "stages.sft_learning_rate",
    "stages.rft_rounds", "stages.rft_attempts", "stages.rft_pass", "stages.rft_keep", "stages.rft_until",
    "stages.distill_steps", "stages.hints", "distill.coefficient", "distill.only", "distill.context",
    "distill.teacher_weights", "distill.divergence", "distill.top_k", "distill.phase_out", "eval.cases",
    "eval.samples_per_case", "eval.temperature", "eval.every", "checkpoint.every", "checkpoint.keep_last",
    "checkpoint.keep_best", "track.report_to", "track.run_name", "track.log_every",
    "track.rollouts_every", "track.tokens_every", "track.transcripts_every",
)  # fmt: skip


@pytest.fixture
def site(tmp_path: Path):
    def read(text: str) -> Site:
        path = tmp_path / "palestra.yaml"
        path.write_text(text)
        return load_site(path)

    return read


def values(site: Site) -> dict:
    return {lock.full_name: lock.value for lock in locks_of(site)}


def test_the_local_profile_locks_infrastructure_and_leaves_learning_to_the_agent():
    locked = values(Site())
    assert {"env.tokenizer_name", "env.rollout_server_url", "server.base_url", "server.server_type"} <= locked.keys()
    assert "trainer.learning_rate" not in locked
    assert locked_settings(locks_of(Site())) == {}


def test_the_tinker_profile_locks_what_it_lists():
    locked = values(Site(profile="tinker"))
    assert locked["env.tokenizer_name"] == locked["server.model_name"] == "Qwen/Qwen3-8B"
    assert (locked["env.max_batches_offpolicy"], locked["server.server_type"]) == (3, "sglang")
    settings = locked_settings(locks_of(Site(profile="tinker")))
    expected = {
        "backend": "tinker", "model.name": "Qwen/Qwen3-8B", "track.report_to": ["wandb"], "train.max_steps": 2500,
        "lora.r": 32, "train.learning_rate": 4e-5, "rollout.max_new_tokens": 8192, "checkpoint.every": 25,
    }  # fmt: skip
    assert expected.items() <= settings.items()
    request = RunRequest(settings={"backend": "local", "lora.r": 8}, backend="tinker")
    assert request.run_settings["backend"] == "tinker"


def test_a_site_file_locks_unlocks_and_limits(site):
    found = site(
        "profile: tinker\ntrainer: {learning_rate: 1e-5}\nrun: {rollout.temperature: 1.0}\n"
        "unlock: [trainer.lora_rank]\nlimits: {status_check_minutes: 5}\nmaximum: {train.max_steps: 10}\nenv:\n"
    )
    locked = values(found)
    assert locked["trainer.learning_rate"] == 1e-5
    assert locked["rollout.temperature"] == 1.0
    assert "trainer.lora_rank" not in locked
    assert found.limits.status_check_minutes == 5
    assert locked_settings(locks_of(found))["train.learning_rate"] == 1e-5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("profil: local", "Did you mean 'profile'"),
        ("trainer: {learning_rat: 1}", "Did you mean 'trainer.learning_rate'"),
        ("trainer: {learning_rate: fast}", "learning_rate"),
        ("run: {train.max_step: 1}", "Did you mean 'train.max_steps'"),
        ("run: {train.max_steps: 0}", "train.max_steps"),
        ("maximum: {model.name: 3}", "not a number"),
        ("unlock: [trainer.lora]", "Did you mean 'trainer.lora_rank'"),
        ("limits: {test_minutes: 0}", "test_minutes"),
        ("- a list", "holds a list"),
        ("profile: tinker\nunlock: [backend]", "leave backend out"),
        ("profile: tinker\nrun: {backend: local}", "leave backend out"),
    ],
)
def test_a_mistake_in_a_site_file_is_told(site, text, words):
    with pytest.raises(PalestraError, match=words):
        site(text)


def test_the_site_file_is_the_one_that_the_variable_names_else_the_one_here_else_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_site(environ={}) == Site()
    (tmp_path / "palestra.yaml").write_text("profile: tinker")
    assert load_site(environ={}).profile == "tinker"
    (tmp_path / "other.yaml").write_text("limits: {test_models: 2}")
    named = load_site(environ={"PALESTRA_SITE": str(tmp_path / "other.yaml")})
    assert (named.profile, named.limits.test_models) == ("local", 2)
    with pytest.raises(NotFoundError, match="no site file"):
        load_site(environ={"PALESTRA_SITE": "gone.yaml"})


def test_every_setting_has_one_class_and_none_that_sounds_like_an_address_or_folder_is_left_to_agents():
    classed = [key for keys in SETTING_CLASSES.values() for key in keys]
    text = "put a new setting into SETTING_CLASSES, or into AGENT_SETTINGS if an agent may edit it"
    assert sorted([*classed, *AGENT_SETTINGS]) == sorted(RunConfig.keys()), text
    words = ("url", "address", "host", "folder", "dir", "path", "file", "entity", "backend")
    open_keys = [key for key in AGENT_SETTINGS if any(word in key.split(".")[-1] for word in words)]
    assert open_keys == []


@pytest.mark.parametrize("profile", ["local", "tinker"])
def test_backend_addresses_folders_and_accounts_are_locked_by_default(profile):
    locked = {lock.setting for lock in locks_of(Site(profile=profile))}
    classes = ("backend", "address", "folder", "account", "code")
    assert {key for name in classes for key in SETTING_CLASSES[name]} <= locked


def test_an_agent_can_neither_switch_the_programs_sandbox_off_nor_choose_the_project_of_a_tracker():
    locked = {lock.setting for lock in locks_of(Site())}
    assert {"agent.sandbox", "track.project"} <= locked
    assert {"agent.sandbox", "track.project"} <= {lock.setting for lock in locks_of(Site(profile="tinker"))}


def test_a_site_decides_or_unlocks_a_setting_that_is_locked_by_default():
    site = Site(run={"vllm.url": "http://gpu:8000", "vllm.mode": "server"}, unlock=["track.entity", "model.name"])
    locks = {lock.setting: lock for lock in locks_of(site)}
    assert locks["vllm.url"].value == "http://gpu:8000"
    assert "track.entity" not in locks
    assert locked_settings(list(locks.values())) == {"vllm.url": "http://gpu:8000", "vllm.mode": "server"}


@pytest.mark.parametrize(("setting", "keys"), KEYS_OF_ADDRESSES.items())
def test_a_key_is_sent_only_to_a_host_that_its_owner_names(setting, keys):
    key, variable = keys
    environ, owned = {key: "secret"}, {setting: "http://gpu-box:8000"}
    for address, run in (("http://evil:1", {}), ("http://gpu-box:8001", owned)):
        with pytest.raises(NotAllowedError, match=key):
            refuse_keys_for_unknown_hosts({setting: address}, run, environ)
    refuse_keys_for_unknown_hosts({setting: "http://gpu-box:8000/v2"}, owned, environ)
    refuse_keys_for_unknown_hosts({setting: "http://evil:1"}, {}, {})  # there is no key to send
    if variable:
        refuse_keys_for_unknown_hosts({setting: "https://a.b/"}, {}, environ | {variable: "https://a.b"})


def test_the_key_of_an_agents_endpoint_is_sent_to_the_owners_host_only():
    keys, owned = {"PALESTRA_ROLE_KEY_CRITIC": "k"}, {"agent.roles": {"critic": "https://api.example/v1#m"}}
    refuse_keys_for_unknown_hosts({"agent.roles": {"critic": "https://api.example/v1#other"}}, owned, keys)
    refuse_keys_for_unknown_hosts({"agent.roles": {"critic": "Qwen/Qwen3-0.6B", "judge": "http://evil:1"}}, {}, keys)
    for run in (owned, {}):
        with pytest.raises(NotAllowedError, match="PALESTRA_ROLE_KEY_CRITIC"):
            refuse_keys_for_unknown_hosts({"agent.roles": {"critic": "http://evil:1/v1"}}, run, keys)
