"""Foreign run folders: looking at them is safe, and code that they name runs with consent only."""

import json
import os
import pickle
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch

from palestra.cli.find_run import code_for_tools, is_own
from palestra.cli.main import run
from palestra.core.config import RunConfig
from palestra.core.errors import StorageError, UnreadableFileError
from palestra.core.files import replacing
from palestra.core.run_folder import RunFolder
from palestra.extras.dashboard.catalog import Catalog
from palestra.extras.dashboard.transcripts import token_texts
from palestra.extras.ranks.sharding import load_sharded, read_metadata
from palestra.runs.manager import RunManager
from palestra.runs.processes import hold

HOSTILE = """
from pathlib import Path
from palestra import Env
Path({marker!r}).touch()
raise RuntimeError("it ran")
class Evil(Env):
    pass
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Exists if code of the folder has run."""
    return tmp_path / "owned"


@pytest.fixture
def foreign(tmp_path: Path, marker: Path):
    """Make a run folder that is not in the index of this home."""

    def make(**record) -> RunFolder:
        folder = RunFolder.create(tmp_path, "theirs", RunConfig(), record, at=tmp_path / "theirs")
        (folder.path / "evil.py").write_text(HOSTILE.format(marker=str(marker)))
        folder.rollouts_file.write_text("")
        folder.model.mkdir()
        return folder

    return make


def evil_environment(tmp_path: Path) -> dict:
    return {"environment": {"name": f"{tmp_path / 'theirs' / 'evil.py'}:Evil", "settings": {}}}


def listed(folder: RunFolder) -> None:
    now = time.time()
    RunManager()._index.add(
        run_id=os.urandom(4).hex(), name="mine", environment="", folder=str(folder.path), kind="foreground",
        state="completed", created=now, launched=now, host="here",
    )  # fmt: skip


COMMANDS = [["chat"], ["rescore", "--measures", "measures.py"], ["train", "--resume"], ["runs", "finish"]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measures.py").write_text("from palestra import measure\n\n@measure\ndef m(ctx):\n    return True\n")


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize("kind", ["environment", "source"])
def test_code_of_a_foreign_folder_runs_with_trust_only(foreign, marker, here, capsys, tmp_path, words, kind) -> None:
    source = {"source": str(tmp_path / "theirs" / "evil.py"), "tools": ["a"]}
    folder = foreign(**(evil_environment(tmp_path) if kind == "environment" else source))
    assert run([*words, str(folder.path)]) == 2
    assert "--trust" in capsys.readouterr().err
    assert not marker.exists()
    if words[0] in ("rescore", "train") or kind == "environment":
        run([*words, str(folder.path), "--trust"])
        assert marker.exists() == (words[0] != "runs"), "with trust it is loaded"  # finish needs a checkpoint


def test_an_mcp_command_of_a_foreign_folder_does_not_run(foreign, marker, here, capsys) -> None:
    folder = foreign(source="demo", agent_options={"mcp": [f"touch {marker}"]})
    assert run(["train", "--resume", str(folder.path)]) == 2
    assert "touch" in capsys.readouterr().err, "the question shows the command"
    assert not marker.exists()


@pytest.mark.parametrize("words", [["chat"], ["train", "--nproc", "2", "--resume"]], ids=lambda words: words[0])
def test_a_terminal_is_asked_and_no_is_no(foreign, marker, here, monkeypatch, tmp_path, words) -> None:
    folder, asked = foreign(**evil_environment(tmp_path)), []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(click, "confirm", lambda text, **_: asked.append(text))
    assert run([*words, str(folder.path)]) == 2
    assert len(asked) == 1
    assert str(folder.path) in asked[0]
    assert not marker.exists()


def test_a_run_that_the_index_lists_is_not_asked_about(foreign, marker, here, tmp_path) -> None:
    folder = foreign(**evil_environment(tmp_path))
    assert not is_own(folder)
    listed(folder)
    assert is_own(folder)
    run(["chat", str(folder.path)])
    assert marker.exists()


def test_a_copy_of_a_listed_run_is_foreign(foreign, here, tmp_path) -> None:
    folder = foreign()
    listed(folder)
    copy = RunFolder(folder.path.rename(tmp_path / "copy"))
    assert not is_own(copy)


@pytest.mark.parametrize(
    ("record", "names_code"),
    [
        ({}, False),
        ({"source": "demo"}, False),
        ({"source": "palestra.demo", "tools": ["x"]}, False),
        pytest.param(
            {"environment": {"name": "calculator", "settings": {"operations": 1}}}, False, marks=pytest.mark.extras
        ),
        ({"environment": {"name": "shell", "settings": {"allow_unsandboxed": True}}}, True),
        ({"environment": {"name": "gymnasium:os:X", "settings": {}}}, True),
        ({"environment": {"name": "verifiers:evil", "settings": {}}}, True),
        ({"environment": {"name": "calculator.py", "settings": {}}}, True),
        ({"source": __file__}, True),
        ({"source": "/elsewhere/agent.py"}, False),  # it is not on this machine
    ],
)
def test_only_code_that_comes_with_palestra_needs_no_trust(record, names_code) -> None:
    assert bool(code_for_tools(record)) == names_code


def test_a_dashboard_passes_trust_on_only_if_it_was_given() -> None:
    assert Catalog(RunManager()).trust_words == []
    assert Catalog(RunManager(), trust=True).trust_words == ["--trust"]


# pickles


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    from torch.distributed.checkpoint import save

    save({"weight/a": torch.ones(2, 3)}, checkpoint_id=tmp_path / "shards", no_dist=True)
    return tmp_path / "shards"


def test_a_pickle_in_the_metadata_of_shards_runs_no_code(shards, marker) -> None:
    metadata = read_metadata(shards / ".metadata")
    assert set(metadata.state_dict_metadata) == {"weight/a"}
    metadata.planner_data = Hostile(marker)
    for content in (Hostile(marker), metadata):
        (shards / ".metadata").write_bytes(pickle.dumps(content))
        with pytest.raises(pickle.UnpicklingError, match="system"):
            read_metadata(shards / ".metadata")
    assert not marker.exists()


def test_a_pickle_with_a_huge_memo_index_is_refused_before_it_is_read(shards) -> None:
    data = (shards / ".metadata").read_bytes()
    (shards / ".metadata").write_bytes(data[:2] + b"Nr" + (2**31 - 1).to_bytes(4, "little") + b"0" + data[2:])
    with pytest.raises(pickle.UnpicklingError, match="memo index"):
        read_metadata(shards / ".metadata")


def test_shards_that_torch_would_unpickle_are_refused(shards) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata = read_metadata(shards / ".metadata")
    metadata.state_dict_metadata["weight/a"] = BytesStorageMetadata()
    (shards / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError):
        read_metadata(shards / ".metadata")


def test_shards_do_not_lead_out_of_their_folder(shards) -> None:
    metadata = read_metadata(shards / ".metadata")
    for place in metadata.storage_data.values():
        place.relative_path = "../../secret"
    (shards / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match="in this folder"):
        read_metadata(shards / ".metadata")


def test_a_hostile_checkpoint_of_ranks_is_refused_in_one_sentence(shards, marker) -> None:
    (shards / ".metadata").write_bytes(pickle.dumps(Hostile(marker)))
    with pytest.raises(UnreadableFileError, match="use another checkpoint"):
        load_sharded(shards.parent, None)  # type: ignore[arg-type]  # it is not used before the metadata is read
    assert not marker.exists()


# damaged files


DEEP = "[" * 100_000
ALIASES = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)


def _fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


DAMAGES = {
    "run.json is deep": lambda run: run.record_file.write_text(DEEP),
    "run.json is a number": lambda run: run.record_file.write_text("7"),
    "run.json has no environment": lambda run: run.record_file.write_text('{"environment": 5}'),
    "run.json has a format of text": lambda run: run.record_file.write_text('{"format": "x"}'),
    "run.json has other agent options": lambda run: run.record_file.write_text('{"agent_options": {"x": 1}}'),
    "config.yaml is deep": lambda run: run.config_file.write_text(DEEP),
    "config.yaml is an alias bomb": lambda run: run.config_file.write_text(ALIASES),
    "config.yaml merges itself": lambda run: run.config_file.write_text("a: &a\n  <<: *a\n"),
    "config.yaml is a pipe": lambda run: _fifo(run.config_file),
    "run.json is a pipe": lambda run: _fifo(run.record_file),
    "run.lock is a pipe": lambda run: _fifo(run.lock_file),
    "run.lock is a link": lambda run: run.lock_file.symlink_to(run.path / "evil.py"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_resuming_a_damaged_folder_ends_with_a_sentence(foreign, here, capsys, damage) -> None:
    folder = foreign(environment={"name": "calculator", "settings": {}})
    DAMAGES[damage](folder)
    before = (folder.path / "evil.py").read_text()
    assert run(["train", "--resume", str(folder.path), "--trust"]) == 2  # an exception would fail the test
    assert "Error: " in capsys.readouterr().err
    assert (folder.path / "evil.py").read_text() == before


@pytest.mark.parametrize("name", ["tokens", "checkpoints", "evals", "metrics.jsonl", "queue.sqlite"])
def test_a_training_refuses_a_folder_in_which_files_or_folders_are_links(foreign, tmp_path, name) -> None:
    folder, outside = foreign(), tmp_path / "outside"
    (folder.path / name).symlink_to(outside)
    with pytest.raises(StorageError, match=name), hold(folder.path):
        raise AssertionError("it may train there")


def test_a_file_is_not_written_through_a_link_at_its_temporary_name(tmp_path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / ".step-000001.npy.partial").symlink_to(outside)
    with replacing(tmp_path / "step-000001.npy") as partial:
        partial.write_text("theirs")
    assert outside.read_text() == "mine"
    assert (tmp_path / "step-000001.npy").read_text() == "theirs"


@pytest.mark.extras
def test_a_manifest_of_other_values_is_a_damaged_checkpoint(foreign, here, capsys) -> None:
    folder = foreign(environment={"name": "calculator", "settings": {}})
    step = folder.step_folder(1)
    step.mkdir(parents=True)
    (step / "manifest.json").write_text('{"state.json": 5}')
    assert run(["train", "--resume", str(folder.path), "--trust"]) == 2
    assert "corrupt" in capsys.readouterr().err


def test_a_line_of_records_that_is_too_deep_is_left_out(foreign) -> None:
    folder = foreign()
    folder.metrics_file.write_text(f'{{"step": 1}}\n{DEEP}\n{{"step": 2}}\n')
    folder.rollouts_file.write_text(f'{DEEP}\n{{"step": 2}}\n')
    assert [row["step"] for row in folder.metrics()] == [1, 2]
    assert len(list(folder.rollouts())) == 1


def test_names_of_a_foreign_run_are_shown_without_escape_sequences(foreign, here, capsys) -> None:
    folder = foreign()
    escape = "\x1b]0;owned\x07\x1b[31mred"
    folder.index_file.write_text(json.dumps({"run_id": escape, "name": escape, "environment": escape}))
    folder.report_file.write_text(json.dumps({"findings": [{"sentence": escape}, 7], "after": 7}))
    folder.metrics_file.write_text(json.dumps({"step": 1, "reward_mean": escape, "loss": 10**400}) + "\n")
    other = RunFolder.create(folder.path.parent, "b", RunConfig(), {}, at=folder.path.with_name("other"))
    for words in (["runs", "show", str(folder.path)], ["runs", "compare", str(folder.path), str(other.path)]):
        assert run(words) == 0
        assert "\x1b]" not in (told := capsys.readouterr().out)
        assert "owned" in told
    assert run(["runs", "show", f"gone{escape}"]) == 2
    assert "\x1b]" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x" * 3000, "~nobody-of-this-name/x", "\0", "\ud800"])
def test_a_model_name_that_no_file_can_have_leaves_tokens_as_numbers(tmp_path, name) -> None:
    nowhere = tmp_path / "none"
    config = SimpleNamespace(model=SimpleNamespace(name=name))
    folder = SimpleNamespace(model=nowhere, tokenizer=nowhere, config=config, last_checkpoint=lambda: None)
    assert token_texts(folder)(17) == "#17"
