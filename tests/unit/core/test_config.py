"""Settings: every one is read, typed, named, and refused where it has no effect."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from palestra.algo.losses import Objective
from palestra.core.config import (
    REMOVED_SETTINGS,
    TRANSLATIONS,
    RemovedSetting,
    RunConfig,
    flatten,
    load_yaml,
    read_yaml_config,
    translate,
)
from palestra.core.config_sections import Section
from palestra.core.errors import PalestraError, SettingError, UnreadableFileError
from palestra.core.grpo_config import GRPOTrainingConfig
from palestra.core.run_folder import RunFolder
from palestra.rollout.agent_loop import AttemptLimits
from palestra.runs.request import RunRequest


def test_later_layers_win_and_leave_the_rest_alone() -> None:
    config = RunConfig.build({"train": {"learning_rate": 1.0, "epochs": 3}}, {"train": {"learning_rate": 2.0}})
    assert (config.train.learning_rate, config.train.epochs) == (2.0, 3)


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMOVED_SETTINGS, "train.gone", RemovedSetting(0.0, "use train.epochs", "0.2.0"))


@pytest.mark.usefixtures("removed")
def test_a_removed_setting_is_rejected_with_what_to_use_instead(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {gone: 0.0}")
    for build in (
        lambda: RunConfig.build({"train": {"gone": 0.0}}),
        lambda: RunConfig.build({"train.gone": 1.0}),
        lambda: read_yaml_config(file),
    ):
        with pytest.raises(SettingError, match=r"train\.gone was removed: use train\.epochs"):
            build()


@pytest.mark.usefixtures("removed")
def test_a_stored_run_loads_with_a_removed_setting_at_its_default_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunFolder.create(tmp_path, "old", RunConfig(), {})
    text = run.config_file.read_text()
    run.config_file.write_text(text.replace("\ntrain:\n", "\ntrain:\n  gone: 0.0\n"))
    assert run.config == run.config == RunConfig()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    run.config_file.write_text(text.replace("\ntrain:\n", "\ntrain:\n  gone: 0.5\n"))
    with pytest.raises(SettingError, match=r"train\.gone = 0\.5.* 0\.2\.0"):
        _ = run.config


@pytest.mark.usefixtures("removed")
def test_a_stored_request_loads_with_a_removed_setting_at_its_default_only(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "old", RunConfig(), {})
    RunRequest(settings={"train.gone": 0.0, "train.epochs": 2}).save(run)
    assert RunRequest.load(run.request_file).settings == {"train.epochs": 2}
    RunRequest(settings={"train.gone": 0.5}).save(run)
    with pytest.raises(SettingError):
        RunRequest.load(run.request_file)


EXACT, FLOOR = {"model.exact": True}, {"train.importance_floor": 0.5, "train.importance_correction": "token_mask"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train": {"learning_rat": 1.0}}, r"train\.learning_rat'\. Did you mean 'train\.learning_rate'\?"),
        ({"lora": {"r": 8}, "lora.r": 16}, r"lora\.r is given twice"),
        ({"rollout": {"group_size": 1}}, r"num_generations\) = 1 gives every advantage 0.*use 2 or more"),
        ({"rollout": {"temperature": 0}}, r"eval\.temperature"),
        ({"seed": 2**32}, "^seed: Input should be"),
        ({"train.adam_beta1": 1.5}, r"^train\.adam_beta1: Input should be"),
        ({"train.adam_beta2": "nan"}, r"^train\.adam_beta2: Input should be"),
        ({"train.learning_rate": "inf"}, r"^train\.learning_rate: Input should be"),
        ({"train.entropy_coefficient": "nan"}, r"^train\.entropy_coefficient: Input should be"),
        ({"rollout.temperature": "inf"}, r"^rollout\.temperature: Input should be"),
        (FLOOR | {"train.importance_correction": "auto"}, "importance_floor"),
        (FLOOR | {"train.importance_correction": "none"}, "importance_floor"),
        (FLOOR | {"train.importance_cap": 0.5}, "importance_cap"),
        ({"train.deterministic": True, "rollout.max_staleness": 1}, "leave out rollout.max_staleness"),
        ({"train.deterministic": True, "backend": "tinker"}, "other backends than local"),
        (EXACT | {"model.engine": "plain"}, "model.exact needs our engine"),
        (EXACT | {"rollout.top_p": 0.9}, "leave out rollout.top_p"),
        (EXACT | {"rollout.constrain_tool_calls": True}, "leave out rollout.top_p"),
    ],
)
def test_what_no_training_can_use_is_refused_before_it_starts(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        RunConfig.build(settings)


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({"train.max_grad_norm": "inf"}, "train.max_grad_norm", float("inf")),  # no clipping
        ({"eval.temperature": 0}, "eval.temperature", 0),
        ({"lora.load_in_4bit": "true"}, "lora.r", 16),  # implies an adapter
        ({"lora.load_in_4bit": True, "lora.r": 4}, "lora.r", 4),
        ({}, "lora.dropout", 0.0),  # the sampler has none, so it would sample from another policy than the learner's
        *((FLOOR | {"train.importance_correction": name}, "train.importance_floor", 0.5)
          for name in ("token_truncate", "sequence_mask", "sequence_truncate")),
    ],
)  # fmt: skip
def test_a_setting_that_has_a_meaning_is_taken(settings: dict[str, Any], key: str, value: Any) -> None:
    assert RunConfig.build(settings).value(key) == value


def test_a_saved_config_reads_back_equal(tmp_path: Path) -> None:
    import yaml

    config = RunConfig.build({"lora": {"r": 8}, "model.chat_template_kwargs": {"enable_thinking": False}})
    config.save(tmp_path / "run.yaml")
    assert RunConfig.build(yaml.safe_load((tmp_path / "run.yaml").read_text())) == config
    assert RunConfig.build(read_yaml_config(tmp_path / "run.yaml")) == config


LORA: dict[str, Any] = {"lora_r": 4, "use_lora": True}
VLLM_SERVER = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://b:1"}
SAVES = {"save_steps": 7, "per_device_batch_size": 2}


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"per_device_batch_size": 3, "gradient_accumulation_steps": 4}, {"train.problems_per_step": 12}),
        ({"per_device_batch_size": 8}, {"train.problems_per_step": 16}),
        ({"num_generations": 6, "world_model_coeff": 0.1}, {"rollout.group_size": 6, "echo.coefficient": 0.1}),
        ({"torch_dtype": "float16", "report_to": "wandb"}, {"model.dtype": "float16", "track.report_to": ["wandb"]}),
        ({}, dict.fromkeys(("train.problems_per_step", "train.epochs", "rollout.group_size"))),  # left to the run
        ({}, {"rollout.max_new_tokens": None, "model.dtype": "auto"}),  # bfloat16 on a GPU, float32 on a CPU
        (LORA, {"lora.r": 4, "lora.dropout": 0.0}),
        (LORA | {"use_lora": False}, {"lora.r": 0}),
        (LORA | {"use_lora": False, "load_in_4bit": True}, {"lora.r": 4}),
        ({"use_vllm": True, "vllm_max_model_len": 64}, {"vllm.mode": "colocate", "vllm.max_model_len": 64}),
        (VLLM_SERVER, {"vllm.mode": "server", "vllm.url": "http://b:1"}),
        ({"use_vllm": False, "vllm_mode": "colocate"}, {"vllm.mode": "off"}),  # at its default
        (SAVES | {"save_strategy": "no"}, {"checkpoint.every": 0}),
        (SAVES | {"save_strategy": "steps"}, {"checkpoint.every": 7}),
        (SAVES | {"save_strategy": "epoch"}, {"checkpoint.every": 3}),
    ],
)
def test_the_flat_config_gives_the_settings_of_a_run(given: dict[str, Any], settings: dict[str, Any]) -> None:
    config = GRPOTrainingConfig(**given).to_run_config(problems=10)
    assert {key: config.value(key) for key in settings} == settings


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"save_strategy": "epoch"}, "set per_device_batch_size"),
        ({"num_generation": 4}, "Did you mean 'num_generations'"),
        ({"num_generations": 1}, "use 2 or more"),
    ],
)
def test_the_flat_config_refuses_what_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PalestraError, match=said):
        GRPOTrainingConfig(**given).to_run_config(problems=10)


def test_sizes_of_a_step_that_are_given_stay() -> None:
    config = RunConfig.build({"rollout.group_size": 16}).with_step_size(8, 8, 256)
    assert (config.train.problems_per_step, config.rollout.group_size, config.rollout.max_new_tokens) == (8, 16, 256)
    assert config.with_step_size(2, 2, 2) is config


@pytest.mark.parametrize(
    ("parameters", "rate", "lora_rate"),
    [
        (7_000_000_000, 1e-6, 2e-5),
        (1_600_000_000, 1.25e-6, 6.25e-5),
        (135_000_000, 1e-5, 1e-4),
        (1_800_000, 1e-3, 1e-4),
    ],
)
def test_the_learning_rate_suits_the_model_unless_it_is_given(parameters, rate, lora_rate):
    assert RunConfig().with_learning_rate(parameters).train.learning_rate == pytest.approx(rate)
    lora = RunConfig.build({"lora.r": 8}).with_learning_rate(parameters)
    assert lora.train.learning_rate == pytest.approx(lora_rate)
    assert RunConfig.build({"train.learning_rate": 3e-6}).with_learning_rate(parameters).train.learning_rate == 3e-6


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "a: " + "{b: " * 200 + "1" + "}" * 200,
        "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
        + "".join(f"c{i + 1}: &c{i + 1} [{','.join([f'*c{i}' if i else '*b'] * 9)}]\n" for i in range(8)),
        "a: &a\n  b: *a\n",
    ],
)
def test_yaml_that_is_deep_or_grows_by_its_aliases_is_refused(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UnreadableFileError, match=r"run\.yaml"):
        load_yaml(path)


def test_yaml_with_a_few_aliases_is_read(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: '[[['}\n")
    assert load_yaml(path) == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": "[[["}}


SOURCE = Path(__file__).parents[3] / "src" / "palestra"
SECTIONS = {
    name: info.annotation.__name__
    for name, info in RunConfig.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
}
BY_CLASS = {kind: name for name, kind in SECTIONS.items()}


def dotted(node: ast.AST) -> str:
    """`ast.unparse`, which takes long for the names and attributes that most nodes are."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ast.unparse(node)


class Reads(ast.NodeVisitor):
    """The dotted keys that one module reads."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.names: dict[str, str] = {}  # a variable or attribute -> the section that it holds

    def section(self, node: ast.AST) -> str | None:
        """The section that an expression gives, "" for a whole config."""
        if isinstance(node, ast.Name | ast.Attribute):
            own = node.id if isinstance(node, ast.Name) else node.attr
            if isinstance(node, ast.Attribute) and own in SECTIONS and self.section(node.value) == "":
                return own
            if (name := dotted(node)) in self.names:
                return self.names[name]
            return "" if own.lstrip("_") == "config" else None
        return None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        found = self.section(node.value)
        if found is not None and isinstance(node.ctx, ast.Load):
            self.keys.add(f"{found}.{node.attr}" if found else node.attr)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs = zip(target.elts, node.value.elts, strict=True) if both else [(target, node.value)]
            for name, value in pairs:
                self._hold(name, self.section(value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._hold(node.target, BY_CLASS.get(ast.unparse(node.annotation)))
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before = dict(self.names)
        for argument in [a for a in (*node.args.args, *node.args.kwonlyargs) if a.arg != "self"]:
            kind = ast.unparse(argument.annotation) if argument.annotation else ""
            self._hold(ast.Name(argument.arg), BY_CLASS.get(kind, "" if kind == "RunConfig" else None))
        self.generic_visit(node)
        self.names = before

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = dict(self.names)
        self._hold(ast.Name("self"), "" if node.name == "_CoreConfig" else BY_CLASS.get(node.name))
        for part in node.body:  # the fields of a dataclass
            if isinstance(part, ast.AnnAssign) and ast.unparse(part.annotation) in BY_CLASS:
                self.names[f"self.{ast.unparse(part.target)}"] = BY_CLASS[ast.unparse(part.annotation)]
        self.generic_visit(node)
        self.names = before

    def _hold(self, target: ast.AST, section: str | None) -> None:
        name = dotted(target)
        self.names.pop(name, None)
        if section is not None:
            self.names[name] = section


def keys_read(paths: Iterator[Path]) -> set[str]:
    found: set[str] = set()
    for path in paths:
        reads = Reads()
        reads.visit(ast.parse(path.read_text(encoding="utf-8")))
        found |= reads.keys
    return found


@pytest.mark.extras
def test_every_setting_of_a_run_is_read_by_some_code() -> None:
    # train.limits.attempt_limits copies the limits of attempts by their names; rollout/agent_loop.py reads them.
    copied = {f"rollout.{field.name}" for field in fields(AttemptLimits)}
    unread = set(RunConfig.keys()) - keys_read(SOURCE.rglob("*.py")) - copied
    assert not unread, f"no code reads {sorted(unread)}: let them act, refuse them by name, or remove them"


def test_every_field_of_the_objective_is_read_by_the_losses() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (SOURCE / "algo").glob("*.py")]
    attributes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    read = {node.attr for node in attributes if ast.unparse(node.value) in ("self", "objective")}
    assert not {field.name for field in fields(Objective)} - read


def test_every_limit_of_an_attempt_is_read() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")]
    attributes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    read = {node.attr for node in attributes if ast.unparse(node.value).endswith("limits")}
    assert not {field.name for field in fields(AttemptLimits)} - read


def test_the_walk_tells_a_section_from_another_object_of_its_name() -> None:
    reads = Reads()
    reads.visit(
        ast.parse(
            "def f(train: TrainSection, config: RunConfig):\n"
            "    echo, other = config.echo, self.model.dtype\n"
            "    return train.loss, echo.coefficient, rollout.top_k\n"
        )
    )
    assert reads.keys == {"echo", "train.loss", "echo.coefficient"}


def other_value(name: str, config: Any) -> Any:
    """A value that is not the default."""
    value, kind = getattr(config, name), type(config).model_fields[name].annotation
    if name == "report_to":
        return "wandb"
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + (1 if isinstance(value, int) else 0.5)
    choices = [choice for choice in get_args(kind) if isinstance(choice, str) and choice != value]
    return (
        choices[-1]
        if choices
        else ["q_proj"]
        if "list" in str(kind)
        else 7
        if {int, float} & set(get_args(kind))
        else "elsewhere"
    )


VLLM = [name for name in GRPOTrainingConfig.model_fields if name.startswith("vllm_")]

# What a field needs beside it to have a meaning.
TOGETHER: dict[str, dict[str, Any]] = {
    "lora_r": {"use_lora": True},
    "save_steps": {"save_strategy": "steps"},
    **{name: {"use_vllm": True} for name in VLLM},
    "vllm_server_base_url": {"use_vllm": True, "vllm_mode": "server"},
}


@pytest.mark.parametrize("name", list(GRPOTrainingConfig.model_fields))
def test_every_field_of_the_flat_config_changes_the_run(name: str) -> None:
    beside = TOGETHER.get(name, {})
    changed = GRPOTrainingConfig(**beside, **{name: other_value(name, GRPOTrainingConfig())})
    assert changed.to_run_config() != GRPOTrainingConfig(**beside).to_run_config()


@pytest.mark.parametrize("name", VLLM)
def test_every_vllm_field_is_refused_by_name_where_vllm_is_not_used(name: str) -> None:
    with pytest.raises(SettingError, match=f"{name}: without effect, as use_vllm is False"):
        GRPOTrainingConfig(**{name: other_value(name, GRPOTrainingConfig())}).to_run_config()


@pytest.mark.parametrize(("theirs", "ours"), TRANSLATIONS.items())
def test_every_name_of_another_trainers_file_is_a_setting_here(theirs: str, ours: str) -> None:
    known = {"wandb.enabled": True, "model.base_model_name": "palestra/smollm2", "rl.training.learning_rate": 2e-5}
    given: Any = known.get(theirs)
    if given is None:
        default = RunConfig.settings()[ours].get_default(call_default_factory=True)
        given = default / 2 if isinstance(default, float) else 7 if "int" in str(RunConfig.settings()[ours]) else "mine"
    assert RunConfig.build(translate(flatten({theirs: given}), "file")) != RunConfig()


def test_settings_without_effect_are_refused_unless_they_are_at_their_default() -> None:
    config = RunConfig.build({"echo.coefficient": 0.5})
    with pytest.raises(SettingError, match=r"echo\.coefficient = 0\.5 has no effect here: no tools; leave it at 0\.0"):
        config.refuse(["eval.every", "echo"], "no tools")
    config.refuse(["eval", "checkpoint.every", "seed"], "no reason")
