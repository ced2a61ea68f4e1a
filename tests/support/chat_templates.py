"""Real chat templates of model families, from installed or downloaded packages, and small tokenizers for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from palestra.chat.families import prepare
from palestra.chat.template import ChatFormat

DOWNLOADED = Path(__file__).parents[2] / "build" / "templates"  # by `make test-templates`
_SPECIAL = re.compile(
    r"<\|[^|<>\s'\"{}]+\|?>|<[^|<>\s'\"{}]+\|>|<\|\"\|>|<｜[^｜<>]+｜>|\[/?[A-Z]{2,}(?:_[A-Z]+)*\]"
    r"|</?think>|</?tool_call>|</?tool_response>|<(?:start|end)_(?:of_turn|function_call)>|<escape>|\[e~\[|\]~b\]|<seed:[a-z_]+>"
    r"|</seed:[a-z_]+>|</?minimax:tool_call>"
)


@dataclass(frozen=True)
class Family:
    """One model family: where its real template is found, and its end-of-sequence token."""

    name: str
    template: str  # a file of TRL (trl/…) or of `make test-templates`
    eos: str
    format: str

    @property
    def path(self) -> Path:
        if self.template.startswith("trl/"):
            spec = find_spec("trl")
            assert spec is not None
            assert spec.origin is not None
            return Path(spec.origin).parent / "chat_templates" / self.template.removeprefix("trl/")
        return DOWNLOADED / self.template


_IM_END, _EOT, _EOS = "<|im_end|>", "<|eot_id|>", "</s>"
_DEEPSEEK_EOS = "<｜end▁of▁sentence｜>"
FAMILIES = (
    Family("Qwen2.5", "trl/qwen2_5.jinja", _IM_END, "hermes"),
    Family("Qwen3", "trl/qwen3.jinja", _IM_END, "hermes"),
    Family("Qwen3-2507", "trl/qwen3_instruct_2507.jinja", _IM_END, "hermes"),
    Family("Qwen3-VL", "trl/qwen3_vl.jinja", _IM_END, "hermes"),
    Family("Qwen3-Coder", "Qwen3-Coder.jinja", _IM_END, "qwen_xml"),
    Family("Qwen3.5", "trl/qwen3_5_think.jinja", _IM_END, "qwen_xml"),
    Family("Qwen3.5 (no thinking)", "trl/qwen3_5_nothink.jinja", _IM_END, "qwen_xml"),
    Family("Qwen3.6", "trl/qwen3_6.jinja", _IM_END, "qwen_xml"),
    Family("Qwen3.8", "trl/qwen3_8.jinja", _IM_END, "qwen_xml"),
    Family("Nemotron 3 Nano", "trl/nemotron_3_nano.jinja", _IM_END, "qwen_xml"),
    Family("Nemotron 3 Super", "trl/nemotron_3_super.jinja", _IM_END, "qwen_xml"),
    Family("Nemotron 3 Ultra", "trl/nemotron_3_ultra.jinja", _IM_END, "qwen_xml"),
    Family("GLM 4.5", "trl/glm4moe.jinja", "<|endoftext|>", "glm"),
    Family("GLM 4.6", "GLM-4.6.jinja", "<|endoftext|>", "glm"),
    Family("GLM 4.7", "GLM-4.7-Flash.jinja", "<|endoftext|>", "glm"),
    Family("gpt-oss", "trl/gptoss.jinja", "<|return|>", "harmony"),
    Family("Gemma 2", "trl/gemma.jinja", "<eos>", "json"),
    Family("Gemma 3", "trl/gemma3.jinja", "<eos>", "json"),
    Family("Gemma 4", "trl/gemma4.jinja", "<eos>", "gemma4"),
    Family("Gemma 4 (newest)", "trl/gemma4_v5.jinja", "<eos>", "gemma4"),
    Family("FunctionGemma", "tool_chat_template_functiongemma.jinja", "<eos>", "function_gemma"),
    Family("LFM2", "trl/lfm2.jinja", _IM_END, "lfm"),
    Family("LFM2.5", "trl/lfm2_2_5_v2.jinja", _IM_END, "lfm"),
    Family("DeepSeek V3", "trl/deepseekv3.jinja", _DEEPSEEK_EOS, "deepseek_v3"),
    Family("DeepSeek V3.1", "deepseek-ai-DeepSeek-V3.1.jinja", _DEEPSEEK_EOS, "deepseek_v31"),
    Family("DeepSeek V3.2", "deepseek-ai-DeepSeek-V3.2.jinja", _DEEPSEEK_EOS, "deepseek_v32"),
    Family("DeepSeek V4", "deepseek-ai-DeepSeek-V4.jinja", _DEEPSEEK_EOS, "deepseek_v4"),
    Family("Kimi K2", "moonshotai-Kimi-K2.jinja", _IM_END, "kimi"),
    Family("MiniMax M2", "MiniMax-M2.jinja", "[e~[", "minimax"),
    Family("Llama 3.1", "trl/llama3_1.jinja", _EOT, "llama"),
    Family("Llama 3.2", "trl/llama3_2.jinja", _EOT, "llama"),
    Family("Llama 4", "tool_chat_template_llama4_json.jinja", "<|eot|>", "llama"),
    Family("Mistral Nemo", "mistralai-Mistral-Nemo-Instruct-2407.jinja", _EOS, "mistral"),
    Family("Mistral Small 3.2", "Mistral-Small-3.2-24B-Instruct-2506.jinja", _EOS, "mistral_args"),
    Family("Ministral 3", "mistralai-Ministral-3-14B-Reasoning-2512.jinja", _EOS, "mistral_args"),
    Family("Phi-3.5", "trl/phi3_5.jinja", "<|endoftext|>", "json"),
    Family("Phi-4 mini", "tool_chat_template_phi4_mini.jinja", "<|end|>", "phi4"),
    Family("Granite 3.3", "ibm-granite-granite-3.3-2B-Instruct.jinja", "<|end_of_text|>", "granite"),
    Family("Granite 4", "ibm-granite-granite-4.0.jinja", "<|end_of_text|>", "hermes"),
    Family("SmolLM3", "HuggingFaceTB-SmolLM3-3B.jinja", _IM_END, "hermes"),
    Family("Hermes 3", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja", _IM_END, "hermes"),
    Family("Seed-OSS", "ByteDance-Seed-OSS.jinja", "<seed:eos>", "seed"),
)


def available() -> list[Family]:
    return [family for family in FAMILIES if family.path.exists()]


@cache
def chat_of(family: Family) -> ChatFormat:
    """The family's chat format, on a small byte-level tokenizer with the special tokens that the template names."""
    return ChatFormat(tokenizer_of(family.path.read_text("utf-8"), family.eos))


def tokenizer_of(template: str, eos: str) -> Any:
    specials = list(dict.fromkeys([eos, "<s>", *_SPECIAL.findall(template)]))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300 + len(specials),
        special_tokens=[AddedToken(token, special=True) for token in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["user assistant the price of tea is 4.50\n\n\n \n\n>\n"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos)
    tokenizer.chat_template = template
    prepare(tokenizer)
    return tokenizer
