"""A policy whose every turn is written down, behind a completer with the embedded model's tokenizer."""

from collections.abc import Callable, Sequence
from typing import Any

from builders import ADD_SCHEMA as TOOL
from builders import END, BranchingPolicy, ScriptedPolicy
from builders import call_text as call

from palestra.core.types import Problem, SamplingParams
from palestra.servers.gateway.attempt import Attempt
from palestra.servers.openai.completer import Completer

__all__ = ["END", "PROBLEM", "TOOL", "BranchingPolicy", "ScriptedPolicy", "attempt", "call", "completer"]
PROBLEM = Problem("p1", "What is 2 + 3?")
QUESTION = {"role": "user", "content": "What is 2 + 3?"}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {"type": "object", "properties": {"x": NUMBER}, "required": ["x"], "additionalProperties": False}
CALLS = "<think>hm</think>Let me see.\n" + call('{"a": 2, "b": "é"}') + "\n" + call("{}", "other") + END


def completer(
    tokenizer: Any,
    say: Callable[[int], str] | Sequence[str],
    context: int = 10_000,
    kind: type[ScriptedPolicy] = ScriptedPolicy,
) -> Completer:
    speak = say if callable(say) else lambda i: say[i]
    return Completer(kind(tokenizer, speak, context=context), tokenizer, "scripted", context)


def attempt(model: Completer, **options: Any) -> Attempt:
    sampling = options.pop("sampling", SamplingParams(max_new_tokens=10_000))
    return Attempt(PROBLEM, model, "http://gateway", sampling=sampling, seed=options.pop("seed", 7), **options)
