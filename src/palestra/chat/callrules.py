"""Grammar rules of each call format, in llguidance's dialect of Lark, by the JSON schemas of the tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.chat.callformats import CallFormat
from palestra.chat.calls_xml import types_of

_SPACE = r"[ \t\r\n]{1,20}"  # room for indentation, and an end: no model can go on with spaces forever
_TEXT = r"/(?s:.*)/"
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
    """The rules of some tools: `body` is what follows the trigger, up to the end of the call."""

    body: str
    rules: tuple[str, ...]
    call: str  # the body with its trigger
    lead: str = ""  # what stands before calls, and before an answer, where a turn is nothing else
    answer_lead: str = ""


@dataclass(slots=True)
class RuleWriter:
    """Writes the rules of one format; `literal` turns a text into Lark, special tokens included."""

    literal: Callable[[str], str]
    rules: list[str] = field(default_factory=list)

    def rule(self, body: str) -> str:
        """The name of a new rule."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def text_until(self, end: str) -> str:
        """Any text up to and including `end`."""
        written = self.literal(end)
        if written.startswith("<["):  # a special token, which no text contains
            return f"{self.rule(_TEXT)} {written}"
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}[suffix={json.dumps(end, ensure_ascii=False)}]: {_TEXT}")
        return name

    def json_call(self, tool: dict[str, Any], key: str, has_id: bool = False, is_open: bool = False) -> str:
        """`{"name": …, "arguments": {…}}`; with `is_open` its first brace is there already."""
        call_id = f' (WS? "," WS? {_key("id")} WS? ":" WS? "\\"" /[A-Za-z0-9]{{9}}/ "\\"")?' if has_id else ""
        return (
            ("" if is_open else '"{" ') + f'WS? {_key("name")} WS? ":" WS? {_key(_name(tool))} WS? "," WS? '
            f'{_key(key)} WS? ":" WS? {json_rule(arguments_schema(tool))}{call_id} WS? "}}"'
        )

    def tagged_arguments(self, tool: dict[str, Any], opening: Callable[[str, bool], str], closing: str) -> str:
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

    def listed_arguments(self, parameters: Sequence[tuple[str, str, bool]], comma: str) -> str:
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
        return f'{json.dumps(f"call:{_name(tool)}{{")} {self.listed_arguments(parameters, json.dumps(","))} "}}"'

    def python_call(self, tool: dict[str, Any]) -> str:
        def value(schema: Any) -> str:
            if choices := _choices(schema):
                return "(" + " | ".join(json.dumps(repr(each), ensure_ascii=False) for each in choices) + ")"
            if _is_text(schema):
                return r"""(/'([^'\\\n]|\\[\\'"nt])*'/ | /"([^"\\\n]|\\[\\'"nt])*"/)"""
            return '("True" | "False")' if types_of(schema) == {"boolean"} else self._json_value(schema)

        parameters = [(f"{name}=", value(schema), is_required) for name, schema, is_required in _parameters(tool)]
        return f'{json.dumps(f"{_name(tool)}(")} {self.listed_arguments(parameters, _COMMA)} ")"'

    def _json_value(self, schema: Any) -> str:
        return self.rule(json_rule(schema if isinstance(schema, dict) else {}))


_COMMA = '"," " "?'
_TRIGGERS = {"json": "```json\n", "llama": "{", "phi4": "functools"}


def trigger_of(format: CallFormat) -> str:
    """The text after which a call is bound to its grammar; `{` only at the beginning of a message."""
    return _TRIGGERS.get(format.name, format.opens[0])


def rules_of(
    format: CallFormat, tools: Sequence[dict[str, Any]], literal: Callable[[str], str], one_call: bool = False
) -> CallRules:
    """The rules by which these tools are called in a format."""
    writer = RuleWriter(literal)

    def one_of(write: Callable[[dict[str, Any]], str]) -> str:
        return "(" + " | ".join(writer.rule(write(tool)) for tool in tools) + ")"

    def several(item: str, separator: str) -> str:
        return item if one_call else f"{item} ({separator} {item})*"

    def json_items(key: str, has_id: bool = False, is_open: bool = False) -> str:
        return one_of(lambda tool: writer.json_call(tool, key, has_id, is_open))

    def json_list(key: str = "arguments", has_id: bool = False) -> str:
        return f'WS? "[" WS? {several(json_items(key, has_id), _LIST_COMMA)} WS? "]"'

    def named_json(before: str, between: str, after: str) -> str:
        return one_of(
            lambda tool: (
                f"{literal(before + _name(tool) + between)} {json_rule(arguments_schema(tool))} {literal(after)}"
            )
        )

    lead = answer_lead = ""
    trigger = trigger_of(format)
    match format.name:
        case "hermes":
            body = f"WS? {json_items('arguments')} WS? {literal('</tool_call>')}"
        case "json":
            body = f"WS? {json_items('parameters')} WS? {literal('```')}"
        case "llama":
            body = json_items("parameters", is_open=True)
        case "phi4":
            body = json_list()
        case "granite":
            body = json_list()
        case "nemotron_v2" | "tool_calls":
            body = f"{json_list()} WS? {literal(trigger.replace('<', '</'))}"
        case "mistral":
            body = json_list(has_id=True)
        case "mistral_args":
            call_id = f"({literal('[CALL_ID]')} /[A-Za-z0-9]{{9}}/)?"
            body = one_of(
                lambda tool: f"{literal(_name(tool))} {call_id} {literal('[ARGS]')} {json_rule(arguments_schema(tool))}"
            )
        case "deepseek_v3" | "deepseek_v31":
            is_v3 = format.name == "deepseek_v3"
            before = "<｜tool▁call▁begin｜>" + ("function<｜tool▁sep｜>" if is_v3 else "")
            between, after = ("\n```json\n", "\n```") if is_v3 else ("<｜tool▁sep｜>", "")
            item = named_json(before, between, f"{after}<｜tool▁call▁end｜>")
            body = f"WS? {several(item, 'WS?')} WS? {literal('<｜tool▁calls▁end｜>')}"
        case "kimi":
            item = one_of(
                lambda tool: (
                    f"{literal('<|tool_call_begin|>functions.' + _name(tool) + ':')} /[0-9]{{1,4}}/ "
                    f"{literal('<|tool_call_argument_begin|>')} {json_rule(arguments_schema(tool))} "
                    f"{literal('<|tool_call_end|>')}"
                )
            )
            body = f"{several(item, 'WS?')} {literal('<|tool_calls_section_end|>')}"
        case "harmony":
            header = (
                f'" "? ({literal("<|channel|>")} "commentary" " "?)? {literal("<|constrain|>")}? "json"? '
                f"{literal('<|message|>')}"
            )
            body = one_of(
                lambda tool: (
                    f"{literal(_name(tool))} {header} {json_rule(arguments_schema(tool))} {literal('<|call|>')}"
                )
            )
            thought = writer.rule(f"{literal('<|channel|>analysis<|message|>')} {writer.text_until('<|end|>')}")
            thoughts = f"({thought} {literal('<|start|>assistant')})?"
            lead = f"{thoughts} {literal('<|channel|>commentary ')}"
            answer_lead = f"{thoughts} {literal('<|channel|>final<|message|>')}"
        case "qwen_xml" | "seed":
            close, line = trigger.replace("<", "</"), "" if format.name == "seed" else "\n"

            def parameter(key: str, is_text: bool) -> str:
                return literal(f"<parameter={key}>{line}")

            body = one_of(
                lambda tool: (
                    f'"\\n"? {literal("<function=" + _name(tool) + ">")} "\\n" '
                    f"{writer.tagged_arguments(tool, parameter, f'{line}</parameter>')} "
                    f'{literal("</function>")} "\\n"?'
                )
            )
            body = f"{body} {literal(close)}"
        case "glm":

            def argument(key: str, is_text: bool) -> str:
                return f'{literal(f"<arg_key>{key}</arg_key>")} "\\n"? {literal("<arg_value>")}'

            body = one_of(
                lambda tool: f'{literal(_name(tool))} "\\n"? {writer.tagged_arguments(tool, argument, "</arg_value>")}'
            )
            body = f"{body} {literal('</tool_call>')}"
        case "minimax" | "deepseek_v32" | "deepseek_v4":
            prefix = "" if format.name == "minimax" else "｜DSML｜"

            def opening(key: str, is_text: bool) -> str:
                mark = f' string="{str(is_text).lower()}"' if prefix else ""
                return literal(f'<{prefix}parameter name="{key}"{mark}>')

            item = one_of(
                lambda tool: (
                    f"{literal(f'<{prefix}invoke name=' + json.dumps(_name(tool)) + '>' + _NL)} "
                    f"{writer.tagged_arguments(tool, opening, f'</{prefix}parameter>')} "
                    f"{literal(f'</{prefix}invoke>' + _NL)}"
                )
            )
            body = f'"\\n" {several(item, "WS?")} {literal(trigger.replace("<", "</"))}'
        case "gemma4":
            body = f"{one_of(lambda tool: writer.gemma_call(tool, _GEMMA_QUOTE))} {literal('<tool_call|>')}"
        case "function_gemma":
            body = f"{one_of(lambda tool: writer.gemma_call(tool, '<escape>'))} {literal('<end_function_call>')}"
        case "lfm":
            body = f'"[" {several(one_of(writer.python_call), _COMMA)} "]" {literal("<|tool_call_end|>")}'
        case _:
            raise NotImplementedError(format.name)
    rules = (*writer.rules, f"WS: /{_SPACE}/")
    return CallRules(body, rules, f"{literal(trigger)} {body}", lead, answer_lead)


_LIST_COMMA = 'WS? "," WS?'
_NL = "\n"
_GEMMA_QUOTE = '<|"|>'


def json_rule(schema: dict[str, Any]) -> str:
    options = {"whitespace_pattern": _SPACE, "coerce_one_of": True, "lenient": True}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def arguments_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Closed as tools read them: what is not named is refused."""
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
