"""Starts trainings from the dashboard's form: fields with values, locked settings, and error messages."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from palestra.core import children
from palestra.core.config import RunConfig, flatten
from palestra.core.errors import NotFoundError, PalestraError, SettingError, UnsupportedError, UserCodeError
from palestra.core.files import read_regular, slug
from palestra.envs.discover import MAX_BYTES, DiscoveredEnv, discover
from palestra.extras.agent_tools.answers import Refusal
from palestra.extras.agent_tools.config_fields import TRACKING_NAME, ConfigField, EnvDescription, Progress, describe
from palestra.extras.agent_tools.inference import InferenceTest
from palestra.extras.agent_tools.locks import Site, load_site
from palestra.extras.agent_tools.pending_run import PendingRunConfig
from palestra.runs.manager import Run, RunManager
from palestra.servers.web import SubjectBody, TestBody

DEMO = "demo"
_CONFIG_S = 60.0
_MAX_AGENTS = 100
_MAX_DESCRIBED = 50
# shown first; the others stand behind "all settings"
_COMMON = (
    "model.name", "train.max_steps", "train.learning_rate", "train.problems_per_step", "rollout.group_size",
    "rollout.max_new_tokens", "rollout.temperature", "lora.r", "eval.every", "eval.cases", "checkpoint.every",
    "run.seed",
)  # fmt: skip
_KINDS = {"integer": "integer", "number": "number", "boolean": "boolean", "string": "text"}


class FormLauncher:
    """Starts runs, tests and exports for the dashboard. Code of users is read in processes of its own."""

    def __init__(self, manager: RunManager, site: Site | None = None, folders: Sequence[Path] = ()) -> None:
        """`folders`: where code may lie besides the working directory. Without a `site`, that of the site file."""
        self._manager = manager
        self._site = site or load_site()
        self._folders = [Path.cwd(), *map(Path.resolve, folders)]
        self._testing = threading.Lock()
        self._described: dict[tuple[str, Path, int], EnvDescription] = {}

    def environments(self) -> dict[str, Any]:
        """The environments, the demo, and files that look like agent files, by their text alone."""
        discovery = discover()
        errors = {str(path): reason for path, reason in discovery.errors.items()}
        ordered = sorted(discovery.environments, key=lambda env: (bool(env.preset), env.origin != "built-in"))
        here, *named = self._folders
        folders = [here, here / "agents", here / "examples", *named]
        files = [path for folder in folders for path in sorted(folder.glob("*.py")) if _is_agent_file(path)]
        agents = [str(path.relative_to(here) if path.is_relative_to(here) else path) for path in files[:_MAX_AGENTS]]
        return {"environments": [_listed(env) for env in ordered], "errors": errors, "agents": [DEMO, *agents]}

    def environment(self, name: str) -> dict[str, Any]:
        """One environment, with the docstrings of its file and of its class, read and not run."""
        env = discover().named(name)
        tree = _parsed(env.file_path)
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == env.class_name]
        texts = [ast.get_docstring(tree), *(ast.get_docstring(node) for node in classes)]
        docs = "\n\n".join(dict.fromkeys(text for text in texts if text)) or env.description
        return {**_listed(env), "docs": docs, "tools": None}

    def code_file(self, name: str) -> Path:
        path = Path(name)
        is_file = os.path.isfile(name) and path.suffix == ".py"  # False for names that no file can have
        if not (is_file and any(path.resolve().is_relative_to(folder) for folder in self._folders)):
            raise NotFoundError(
                f"there is no Python file {name[:200]} in the working directory of this server; other folders are "
                "named at its start: palestra dashboard --agents-folder FOLDER"
            )
        return path

    def form(self, body: SubjectBody) -> dict[str, Any]:
        draft = self._draft(body)
        fields = [_field(f, draft) for f in draft.open_fields() if f.name != TRACKING_NAME]
        locked = [
            {"name": row["name"], "value": row["locked_value"], "description": row["description"]}
            for row in draft.locked_rows()
        ]
        return {"subject": draft.env.name, "fields": fields, "locked": locked}

    def check(self, body: SubjectBody) -> dict[str, str]:
        errors: dict[str, str] = {}
        draft = self._edited(body, errors)
        if body.environment is not None and not errors:
            try:
                describe(draft.env, draft.env_settings())  # they must fit together, too
            except PalestraError as error:
                errors[""] = str(error)
        return errors

    def start(self, body: SubjectBody) -> Run:
        request = self._edited(body).request()
        if body.environment is None:
            file = None if body.agent_file == DEMO else str(Path(str(body.agent_file)).resolve())
            request = replace(request, environment=None, environment_name=None, agent_file=file)
        if body.name:
            request = replace(request, name=slug(body.name))
        return self._manager.start(request, max_active=self._site.limits.active_runs)

    def test(self, body: TestBody, progress: Progress, cancelled: threading.Event) -> Mapping[str, Any]:
        draft = self._edited(body)
        if body.environment is None:
            raise UnsupportedError("only an environment can be tested this way; score an agent with `palestra eval`")
        test = InferenceTest(draft, body.num_steps, body.group_size, self._manager.home, progress, cancelled)
        with self._testing:
            return test.run(body.models)

    def _edited(self, body: SubjectBody, errors: dict[str, str] | None = None) -> PendingRunConfig:
        """With the values of the form; a wrong one raises Refusal, or adds to `errors`."""
        draft = self._draft(body)
        for name, value in body.values.items():
            try:
                draft = draft.edit(name, value)
            except Refusal as refusal:
                if errors is None:
                    raise
                errors[name] = str(refusal)
        return draft

    def _draft(self, body: SubjectBody) -> PendingRunConfig:
        if (body.environment is None) == (body.agent_file is None):
            raise SettingError("name an environment or an agent file, and not both")
        if body.environment is not None:
            subject = discover().named(body.environment)
        else:  # an agent file has no class
            path = Path(DEMO) if body.agent_file == DEMO else self.code_file(str(body.agent_file))
            subject = DiscoveredEnv(path.stem, "", path, "", "configured")
        changed = subject.file_path.stat().st_mtime_ns if subject.file_path.is_file() else 0
        key = (subject.name, subject.file_path, changed)
        if key not in self._described:  # cached until the file changes: each change of a form asks for it
            made = describe(subject) if subject.class_name else _describe_agent(subject)
            self._described = dict([*self._described.items(), (key, made)][-_MAX_DESCRIBED:])
        return PendingRunConfig.of(subject, self._described[key], self._site)


def _is_agent_file(path: Path) -> bool:
    targets = [target for node in _parsed(path).body if isinstance(node, ast.Assign) for target in node.targets]
    return {"agent", "suite"} <= {target.id for target in targets if isinstance(target, ast.Name)}


def _parsed(path: Path) -> ast.Module:
    """The syntax tree of a file; empty if it cannot be read or parsed."""
    try:
        return ast.parse(read_regular(path, MAX_BYTES))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ast.Module([], [])


def _describe_agent(found: DiscoveredEnv) -> EnvDescription:
    """It has no fields of its own, and the settings that it names."""
    agent_file = str(found.file_path)
    words = [] if agent_file == DEMO else [str(found.file_path.resolve())]
    child = children.start(children.isolated("-m", "palestra", "config", *words, "--json"))
    try:
        out, complaints = child.communicate(timeout=_CONFIG_S)
    except subprocess.TimeoutExpired:
        raise UserCodeError(f"reading {agent_file} took longer than {_CONFIG_S:g} s") from None
    finally:
        children.end(child)
    if child.returncode:
        raise UserCodeError(complaints.strip().rpartition("Error: ")[2] or f"{agent_file} cannot be read")
    defaults = flatten(RunConfig().model_dump(mode="json"))
    own = {key: value for key, value in flatten(json.loads(out)).items() if value != defaults.get(key)}
    return EnvDescription([], own)


def _listed(env: DiscoveredEnv) -> dict[str, Any]:
    return {
        **{name: getattr(env, name) for name in ("name", "description", "origin", "dialect")},
        "file": str(env.file_path),
        "family": env.name.partition("/")[0] if env.preset else None,
    }


def _field(field: ConfigField, draft: PendingRunConfig) -> dict[str, Any]:
    choices, options = field.schema.get("enum"), field.schema.get("anyOf") or [field.schema]
    types = [option.get("type") for option in options if option.get("type") != "null"]
    kind = "choice" if choices else _KINDS.get(types[0], "json") if len(types) == 1 else "json"
    is_own = field.setting is None
    return {
        **{name: getattr(field, name) for name in ("name", "type", "default", "description")},
        "section": "env" if is_own else (field.setting or "").rpartition(".")[0] or "run",
        "kind": kind,
        "value": draft.value(field.name),
        "choices": choices,
        "maximum": draft.site.maximums.get(field.key or ""),
        "common": is_own or field.name in _COMMON,
    }
