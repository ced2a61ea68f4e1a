"""Who decides each setting of a run: an agent with the rl_* tools, or only the site."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from palestra.core.errors import NotAllowedError

# Settings that decide where data, keys and weights go. They are locked unless the site file unlocks them, except that
# an agent may name a "model" of the hub. An agent may edit all others: tests/extras/agent_tools/test_locks.py lists
# them, so that each new setting is put here or there.
SETTING_CLASSES = {
    "backend": ("backend", "vllm.mode"),
    "address": (
        "vllm.url", "rollout.policy_url", "tinker.base_url", "ray.address", "stages.teacher", "distill.teacher_url",
        "agent.roles",
    ),
    "folder": ("output_dir", "rollout.weights_folder", "stages.traces", "distill.teacher"),
    "code": ("train.custom_advantages", "train.custom_loss", "agent.sandbox"),
    "model": ("model.name",),
    "account": ("track.entity", "track.project"),
}  # fmt: skip
SITE_SETTINGS = [key for name, keys in SETTING_CLASSES.items() if name != "model" for key in keys]
# An address -> the key that is sent there, and the variable by which the owner of the key names a host.
KEYS_OF_ADDRESSES = {
    "tinker.base_url": ("TINKER_API_KEY", "TINKER_BASE_URL"),
    "vllm.url": ("VLLM_API_KEY", None),
    "rollout.policy_url": ("PALESTRA_TOKEN", None),
    "stages.teacher": ("PALESTRA_TEACHER_KEY", None),
}
AGENT_MAXIMUM = {"checkpoint.keep_last": 20.0}  # bounds disk space; `maximum` of the site file overrides it
_HUB_NAME = re.compile(r"\w[\w.-]{0,99}(/\w[\w.-]{0,99})?(:\w[\w.-]{0,99})?", re.ASCII)


def is_hub_name(name: str) -> bool:
    """Whether a model name can only mean a model of the hub, or one that comes with Palestra.

    >>> [is_hub_name(name) for name in ("Qwen/Qwen3-0.6B", "palestra/tiny", "/models/x", "../x", "a/b/c", "x.gguf")]
    [True, True, False, False, False, False]
    """
    return bool(_HUB_NAME.fullmatch(name)) and not name.endswith(".gguf") and not Path(name).exists()


def refuse_keys_for_unknown_hosts(
    edited: Mapping[str, Any], owned: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> None:
    """Refuse an address that an agent chose and to which a key would be sent.

    A key goes to hosts that its owner names, in `owned` (the settings under `run:` of the site file) or in the
    environment.
    """
    roles, own_roles = (
        {f"PALESTRA_ROLE_KEY_{str(label).upper()}": (label, model) for label, model in (given or {}).items()}
        for given in (edited.get("agent.roles"), owned.get("agent.roles"))
    )
    rows = [(name, edited.get(name), key, owned.get(name), own) for name, (key, own) in KEYS_OF_ADDRESSES.items()]
    rows += [  # the endpoints of a program's agents, each of which has a key of its own
        (f"agent.roles: {label}", model, key, own_roles.get(key, (label, None))[1], None)
        for key, (label, model) in roles.items()
        if "://" in str(model)
    ]
    for name, address, key, owner, variable in rows:
        hosts = [owner, environ.get(variable) if variable else None]
        if address is None or not environ.get(key) or _origin(str(address)) in [_origin(str(h)) for h in hosts if h]:
            continue
        raise NotAllowedError(
            f"{name} = {address!r} would get {key}, which is sent to hosts of its owner's choice only; "
            f"the owner names them under run: in the site file{f', or as {variable}' if variable else ''}"
        )


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port of a URL; a URL that cannot be read equals no other."""
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname, parts.port
    except ValueError:
        return "", url, None
