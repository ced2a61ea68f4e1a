"""The kernel that chooses tokens never chooses an impossible one. Runs in Triton's interpreter, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton")

# A draw of 1.0 stands for the worst case of rounding: a target at the end of the cumulative sum.
SCRIPT = """
import torch
from palestra.engine.cuda import state as states

states.VOCABULARY_BLOCK = 16
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
cases = ((40, range(3, 9)), (40, range(16)), (40, range(20, 40)), (12, range(2, 7)), (32, range(32)))
for vocabulary, possible in cases:
    logits = torch.full((4, vocabulary), -float("inf"), device=device)
    logits[:, list(possible)] = torch.randn(4, len(possible), device=device)
    state = states.DecodeState(4, 1, 1, device)
    state.left.fill_(1)
    state.temperature.fill_(1.0)
    state.draws.copy_(torch.tensor([[0.0, 0.5, 1.0, 1.0]]))
    state.greedy.copy_(torch.tensor([0, 0, 0, 1]))
    state.stops.fill_(-1)
    state.choose(logits)
    tokens = state.tokens[0].tolist()
    assert all(token in possible for token in tokens), (vocabulary, list(possible), tokens)
    expected = torch.log_softmax(logits, -1).gather(1, state.tokens[0].long()[:, None])[:, 0]
    torch.testing.assert_close(state.logprobs[0], expected)
    assert tokens[3] == int(logits[3].argmax())
print("POSSIBLE")
"""


def test_a_draw_at_the_end_of_a_block_chooses_a_possible_token(run_kernels: Callable[..., tuple[int, str]]) -> None:
    status, said = run_kernels(SCRIPT)
    assert status == 0, said[-3000:]
    assert said.endswith("POSSIBLE\n")
