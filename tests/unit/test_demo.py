from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from palestra import demo
from palestra.core.config import RunConfig
from palestra.models.loading import load_model

ITEMS = re.compile(r"(a|\d) (\w+ \w+?)s?\b(?= cost| and)")  # count and item


def questions(suite: object) -> list[str]:
    return [case.input for case in suite]  # type: ignore[attr-defined]


def test_there_are_enough_different_cases_of_three_kinds() -> None:
    assert len(set(questions(demo.suite))) >= 500
    assert len(set(questions(demo.held_out))) >= 200
    for suite in (demo.suite, demo.held_out):
        kinds = [re.match(r"What do \d|What does a|What do a", q).group() for q in questions(suite)]  # type: ignore[union-attr]
        assert {kind: len(kinds) // 3 for kind in ("What does a", "What do a")}.items() <= {
            k: kinds.count(k) for k in set(kinds)
        }.items()


def test_held_out_items_and_prices_are_in_no_training_case() -> None:
    for suite, is_held_out in ((demo.suite, False), (demo.held_out, True)):
        for question in questions(suite):
            items = [item.split() for _, item in ITEMS.findall(question)]
            assert [demo.is_held_out_item(*item) for item in items] == [is_held_out] * len(items)
    train = {p for item, p in demo.CATALOGUE.items() if not demo.is_held_out_item(*item.split())}
    held = {p for item, p in demo.CATALOGUE.items() if demo.is_held_out_item(*item.split())}
    assert not train & held
    assert len(held) > 10


def test_the_tools_solve_every_case() -> None:
    for case in (*demo.suite, *demo.held_out):
        total = 0
        for count, item in ITEMS.findall(case.input):
            value = demo.price(item)
            total = demo.add(total, value if count == "a" else demo.multiply(int(count), value))
        assert total == case.expect


def test_price_takes_the_plural_and_refuses_what_is_not_there() -> None:
    assert demo.price("red lamps") == demo.price("red lamp") == demo.CATALOGUE["red lamp"]
    with pytest.raises(ValueError, match="lamp"):
        demo.price("lamp")


@pytest.mark.parametrize(
    ("text", "value"),
    [("That costs 148.", 1.0), ("4 lamps cost 148.", 1.0), ("148 or 37", 0.0), ("I do not know.", 0.0)],
)
def test_the_measure_wants_the_last_number_to_be_the_total(text: str, value: float) -> None:
    context = SimpleNamespace(final_assistant_message=SimpleNamespace(text=text), expect=148)
    assert demo.right_total(context).value == value


def test_the_config_is_valid_and_prompts_are_short() -> None:
    RunConfig.build(demo.config)
    tokenizer = load_model("palestra/tiny", device="cpu").tokenizer
    messages = [{"role": "system", "content": demo.agent.instructions}, {"role": "user", "content": ""}]
    tools = [tool.schema for tool in demo.agent.tools]
    for case in demo.held_out:
        messages[1]["content"] = case.input
        assert len(tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)["input_ids"]) <= 200
