"""`backend: tinker`: learner and policy are two clients of one model on a Tinker server."""

from __future__ import annotations

from importlib.util import find_spec

from palestra.core.config import RunConfig
from palestra.core.errors import MissingPackageError
from palestra.models.export.hf import save_downloaded
from palestra.models.loading import LoadedModel
from palestra.train.setup import Backend

LOADS_MODEL = False  # the model is on the server; a run loads its tokenizer alone


def require(config: RunConfig) -> None:
    if find_spec("tinker") is None:
        raise MissingPackageError("backend: tinker needs its SDK; pip install 'palestra[tinker]'")


def open_backend(config: RunConfig, loaded: LoadedModel) -> Backend:
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
