"""Settings that a Tinker server cannot heed are refused before anything is sent, and its key is asked for by name."""

from types import SimpleNamespace
from typing import Any

import pytest
import tinker

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, SettingError
from palestra.extras.tinker.client.backend import connect, context_tokens, suited


def config(**settings: Any) -> RunConfig:
    return RunConfig.build({"backend": "tinker"}, {key.replace("__", "."): value for key, value in settings.items()})


def test_the_defaults_of_a_tinker_run_are_an_adapter_and_temperature_one() -> None:
    assert (config().lora.r, config().rollout.temperature) == (32, 1.0)
    assert (RunConfig().lora.r, RunConfig().rollout.temperature) == (0, 0.8)
    assert config(lora__r=8, rollout__group_size=6).rollout.temperature == 1.0
    again = RunConfig.build(config(lora__r=0).model_dump(mode="json"))  # as config.yaml keeps it
    assert (again.lora.r, again.rollout.temperature) == (0, 1.0)
    assert suited(config()).train.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.dtype", "bfloat16", "the model is not in this process"),
        ("model.kv_memory_gib", 2.0, "the model is not in this process"),
        ("train.tokens_per_micro_batch", 512, "the model is not in this process"),
        ("rollout.policy_url", "http://127.0.0.1:1", "the model is not in this process"),
        ("lora.alpha", 64, "chooses the adapter's form by its rank"),
        ("lora.target_modules", ["q_proj"], "chooses the adapter's form by its rank"),
        ("train.entropy_coefficient", 0.1, "not the entropy of their distributions"),
        ("train.target_entropy", 0.5, "not the entropy of their distributions"),
        ("rollout.min_p", 0.1, "samples by temperature, top_p and top_k alone"),
        ("rollout.repetition_penalty", 1.1, "samples by temperature, top_p and top_k alone"),
        ("rollout.constrain_tool_calls", True, "samples by temperature, top_p and top_k alone"),
        ("rollout.temperature", 0.8, "scores tokens at temperature 1"),
        ("lora.r", 0, "give train.learning_rate"),
    ],
)
def test_a_setting_that_the_server_cannot_heed_is_refused_by_name(key: str, value: Any, words: str) -> None:
    with pytest.raises(SettingError, match=rf"{key} = .*{words}"):
        suited(config(**{key: value}))


def test_all_weights_are_trained_where_the_rate_is_given() -> None:
    assert suited(config(lora__r=0, train__learning_rate=1e-3)).train.learning_rate == 1e-3


def test_a_missing_key_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no stored one either
    with pytest.raises(SettingError, match="backend: tinker needs a key; set TINKER_API_KEY"):
        connect("http://127.0.0.1:9")


def test_a_key_of_another_kind_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "sk-0123456789")
    monkeypatch.setattr(tinker, "ServiceClient", lambda **options: pytest.fail("it was sent"))
    with pytest.raises(SettingError, match="TINKER_API_KEY does not begin with tml-") as raised:
        connect("http://127.0.0.1:9")
    assert "sk-0123456789" not in str(raised.value)


@pytest.mark.parametrize("sdk", ["0.36", "0.38"])
def test_a_model_that_the_server_does_not_have_is_told_with_those_it_has(
    sdk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [SimpleNamespace(model_name=name, max_context_length=n) for name, n in (("a/b-8B", 4096), ("c/d", None))]
    answer = SimpleNamespace(supported_models=models)
    service, rest = SimpleNamespace(holder=None), SimpleNamespace()
    if sdk == "0.36":
        service.get_server_capabilities = lambda: answer
    else:
        rest.get_server_capabilities = lambda: SimpleNamespace(result=lambda: answer)
    monkeypatch.setattr(tinker, "RestClient", lambda holder: rest)
    assert (context_tokens(service, "a/b-8B"), context_tokens(service, "c/d")) == (4096, 32768)
    with pytest.raises(PalestraError, match=r"has no model 'a/b-8'\. Did you mean 'a/b-8B'\? It has: a/b-8B, c/d"):
        context_tokens(service, "a/b-8")
