"""Where the model of a run is trained and sampled: on this machine, by actors of a Ray cluster, on a Tinker server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.errors import SettingError
from palestra.core.ranks import ONE_PROCESS, Ranks
from palestra.extras.ray.pool import PoolPolicy, RolloutPool
from palestra.learner.base import Learner
from palestra.learner.fsdp import FsdpLearner
from palestra.learner.local import LocalLearner
from palestra.models.export.hf import save_downloaded, save_hf, write_tokenizer_and_card
from palestra.models.loading import LoadedModel
from palestra.policy.base import Policy
from palestra.train.setup import policy_for, samples_from_server, suited_to, with_adapter

Record = Mapping[str, Any]  # of the run folder


@dataclass(frozen=True, slots=True)
class Backend:
    """What trains and samples the model, and how it is written to disk."""

    config: RunConfig  # suited to the model
    model: Any  # the module; None where it is not in this process
    tokenizer: Any
    learner: Learner
    policy: Policy[Any]
    complete_checkpoint: Callable[[Path, Record], None]  # makes what the learner saved a model: tokenizer, …
    save_model: Callable[[Path, Record], Path]
    close: Callable[[bool], None] = lambda good: None

    @property
    def context_tokens(self) -> int | None:
        """The model's context length; None if it is not known."""
        if self.policy.context_tokens is not None:
            return self.policy.context_tokens
        config = getattr(self.model, "config", None)
        return None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)


def backend_of(
    config: RunConfig,
    loaded: LoadedModel,
    learner: Learner | None = None,
    policy: Policy[Any] | None = None,
    ranks: Ranks = ONE_PROCESS,
    *,
    max_problems: int | None = None,
    max_group: int | None = None,
) -> Backend:
    """The backend that the config names. Learner and policy share one module, unless others are given.

    `max_problems` and `max_group` bound the sizes of a step that the config leaves to the run.
    """
    if config.backend == "tinker":
        config.refuse(["ray"], "it is for backend: ray")
        return tinker_backend(config, loaded)
    config.refuse(["tinker"], "it is for backend: tinker")
    config = suited_to(config, loaded.model, max_problems=max_problems, max_group=max_group)
    model, tokenizer = with_adapter(loaded.model, config), loaded.tokenizer
    if config.backend == "ray":
        config = ray_config(config, model)
        pool = ray_pool(config)
        policy = PoolPolicy(pool, policy_for(model, tokenizer, config) if samples_from_server(config) else None)
    else:
        config.refuse(["ray"], "it is for backend: ray")
        policy = policy or policy_for(model, tokenizer, config)
    kind = LocalLearner if ranks.size == 1 else partial(FsdpLearner, ranks=ranks)
    make = partial(kind, model, config=config, pad_token_id=tokenizer.pad_token_id or 0)
    return Backend(
        config,
        model,
        tokenizer,
        learner or make(),
        policy,
        lambda folder, record: write_tokenizer_and_card(model, tokenizer, folder, record),
        lambda folder, record: save_hf(model, tokenizer, folder, record=record),
        lambda good: policy.release(),
    )


def ray_config(config: RunConfig, model: Any) -> RunConfig:
    """For a run that rollout actors sample for: in the dtype of the model that is trained, whatever their devices."""
    config.refuse(["model.sleep_mode"], "the sampler's memory is that of the rollout actors")
    if config.vllm.mode == "colocate":
        raise SettingError(
            "vllm.mode = colocate is a vLLM in the process that trains, and backend: ray samples with rollout actors; "
            "leave it out (they have our engine), or use vllm.mode = server"
        )
    if config.model.dtype != "auto" or config.lora.load_in_4bit:
        return config
    dtype = str(model.dtype).removeprefix("torch.")
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def ray_pool(config: RunConfig) -> RolloutPool:
    from palestra.extras.ray.ray_cluster import RayCluster

    options = config.ray
    needs = f"{options.cpus_per_actor:g} CPUs and {options.gpus_per_actor:g} GPUs"
    return RolloutPool(RayCluster(options), options.actors, needs=needs, timeout_s=options.timeout_s)


def tinker_backend(config: RunConfig, loaded: LoadedModel) -> Backend:
    """Learner and policy are two clients of one model on the server."""
    from palestra.extras.tinker.client.connect import context_tokens, open_model, suited
    from palestra.extras.tinker.client.learner import TinkerLearner
    from palestra.extras.tinker.client.policy import TinkerPolicy

    config = suited(config)
    model = open_model(config)
    learner = TinkerLearner(model, config=config)
    return Backend(
        config,
        None,
        loaded.tokenizer,
        learner,
        TinkerPolicy(model, context_tokens(model.service, config.model.name)),
        lambda folder, record: None,  # the state is on the server
        lambda folder, record: save_downloaded(
            learner.export, loaded.tokenizer, folder, base=config.model.name, record=record
        ),
        lambda good: model.close(good=good),
    )
