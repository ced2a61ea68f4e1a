"""Where the model of a run is trained and sampled: on this machine, by actors of a Ray cluster, on a Tinker server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.extras import BACKENDS, provided
from palestra.core.ranks import ONE_PROCESS, Ranks
from palestra.learner.base import Learner
from palestra.learner.fsdp import FsdpLearner
from palestra.learner.local import LocalLearner
from palestra.models.export.hf import save_hf, write_tokenizer_and_card
from palestra.models.loading import LoadedModel
from palestra.policy.base import Policy
from palestra.train.setup import policy_for, suited_to, with_adapter

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
    for name in BACKENDS:
        if name != config.backend:
            config.refuse([name], f"it is for backend: {name}")
    if loaded.model is not None:
        config = suited_to(config, loaded.model, max_problems=max_problems, max_group=max_group)
    if config.backend != "local":
        return provided(f"backend: {config.backend}").open_backend(config, loaded)
    model = with_adapter(loaded.model, config)
    return local_backend(
        config, model, loaded.tokenizer, policy or policy_for(model, loaded.tokenizer, config), learner, ranks
    )


def local_backend(
    config: RunConfig,
    model: Any,
    tokenizer: Any,
    policy: Policy[Any],
    learner: Learner | None = None,
    ranks: Ranks = ONE_PROCESS,
) -> Backend:
    """A backend that trains in this process."""
    kind = LocalLearner if ranks.size == 1 else partial(FsdpLearner, ranks=ranks)
    return Backend(
        config,
        model,
        tokenizer,
        learner or kind(model, config=config, pad_token_id=tokenizer.pad_token_id or 0),
        policy,
        lambda folder, record: write_tokenizer_and_card(model, tokenizer, folder, record),
        lambda folder, record: save_hf(model, tokenizer, folder, record=record),
        lambda good: policy.release(),
    )
