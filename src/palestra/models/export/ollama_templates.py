"""Chat templates for Ollama (in Go's text/template), by model family.

Each renders the same text as the Jinja template of its family, except that Ollama writes JSON without spaces. The text
that begins a tool call is literal text in the template, because Ollama detects from it how calls look in an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The system message with the tools, for families that support both.
_HEAD = r"""
{{- if or .System .Tools }}{{ "@OPEN@" }}{{ .System }}
{{- if and .System .Tools }}{{ "@GAP@" }}{{ end }}
{{- if .Tools }}@TOOLS@{{ end }}{{ "@CLOSE@" }}{{ end }}
"""

_HERMES_TOOLS = (
    r"""{{ "# Tools\n\nYou may call one or more functions. " }}
{{- "Their signatures are within <tools></tools> tags:\n<tools>" }}
{{- range .Tools }}{{ "\n" }}{{ . }}{{ end }}
{{- "\n</tools>\n\nFor each call, write its name and arguments as JSON within <tool_call></tool_call> tags:\n" }}"""
    r"""{{ "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}"""
)
_QWEN_TOOLS = (
    r"""{{ "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n" }}"""
    r"""{{ "You are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
{{- range .Tools }}{{ "\n" }}{{ . }}{{ end }}
{{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within " }}"""
    r"""{{ "<tool_call></tool_call> XML tags:\n" }}"""
    r"""{{ "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}"""
)
_TINY_TOOLS = r"""{{ $line := "" }}{{ range .Tools }}{{ $line }}{"name": "{{ .Function.Name }}", "arguments": {
{{- $comma := "" }}{{ range $name, $property := .Function.Parameters.Properties -}}
{{ $comma }}"{{ $name }}": {{ if $property.Enum }}{{ json $property.Enum }}{{ else }}"{{ $property.Type }}"{{ end }}
{{- $comma = ", " }}{{ end -}}
}} {{ .Function.Description }}{{ $line = "\n" }}{{ end }}"""
_JSON_TOOLS = (
    r"""{{ "You have access to these functions:" }}{{ range $.Tools }}{{ "\n" }}{{ . }}{{ end }}
{{- "\n\nTo call one, answer with this and nothing else:\n" }}"""
    r"""{{ "```json\n{\"name\": <function-name>, \"parameters\": <args-json-object>}\n```" }}"""
)
_LLAMA3_TOOLS = (
    r"""{{ "You have access to these functions:" }}{{ range .Tools }}{{ "\n" }}{{ . }}{{ end }}
{{- "\n\nTo call one, answer with a JSON object and nothing else: " }}"""
    r"""{{ "{\"name\": function name, \"parameters\": dictionary of argument name and its value}" }}"""
)
_LLAMA31_TOOLS = (
    r"""{{ "Given the following functions, please respond with a JSON for a function call with its proper arguments """
    r"""that best answers the given prompt.\n\nRespond in the format {\"name\": function name, \"parameters\": """
    r"""dictionary of argument name and its value}. Do not use variables.\n\n" }}
{{- range $.Tools }}{{ . }}{{ "\n\n" }}{{ end }}"""
)
_ARGUMENTS = "{{ .Function.Arguments }}"
_SPACED_ARGUMENTS = (  # as palestra/tiny writes them
    r"""{ {{- $comma := "" }}{{ range $name, $value := .Function.Arguments }}"""
    r"""{{ $comma }}"{{ $name }}": {{ json $value }}{{ $comma = ", " }}{{ end }}}"""
)

# The tool results of one turn share a user message; `$results` is true while it is open.
_CHATML = r"""
{{- $results := false }}
{{- range .Messages }}{{ $content := .Content }}
{{- if and $results (ne .Role "tool") }}{{ "<|im_end|>\n" }}{{ $results = false }}{{ end }}
{{- if eq .Role "user" }}{{ "<|im_start|>user\n" }}{{ .Content }}{{ "<|im_end|>\n" }}
{{- else if eq .Role "assistant" }}{{ "<|im_start|>assistant\n" }}{{ .Content }}
{{- if .ToolCalls }}{{ range $i, $_ := .ToolCalls }}{{ if or $i $content }}
<tool_call>{{ else }}<tool_call>{{ end }}
{"name": "{{ .Function.Name }}", "arguments": @ARGUMENTS@}
</tool_call>{{ end }}{{ end }}{{ "<|im_end|>\n" }}
{{- else if eq .Role "tool" }}{{ if not $results }}{{ "<|im_start|>user" }}{{ end }}{{ $results = true }}
{{- "\n<tool_response>\n" }}{{ .Content }}{{ "\n</tool_response>" }}
{{- end }}{{ end }}
{{- if $results }}{{ "<|im_end|>\n" }}{{ end }}
{{- "<|im_start|>assistant\n" }}"""

_LLAMA3 = r"""
{{- range .Messages }}
{{- if eq .Role "user" }}{{ "<|start_header_id|>user<|end_header_id|>\n\n" }}
{{- "" }}@USER_TOOLS@{{ .Content }}{{ "<|eot_id|>" }}
{{- else if eq .Role "assistant" }}{{ "<|start_header_id|>assistant<|end_header_id|>\n\n" }}{{ .Content }}
{{- if .ToolCalls }}{{ range $i, $_ := .ToolCalls }}{{ if $i }}; {"name": "{{ else }}{"name": "{{ end }}
{{- .Function.Name }}", "parameters": {{ .Function.Arguments }}}{{ end }}{{ end }}{{ "<|eot_id|>" }}
{{- else if eq .Role "tool" }}{{ "<|start_header_id|>ipython<|end_header_id|>\n\n" }}{{ .Content }}{{ "<|eot_id|>" }}
{{- end }}{{ end }}
{{- "<|start_header_id|>assistant<|end_header_id|>\n\n" }}"""

_MISTRAL = r"""
{{- $due := true }}
{{- range .Messages }}
{{- if eq .Role "user" }}
{{- if and $due $.Tools }}{{ "[AVAILABLE_TOOLS] " }}{{ $.Tools }}{{ "[/AVAILABLE_TOOLS]" }}{{ end }}
{{- "[INST] " }}{{ if and $due $.System }}{{ $.System }}{{ "\n\n" }}{{ end }}{{ $due = false }}
{{- .Content }}{{ "[/INST]" }}
{{- else if eq .Role "assistant" }}{{ if .Content }}{{ " " }}{{ .Content }}{{ end }}
{{- if .ToolCalls }}[TOOL_CALLS] [{{ range $i, $_ := .ToolCalls }}{{ if $i }}, {{ end }}{"name": "
{{- .Function.Name }}", "arguments": {{ .Function.Arguments }}}{{ end }}]{{ end }}{{ "</s>" }}
{{- else if eq .Role "tool" }}{{ "[TOOL_RESULTS] {\"content\": " }}{{ json .Content }}{{ "}[/TOOL_RESULTS]" }}
{{- end }}{{ end }}"""

# Families without a tool format of their own, as in `chat.families`: fenced JSON, results in a user message.
_FENCED = r"""
{{- $results := false }}{{ $due := @DUE@ }}
{{- range .Messages }}{{ $content := .Content }}
{{- if and $results (ne .Role "tool") }}{{ "@END@" }}{{ $results = false }}{{ end }}
{{- if eq .Role "user" }}{{ "@USER@" }}
{{- if $due }}{{ $.System }}{{ if and $.System $.Tools }}{{ "\n\n" }}{{ end }}
{{- if $.Tools }}@TOOLS@{{ end }}{{ if or $.System $.Tools }}{{ "\n\n" }}{{ end }}{{ $due = false }}{{ end }}
{{- .Content }}{{ "@END@" }}
{{- else if eq .Role "assistant" }}{{ "@MODEL@" }}{{ .Content }}
{{- if .ToolCalls }}{{ range $i, $_ := .ToolCalls }}{{ if or $i $content }}
```json{{ else }}```json{{ end }}
{"name": "{{ .Function.Name }}", "parameters": {{ .Function.Arguments }}}
```{{ end }}{{ end }}{{ "@END@" }}
{{- else if eq .Role "tool" }}{{ if $results }}{{ "\n" }}{{ else }}{{ "@USER@" }}{{ end }}{{ $results = true }}
{{- "<tool_response>\n" }}{{ .Content }}{{ "\n</tool_response>" }}
{{- end }}{{ end }}
{{- if $results }}{{ "@END@" }}{{ end }}
{{- "@MODEL@" }}"""

_IM = {"OPEN": r"<|im_start|>system\n", "CLOSE": r"<|im_end|>\n", "GAP": r"\n\n"}
_HEADER = {"OPEN": r"<|start_header_id|>system<|end_header_id|>\n\n", "CLOSE": "<|eot_id|>", "GAP": r"\n\n"}
_NO_THINKING = r"""{{ if and .IsThinkSet (not .Think) }}{{ "<think>\n\n</think>\n\n" }}{{ end }}"""
_FIRST_USER = r"{{ if and $due $.Tools }}" + _LLAMA31_TOOLS + r"{{ end }}{{ $due = false }}"


@dataclass(frozen=True)
class OllamaTemplate:
    """A family's template and the strings that end an answer."""

    text: str
    stops: tuple[str, ...]


def _fill(template: str, parts: Mapping[str, str]) -> str:
    for name, text in parts.items():
        template = template.replace(f"@{name}@", text)
    return template.strip("\n")


def _chatml(tools: str, arguments: str = _ARGUMENTS, gap: str = r"\n\n", end: str = "") -> OllamaTemplate:
    parts = {**_IM, "GAP": gap, "TOOLS": tools, "ARGUMENTS": arguments}
    return OllamaTemplate(_fill(_HEAD + _CHATML, parts) + end, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"))


def _llama3(head: str, tools: str, user_tools: str) -> OllamaTemplate:
    parts = {**_HEADER, "TOOLS": tools, "USER_TOOLS": user_tools}
    return OllamaTemplate(
        _fill(head + _LLAMA3, parts), ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
    )


_LLAMA31_HEAD = (
    r"""{{ $due := true }}{{ "<|start_header_id|>system<|end_header_id|>\n\n" }}"""
    r"""{{ if .Tools }}{{ "Environment: ipython\n" }}{{ end }}"""
    r"""{{ "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n" }}{{ .System }}{{ "<|eot_id|>" }}
"""
)
_GEMMA = {
    "DUE": "true",
    "USER": r"<start_of_turn>user\n",
    "MODEL": r"<start_of_turn>model\n",
    "END": r"<end_of_turn>\n",
}
_PHI3 = {"DUE": "false", "USER": r"<|user|>\n", "MODEL": r"<|assistant|>\n", "END": r"<|end|>\n"}
_PHI3_HEAD = {"OPEN": r"<|system|>\n", "CLOSE": r"<|end|>\n", "GAP": r"\n\n"}

TEMPLATES = {
    "palestra/tiny": _chatml(_TINY_TOOLS, _SPACED_ARGUMENTS, gap=r"\n"),
    "chatml": _chatml(_HERMES_TOOLS),
    "qwen2": _chatml(_QWEN_TOOLS),
    "qwen3": _chatml(_QWEN_TOOLS, end=_NO_THINKING),
    "llama3": _llama3(_HEAD, _LLAMA3_TOOLS, ""),
    "llama3.1": _llama3(_LLAMA31_HEAD, "", _FIRST_USER),
    "mistral": OllamaTemplate(_fill(_MISTRAL, {}), ("[INST]", "[/INST]", "</s>")),
    "gemma": OllamaTemplate(_fill(_FENCED, {**_GEMMA, "TOOLS": _JSON_TOOLS}), ("<start_of_turn>", "<end_of_turn>")),
    "phi3": OllamaTemplate(
        _fill(_HEAD + _FENCED, {**_PHI3, **_PHI3_HEAD, "TOOLS": _JSON_TOOLS}), ("<|user|>", "<|assistant|>", "<|end|>")
    ),
}
