"""Model files from elsewhere: damaged, cut off or made to harm. Each gives one clear sentence, soon."""

import json
import shutil
import struct
import threading
import time
from pathlib import Path

import pytest

from palestra.core.errors import NotFoundError, UnreadableFileError, UserCodeError
from palestra.core.time_limit import TimeLimitError, time_limit
from palestra.extras.gguf.config import config_from_gguf
from palestra.extras.gguf.file import open_gguf
from palestra.models import loading
from palestra.models.chat import encode
from palestra.models.chat.encode import TemplateRefusal, render
from palestra.models.chat.prompts import prepare
from palestra.models.loading import load_config, load_model, load_tokenizer

TINY = Path(loading.__file__).parent / "tiny"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "model"


def test_a_model_folder_without_a_tokenizer_is_refused_in_one_sentence(tiny):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tiny / name).unlink()
    with pytest.raises(NotFoundError, match=r"has no tokenizer: none of tokenizer\.json"):
        load_tokenizer(str(tiny))
    with pytest.raises(NotFoundError, match="has no tokenizer"):
        load_model(str(tiny))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_truncated_model_file_is_refused_in_one_sentence(tiny, name):
    path = tiny / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UnreadableFileError, match="could not be loaded: ") as refused:
        load_model(str(tiny))
    assert "\n" not in str(refused.value)


def test_an_adapter_that_leads_back_to_itself_is_refused(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, base in ((one, two), (two, one)):
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    with pytest.raises(UnreadableFileError, match="leads back to itself"):
        load_model(str(one))
    (one / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(one)}))
    with pytest.raises(UnreadableFileError, match="leads back to itself"):
        load_model(str(one))


@pytest.mark.parametrize("text", ["", "7", "{}", '{"base_model_name_or_path": [1]}'])
def test_an_adapter_that_names_no_base_is_refused(tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(UnreadableFileError, match="names no base model"):
        load_model(str(tmp_path))


class Endless:
    """A tokenizer whose template has two nested loops of 99,999 rounds."""

    added_tokens_decoder: dict = {}  # noqa: RUF012

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def apply_chat_template(self, messages, tools=None, **options):
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        return ImmutableSandboxedEnvironment().from_string(self.chat_template).render(messages=messages)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_chat_template_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setattr(encode, "RENDER_S", 0.2)
    with pytest.raises(UserCodeError, match=r"took longer than 0\.2 s"):
        prepare(Endless(ENDLESS))


@pytest.mark.parametrize(
    "template", ["{{ 1 // 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages | sum }}", "{% for %}"]
)
def test_whatever_a_chat_template_raises_is_a_refusal(template):
    with pytest.raises(TemplateRefusal, match="refuses messages with the roles user"):
        render(Endless(template), [{"role": "user", "content": "?"}])


def test_a_time_limit_hits_only_its_own_body():
    ended = []

    def work() -> None:
        for _ in range(20):
            try:
                with time_limit(0.001):
                    while True:
                        pass
            except TimeLimitError:
                ended.append("stopped")
            with time_limit(10):
                ended.append("done")
        time.sleep(0.01)
        ended.append("alive")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (ended.count("stopped"), ended.count("done"), ended.count("alive")) == (60, 60, 3)


def gguf_file(path: Path, *pairs: bytes, tensors: bytes = b"", tensor_count: int = 0) -> Path:
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, tensor_count, len(pairs)) + b"".join(pairs) + tensors + bytes(4096)
    )
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


ARCHITECTURE = pair("general.architecture", 8, text("llama"))
FIELDS = {
    "embedding_length": 64, "feed_forward_length": 64, "attention.head_count": 4, "context_length": 64,
    "attention.layer_norm_rms_epsilon": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("alignment", "refusal"),
    [
        (pair("general.alignment", 4, struct.pack("<I", 0)), "Invalid alignment"),
        (pair("general.alignment", 5, struct.pack("<i", -32)), "Bad type for general.alignment"),
        (pair("general.alignment", 9, struct.pack("<IQI", 4, 1, 32)), "Bad type for general.alignment"),
        (pair("general.alignment", 9, struct.pack("<IQ", 9, 3)), "ARRAY"),
        (pair("general.alignment", 77, b""), r"77\)? is not a valid"),
    ],
)
def test_the_alignment_of_a_gguf_file_is_a_sensible_number(tmp_path, alignment, refusal):
    pytest.importorskip("gguf")
    with pytest.raises(UnreadableFileError, match=refusal):
        open_gguf(gguf_file(tmp_path / "a.gguf", ARCHITECTURE, alignment))


@pytest.mark.parametrize(
    ("field", "value", "refusal"),
    [
        ("block_count", struct.pack("<I", 0xFFFFFFFF), "block_count is 4294967295"),
        ("block_count", struct.pack("<I", 1000), "block_count is 1000, but its tensors have 1"),
        ("embedding_length", struct.pack("<I", 1 << 30), "embedding_length is 1073741824, but its tensors have 64"),
        ("attention.head_count", struct.pack("<I", 0), "head_count is 0"),
    ],
)
def test_sizes_that_do_not_fit_the_tensors_are_refused_before_a_model_is_made(tmp_path, field, value, refusal):
    pytest.importorskip("gguf")
    fields = {name: struct.pack("<I", number) for name, number in {"block_count": 1, **FIELDS}.items()} | {field: value}
    pairs = [pair(f"llama.{name}", 4, number) for name, number in fields.items()]
    tensor = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 64, 4, 0, 0)
    tensor += text("blk.0.attn_q.weight") + struct.pack("<IQIQ", 1, 4, 0, 0)
    file = open_gguf(gguf_file(tmp_path / "a.gguf", ARCHITECTURE, *pairs, tensors=tensor, tensor_count=2))
    with pytest.raises(UnreadableFileError, match=refusal):
        config_from_gguf(file)


def test_a_model_with_code_of_its_own_is_refused_without_a_question(tmp_path, monkeypatch):
    """transformers asks on a terminal whether the code may run; here it may not."""
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    for load in (load_model, load_config, load_tokenizer):
        with pytest.raises(UnreadableFileError):
            load(str(tmp_path))
    assert not (tmp_path / "owned").exists()
