"""Which models rl_test_inference asks: at an endpoint with a key, at a server on this machine, or loaded here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from palestra.agent_tools.answers import short
from palestra.core.errors import PalestraError
from palestra.runs.agent_settings import is_hub_name
from palestra.runs.locks import Site

OPENROUTER = "https://openrouter.ai/api/v1"
OPENROUTER_MODELS = ("qwen/qwen3-8b", "z-ai/glm-4.7-flash", "minimax/minimax-m2.7")
_SCALES = dict(zip(OPENROUTER_MODELS, ("small", "medium", "large"), strict=True))
_MAX_NAME_CHARS = 300


@dataclass(frozen=True)
class Candidate:
    """A model to test. Without a URL it is loaded here."""

    label: str  # as it was asked for
    name: str
    base_url: str | None = None
    api_key_env: str | None = None

    @property
    def scale(self) -> str | None:
        """small, medium or large, of the models that are tested by default."""
        return _SCALES.get(self.name)

    @property
    def more(self) -> dict[str, Any]:
        """What every request says besides: OpenRouter reports the cost on request."""
        return {"usage": {"include": True}} if self.base_url == OPENROUTER else {}


def choose_models(
    models: Sequence[str] | None, site: Site, current: str, environ: Mapping[str, str] = os.environ
) -> list[Candidate]:
    """The models that were named, or those that this site or its keys suggest, or the one to be trained."""
    url, key, usual = _endpoint(site, environ)
    names = list(models) if models else usual or [f"local:{current}"]
    if len(names) > site.limits.test_models:
        raise PalestraError(f"{len(names)} models were named; at most {site.limits.test_models} are tested together")
    if len(set(names)) != len(names):
        raise PalestraError("a model is named twice; name each once")
    candidates = [_candidate(name, url, key) for name in names]
    paths = [c.label for c in candidates if models and c.base_url is None and not is_hub_name(c.name)]
    if paths and "model.name" not in site.unlock:
        raise PalestraError(
            f"{short(paths[0])}: only models of the hub can be named here, such as local:Qwen/Qwen3-0.6B; "
            "the site file allows paths with unlock: [model.name]"
        )
    return candidates


def _endpoint(site: Site, environ: Mapping[str, str]) -> tuple[str | None, str | None, list[str]]:
    """Its URL, the name of its key's variable, and the models to take when none are named."""
    inference = site.inference
    if inference.base_url:
        return inference.base_url, inference.api_key_env, inference.models
    if environ.get("OPENROUTER_API_KEY"):
        return OPENROUTER, "OPENROUTER_API_KEY", inference.models or list(OPENROUTER_MODELS)
    if environ.get("OPENAI_BASE_URL"):
        return environ["OPENAI_BASE_URL"], "OPENAI_API_KEY", inference.models
    return None, None, inference.models


def _candidate(label: str, url: str | None, key: str | None) -> Candidate:
    name, at, place = label.rpartition("@http")
    if not label.strip() or len(label) > _MAX_NAME_CHARS or not label.isprintable():
        raise PalestraError(f"{short(label)!r} is not the name of a model")
    if at:
        return Candidate(label, name, _loopback(f"http{place}", label))
    if label.startswith("local:"):
        return Candidate(label, label.removeprefix("local:"))
    if label.startswith("palestra/") or (label.startswith(("/", "./", "~")) and Path(label).expanduser().exists()):
        return Candidate(label, label)
    if url is None:
        raise PalestraError(
            f"nothing says where {short(label)} is: set OPENROUTER_API_KEY, or OPENAI_BASE_URL and OPENAI_API_KEY, "
            "for an "
            f"endpoint; write local:{short(label)} to load it here, or {short(label)}@http://127.0.0.1:8000/v1 for a "
            "server on this machine"
        )
    return Candidate(label, label, url, key)


def _loopback(url: str, label: str) -> str:
    """A URL that a caller names may only lead to this machine, and gets no key."""
    host = urlsplit(url).hostname
    if host not in ("127.0.0.1", "localhost", "::1"):
        raise PalestraError(
            f"{short(label)}: only a server on this machine can be named here; for another one, set inference.base_url "
            "in the site file, or OPENAI_BASE_URL"
        )
    return url
