"""Tool calls of each model family with its real chat template, as docs/models.md says.

TRL's templates are installed with it. `make test-templates` downloads the others; without it their tests are skipped.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[4] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import model_families  # noqa: E402

sys.path.remove(str(SCRIPTS))


def of_each(family: Any) -> Any:
    is_there = family.path.exists()
    skip = pytest.mark.skipif(not is_there, reason=f"{family.path.name} is not there: make test-templates")
    return pytest.param(family, id=family.name, marks=skip)


EACH = [of_each(family) for family in model_families.FAMILIES]


CHECKS = {
    "calls are read back": model_families.check_round_trip,
    "the grammar allows good calls alone": model_families.check_constrained,
    "a streamed call is no text": model_families.check_openai_stream,
    "a streamed call is no text for Anthropic": model_families.check_anthropic_stream,
}


@pytest.mark.parametrize("family", EACH)
@pytest.mark.parametrize("check", CHECKS)
def test_tool_calls_of_each_family(family: Any, check: str) -> None:
    CHECKS[check](family)


@pytest.mark.parametrize("family", EACH)
def test_a_template_that_was_prepared_and_saved_is_not_prepared_again(family):
    tokenizer = model_families.chat_of(family).tokenizer
    template = tokenizer.chat_template
    model_families.prepare(tokenizer)
    assert tokenizer.chat_template == template


@pytest.mark.parametrize("family", [of_each(f) for f in model_families.FAMILIES if f.name == "GLM 4.5"])
def test_a_turn_that_ended_with_another_stop_token_gets_the_one_that_begins_the_result(family):
    chat = model_families.chat_of(family)
    result = [model_families.Message("tool", "4", tool_call_id="call_0", name="look_up")]

    def appended(last: str) -> str:
        turns = chat.continuation(result, last_token=chat.tokenizer.convert_tokens_to_ids(last))
        return chat.tokenizer.decode([i for turn in turns for i in turn.token_ids])

    assert appended("<|endoftext|>") == "<|observation|>" + appended("<|observation|>")


def test_the_table_of_the_docs_has_a_row_of_passed_checks_for_every_family():
    rows = model_families.written_rows()
    assert list(rows) == [family.name for family in model_families.FAMILIES]
    for family in model_families.FAMILIES:
        cells = [family.name, f"`{family.format}`", f"`{family.template}`", *["yes"] * len(model_families.CHECKS)]
        assert rows[family.name] == f"| {' | '.join(cells)} |"
