"""Grammar rules of each call format, in llguidance's dialect of Lark, by the JSON schemas of the tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.models.chat.callformats import CallFormat
from palestra.models.chat.calls_tagged import types_of

_SPACE = r"[ \t\r\n]{1,20}"  # enough for indentation; bounded, so that a model cannot write spaces forever
_TEXT = r"/(?s:.*)/"
_COMMA, _NL = '"," " "?', "\n"
_GEMMA_QUOTE = '<|"|>'
_MISTRAL_ID = "/[A-Za-z0-9]{9}/"
_TRIGGERS = {"json": "```json\n", "llama": "{", "phi4": "functools"}
# Values of Gemma's formats inside of objects and lists, which follow no schema. `gemma_text` is a quoted string.
_GEMMA_VALUES = (
    'gemma_value: gemma_text | GEMMA_NUMBER | "true" | "false" | "null" | gemma_object | gemma_list',
    'gemma_object: "{" (gemma_pair ("," gemma_pair)*)? "}"',
    "gemma_pair: GEMMA_KEY gemma_value",
    'gemma_list: "[" (gemma_value ("," gemma_value)*)? "]"',
    r"GEMMA_NUMBER: /-?[0-9]{1,30}(\.[0-9]{1,30})?/",
    r"GEMMA_KEY: /[A-Za-z_][A-Za-z0-9_]{0,60}:/",
)


@dataclass(frozen=True, slots=True)
class CallRules:
    """Grammar rules for the calls of some tools. `body` follows the trigger, up to the end of the call."""

    body: str
    rules: tuple[str, ...]
    call: str  # the body with its trigger
    lead: str = ""  # text before the calls, and before an answer, in a turn without free text
    answer_lead: str = ""


def trigger_of(format: CallFormat) -> str:
    """The text after which a call is bound to its grammar; `{` only at the beginning of a message."""
    return _TRIGGERS.get(format.name, format.opens[0])


def rules_of(
    format: CallFormat, tools: Sequence[dict[str, Any]], literal: Callable[[str], str], one_call: bool = False
) -> CallRules:
    """The rules by which these tools are called in a format. `literal` turns a text, with special tokens, into Lark."""
    writer = _RuleWriter(literal, tools, one_call)
    trigger = trigger_of(format)
    body, lead, answer_lead = _body(format.name, trigger, writer), "", ""
    if format.name == "harmony":  # reasoning, and the header of a call or of an answer
        text, analysis = writer.text_until("<|end|>"), literal("<|channel|>analysis<|message|>")
        thought = writer.rule(f"{analysis} {text} {literal('<|start|>assistant')}")
        lead = f"{thought}? {literal('<|channel|>commentary ')}"
        answer_lead = f"{thought}? {literal('<|channel|>final<|message|>')}"
    rules = (*writer.rules, f"WS: /{_SPACE}/")
    return CallRules(body, rules, f"{literal(trigger)} {body}", lead, answer_lead)


def _body(name: str, trigger: str, w: _RuleWriter) -> str:
    """The rule for the part of a call behind the trigger, by the name of the format."""
    closing = w.literal(trigger.replace("<", "</"))
    match name:
        case "hermes":
            return f"WS? {w.json_calls('arguments')} WS? {closing}"
        case "json":
            return f"WS? {w.json_calls('parameters')} WS? {w.literal('```')}"
        case "llama":
            return w.json_calls("parameters", is_open=True)
        case "granite" | "phi4":
            return w.json_list()
        case "nemotron_v2" | "tool_calls":
            return f"{w.json_list()} WS? {closing}"
        case "mistral":
            return w.json_list(has_id=True)
        case "mistral_args":
            return w.named_json("", f"({w.literal('[CALL_ID]')} {_MISTRAL_ID})? {w.literal('[ARGS]')}", '""')
        case "deepseek_v3":
            call = w.named_json("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", w.literal("\n```json\n"),
                                w.literal("\n```<｜tool▁call▁end｜>"))  # fmt: skip
            return f"WS? {w.several(call, 'WS?')} WS? {w.literal('<｜tool▁calls▁end｜>')}"
        case "deepseek_v31":
            call = w.named_json("<｜tool▁call▁begin｜>", w.literal("<｜tool▁sep｜>"), w.literal("<｜tool▁call▁end｜>"))
            return f"WS? {w.several(call, 'WS?')} WS? {w.literal('<｜tool▁calls▁end｜>')}"
        case "kimi":
            number = f'":" /[0-9]{{1,4}}/ {w.literal("<|tool_call_argument_begin|>")}'
            call = w.named_json("<|tool_call_begin|>functions.", number, w.literal("<|tool_call_end|>"))
            return f"{w.several(call, 'WS?')} {w.literal('<|tool_calls_section_end|>')}"
        case "harmony":
            channel, constrain = w.literal("<|channel|>"), w.literal("<|constrain|>")
            header = f'" "? ({channel} "commentary" " "?)? {constrain}? "json"? {w.literal("<|message|>")}'
            return w.named_json("", header, w.literal("<|call|>"))
        case "qwen_xml" | "seed":
            return f"{w.one_of(lambda tool: w.qwen_call(tool, _NL if name == 'qwen_xml' else ''))} {closing}"
        case "glm":
            return f"{w.one_of(w.glm_call)} {closing}"
        case "minimax" | "deepseek_v32" | "deepseek_v4":
            prefix = "" if name == "minimax" else "｜DSML｜"
            call = w.one_of(lambda tool: w.invoke_call(tool, prefix))
            return f'"\\n" {w.several(call, "WS?")} {closing}'
        case "gemma4":
            return f"{w.one_of(lambda tool: w.gemma_call(tool, _GEMMA_QUOTE))} {w.literal('<tool_call|>')}"
        case "function_gemma":
            return f"{w.one_of(lambda tool: w.gemma_call(tool, '<escape>'))} {w.literal('<end_function_call>')}"
        case "lfm":
            return f'"[" {w.several(w.one_of(w.python_call), _COMMA)} "]" {w.literal("<|tool_call_end|>")}'
    raise NotImplementedError(f"the call format {name} has no grammar")


@dataclass(slots=True)
class _RuleWriter:
    literal: Callable[[str], str]
    tools: Sequence[dict[str, Any]]
    one_call: bool
    rules: list[str] = field(default_factory=list)

    def rule(self, body: str) -> str:
        """The name of a new rule."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def one_of(self, write: Callable[[dict[str, Any]], str]) -> str:
        return "(" + " | ".join(self.rule(write(tool)) for tool in self.tools) + ")"

    def several(self, call: str, separator: str) -> str:
        return call if self.one_call else f"{call} ({separator} {call})*"

    def text_until(self, end: str) -> str:
        """Any text up to and including `end`."""
        written = self.literal(end)
        if written.startswith("<["):  # a special token, which no text contains
            return f"{self.rule(_TEXT)} {written}"
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}[suffix={json.dumps(end, ensure_ascii=False)}]: {_TEXT}")
        return name

    def json_calls(self, key: str, has_id: bool = False, is_open: bool = False) -> str:
        """`{"name": …, "arguments": {…}}`; with `is_open` its first brace is there already."""
        brace = "" if is_open else '"{" '
        call_id = f' (WS? "," WS? {_key("id")} WS? ":" WS? "\\"" {_MISTRAL_ID} "\\"")?' if has_id else ""
        return self.one_of(
            lambda tool: (
                f'{brace}WS? {_key("name")} WS? ":" WS? {_key(_name(tool))} WS? "," WS? {_key(key)} WS? ":" WS? '
                f'{json_rule(arguments_schema(tool))}{call_id} WS? "}}"'
            )
        )

    def json_list(self, has_id: bool = False) -> str:
        calls = self.several(self.json_calls("arguments", has_id), 'WS? "," WS?')
        return f'WS? "[" WS? {calls} WS? "]"'

    def named_json(self, before: str, between: str, after: str) -> str:
        """The name behind the text `before`, then arguments as JSON between two pieces of Lark."""
        return self.one_of(
            lambda tool: f"{self.literal(before + _name(tool))} {between} {json_rule(arguments_schema(tool))} {after}"
        )

    def qwen_call(self, tool: dict[str, Any], line: str) -> str:
        arguments = self._tagged(tool, lambda key, _: self.literal(f"<parameter={key}>{line}"), f"{line}</parameter>")
        opening = self.literal(f"<function={_name(tool)}>")
        return f'"\\n"? {opening} "\\n" {arguments} {self.literal("</function>")} "\\n"?'

    def glm_call(self, tool: dict[str, Any]) -> str:
        def opening(key: str, is_text: bool) -> str:
            return f'{self.literal(f"<arg_key>{key}</arg_key>")} "\\n"? {self.literal("<arg_value>")}'

        return f'{self.literal(_name(tool))} "\\n"? {self._tagged(tool, opening, "</arg_value>")}'

    def invoke_call(self, tool: dict[str, Any], prefix: str) -> str:
        def opening(key: str, is_text: bool) -> str:
            mark = f' string="{str(is_text).lower()}"' if prefix else ""
            return self.literal(f'<{prefix}parameter name="{key}"{mark}>')

        arguments = self._tagged(tool, opening, f"</{prefix}parameter>")
        first, last = f'<{prefix}invoke name="{_name(tool)}">\n', f"</{prefix}invoke>\n"
        return f"{self.literal(first)} {arguments} {self.literal(last)}"

    def _tagged(self, tool: dict[str, Any], opening: Callable[[str, bool], str], closing: str) -> str:
        """One rule for each parameter, in the order of the schema: its opening (as Lark), value and closing tag."""
        parts = []
        for name, schema, is_required in _parameters(tool):
            is_text = _is_text(schema)
            if choices := _choices(schema):
                value = f"({' | '.join(self.literal(each) for each in choices)}) {self.literal(closing)}"
            elif is_text:
                value = self.text_until(closing)
            elif types_of(schema) == {"boolean"}:  # templates write Python's words, too
                value = f'("true" | "false" | "True" | "False") {self.literal(closing)}'
            else:
                value = f"{self._json_value(schema)} {self.literal(closing)}"
            part = self.rule(f'{opening(name, is_text)} {value} "\\n"?')
            parts.append(part if is_required else f"{part}?")
        return " ".join(parts) or '""'

    def _listed(self, parameters: Sequence[tuple[str, str, bool]], comma: str) -> str:
        """`key value` rules with commas between those that are there: (key, value rule, is required) of each."""
        following = '""'  # what may follow, with its comma
        first: list[str] = []
        for key, value, is_required in reversed(parameters):
            pair = self.rule(f"{json.dumps(key)} {value}")
            first = [f"{pair} {following}", *([] if is_required else first)]
            following = self.rule(f"{comma} {pair} {following}" + ("" if is_required else f" | {following}"))
        needs_any = any(is_required for _, _, is_required in parameters)
        return "(" + " | ".join([*first, *([] if needs_any else ['""'])]) + ")"

    def gemma_call(self, tool: dict[str, Any], quote: str) -> str:
        text = self.rule(f"{self.literal(quote)} {self.text_until(quote)}")
        if not any(rule.startswith("gemma_value") for rule in self.rules):
            self.rules += [*_GEMMA_VALUES, f"gemma_text: {text}"]

        def value(schema: Any) -> str:
            if choices := _choices(schema):
                return f"{self.literal(quote)} ({' | '.join(map(self.literal, choices))}) {self.literal(quote)}"
            if _is_text(schema):
                return text
            is_flat = types_of(schema) <= {"integer", "number", "boolean", "null"} and types_of(schema)
            return self._json_value(schema) if is_flat else "gemma_value"

        parameters = [(f"{name}:", value(schema), is_required) for name, schema, is_required in _parameters(tool)]
        if quote == _GEMMA_QUOTE:  # Gemma 4's template sorts them
            parameters.sort()
        return f'{json.dumps(f"call:{_name(tool)}{{")} {self._listed(parameters, json.dumps(","))} "}}"'

    def python_call(self, tool: dict[str, Any]) -> str:
        def value(schema: Any) -> str:
            if choices := _choices(schema):
                return "(" + " | ".join(json.dumps(repr(each), ensure_ascii=False) for each in choices) + ")"
            if _is_text(schema):
                return r"""(/'([^'\\\n]|\\[\\'"nt])*'/ | /"([^"\\\n]|\\[\\'"nt])*"/)"""
            return '("True" | "False")' if types_of(schema) == {"boolean"} else self._json_value(schema)

        parameters = [(f"{name}=", value(schema), is_required) for name, schema, is_required in _parameters(tool)]
        return f'{json.dumps(f"{_name(tool)}(")} {self._listed(parameters, _COMMA)} ")"'

    def _json_value(self, schema: Any) -> str:
        return self.rule(json_rule(schema if isinstance(schema, dict) else {}))


def json_rule(schema: dict[str, Any]) -> str:
    options = {"whitespace_pattern": _SPACE, "coerce_one_of": True, "lenient": True}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def arguments_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments; unknown arguments are rejected unless it allows them."""
    return {"type": "object", "additionalProperties": False, **(tool["function"].get("parameters") or {})}


def _parameters(tool: dict[str, Any]) -> list[tuple[str, Any, bool]]:
    """Name, schema and whether it is required, of each parameter."""
    whole = arguments_schema(tool)
    shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    required = whole.get("required") or ()
    properties = whole.get("properties") or {}
    return [
        (name, {**schema, **shared} if isinstance(schema, dict) else schema, name in required)
        for name, schema in properties.items()
    ]


def _is_text(schema: Any) -> bool:
    return "string" in types_of(schema if isinstance(schema, dict) else None)


def _choices(schema: Any) -> list[str]:
    values = schema.get("enum", [schema["const"]] if "const" in schema else []) if isinstance(schema, dict) else []
    return list(values) if values and all(isinstance(value, str) for value in values) else []


def _name(tool: dict[str, Any]) -> str:
    return str(tool["function"]["name"])


def _key(word: str) -> str:
    return json.dumps(json.dumps(word, ensure_ascii=False), ensure_ascii=False)
