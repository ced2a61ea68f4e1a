"""`backend: ray`: trained here, sampled by actors on a Ray cluster."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.errors import MissingPackageError, SettingError
from palestra.extras.ray.pool import GroupSampler, RolloutPool
from palestra.models.loading import LoadedModel, load_tokenizer
from palestra.train.setup import Backend, load_for_run, local_backend, policy_for, samples_from_server, with_adapter
from palestra.train.tasks import EnvironmentTask, Parts
from palestra.train.watcher import Watcher

LOADS_MODEL = True


def require(config: RunConfig) -> None:
    """Raise for a cluster that does not answer, before anything is loaded or written."""
    if find_spec("ray") is None:
        raise MissingPackageError("backend: ray needs Ray, here and on every node; pip install 'palestra[ray]'")
    from palestra.extras.ray.ray_cluster import require_answer

    require_answer(config.ray)


def open_backend(config: RunConfig, loaded: LoadedModel) -> Backend:
    """The learner of this process, and a pool of actors that sample in the dtype of the model that is trained."""
    config.refuse(["model.sleep_mode"], "the sampler's memory is that of the rollout actors")
    if config.vllm_mode == "colocate":
        raise SettingError(
            "vllm.mode = colocate is a vLLM in the process that trains, and backend: ray samples with rollout actors; "
            "leave it out (they have our engine), or use vllm.mode = server"
        )
    model = with_adapter(loaded.model, config)
    if config.model.dtype == "auto" and not config.lora.load_in_4bit:
        dtype = str(model.dtype).removeprefix("torch.")
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    server = policy_for(model, loaded.tokenizer, config) if samples_from_server(config) else None
    from palestra.extras.ray.ray_cluster import RayCluster

    options = config.ray
    needs = f"{options.cpus_per_actor:g} CPUs and {options.gpus_per_actor:g} GPUs"
    limits: dict[str, Any] = {"needs": needs, "timeout_s": options.timeout_s}
    pool = RolloutPool(RayCluster(options), options.actors, **limits, server=server, recipe_of=ActorRecipe)
    return local_backend(config, model, loaded.tokenizer, pool)


@dataclass(frozen=True, slots=True)
class ActorRecipe:
    """Builds the sampler of one rollout actor, in that actor's process: a model of its own, the same environment."""

    config: RunConfig
    task: EnvironmentTask

    def __call__(self) -> GroupSampler:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        device = "cuda" if self.config.ray.gpus_per_actor else "cpu"
        changes = {"backend": "local", "model.device": device, "model.gpus": None, "rollout.max_staleness": 0}
        config = self.config.with_settings(changes)
        if samples_from_server(config):
            model, tokenizer = None, load_tokenizer(config.model.name)
        else:
            loaded = load_for_run(config, training=False)
            model, tokenizer = with_adapter(loaded.model, config).eval().requires_grad_(False), loaded.tokenizer
        policy = policy_for(model, tokenizer, config)
        return self.sampler(Parts(config, policy, tokenizer, asyncio.Runner(), Watcher()))

    def sampler(self, parts: Parts) -> GroupSampler:
        """The sampler of an actor with these parts."""
        collectors = {training: self.task.collector(parts, training=training) for training in (True, False)}
        return GroupSampler(parts.policy, collectors)
