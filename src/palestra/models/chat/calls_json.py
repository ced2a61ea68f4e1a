"""Call formats whose calls are JSON or Python: parsers and writers. Python calls are parsed, never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from palestra.models.chat.toolcalls import (
    Calls,
    Found,
    Schemas,
    Unreadable,
    decode_all,
    decoder,
    dumps,
    find_tagged,
    name_of,
    read_json,
    why_not_json,
)

_CALL = r"\s*[A-Za-z_][\w.]*\("
_LIST, _CODE = re.compile(rf"\[{_CALL}"), re.compile(rf"\[?{_CALL}")  # where only code is expected, one call alone
_JSON_WORDS = {"true": True, "false": False, "null": None}
_LONGEST = 100_000


def read_calls(text: str) -> list[Any]:
    """Each call as {"name": …, "arguments": {…}}, or Unreadable.

    >>> read_calls('[add(a=1, b=[2, 3])]')
    [{'name': 'add', 'arguments': {'a': 1, 'b': [2, 3]}}]
    """
    body = _parse(text.strip()) or _parse(text.strip().replace("\n", "\\n"))  # a line break in a string, not escaped
    if body is None:
        return [Unreadable("the tool call is not valid Python")]
    calls: list[Any] = []
    for statement in body:
        value = statement.value if isinstance(statement, ast.Expr) else statement
        calls += [_read(node) for node in (value.elts if isinstance(value, ast.List) else [value])]
    return calls


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as Python: `add(a=1, b='x')`."""
    written = (f"{k}={dumps(v) if isinstance(v, dict | list) else repr(v)}" for k, v in arguments.items())
    return f"{name}({', '.join(written)})"


def _parse(text: str) -> list[ast.stmt] | None:
    try:
        return ast.parse(text).body if len(text) <= _LONGEST else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _read(node: ast.AST) -> Any:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(node.args) == 1:
        node = node.args[0]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return Unreadable("the tool call is not of the form name(argument=value)")
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return Unreadable("every argument needs its name: name(argument=value)", name)
    try:
        values = {str(k.arg): ast.literal_eval(_AsPython().visit(k.value)) for k in node.keywords}
        return {"name": name, "arguments": values}
    except (ValueError, TypeError, RecursionError, MemoryError):
        return Unreadable("an argument is not a plain value", name)


class _AsPython(ast.NodeTransformer):
    """true, false and null as Python spells them."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


MISTRAL = "[TOOL_CALLS]"
_LOOKS_LIKE_JSON_CALL = re.compile(r'[\[\s]*\{\s*"(name|function|type|parameters|arguments)"')
_FENCE = re.compile(r"```(\w*)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
# A call in a text, with the fence, the tag, the backtick or the doubled braces around it. Qwen2.5-Coder's template
# shows calls as {{"name": …}} by mistake, and the model copies that.
_EMBEDDED_START = re.compile(r'\{\s*"(?:name|function|tool_name|type|arguments|parameters)"')
_BEFORE_EMBEDDED = re.compile(r"(?:\s*(?:\w*```|>llac_loot<)|`|(?<=\{)\{)*")  # matched from right to left
_MAX_EMBEDDED = 300  # objects that are decoded: one inside of others is decoded once for each of them
_EMBEDDED_END = re.compile(r"[\s},;]*(?:```|`|</tool_call>)?[\s.]*")
_NAMED_TOOL = re.compile(r'\{\s*"(?:name|function|tool_name)"\s*:\s*"([^"]*)"')
_CODE_FENCES = ("tool_code", "tool_call", "tool_calls")
_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*+(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(?=\{)")
_DEEPSEEK_CALL = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<v3>[^\n]*)\n```json\n|(?P<name>[^<]*)<｜tool▁sep｜>)"
    r"(?P<arguments>.*?)(?:<｜tool▁call▁end｜>|\Z)",
    re.DOTALL,
)
_KIMI_CALL = re.compile(
    r"<\|tool_call_begin\|>(?P<id>[^<]*)<\|tool_call_argument_begin\|>"
    r"(?P<arguments>.*?)(?:<\|tool_call_end\|>|\Z)",
    re.DOTALL,
)
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")
_LLAMA_TAG = re.compile(r"<\|python_tag\|>|<\|python_start\|>(?:<\|python_end\|>)?")


def write_tagged_list(calls: Calls, opening: str, closing: str) -> str:
    """One block with a list of all calls."""
    return f"{opening}{dumps([{'name': n, 'arguments': dict(a)} for n, a in calls])}{closing}"


def find_bare(text: str, schemas: Schemas) -> Found:
    """Llama: a message that is nothing but calls, or calls behind a tag."""
    if tag := _LLAMA_TAG.search(text):
        calls = _bare(text[tag.end() :], is_code=True)
        return text[: tag.start()], calls or [Unreadable(f"no call follows {tag[0]}")]
    calls = _bare(text)
    return ("", calls) if calls else (text, [])


def find_phi(text: str, schemas: Schemas) -> Found:
    """Phi-4 mini: a list behind `functools`, or a message that is nothing but calls, as its template writes them."""
    if "functools[" in text:
        return find_tagged(text, schemas, "functools", "\0", needs_close=False)
    return find_bare(text, schemas)


def find_fenced(text: str, schemas: Schemas, known_tools_only: bool = False) -> Found:
    """Fenced blocks that hold calls; without any, a message that is nothing but calls."""
    calls: list[Any] = []

    def counts(block: Sequence[Any]) -> bool:
        return bool(block) and (not known_tools_only or all(name_of(call) in schemas for call in block))

    def take(fence: re.Match[str]) -> str:
        is_code = fence[1] in _CODE_FENCES
        block = _bare(fence[2], is_code)
        if not block and is_code:
            block = [Unreadable(f"the block {fence[1]} holds no call")]
        if not counts(block):
            return fence[0]
        calls.extend(block)
        return ""

    rest = _FENCE.sub(take, text)
    if not calls and counts(bare := _bare(text)):
        return "", bare
    return rest, calls


def find_embedded(text: str, schemas: Schemas) -> Found:
    """Calls of known tools as JSON that begins a line or ends the message; other JSON stays text."""
    parts, calls, position, last, decoded = list[str](), list[Any](), 0, 0, 0
    while decoded < _MAX_EMBEDDED and (opening := _EMBEDDED_START.search(text, position)):
        before = text[position : opening.start() + 1][::-1]
        start = opening.start() + 1 - _BEFORE_EMBEDDED.match(before, 1).end()  # type: ignore[union-attr]
        _, newline, line = text[last:start].rpartition("\n")
        begins_line = not line.strip() and bool(newline or not last)
        last = opening.end()
        if begins_line or text[start - 1].isspace():
            decoded += 1
            value, end = _decode_call(text, opening.start())
            end = _EMBEDDED_END.match(text, end).end()  # type: ignore[union-attr]
            if name_of(value) in schemas and (begins_line or end == len(text)):
                calls.append(value)
                parts.append(text[position:start])
                position = end
                continue
        parts.append(text[position : opening.end()])
        position = opening.end()
    return "".join([*parts, text[position:]]), calls


def _decode_call(text: str, start: int) -> tuple[Any, int]:
    """The JSON object at `start` and its end; `Unreadable` with the tool's name if it is not valid JSON."""
    try:
        value, end = decoder.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        named = _NAMED_TOOL.match(text, start)
        why = Unreadable(f"the tool call is not valid JSON ({why_not_json(error)})", named[1] if named else "")
        return why, len(text)
    return (value if _is_call(value) else None), end


def write_bare(calls: Calls) -> str:
    return "; ".join(dumps({"name": n, "parameters": dict(a)}) for n, a in calls)


def write_fenced(calls: Calls) -> str:
    return "\n".join(f"```json\n{dumps({'name': n, 'parameters': dict(a)})}\n```" for n, a in calls)


def _bare(text: str, is_code: bool = False) -> list[Any]:
    """The calls that a text consists of, as JSON or as Python; nothing where it is something else."""
    body = text.strip()
    if (_CODE if is_code else _LIST).match(body):
        return read_calls(body)
    if not _LOOKS_LIKE_JSON_CALL.match(body):
        return []
    calls, end = decode_all(body, 0)
    if body[end:].strip("; \n\t"):
        calls.append(read_json(body[end:].lstrip(";, \n\t")))
    return calls if any(isinstance(call, Unreadable) or _is_call(call) for call in calls) else []


def _is_call(value: Any) -> bool:
    """Whether a JSON value is a call: it has a name and arguments. Other JSON may be an answer."""
    if not isinstance(value, dict):
        return False
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    return bool({"name", "function"} & set(inner)) and bool({"arguments", "parameters"} & set(inner))


def find_mistral(text: str, schemas: Schemas) -> Found:
    """`[TOOL_CALLS] [{…}, {…}]` of older models, `[TOOL_CALLS]name[ARGS]{…}` of newer ones."""
    before, *pieces = text.split(MISTRAL)
    calls: list[Any] = []
    for piece in pieces:
        if named := _MISTRAL_NAME.match(piece):
            calls.append(named_call(named[1], piece[named.end() :], named[2]))
        else:
            value = read_json(piece)
            calls += value if isinstance(value, list) else [value]
    return before, calls


write_mistral = partial(write_tagged_list, opening=f"{MISTRAL} ", closing="")
write_phi = partial(write_tagged_list, opening="functools", closing="")


def write_mistral_args(calls: Calls) -> str:
    return "".join(f"{MISTRAL}{name}[ARGS]{dumps(dict(arguments))}" for name, arguments in calls)


def named_call(name: str, arguments: str, call_id: str | None = None) -> Any:
    """A call whose name stands in front of its arguments."""
    value = read_json(arguments)
    if isinstance(value, Unreadable):
        return Unreadable(value.reason, name)
    return {"name": name, "arguments": value} | ({"id": call_id} if call_id else {})


def find_deepseek(text: str, schemas: Schemas) -> Found:
    """DeepSeek V3 (a ```json block behind the name) and V3.1 (JSON behind the name)."""
    before, tag, behind = text.partition("<｜tool▁calls▁begin｜>")
    if not tag and "<｜tool▁call▁begin｜>" in text:
        start = text.index("<｜tool▁call▁begin｜>")
        before, behind = text[:start], text[start:]
    body, _, after = behind.partition("<｜tool▁calls▁end｜>")
    calls = [
        named_call((m["v3"] or m["name"] or "").strip(), m["arguments"].rstrip().removesuffix("\n```"))
        for m in _DEEPSEEK_CALL.finditer(body)
    ]
    if tag and not calls:
        calls = [Unreadable("no call follows <｜tool▁calls▁begin｜>")]
    return before + after, calls


def write_deepseek(calls: Calls, is_v3: bool) -> str:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        body = dumps(dict(arguments))
        written = f"function<｜tool▁sep｜>{name}\n```json\n{body}\n```" if is_v3 else f"{name}<｜tool▁sep｜>{body}"
        return f"<｜tool▁call▁begin｜>{written}<｜tool▁call▁end｜>"

    between = "\n" if is_v3 else ""
    return f"<｜tool▁calls▁begin｜>{between.join(one(*call) for call in calls)}<｜tool▁calls▁end｜>"


def find_kimi(text: str, schemas: Schemas) -> Found:
    before, tag, behind = text.partition("<|tool_calls_section_begin|>")
    body, _, after = behind.partition("<|tool_calls_section_end|>")
    calls = []
    for match in _KIMI_CALL.finditer(body):
        call_id = match["id"].strip()
        named = _KIMI_ID.fullmatch(call_id)
        calls.append(named_call(named["name"] if named else "", match["arguments"], call_id))
    if tag and not calls:
        calls = [Unreadable("no call follows <|tool_calls_section_begin|>")]
    return before + after, calls


def write_kimi(calls: Calls) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{dumps(dict(arguments))}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"
