"""A run is a folder. This is the only module that knows the names of its files.

>>> run = RunFolder(Path("runs/demo-20260131-101500"))
>>> run.metrics_file.name, run.eval_file(50).name, run.step_folder(50).name
('metrics.jsonl', 'step-000050.jsonl', 'step-000050')
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from palestra.core.config import RunConfig, flatten, parse_yaml, without_removed
from palestra.core.errors import (
    NotFoundError,
    SettingError,
    StateError,
    StorageError,
    UnreadableFileError,
    UnsupportedError,
)
from palestra.core.files import MANIFEST, new_folder, read_jsonl, read_regular, slug, write_json
from palestra.core.text import show_path

FORMAT = 1  # written into run.json; folders of Palestra 0.1 have none and count as 0
STATE = "state.json"  # of a checkpoint: where the loop stands
# how rollouts are made. agent: our agent loop; function: a user's rollout_func; program: an agent with its own program;
# wire: environments over HTTP; prompts: StepTrainer; endpoint: a chat endpoint is scored; other: another trainer's run
RunKind = Literal["agent", "function", "program", "wire", "prompts", "endpoint", "other"]
MAX_STEP = 2**53
_step_name = "step-{:06d}".format
TOKENS_NAME = "step-{:06d}.npy"  # in RunFolder.tokens
MAX_CONFIG_BYTES = 1 << 20
EvalName = Literal["before", "after"] | int  # an int is the step after which the evaluation ran


class PathBelow:
    """A file or folder of a run folder, by its name there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunFolder, owner: type[RunFolder]) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run, for example runs/demo-20260131-101500."""

    path: Path

    @classmethod
    def create(
        cls, output_dir: Path, name: str, config: RunConfig, record: Mapping[str, Any], at: Path | None = None
    ) -> RunFolder:
        """Make a new run folder in `output_dir`, or turn the folder `at`, which must not hold a run, into one."""
        run = cls(new_folder(output_dir, name) if at is None else at)
        if run.has_begun:
            raise StateError(f"{run.path} holds a run already; continue it with --resume, or choose another folder")
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make the run folder {run.path} ({error.strerror}); choose another") from None
        config.save(run.config_file)
        about = {"format": FORMAT, "name": slug(name), "created": time.strftime("%Y%m%d-%H%M%S")}
        write_json(run.record_file, {**about, **record})  # last: from here on the folder counts as a run
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A run folder that exists, in a format that this version reads."""
        run = cls(path)
        if not run.has_begun:
            raise NotFoundError(f"{path} is not a run folder: it has no run.json. Give one that `palestra train` made")
        if run.format > FORMAT:
            raise UnsupportedError(
                f"{path} is a run folder of format {run.format}, and this Palestra reads formats up to {FORMAT}; "
                "update it: pip install -U palestra"
            )
        return run

    @property
    def has_begun(self) -> bool:
        """Whether a training has made the folder its own."""
        return self.record_file.is_file()

    # files and folders

    record_file = PathBelow("run.json")  # format, name, source (the agent's file), when it was made, steps in total
    config_file = PathBelow("config.yaml")  # the resolved config
    metrics_file = PathBelow("metrics.jsonl")  # one object a step
    rollouts_file = PathBelow("rollouts.jsonl")  # one object a rollout of training: messages, scores, token ids
    tokens = PathBelow("tokens")  # step-000050.npy: what the learner found for each token (`train.update`)
    queue_file = PathBelow("queue.sqlite")  # groups sampled ahead of their step, with rollout.max_staleness
    demonstrations_file = PathBelow("demonstrations.jsonl")  # what sft and rft stages learn from, one rollout a line
    teacher_file = PathBelow("teacher.jsonl")  # a teacher's conversations that passed, in OpenAI's chat form
    evals = PathBelow("evals")  # rollouts of the evaluations: before.jsonl, step-000050.jsonl, after.jsonl
    checkpoints = PathBelow("checkpoints")  # step-000050, …
    model = PathBelow("model")  # the trained weights; written aside and renamed: where it exists, it is whole
    export = PathBelow("export")  # what `palestra export` made of them
    report_file = PathBelow("report.json")
    report_page = PathBelow("report.html")
    dashboard_index = PathBelow("dashboard.db")  # made again where it is missing
    request_file = PathBelow("request.json")  # of a run in the background
    index_file = PathBelow("index.json")  # what the index of runs needs to list the run again, should it be lost
    lock_file = PathBelow("run.lock")  # held by the process that trains
    logs = PathBelow("logs")
    wire = PathBelow("wire")  # what environments in other processes have posted; only runs over the wire have it
    env_checkpoints = PathBelow("environments")  # where environments in other processes may keep their state
    tokenizer = PathBelow("tokenizer")
    tinker = PathBelow("tinker")  # weights/NAME with the optimizer's state, sampler_weights/NAME without
    tensorboard = PathBelow("tensorboard")
    wandb_id_file = PathBelow("wandb_run_id")
    wandb_url_file = PathBelow("wandb_url")
    mlflow_id_file = PathBelow("mlflow_run_id")
    mlflow_database = PathBelow("mlflow.db")
    mlflow_artifacts = PathBelow("mlflow_artifacts")

    def tokens_file(self, step: int) -> Path:
        return self.tokens / TOKENS_NAME.format(step)

    def tokens_files(self) -> dict[int, Path]:
        """The token files on disk, by step."""
        return {step_of(path.with_suffix("")): path for path in sorted(self.tokens.glob("step-[0-9]*.npy"))}

    def eval_file(self, name: EvalName) -> Path:
        return self.evals / f"{_step_name(name) if isinstance(name, int) else name}.jsonl"

    def step_folder(self, step: int) -> Path:
        return step_folder(self.checkpoints, step)

    def log_file(self, part: str) -> Path:
        """The log of one process: trainer, env, api, supervisor."""
        return self.logs / f"{part}.log"

    # what they hold

    @property
    def record(self) -> dict[str, Any]:
        """run.json: what the run is."""
        try:
            return dict(json.loads(read_regular(self.record_file)))
        except (ValueError, TypeError, RecursionError) as error:
            raise UnreadableFileError(
                f"{self.record_file} is not valid JSON ({error}); restore it from a copy"
            ) from None

    def environment(self, key: str = "environment") -> tuple[str, dict[str, Any]] | None:
        """Name and settings of the environment that run.json names; None if it names none."""
        match self.record.get(key):
            case None:
                return None
            case {"name": str(name), "settings": dict(settings)}:
                return name, settings
            case _:
                raise UnreadableFileError(f"{self.record_file}: {key} has no name and settings; restore it from a copy")

    def add_to_record(self, **values: Any) -> None:
        """Write more into run.json, if it is new."""
        if (record := self.record) != (more := record | values):
            write_json(self.record_file, more)

    @property
    def format(self) -> int:
        version = self.record.get("format", 0)
        if type(version) is not int:
            raise UnreadableFileError(f"{self.record_file}: format is not a whole number; restore the file from a copy")
        return version

    @property
    def wire_command(self) -> str | None:
        """The command that continues a run over the wire that has no environment of ours; None for other runs."""
        record = self.record if self.has_begun else {}
        command = "env run-atropos" if "atropos" in record else f"train --env-url {record.get('env_url')}"
        return f"palestra {command} --resume {shlex.quote(show_path(self.path))}" if "env_url" in record else None

    @property
    def config(self) -> RunConfig:
        import yaml

        try:
            text = read_regular(self.config_file, MAX_CONFIG_BYTES).decode("utf-8")
            if text.startswith("---") and not text.rstrip().endswith("\n..."):  # files of 0.1 have neither
                raise ValueError("it was cut off: its last line, '...', is missing")
            settings = parse_yaml(text)
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            settings, reason = None, (str(error).splitlines() or [""])[0]
        else:
            reason = "it holds no settings"
        if not isinstance(settings, dict):
            raise UnreadableFileError(f"{self.config_file} cannot be read ({reason}); restore it from a copy")
        return RunConfig.build(without_removed(flatten(settings), str(self.config_file)))

    def tracking(self) -> dict[str, str | None]:
        """The names under which it is tracked, and where Weights & Biases shows it, if it does."""
        try:
            settings = json.loads(read_regular(self.request_file))["settings"]
            names = RunConfig().with_settings({k: v for k, v in settings.items() if k.startswith("track.")}).track
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            names = self.config.track if self.config_file.is_file() else RunConfig().track
        url = self.wandb_url_file.read_text(encoding="utf-8") if self.wandb_url_file.is_file() else None
        return {"project": names.project, "run_name": names.run_name or self.path.name, "url": url}

    def metrics(self) -> list[dict[str, float]]:
        """All rows so far, one a step; an evaluation during training adds a row of its own for its step."""
        return numbered_rows(read_jsonl(self.metrics_file))

    def elapsed_s(self) -> float:
        """How long the run has taken by its metrics; of runs of 0.1, the steps alone."""
        rows = self.metrics()
        steps = sum(row.get("sample_seconds", 0.0) + row.get("train_seconds", 0.0) for row in rows)
        return max([steps, *(row["elapsed_seconds"] for row in rows if "elapsed_seconds" in row)])

    def rollouts(self) -> Iterator[dict[str, Any]]:
        """The rollouts of training, read one at a time: the file may be larger than memory."""
        return read_jsonl(self.rollouts_file)

    def eval_names(self) -> list[EvalName]:
        """The evaluations on disk: "before", steps in ascending order, "after"."""
        steps = sorted(int(path.stem.removeprefix("step-")) for path in self.evals.glob("step-[0-9]*.jsonl"))
        names: list[EvalName] = ["before", *steps, "after"]
        return [name for name in names if self.eval_file(name).is_file()]

    def report(self) -> dict[str, Any] | None:
        """report.json; None until the run has one."""
        try:
            return dict(json.loads(read_regular(self.report_file)))
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def step_checkpoints(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        return step_checkpoints(self.checkpoints)

    def last_checkpoint(self) -> Path | None:
        return last_checkpoint(self.checkpoints)

    def partial_checkpoints(self) -> list[Path]:
        """Checkpoints that are being written, or were when the trainer was killed."""
        return sorted(self.checkpoints.glob(".step-*.partial"))

    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the best reward, by what the newest one recorded; None where it was not kept."""
        last = self.last_checkpoint()
        try:
            best = None if last is None else json.loads(read_regular(last / STATE))["best_step"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return next((path for path in self.step_checkpoints() if step_of(path) == best), None)

    def checkpoint(self, name: str) -> Path:
        """The finished checkpoint of a step, or "best", or "last"."""
        steps = {str(step_of(path)): path for path in self.step_checkpoints()}
        words = steps | {"best": self.best_checkpoint(), "last": self.last_checkpoint()}
        path = words.get(name.removeprefix("step-").lstrip("0") or name)
        if path is None:
            known = ", ".join(word for word, path in words.items() if path is not None)
            raise NotFoundError(f"{self.path} has no checkpoint {name!r}; it has {known or 'none'}")
        return path

    @classmethod
    def around(cls, path: Path) -> RunFolder | None:
        """The run folder that a model or a checkpoint lies in."""
        path = path.absolute()
        run = cls(path.parent.parent if path.parent.name == "checkpoints" else path.parent)
        return run if run.has_begun and (path == run.model or path.parent == run.checkpoints) else None


@dataclass(frozen=True, slots=True)
class Resume:
    """How to continue a run: by default from its newest intact checkpoint to its planned end."""

    folder: Path
    checkpoint: str | None = None  # a step, or "best"
    max_steps: int | None = None  # steps in total
    finish: bool = False  # no more steps: score and save what there is

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))  # a text will do

    @classmethod
    def of(cls, run: Path | str | Resume | None) -> Resume | None:
        return cls(Path(run)) if isinstance(run, Path | str) else run

    def config(self, planned: RunConfig, done: int) -> RunConfig:
        """The run's config from now on; the checkpoint has `done` steps."""
        steps = max(1, done) if self.finish else self.max_steps
        if steps is None:
            return planned
        config = planned.with_settings({"train.max_steps": steps})
        if int(steps) < done:
            raise SettingError(
                f"train.max_steps={steps}, but {self.folder} has {done} steps already; give {done} or more, "
                f"or go back: palestra train --resume {shlex.quote(str(self.folder))} --from-checkpoint STEP"
            )
        return config


def numbered_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """The rows of metrics that have a step, with their numbers; other values cannot be shown or compared."""

    def is_number(value: Any) -> bool:  # that fits a float: integers in a file have no bound
        return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1e300)

    numbers = [{key: value for key, value in row.items() if is_number(value)} for row in rows]
    return [row for row in numbers if "step" in row and abs(row["step"]) < MAX_STEP]


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / _step_name(step)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def step_checkpoints(checkpoints: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted((manifest.parent for manifest in checkpoints.glob(f"step-[0-9]*/{MANIFEST}")), key=step_of)


def last_checkpoint(checkpoints: Path) -> Path | None:
    finished = step_checkpoints(checkpoints)
    return finished[-1] if finished else None
