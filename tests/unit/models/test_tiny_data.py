"""The data that palestra/tiny is made from: well-formed, repeatable, and without the demo's held-out cases."""

import itertools
import json
import random
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from palestra import demo

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "scripts"
AGENTS = sorted([*ROOT.glob("examples/tiny_agents/*.py"), *ROOT.glob("benchmarks/tiny_agents/*.py")])


@pytest.fixture(scope="module")
def make_tiny() -> Any:
    sys.path.insert(0, str(SCRIPTS))
    try:
        import make_tiny
    finally:
        sys.path.remove(str(SCRIPTS))
    return make_tiny


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a red lamp", True), ("4 Red lamps", True), ("it costs 15.", True), ("115 or 150", False), ("red", False)],
)
def test_a_text_mentions_held_out_things_by_item_or_by_price(make_tiny: Any, text: str, expected: bool) -> None:
    assert demo.is_held_out_item("red", "lamp")
    assert sys.modules["tiny_data"].mentions_held_out(text) is expected


@pytest.fixture(scope="module")
def sample(make_tiny: Any) -> list[Any]:
    return list(itertools.islice(make_tiny.dialogues(1), 1500))


def test_no_held_out_item_price_or_question_is_in_the_data(sample: list[Any]) -> None:
    text = json.dumps([[d.messages, d.tools] for d in sample]).lower()
    words = re.findall(r"[a-z]+|\d+", text)
    pairs = {f"{first} {second}" for first, second in itertools.pairwise(words)}
    for item, price in demo.CATALOGUE.items():
        if demo.is_held_out_item(*item.split()):
            assert not {item, f"{item}s"} & pairs
            assert str(price) not in words
    assert not any(case.input.lower() in text for case in demo.held_out)


def test_each_word_of_a_held_out_item_is_known_from_other_items(sample: list[Any]) -> None:
    text = json.dumps([d.messages for d in sample])
    assert all(word in text for word in [*demo.ADJECTIVES, *demo.NOUNS])


def words_of(value: Any) -> set[str]:
    """The words in a generator's constants, however deep."""
    if isinstance(value, str):
        return set(re.findall(r"[^\W\d_]+", value.lower()))
    if isinstance(value, dict):
        return words_of(list(value.items()))
    return set().union(*map(words_of, value)) if isinstance(value, list | tuple | set) else set()


@pytest.fixture(scope="module")
def name_lists(make_tiny: Any) -> set[str]:
    """Every word that the generator can use whole in the name of a tool, of an argument or of an entity."""
    open_world, names, lists = (sys.modules[name] for name in ("tiny_open", "tiny_names", "tiny_words"))
    constants = [names.ATTRIBUTES, names.SHORT_ARGUMENTS, names.VERBS, open_world.OP_NAMES, open_world.A_B]
    fixed = [lists.PEOPLE, lists.CITIES, lists.COUNTRIES, lists.PLAIN_WORDS, lists.ADJECTIVES, lists.NOUNS]
    topics = [(topic.tool_names, topic.argument_names) for _, topic in sys.modules["tiny_world"].TOPICS]
    return words_of([constants, fixed]) | {name for pair in topics for group in pair for name in group}


@pytest.mark.parametrize("path", AGENTS, ids=lambda path: path.stem)
def test_no_tool_argument_or_entity_of_the_agents_is_in_the_word_lists(path: Path, name_lists: set[str]) -> None:
    module = runpy.run_path(str(path))
    names = {name for tool in module["agent"].tools for name in (tool.name, *tool.parameters["properties"])}
    assert not names & name_lists
    tables = [value for name, value in module.items() if name.isupper() and isinstance(value, dict)]
    entities = {
        str(part).lower() for table in tables for key in table for part in (key if type(key) is tuple else [key])
    }
    assert not entities & name_lists


@pytest.mark.parametrize("path", AGENTS, ids=lambda path: path.stem)
def test_no_question_of_the_agents_is_in_the_data(path: Path, sample: list[Any]) -> None:
    text = json.dumps([d.messages for d in sample])
    assert not any(case.input in text for case in runpy.run_path(str(path))["suite"])


def test_the_same_seed_gives_the_same_dialogues(make_tiny: Any) -> None:
    first, again, other = (list(itertools.islice(make_tiny.dialogues(seed), 50)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_tool_calls_fit_the_schemas_in_their_prompt(sample: list[Any]) -> None:
    kinds = {"string": str, "integer": int, "number": int | float}
    for dialogue in sample:
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in dialogue.tools}
        for message in dialogue.messages:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                schema = schemas[function["name"]]
                assert list(function["arguments"]) == schema["required"]
                for name, value in function["arguments"].items():
                    assert isinstance(value, kinds[schema["properties"][name]["type"]])


ASKED, ANSWERED = "<|im_start|>user\nassistant\n<|im_end|>\n", "<|im_start|>assistant\n%s<|im_end|>\n"


@pytest.mark.parametrize(
    ("text", "learned"),
    [
        (ASKED + ANSWERED % "Hi." + ASKED, "Hi."),
        (ANSWERED % "3151", "311"),  # no digit that goes on from a held-out price
        (ANSWERED % "3251", "3251"),
        (ANSWERED % "131", "131"),
        (ANSWERED % "317", "31"),
    ],
)
def test_the_assistants_own_turns_are_learned_but_for_held_out_prices(make_tiny, tiny_tokenizer, text, learned):
    (row,) = make_tiny.encode([text], tiny_tokenizer)
    said = [token for token, by_it in zip(row.ids, row.said, strict=True) if by_it]
    assert tiny_tokenizer.decode(said) == f"{learned}<|im_end|>"


def test_batches_hold_every_row_once_within_the_token_budget(make_tiny: Any) -> None:
    rng = random.Random(0)
    rows = [make_tiny.Row([i] * rng.randint(1, 400), []) for i in range(200)]
    batches = make_tiny.batches(rows, rng)
    assert sorted(row.ids[0] for batch in batches for row in batch) == list(range(200))
    assert all(max(len(r.ids) for r in b) * len(b) <= make_tiny.TOKENS_PER_BATCH for b in batches)


def test_two_steps_of_making_it_twice_give_the_same_bytes(make_tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(make_tiny, "TOKENIZER_DIALOGUES", 120)
    monkeypatch.setattr(make_tiny, "DIALOGUES_AT_ONCE", 40)
    monkeypatch.setattr(make_tiny, "score", lambda model, tokenizer: {})
    made = []
    for name in ("one", "two"):
        arguments = ["make_tiny.py", "--steps", "2", "--threads", "1", "--out", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", arguments)
        make_tiny.main()
        made.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert made[0] == made[1]
    assert set(made[0]) > {"model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"}
