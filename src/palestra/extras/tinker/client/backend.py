"""`backend: tinker`: the settings that a Tinker server supports, the key, and learner and policy of one model there."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from palestra.core.config import RunConfig
from palestra.core.config_sections import LORA_LEARNING_RATE
from palestra.core.errors import MissingPackageError, NotFoundError, SettingError, did_you_mean
from palestra.core.files import write_json, write_text
from palestra.models.export.hf import adapter_card, written_aside
from palestra.models.loading import RECORD, LoadedModel, is_adapter
from palestra.train.setup import Backend

if TYPE_CHECKING:
    from palestra.extras.tinker.client.model import TinkerModel

LOADS_MODEL = False  # the model is on the server; a run loads its tokenizer alone
KEY = "TINKER_API_KEY"
_UNSTATED_CONTEXT = 1 << 15
_ANY_KEY = "for a server of your own that asks for none, any that begins with tml-"

# settings that would have no effect, and why
_NOT_ON_THE_WIRE = {
    "the model is not in this process": [
        *("model.dtype", "model.device", "model.threads", "model.gradient_checkpointing", "model.sleep_mode"),
        *("model.master_weights", "model.engine", "model.kv_memory_gib"),
        *("train.tokens_per_micro_batch", "train.share_prefix", "rollout.policy_url", "rollout.weights_folder"),
        "vllm",
    ],
    "a Tinker server chooses the adapter's form by its rank": [
        *("lora.alpha", "lora.dropout", "lora.target_modules", "lora.load_in_4bit")
    ],
    "a Tinker server gives the logprobs of tokens, not the entropy of their distributions": [
        *("train.entropy_coefficient", "train.target_entropy")
    ],
    "a Tinker server samples by temperature, top_p and top_k alone": [
        *("rollout.min_p", "rollout.repetition_penalty", "rollout.constrain_tool_calls")
    ],
}


def require(config: RunConfig) -> None:
    if find_spec("tinker") is None:
        raise MissingPackageError("backend: tinker needs its SDK; pip install 'palestra[tinker]'")


def open_backend(config: RunConfig, loaded: LoadedModel) -> Backend:
    from palestra.extras.tinker.client.learner import TinkerLearner, TinkerPolicy

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


def save_downloaded(
    download: Callable[[Path], Any], tokenizer: Any, folder: Path, *, base: str, record: Mapping[str, Any]
) -> Path:
    """Save a model that another machine has trained: an adapter to `base`, or a whole one, as its files come."""
    with written_aside(folder) as partial:
        download(partial)
        tokenizer.save_pretrained(partial)
        write_json(partial / RECORD, dict(record))
        if is_adapter(partial):
            path = partial / "adapter_config.json"
            lora = {**json.loads(path.read_text(encoding="utf-8")), "base_model_name_or_path": base}
            write_json(path, lora)
            write_text(partial / "README.md", adapter_card(base, SimpleNamespace(**lora), record))
    return folder


def suited(config: RunConfig) -> RunConfig:
    """The config for a Tinker server; settings without effect are refused by their names."""
    for why, keys in _NOT_ON_THE_WIRE.items():
        config.refuse(keys, why)
    if config.rollout.temperature != 1.0:
        raise SettingError(
            f"rollout.temperature = {config.rollout.temperature:g}: a Tinker server scores tokens at temperature 1, so "
            "that another distribution would be trained than the one sampled from; use 1.0"
        )
    if config.rollout.top_p < 1 or config.rollout.top_k:
        logging.getLogger("palestra").warning(
            "rollout.top_p and rollout.top_k bias the importance ratio: a Tinker server scores tokens by the whole "
            "distribution; prefer the defaults"
        )
    if config.train.learning_rate is None and not config.lora.r:
        raise SettingError(
            "lora.r = 0 trains all weights, and a Tinker server does not say how many there are; "
            f"give train.learning_rate, or an adapter's rank (its rate is then {LORA_LEARNING_RATE:g})"
        )
    config = config.with_step_size()  # the server does not say what it runs on
    return config.with_learning_rate(0) if config.train.learning_rate is None else config


def context_tokens(service: Any, name: str) -> int:
    """Context length of the server's model; raises if the server does not have it."""
    import tinker

    rest = tinker.RestClient(service.holder)
    is_new = hasattr(rest, "get_server_capabilities")  # SDK 0.38 and newer
    capabilities = rest.get_server_capabilities().result() if is_new else service.get_server_capabilities()
    models = {str(model.model_name): model for model in capabilities.supported_models}
    if models and name not in models:
        raise NotFoundError(
            f"the Tinker server has no model {name!r}.{did_you_mean(name, models)} It has: {', '.join(sorted(models))}"
        )
    return int(getattr(models.get(name), "max_context_length", None) or _UNSTATED_CONTEXT)


def open_model(config: RunConfig) -> TinkerModel:
    """A new model on the server, with its adapter at the beginning."""
    from palestra.extras.tinker.client.model import TinkerModel

    def create(service: Any) -> Any:
        context_tokens(service, config.model.name)
        return service.create_lora_training_client(
            config.model.name, rank=config.lora.r, seed=config.seed, user_metadata={"made_by": "palestra"}
        )

    return TinkerModel(lambda: connect(config.tinker.base_url), create)


def connect(base_url: str | None) -> Any:
    """A session with the server, by the key in TINKER_API_KEY, or the one that `tinker auth login` stored."""
    import tinker

    from palestra.extras.tinker.client.model import refusal

    key = os.environ.get(KEY)
    if key and not key.startswith(("tml-", "eyJ")):
        raise SettingError(f"{KEY} does not begin with tml-, so that it is no key of Tinker; {_ANY_KEY}")
    try:
        logging.getLogger("tinker.lib.api_future_impl").addFilter(_is_news)
        service = tinker.ServiceClient(base_url=base_url)
        _ = service.holder  # opens the session
        return service
    except tinker.TinkerError as error:
        if key is None and "api_key" in str(error):
            raise SettingError(f"backend: tinker needs a key; set {KEY} ({_ANY_KEY})") from None
        raise refusal(error) from error


def _is_news(record: logging.LogRecord) -> bool:
    """The SDK warns whenever an answer takes longer than one poll."""
    return "try_again" not in record.getMessage()
