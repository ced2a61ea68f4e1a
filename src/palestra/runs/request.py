"""What is asked of the run manager, and how it is kept in the run folder. Secrets are not taken."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.files import write_json, write_text
from palestra.core.secrets import redact

FILE = "request.json"
SETTINGS = "settings.yaml"
_SECRET = re.compile(r"(api_?key|secret|passw(or)?d|credentials?|(access|auth|api|hf)_token|^token)$", re.IGNORECASE)
_HARMLESS = ("", "none", "x", "empty")


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What to train on, and how.

    `settings` are dotted keys of RunConfig, `env_settings` fields of the environment's own config, and
    `server_settings` what an Atropos environment is told of its inference server. `wire` says whether the
    environment runs as a process of its own; None: only where it must (Atropos). Neither environment nor
    agent file: the demo.
    """

    environment: str | None = None
    agent_file: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    env_settings: Mapping[str, Any] = field(default_factory=dict)
    server_settings: Mapping[str, Any] = field(default_factory=dict)
    wire: bool | None = None
    name: str | None = None
    backend: str = "local"

    @property
    def subject(self) -> str:
        """What is trained on, in a word: the environment, the agent's file, or the demo."""
        if self.environment is not None:
            return self.environment
        return Path(self.agent_file).stem if self.agent_file else "demo"

    def check(self) -> None:
        """Refuse what can be seen to be wrong without running anybody's code."""
        if self.environment is not None and self.agent_file is not None:
            raise PalestraError("train on an environment or on an agent file, not on both")
        if self.backend != "local":
            raise PalestraError(f"backend={self.backend!r} cannot run here yet; use 'local'")
        if self.wire and self.environment is None:
            raise PalestraError("only an environment can run as a process of its own (wire); give one")
        RunConfig.build(self.settings)
        for kind in ("settings", "env_settings", "server_settings"):
            refuse_secrets(getattr(self, kind), kind)

    def save(self, folder: Path, cwd: Path) -> None:
        """request.json says all of it; settings.yaml is the part that `--config` reads."""
        import yaml

        write_json(folder / FILE, {**asdict(self), "cwd": str(cwd)})
        sections = {"env": dict(self.env_settings), "openai": dict(self.server_settings)}
        content = dict(self.settings) | {name: section for name, section in sections.items() if section}
        write_text(folder / SETTINGS, yaml.safe_dump(content, sort_keys=False))

    @classmethod
    def load(cls, folder: Path) -> tuple[RunRequest, Path]:
        """The request, and the folder from which it was made."""
        data = json.loads((folder / FILE).read_text())
        cwd = Path(data.pop("cwd"))
        return cls(**data), cwd if cwd.is_dir() else folder


def refuse_secrets(settings: Mapping[str, Any], kind: str) -> None:
    """Keys and passwords belong into the environment of the process: settings are written to disk and shown."""
    for name, value in settings.items():
        named_so = _SECRET.search(name) and isinstance(value, str) and value.lower() not in _HARMLESS
        if named_so or redact(str(value)) != str(value):
            raise PalestraError(
                f"{kind}: {name} holds a secret, and settings are written to disk; set it as an environment variable"
            )
