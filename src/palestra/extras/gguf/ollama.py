"""A model for Ollama: the GGUF file, a Modelfile, and `ollama create` where Ollama is installed."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

from palestra.core.errors import InputError, SettingError, UnsupportedError
from palestra.core.files import write_text
from palestra.extras.gguf.config import config_to_gguf, is_written_here
from palestra.extras.gguf.export import Progress, run_program, to_gguf
from palestra.extras.gguf.source import ModelSource
from palestra.extras.gguf.tokenizer import chat_template
from palestra.models.loading import TINY

_MAX_CONTEXT = 8192  # longer ones need more memory than most machines have; PARAMETER num_ctx can be edited
_NAME = re.compile(r"[\w.-]+(/[\w.-]+){0,2}(:[\w.-]+)?")
_CHATML_STOPS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_LLAMA3_STOPS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
# family -> the strings that end an answer
STOPS = {
    TINY: _CHATML_STOPS,
    "chatml": _CHATML_STOPS,
    "qwen2": _CHATML_STOPS,
    "qwen3": _CHATML_STOPS,
    "llama3": _LLAMA3_STOPS,
    "llama3.1": _LLAMA3_STOPS,
    "mistral": ("[INST]", "[/INST]", "</s>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "phi3": ("<|user|>", "<|assistant|>", "<|end|>"),
}
# transformers' name of a setting -> Ollama's
_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "min_p")} | {
    "repetition_penalty": "repeat_penalty"
}


class OllamaModel(str):
    """The name of a model in Ollama, with its files, whether Ollama has created it, and the command that does.

    >>> f"litellm/ollama_chat/{OllamaModel('clerk', Path('a.gguf'), Path('Modelfile'), 'ollama create …', False)}"
    'litellm/ollama_chat/clerk'
    """

    def __new__(cls, name: str, gguf: Path, modelfile: Path, command: str, created: bool) -> OllamaModel:
        self = super().__new__(cls, name)
        self.name, self.gguf, self.modelfile, self.command, self.created = name, gguf, modelfile, command, created
        return self

    name: str
    gguf: Path
    modelfile: Path
    command: str
    created: bool


def to_ollama(
    source: ModelSource,
    name: str,
    folder: Path,
    *,
    type: str = "q8_0",
    llama_cpp: str | None = None,
    progress: Progress = lambda done, total: None,
) -> OllamaModel:
    """Write the GGUF file and the Modelfile to `folder`, and create the model if `ollama` is on PATH."""
    if not _NAME.fullmatch(name):
        raise SettingError(f"{name!r} is not a valid name in Ollama; use letters, digits, . - _ and one : before a tag")
    file = f"{re.sub(r'[^a-z0-9.]+', '-', name.lower()).strip('-.')}-{type.lower()}.gguf"
    text = modelfile(source, file)
    gguf = to_gguf(source, folder / file, type=type, llama_cpp=llama_cpp, progress=progress)
    path = folder / "Modelfile"
    write_text(path, text)
    program = shutil.which("ollama")
    command = ["ollama", "create", name, "-f", str(path.resolve())]
    if program is not None:
        hint = f". The files are complete; start Ollama, then run: {shlex.join(command)}"
        run_program([program, *command[1:]], "Ollama could not create the model", hint=hint)
    return OllamaModel(name, gguf, path, shlex.join(command), program is not None)


def modelfile(source: ModelSource, gguf: str) -> str:
    """The text of the Modelfile: weights, template, stop strings, sampling and the agent's instructions."""
    family, system = family_of(source.tokenizer), source.instructions
    context = getattr(source.config.get_text_config(), "max_position_embeddings", None)
    if is_written_here(source.config):
        context = config_to_gguf(source.config)["context_length"]
    parameters: dict[str, Any] = {"num_ctx": min(int(context or _MAX_CONTEXT), _MAX_CONTEXT)}
    for key, parameter in _SAMPLING.items():
        value = getattr(source.generation, key, None)
        if value is not None:
            parameters[parameter] = value
    if not system:  # Qwen 2.5 and SmolLM2: the template inserts one by default
        text = source.tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        default = re.search(r"<\|im_start\|>system\n(.*?)<\|im_end\|>", text, re.DOTALL)
        system = default[1] if default else ""
    template = template_of(family)
    if '"""' in system + template:
        raise InputError('a Modelfile cannot hold three quotation marks in a row (""") in the instructions')
    lines = [f"FROM ./{gguf}", f'TEMPLATE """{template}"""', *([f'SYSTEM """{system}"""'] if system else [])]
    lines += [f"PARAMETER {name} {value}" for name, value in parameters.items()]
    lines += [f'PARAMETER stop "{stop}"' for stop in STOPS[family]]
    return "\n".join(lines) + "\n"


def template_of(family: str) -> str:
    """The family's chat template in Go's text/template.

    It renders the same text as the family's Jinja template, except that Ollama writes JSON without spaces. The text
    that begins a tool call is literal text in it, because Ollama detects from it how calls look in an answer.
    """
    path = Path(__file__).parent / "ollama_templates" / f"{family.rpartition('/')[2]}.gotmpl"
    return path.read_text(encoding="utf-8").removesuffix("\n")


def family_of(tokenizer: Any) -> str:
    """The model family whose conversation format the chat template renders."""
    text = chat_template(tokenizer)
    if "macro tool_line(tool)" in text:
        return TINY
    if "<|im_start|>" in text:
        return "qwen3" if "<think>" in text else "qwen2" if "XML tags" in text else "chatml"
    if "<|start_header_id|>" in text:
        return "llama3.1" if "Given the following functions" in text else "llama3"
    if "[INST]" in text and "<<SYS>>" not in text:
        return "mistral"
    if "<start_of_turn>" in text:
        return "gemma"
    if "<|end|>" in text:
        return "phi3"
    raise UnsupportedError(
        f"there is no Ollama template for this model's conversation format; supported are {', '.join(STOPS)}. "
        "Use --to gguf and write a Modelfile for it"
    )
