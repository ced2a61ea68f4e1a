"""The settings `tinker.*`."""

from __future__ import annotations

from typing import Any, ClassVar

from palestra.core.config_sections import TINKER_LORA_RANK, Section


class TinkerSection(Section):
    """Where a model is trained with `backend: tinker`; the key is in TINKER_API_KEY."""

    base_url: str | None = None
    """a Tinker server, of `palestra tinker` for instance; none: TINKER_BASE_URL or the service"""

    # a server trains adapters, and scores tokens at temperature 1
    RUN_DEFAULTS: ClassVar[dict[str, Any]] = {"rollout": {"temperature": 1.0}, "lora": {"r": TINKER_LORA_RANK}}
