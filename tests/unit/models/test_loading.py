import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, GptOssConfig

from palestra.core.config_sections import LoraSection
from palestra.core.errors import NotFoundError, PalestraError, ServiceError, SettingError, UnreadableFileError
from palestra.learner.lora import add_lora
from palestra.models.loading import (
    LoadedModel,
    canonical_name,
    choose_threads,
    idle_processors,
    load_model,
    set_template_variables,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("palestra/tiny", "palestra/tiny"),
        ("palestra/smollm2", "palestra/smollm2"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("litellm/ollama_chat/hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0", "Qwen/Qwen3-0.6B"),
        ("litellm/ollama/hf.co/bartowski/Some-Model-gguf", "bartowski/Some-Model"),
        ("models/qwen3-0.6b-Q8_0.gguf", "models/qwen3-0.6b-Q8_0.gguf"),
        ("gpt2", "gpt2"),
    ],
)
def test_names_lose_their_route_tag_and_gguf_ending(name: str, expected: str) -> None:
    assert canonical_name(name) == expected


def test_an_existing_folder_keeps_its_name_whatever_it_looks_like(tmp_path: Path) -> None:
    folder = tmp_path / "my:model-GGUF"
    folder.mkdir()
    assert canonical_name(str(folder)) == str(folder)


def test_tiny_loads_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise AssertionError("loading palestra/tiny asked for the network")

    monkeypatch.setattr("socket.socket.connect", no_network)
    loaded = load_model("palestra/tiny", device="cpu")
    assert (loaded.name, loaded.model.dtype) == ("palestra/tiny", torch.float32)
    assert Path(loaded.path).is_dir()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("palestra/huge", "palestra/tiny"),
        ("./no/such/folder", "no folder"),
        ("/no/such/folder", "no folder"),
        ("a name with spaces", "no folder"),
        (str(Path(__file__).parent), r"no config\.json"),
    ],
)
def test_a_name_that_means_nothing_says_what_to_give(name: str, words: str) -> None:
    with pytest.raises(PalestraError, match=words):
        load_model(name)


def test_a_saved_folder_loads_with_the_dtype_asked_for_and_a_reason_that_is_a_list_is_told_whole(tiny, tmp_path):
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    again = load_model(str(tmp_path), dtype="bfloat16", device="cpu")
    assert again.model.dtype == torch.bfloat16
    assert again.tokenizer.chat_template == tiny.tokenizer.chat_template
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UnreadableFileError, match=r"backend tokenizer from one of: \(1\) a `tokenizers` library"):
        load_model(str(tmp_path), device="cpu")


def test_an_offline_machine_says_so_and_leads_to_a_local_folder_or_tiny() -> None:
    with pytest.raises(ServiceError, match=r"not in the local cache, and HF_HUB_OFFLINE is set.*palestra/tiny"):
        load_model("nobody/nothing")


def test_a_hub_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ServiceError, match=r"not in the local cache, and http://127\.0\.0\.1:9 cannot be reached"):
        load_model("nobody/nothing")


def test_a_hub_that_answers_is_asked_and_its_own_words_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_model(*args: object, local_files_only: bool, **kwargs: object) -> None:
        raise OSError("not here" if local_files_only else "nobody/nothing is not a valid model.\nMore lines.")

    monkeypatch.setattr("palestra.models.loading.hub_unreachable", lambda: None)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", no_such_model)
    with pytest.raises(UnreadableFileError, match=r"could not be loaded: nobody/nothing is not a valid model\. Give"):
        load_model("nobody/nothing")


@pytest.mark.parametrize(("option", "value"), [("dtype", "float12"), ("device", "abacus")])
def test_unknown_dtype_and_device_name_the_known_ones(option: str, value: str) -> None:
    with pytest.raises(SettingError, match="auto"):
        load_model("palestra/tiny", **{"device": "cpu", option: value})


def test_the_cap_of_attention_logits_counts_in_a_model_that_has_one(tiny: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=len(tiny.tokenizer),
        attn_logit_softcapping=2.0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    torch.nn.init.normal_(model.model.layers[0].self_attn.q_proj.weight, std=3.0)
    model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = model(ids).logits
        loaded = load_model(str(tmp_path), dtype="float32", device="cpu").model
        torch.testing.assert_close(loaded(ids).logits, expected)
        loaded.set_attn_implementation("sdpa")
        assert not torch.allclose(loaded(ids).logits, expected, atol=0.01), "then it would not count"


def test_padding_and_ends_are_set_where_a_model_has_none(tmp_path: Path) -> None:
    loaded = load_model("palestra/tiny", device="cpu")
    loaded.tokenizer.pad_token = None
    loaded.model.config.pad_token_id = -1
    loaded.model.generation_config.eos_token_id = None
    loaded.model.generation_config.pad_token_id = None
    loaded.model.config.save_pretrained(tmp_path)
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    again = load_model(str(tmp_path), device="cpu")
    assert again.tokenizer.pad_token == "<|endoftext|>"
    assert again.model.config.pad_token_id == again.model.generation_config.pad_token_id == 0
    assert again.model.generation_config.eos_token_id == [0, 2]


def save_adapter(folder: Path, base: LoadedModel) -> None:
    """An adapter, saved without its base."""
    add_lora(base.model, LoraSection(r=4)).save_pretrained(folder, save_embedding_layers=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"hidden_size": 64, "head_dim": 32}, "trained on another base"), ({"num_hidden_layers": 1}, "has no layer")],
)
def test_an_adapter_for_another_base_is_named(tmp_path: Path, change: dict[str, int], words: str) -> None:
    tiny = load_model("palestra/tiny", device="cpu")
    other, adapter = tmp_path / "other", tmp_path / "adapter"
    config = tiny.model.config.__class__.from_dict({**tiny.model.config.to_dict(), **change, "layer_types": None})
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    tiny.tokenizer.save_pretrained(other)
    save_adapter(adapter, tiny)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": str(other)}))
    with pytest.raises(UnreadableFileError, match=words):
        load_model(str(adapter), device="cpu")


def test_a_small_model_runs_on_one_thread_wherever_it_is_loaded_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        load_model("palestra/tiny", device="cpu")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("load", "threads"), [(0.2, 4), (2.7, 1), (9.0, 1)])
def test_a_larger_model_takes_the_processors_that_are_idle(monkeypatch, load, threads):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    assert idle_processors() == threads


def test_the_setting_for_threads_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    model = torch.nn.Linear(1, 1)
    choose_threads(model)
    choose_threads(model, 3)
    assert chosen == [3]


def test_an_adapter_whose_base_has_gone_names_both(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(gone)}))
    with pytest.raises(NotFoundError, match=f"the adapter in {tmp_path} needs its base model, and {gone} is not there"):
        load_model(str(tmp_path), device="cpu")


def test_variables_of_the_chat_template_have_the_given_values_unless_the_caller_gives_others(
    tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = (
        "{% if enable_thinking is defined and not enable_thinking %}/no_think {% endif %}{{ messages[0].content }}"
    )
    tiny.tokenizer.chat_template = template
    set_template_variables(tiny.tokenizer, {"enable_thinking": False, "unknown": 1})
    assert "no variable 'unknown'" in caplog.text
    tiny.tokenizer.save_pretrained(tmp_path)
    for tokenizer in (tiny.tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        said = [{"role": "user", "content": "Hi"}]
        assert tokenizer.apply_chat_template(said, tokenize=False) == "/no_think Hi"
        assert tokenizer.apply_chat_template(said, tokenize=False, enable_thinking=True) == "Hi"


def test_experts_in_mxfp4_are_loaded_in_the_models_dtype_and_saved_again(tiny: Any, tmp_path: Path) -> None:
    config = GptOssConfig(
        vocab_size=tiny.model.config.vocab_size, hidden_size=64, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_local_experts=2, pad_token_id=0,
    )  # fmt: skip
    tensors = dict(AutoModelForCausalLM.from_config(config).state_dict())
    experts = "model.layers.0.mlp.experts"
    for name, outputs, blocks in (("gate_up_proj", 64, 2), ("down_proj", 64, 1)):
        del tensors[f"{experts}.{name}"]
        ones, times_two = (2, outputs, blocks, 16), (2, outputs, blocks)
        tensors[f"{experts}.{name}_blocks"] = torch.full(ones, 0x22, dtype=torch.uint8)
        tensors[f"{experts}.{name}_scales"] = torch.full(times_two, 128, dtype=torch.uint8)
    others = ["model.layers.*.self_attn", "lm_head"]
    stored = config.to_dict() | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": others}}
    stored["architectures"] = ["GptOssForCausalLM"]
    tiny.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(stored))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    model = load_model(str(tmp_path), dtype="float32", device="cpu").model
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    assert weight.dtype == torch.float32
    assert (weight == 2.0).all()
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


NAMES = """
import sys
from palestra.core.errors import PalestraError
from palestra.models.names import require_model

for name in sys.argv[1:]:
    try:
        require_model(name)
    except PalestraError as error:
        print(error)
    else:
        print("fine")
assert "torch" not in sys.modules
"""


def test_a_model_that_cannot_be_had_is_reported_without_torch(tmp_path) -> None:
    names = ["palestra/tiny", str(tmp_path), "palestra/tny", "gone.gguf", "./gone", "no-such/model"]
    done = subprocess.run([sys.executable, "-c", NAMES, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert found[:2] == ["fine", "fine"]
    expected = ("palestra/smollm2", "gone.gguf", "hub id", "HF_HUB_OFFLINE")
    assert [text in line for text, line in zip(expected, found[2:], strict=True)] == [True] * 4
