"""Tool calls of model families with their real chat templates: checks each, and writes the table of docs/models.md.

    python scripts/model_families.py            # after `make test-templates`, which downloads the templates

Templates come from packages: TRL, which the dev extra installs, and the source packages of llama-cpp-python and vLLM,
of which `--download` keeps the templates in build/templates. Without these, their rows of the table stay as they are.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from palestra.core.types import Message, Problem, SamplingParams, ToolCall, Turn
from palestra.models.chat.callformats import HARMONY
from palestra.models.chat.grammars import GrammarText, grammar_compiler
from palestra.models.chat.prompts import prepare
from palestra.models.chat.template import ChatFormat
from palestra.models.chat.toolcalls import closing_tag
from palestra.models.chat.written import check_tool_calls
from palestra.policy.base import Policy
from palestra.servers.gateway.attempt import Attempt
from palestra.servers.gateway.gateway import Gateway
from palestra.servers.openai.completer import Completer

ROOT = Path(__file__).parent.parent
DOWNLOADED = ROOT / "build" / "templates"
PAGE = ROOT / "docs" / "models.md"
MARKS = ("<!-- model families: scripts/model_families.py -->", "<!-- end of model families -->")
SOURCES = {"llama-cpp-python": ("0.3.36", "vendor/llama.cpp/models/templates/"), "vllm": ("0.33.0", "/examples/tool_")}
_SPECIAL = re.compile(
    r"<\|[^|<>\s'\"{}]+\|?>|<[^|<>\s'\"{}]+\|>|<\|\"\|>|<｜[^｜<>]+｜>|\[/?[A-Z]{2,}(?:_[A-Z]+)*\]"
    r"|</?think>|</?tool_call>|</?tool_response>|<(?:start|end)_(?:of_turn|function_call)>|<escape>|\[e~\[|\]~b\]|<seed:[a-z_]+>"
    r"|</seed:[a-z_]+>|</?minimax:tool_call>"
)


@dataclass(frozen=True)
class Family:
    """One model family: the package and file with its real template, its end-of-sequence token and call format."""

    name: str
    template: str  # package/file
    eos: str
    format: str

    @property
    def path(self) -> Path:
        package, _, file = self.template.partition("/")
        if package != "trl":
            return DOWNLOADED / file
        spec = find_spec("trl")
        return Path(spec.origin).parent / "chat_templates" / file if spec and spec.origin else Path("trl is missing")


_IM_END, _EOT, _EOS = "<|im_end|>", "<|eot_id|>", "</s>"
_DEEPSEEK_EOS = "<｜end▁of▁sentence｜>"
FAMILIES = (
    Family("Qwen2.5", "trl/qwen2_5.jinja", _IM_END, "hermes"),
    Family("Qwen3", "trl/qwen3.jinja", _IM_END, "hermes"),
    Family("Qwen3-2507", "trl/qwen3_instruct_2507.jinja", _IM_END, "hermes"),
    Family("Qwen3-VL", "trl/qwen3_vl.jinja", _IM_END, "hermes"),
    Family("Qwen3-Coder", "llama-cpp-python/Qwen3-Coder.jinja", _IM_END, "qwen_xml"),
    Family("Qwen3.5", "trl/qwen3_5_think.jinja", _IM_END, "qwen_xml"),
    Family("Qwen3.5 (no thinking)", "trl/qwen3_5_nothink.jinja", _IM_END, "qwen_xml"),
    Family("Qwen3.6", "trl/qwen3_6.jinja", _IM_END, "qwen_xml"),
    Family("Qwen3.8", "trl/qwen3_8.jinja", _IM_END, "qwen_xml"),
    Family("Nemotron 3 Nano", "trl/nemotron_3_nano.jinja", _IM_END, "qwen_xml"),
    Family("Nemotron 3 Super", "trl/nemotron_3_super.jinja", _IM_END, "qwen_xml"),
    Family("Nemotron 3 Ultra", "trl/nemotron_3_ultra.jinja", _IM_END, "qwen_xml"),
    Family("GLM 4.5", "trl/glm4moe.jinja", "<|endoftext|>", "glm"),
    Family("GLM 4.6", "llama-cpp-python/GLM-4.6.jinja", "<|endoftext|>", "glm"),
    Family("GLM 4.7", "llama-cpp-python/GLM-4.7-Flash.jinja", "<|endoftext|>", "glm"),
    Family("gpt-oss", "trl/gptoss.jinja", "<|return|>", "harmony"),
    Family("Gemma 2", "trl/gemma.jinja", "<eos>", "json"),
    Family("Gemma 3", "trl/gemma3.jinja", "<eos>", "json"),
    Family("Gemma 4", "trl/gemma4.jinja", "<eos>", "gemma4"),
    Family("Gemma 4 (newest)", "trl/gemma4_v5.jinja", "<eos>", "gemma4"),
    Family("FunctionGemma", "vllm/tool_chat_template_functiongemma.jinja", "<eos>", "function_gemma"),
    Family("LFM2", "trl/lfm2.jinja", _IM_END, "lfm"),
    Family("LFM2.5", "trl/lfm2_2_5_v2.jinja", _IM_END, "lfm"),
    Family("DeepSeek V3", "trl/deepseekv3.jinja", _DEEPSEEK_EOS, "deepseek_v3"),
    Family("DeepSeek V3.1", "llama-cpp-python/deepseek-ai-DeepSeek-V3.1.jinja", _DEEPSEEK_EOS, "deepseek_v31"),
    Family("DeepSeek V3.2", "llama-cpp-python/deepseek-ai-DeepSeek-V3.2.jinja", _DEEPSEEK_EOS, "deepseek_v32"),
    Family("DeepSeek V4", "llama-cpp-python/deepseek-ai-DeepSeek-V4.jinja", _DEEPSEEK_EOS, "deepseek_v4"),
    Family("Kimi K2", "llama-cpp-python/moonshotai-Kimi-K2.jinja", _IM_END, "kimi"),
    Family("MiniMax M2", "llama-cpp-python/MiniMax-M2.jinja", "[e~[", "minimax"),
    Family("Llama 3.1", "trl/llama3_1.jinja", _EOT, "llama"),
    Family("Llama 3.2", "trl/llama3_2.jinja", _EOT, "llama"),
    Family("Llama 4", "vllm/tool_chat_template_llama4_json.jinja", "<|eot|>", "llama"),
    Family("Mistral Nemo", "llama-cpp-python/mistralai-Mistral-Nemo-Instruct-2407.jinja", _EOS, "mistral"),
    Family("Mistral Small 3.2", "llama-cpp-python/Mistral-Small-3.2-24B-Instruct-2506.jinja", _EOS, "mistral_args"),
    Family("Ministral 3", "llama-cpp-python/mistralai-Ministral-3-14B-Reasoning-2512.jinja", _EOS, "mistral_args"),
    Family("Phi-3.5", "trl/phi3_5.jinja", "<|endoftext|>", "json"),
    Family("Phi-4 mini", "vllm/tool_chat_template_phi4_mini.jinja", "<|end|>", "phi4"),
    Family("Granite 3.3", "llama-cpp-python/ibm-granite-granite-3.3-2B-Instruct.jinja", "<|end_of_text|>", "granite"),
    Family("Granite 4", "llama-cpp-python/ibm-granite-granite-4.0.jinja", "<|end_of_text|>", "hermes"),
    Family("SmolLM3", "llama-cpp-python/HuggingFaceTB-SmolLM3-3B.jinja", _IM_END, "hermes"),
    Family("Hermes 3", "llama-cpp-python/NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja", _IM_END, "hermes"),
    Family("Seed-OSS", "llama-cpp-python/ByteDance-Seed-OSS.jinja", "<seed:eos>", "seed"),
)


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


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "Any text."},
                "kind": {"type": "string", "enum": ["new", "old"], "description": "Which."},
                "count": {"type": "integer", "description": "A number."},
                "flag": {"type": "boolean", "description": "Yes or no."},
                "nested": {"type": "object", "description": "An object."},
            },
            "required": ["text"],
        },
    },
}
OTHER = {"type": "function", "function": {"name": "other", "description": "Do nothing.", "parameters": {}}}
ARGUMENTS = {"text": 'a "b" <c> é', "kind": "old", "count": 3, "flag": True, "nested": {"list": [1, "two", None]}}


def check_round_trip(family: Family) -> None:
    """Calls that the template writes are read back, and what is appended is what the template writes."""
    chat = chat_of(family)
    assert chat.call_format.name == family.format
    check_tool_calls(chat)
    call = ToolCall("call_0", "look_up", {"text": "tea"})
    conversation = [
        Message("user", "Price?"),
        Message("assistant", "", (call,)),
        Message("tool", "PRICED", tool_call_id="call_0", name="look_up"),
    ]
    whole = chat.render(conversation, [TOOL], add_generation_prompt=True)
    turns = chat.continuation(conversation[2:])
    appended = chat.tokenizer.decode([i for turn in turns for i in turn.token_ids])
    assert any(whole.endswith(stop + appended) for stop in [*chat.stop_texts, "<|end|>"]), (whole, appended)
    said = [chat.tokenizer.decode(turn.token_ids) for turn in turns if turn.maker == "environment"]
    assert said == ["PRICED"], said


def check_constrained(family: Family) -> None:
    """Sampling bound to the grammar can write any good call, and no call of a tool that is not there."""
    chat = chat_of(family)
    compile_grammar = grammar_compiler(chat.tokenizer)
    free = compile_grammar(json.dumps([TOOL, OTHER]))
    bound = compile_grammar(str(GrammarText(chat.stop_token_ids, (TOOL, OTHER))))
    close = chat.closes_reasoning({}) or "</think>"
    thinking = compile_grammar(str(GrammarText(chat.stop_token_ids, (TOOL, OTHER), close_reasoning=close)))
    for name, arguments in (("look_up", ARGUMENTS), ("look_up", {"text": ""}), ("other", {})):
        written = chat.call_format.write([(name, arguments)])
        for grammar in (free, bound):
            assert _follow(chat, grammar.start(), written) is None, (written, _follow(chat, grammar.start(), written))
        thought = f"hm <b>{close}\n{written}"
        assert _follow(chat, thinking.start(), thought) is None, _follow(chat, thinking.start(), thought)
        (read,) = chat.parse(written, [TOOL, OTHER]).calls
        assert (read.name, read.arguments, read.error, read.format) == (name, arguments, None, "")
    for wrong in (("absent", {"text": "x"}), ("look_up", {"count": 1}), ("look_up", {"text": "x", "count": "many"})):
        written = chat.call_format.write([wrong])
        assert _follow(chat, free.start(), written) is not None, written
        assert _follow(chat, bound.start(), written) is not None, written


def _follow(chat: ChatFormat, matching: Any, text: str) -> str | None:
    """The part of a text that the grammar allows."""
    said: list[int] = []
    for token_id in chat.tokenizer.encode(text, add_special_tokens=False):
        mask = matching.allowed()
        if mask is not None and not mask[token_id >> 3] >> (token_id & 7) & 1:
            return str(chat.tokenizer.decode(said))
        matching.accept(token_id)
        said.append(token_id)
    return None


@dataclass(eq=False)
class _Session:
    token_ids: list[int]


@dataclass
class _StreamingPolicy(Policy[_Session]):
    """Says one text, a few tokens at a time."""

    token_ids: list[int]
    version: int = 0

    def open(self, prompt_ids: Sequence[int]) -> _Session:
        return _Session(list(prompt_ids))

    def close(self, session: _Session) -> None: ...

    async def sample(self, session: _Session, params: SamplingParams) -> Turn:
        step = max(1, len(self.token_ids) // 6)
        for start in range(0, len(self.token_ids), step):
            session.token_ids += self.token_ids[start : start + step]
            await asyncio.sleep(0.012)  # so that the gateway looks at it meanwhile
        return Turn("model", self.token_ids, [-0.5] * len(self.token_ids), 0, "stop")  # type: ignore[arg-type]


def check_openai_stream(family: Family) -> None:
    """Chat completions: reasoning, text and calls arrive apart, and nothing of a call as text."""
    body = {"model": "any", "messages": [{"role": "user", "content": "Price?"}], "tools": [TOOL], "stream": True}
    text, reasoning, calls = "", "", dict[int, list[str]]()
    for event in _streamed(family, lambda attempt: f"{attempt.base_url}/chat/completions", body):
        for delta in (choice["delta"] for choice in event["choices"]):
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                parts = calls.setdefault(call["index"], ["", ""])
                parts[0] += call["function"].get("name") or ""
                parts[1] += call["function"].get("arguments") or ""
    _compare(family, text, reasoning, [(name, json.loads(arguments)) for name, arguments in calls.values()])


def check_anthropic_stream(family: Family) -> None:
    """The same with Anthropic's messages."""
    function = TOOL["function"]
    tool = {"name": function["name"], "description": "Look up.", "input_schema": function["parameters"]}  # type: ignore[index]
    body = {"model": "any", "max_tokens": 4000, "messages": [{"role": "user", "content": "Price?"}], "tools": [tool],
            "stream": True, "thinking": {"type": "enabled", "budget_tokens": 1024}}  # fmt: skip
    text, reasoning, calls = "", "", dict[int, list[str]]()
    for event in _streamed(family, lambda attempt: f"{attempt.anthropic_base_url}/v1/messages", body):
        block, delta = event.get("content_block") or {}, event.get("delta") or {}
        if block.get("type") == "tool_use":
            calls[event["index"]] = [block["name"], ""]
        text += delta.get("text") or ""
        reasoning += delta.get("thinking") or ""
        if "partial_json" in delta:
            calls[event["index"]][1] += delta["partial_json"]
    _compare(family, text, reasoning, [(name, json.loads(arguments)) for name, arguments in calls.values()])


def _compare(family: Family, text: str, reasoning: str, calls: list[Any]) -> None:
    lead, preface = _lead(chat_of(family))
    assert text.strip() == preface.strip(), text
    assert reasoning == ("hm" if lead else ""), reasoning
    assert calls == [("look_up", ARGUMENTS)], calls


def _lead(chat: ChatFormat) -> tuple[str, str]:
    """Reasoning, where the prompt or the format asks for it, and text, where a call may follow some."""
    if chat.call_format is HARMONY:
        return "<|channel|>analysis<|message|>hm<|end|><|start|>assistant", ""
    close = closing_tag(chat.render([Message("user", "?")], [TOOL], add_generation_prompt=True))
    return f"hm{close}" if close else "", "" if chat.call_format.at_start else "Let me look it up.\n"


def _streamed(family: Family, url_of: Callable[[Attempt], str], body: dict[str, Any]) -> list[Any]:
    """The events of a request to a gateway, at which the model writes one call."""
    chat = chat_of(family)
    lead, preface = _lead(chat)
    written = f"{lead}{preface}{chat.call_format.write([('look_up', ARGUMENTS)])}"
    if not any(written.endswith(stop) for stop in chat.stop_texts):
        written += family.eos
    policy = _StreamingPolicy(chat.tokenizer.encode(written, add_special_tokens=False))
    model = Completer(policy, chat.tokenizer, family.name, 100_000)  # type: ignore[arg-type]

    async def run() -> list[Any]:
        gateway = Gateway(model, SamplingParams(max_new_tokens=4000))
        await gateway.start()
        attempt = gateway.open(Problem("p", ""), seed_key="0/0/0")
        headers = {"authorization": f"Bearer {attempt.api_key}", "x-api-key": attempt.api_key}
        try:
            async with (
                httpx.AsyncClient(timeout=60) as client,
                client.stream("POST", url_of(attempt), json=body, headers=headers) as answer,
            ):
                assert answer.status_code == 200, (await answer.aread()).decode()
                return [event async for event in _events(answer)]
        finally:
            await gateway.close()

    return asyncio.run(run())


async def _events(answer: httpx.Response) -> AsyncIterator[Any]:
    async for line in answer.aiter_lines():
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            yield json.loads(data)


CHECKS: dict[str, Callable[[Family], None]] = {
    "template round trip": check_round_trip,
    "streaming, OpenAI": check_openai_stream,
    "streaming, Anthropic": check_anthropic_stream,
    "constrained": check_constrained,
}


def row(family: Family) -> str:
    """The family's row of the table; a check that fails says so."""
    cells = [family.name, f"`{family.format}`", f"`{family.template}`"]
    for check in CHECKS.values():
        try:
            check(family)
        except Exception as error:
            print(f"{family.name}, {check.__name__}: {type(error).__name__}: {error}", file=sys.stderr)
            cells.append("fails")
        else:
            cells.append("yes")
    return f"| {' | '.join(cells)} |"


def written_rows() -> dict[str, str]:
    """The rows of the page, by family."""
    table = PAGE.read_text("utf-8").partition(MARKS[0])[2].partition(MARKS[1])[0]
    return {line.split("|")[1].strip(): line for line in table.strip().splitlines()[2:]}


def write_page() -> None:
    known = written_rows()
    rows = [row(family) if family.path.exists() else known.get(family.name, "") for family in FAMILIES]
    head = ["family", "call format", "template", *CHECKS]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |", *(line for line in rows if line)]
    before, mark, rest = PAGE.read_text("utf-8").partition(MARKS[0])
    table = "\n".join(lines)
    PAGE.write_text(f"{before}{mark}\n{table}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}", "utf-8")


def download() -> None:
    """Extract the templates from source packages, which are downloaded but not built."""
    DOWNLOADED.mkdir(parents=True, exist_ok=True)
    for package, (version, part) in SOURCES.items():
        with tempfile.TemporaryDirectory() as folder:
            for member, text in _templates(_source(package, version, Path(folder)), part):
                (DOWNLOADED / member).write_text(text, "utf-8")


def _source(package: str, version: str, folder: Path) -> Path:
    """The source package from pip's index. `pip download` would build it to learn its metadata."""
    configured = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    ).stdout.strip()
    index = os.environ.get("PIP_INDEX_URL") or configured or "https://pypi.org/simple"
    page = f"{index.rstrip('/')}/{package}/"
    links = re.findall(r'href="([^"]+)"', httpx.get(page, timeout=60, follow_redirects=True).raise_for_status().text)
    file = f"{package.replace('-', '_')}-{version}.tar.gz"
    (link,) = [html.unescape(link) for link in links if file in link and not link.endswith(".metadata")]
    address, _, checksum = urljoin(page, link).partition("#sha256=")
    content = httpx.get(address, timeout=600, follow_redirects=True).raise_for_status().content
    assert hashlib.sha256(content).hexdigest() == checksum, f"{file} is damaged; download it again"
    (folder / file).write_bytes(content)
    return folder / file


def _templates(source: Path, part: str) -> list[tuple[str, str]]:
    found = []
    with tarfile.open(source) as archive:
        for member in archive.getmembers():
            if part in member.name and member.name.endswith(".jinja") and "/rust/" not in member.name:
                file = archive.extractfile(member)
                if file is not None:
                    found.append((Path(member.name).name, io.TextIOWrapper(file, "utf-8").read()))
    return found


if __name__ == "__main__":
    if "--download" in sys.argv:
        download()
    write_page()
