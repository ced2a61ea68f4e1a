"""Reasoning in a model's text: where it begins and ends, by the tags of all model families."""

from __future__ import annotations

import re

# Opening and closing tag of each family. The tags are unambiguous, so the family does not have to be known.
TAGS = (
    ("<think>", "</think>"),  # Qwen, DeepSeek, GLM, Kimi, Nemotron, MiniMax, SmolLM3, Granite, LFM2
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<seed:think>", "</seed:think>"),  # Seed
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ("◁think▷", "◁/think▷"),  # Kimi VL
)
_PAIRS = (rf"{re.escape(opening)}(.*?)(?:{re.escape(closing)}|\Z)" for opening, closing in TAGS)
_BLOCK = re.compile(rf"\s*(?:{'|'.join(_PAIRS)})", re.DOTALL)
_ANALYSIS = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>analysis(?:(?!<\|message\|>|<\|channel\|>|to=).)*<\|message\|>"
    r"(.*?)(?:<\|end\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_MARKS = re.compile("|".join(re.escape(tag) for pair in TAGS for tag in pair) + r"|<\|channel\|>analysis")


def split_reasoning(text: str, is_open: bool = False, before: str | None = None) -> tuple[str, str]:
    """The reasoning without its tags, and the text that follows.

    `is_open`: the prompt ended with an opening tag. Where this is not known, a closing tag that was never opened ends
    the reasoning too, unless the text `before`, which begins a tool call, comes first.
    """
    if not is_open and _MARKS.search(text) is None:
        return "", text
    found = [match[1].strip() for match in _ANALYSIS.finditer(text)]
    text = _ANALYSIS.sub("", text) if found else text
    close, opening = text.find("</think>"), text.find("<think>")
    call = text.find(before) if before else -1
    closes_first = (opening < 0 or close < opening) and (call < 0 or close < call)
    if is_open or (close >= 0 and closes_first):
        places = [(text.find(tag), tag) for _, tag in TAGS if tag in text]
        reasoning, _, text = text.partition(min(places)[1]) if places else (text, "", "")
        found.append(reasoning)
    position = 0
    while block := _BLOCK.match(text, position):
        found.append(block[block.lastindex or 0])
        position = block.end()
    text = text[position:]
    if found and text.lstrip().startswith("<response>"):  # Granite 3 wraps its answer when it thinks
        text = text.strip().removeprefix("<response>").removesuffix("</response>")
    return "\n".join(part.strip() for part in found if part.strip()), text


def strip_reasoning(text: str) -> str:
    """The text without reasoning, wherever it is."""
    if _MARKS.search(text) is None:
        return text.strip()
    _, text = split_reasoning(text)
    for opening, closing in TAGS:
        if opening in text:
            text = re.sub(f"{re.escape(opening)}.*?(?:{re.escape(closing)}|\\Z)", "", text, flags=re.DOTALL)
    return text.strip()


def is_inside(text: str) -> bool:
    """Whether a text ends within reasoning that it opened at its start or, in harmony, in its last message."""
    start = text.lstrip()
    if any(start.startswith(opening) and closing not in start for opening, closing in TAGS):
        return True
    return text.rfind("<|channel|>analysis") > max(text.rfind("<|end|>"), -1)


def ends_open(prompt: str) -> bool:
    """Whether a prompt's end has opened the reasoning.

    >>> ends_open("<|im_start|>assistant\\n<think>\\n"), ends_open("<think>\\n\\n</think>\\n\\n")
    (True, False)
    """
    return bool(closing_tag(prompt))


def closing_tag(prompt: str) -> str:
    """The tag that ends the reasoning which a prompt's end has opened; empty if it has not."""
    end = prompt.rstrip()
    return next((closing for opening, closing in TAGS if end.endswith(opening)), "")


def has_closed(prompt: str) -> bool:
    """Whether a prompt ends behind reasoning, which is empty then.

    >>> has_closed("<think>\\n\\n</think>\\n\\n")
    True
    """
    return prompt.rstrip().endswith(tuple(closing for _, closing in TAGS))
