"""How many tokens each way of sampling computes, by benchmarks/sampling.py."""

import runpy
from pathlib import Path

benchmark = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "sampling.py"))
ROLLOUTS, GROUP, PROMPT, NEW, RESULT = 6, 3, 20, 5, benchmark["TOOL_RESULT_TOKENS"]


def test_every_side_samples_the_same_and_the_engine_computes_each_token_once():
    sizes = {"prompts": 2, "group_size": GROUP, "prompt_tokens": PROMPT, "new_tokens": NEW, "tool_rounds": 2}
    found = benchmark["measure"]("palestra/tiny", sizes)
    single, tools = found["0 tool rounds"], found["2 tool rounds"]
    assert {each["sampled_tokens"] for each in single.values()} == {ROLLOUTS * NEW}
    assert {each["sampled_tokens"] for each in tools.values()} == {ROLLOUTS * NEW * 3}

    # A prompt's tokens but the last are computed once for its group; the last sampled token of all is never fed.
    shared, own = 2 * (PROMPT - 1), ROLLOUTS * (1 + NEW - 1)
    assert single["engine"]["computed_tokens"] == shared + own
    assert tools["engine"]["computed_tokens"] == shared + own + ROLLOUTS * 2 * (RESULT + NEW)
    # The others compute each turn from its first token on.
    turns = [PROMPT + NEW - 1 + i * (RESULT + NEW) for i in range(3)]
    for side in ("plain", "generate"):
        assert single[side]["computed_tokens"] == ROLLOUTS * turns[0]
        assert tools[side]["computed_tokens"] == ROLLOUTS * sum(turns)
