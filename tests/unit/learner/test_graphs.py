"""Which passes are captured, and what becomes of the gradients of a replay. The graphs themselves need a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from palestra.learner import graphs
from palestra.learner.graphs import Captured, Graphs


def layout(shape: int) -> Any:
    return SimpleNamespace(bounds=SimpleNamespace(shape=(shape,)))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Graphs whose captures are notes, over a run that says "plain"."""
    model = nn.Linear(2, 2)
    captures = Graphs(model, lambda ids, positions, layout: torch.zeros(1))
    captures._addresses = captures._weights_at()
    said: list[Any] = []

    class Fake:
        anchor = torch.zeros((), requires_grad=True)

        def __init__(self, shape: Any) -> None:
            said.append(("captured", shape))
            self.shape = shape

        def load(self, ids: Tensor, positions: Tensor, layout: Any) -> None:
            said.append(("replayed", self.shape))

        def replay_forward(self) -> Tensor:
            return torch.ones(1)

    monkeypatch.setattr(captures, "_capture", lambda ids, positions, layout: Fake(layout.bounds.shape[0]))
    return SimpleNamespace(graphs=captures, said=said, model=model)


def shapes(found: Any, *sizes: int) -> list[float]:
    return [found.graphs.hidden(torch.zeros(1), torch.zeros(1), layout(size)).item() for size in sizes]


def test_a_shape_is_captured_when_it_comes_again(found: Any) -> None:
    assert shapes(found, 1, 2, 1, 1, 3) == [0.0, 0.0, 1.0, 1.0, 0.0]
    assert found.said == [("captured", 1), ("replayed", 1), ("replayed", 1)]


def test_the_shapes_met_last_are_kept(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 2)
    shapes(found, 1, 1, 2, 2, 1, 3, 3, 2, 1)
    assert [shape for what, shape in found.said if what == "captured"] == [1, 2, 3, 2, 1]


def test_weights_that_have_moved_are_captured_anew(found: Any) -> None:
    shapes(found, 1, 1, 1)
    found.model.weight.data = found.model.weight.data.clone()
    shapes(found, 1)
    assert [shape for what, shape in found.said if what == "captured"] == [1, 1]


@pytest.mark.parametrize(
    ("error", "pads"),
    [(RuntimeError("operation not permitted when stream is capturing"), False), (torch.OutOfMemoryError(), True)],
)
def test_what_cannot_be_captured_is_computed_as_before_and_padded_if_only_memory_is_missing(
    error: RuntimeError, pads: bool, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        try:
            raise error
        finally:
            raise RuntimeError("the capture was ended")

    monkeypatch.setattr(found.graphs, "_capture", refuse)
    assert shapes(found, 1, 1, 1) == [0.0, 0.0, 0.0]
    assert found.graphs.pads == pads
    monkeypatch.undo()
    assert shapes(found, 2, 2) == [0.0, 0.0]  # not tried again


def test_replays_add_up_as_backward_passes_do() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    buffers = [torch.zeros(2) for _ in weights]
    values = iter([1.0, 10.0, 100.0])

    def replay() -> None:
        value = next(values)
        for buffer in buffers[:2]:  # the third weight is not used
            buffer.fill_(value)

    captured = Captured.__new__(Captured)
    captured._trained, captured._gradients, captured._used = weights, buffers, [True, True, False]
    captured._gradient = torch.zeros(3)
    captured._backward = SimpleNamespace(replay=replay)  # type: ignore[assignment]
    weights[1].grad = torch.full((2,), 0.5)  # of the head, which has the same weight
    captured.replay_backward(torch.ones(3))
    assert weights[0].grad is buffers[0]
    captured.replay_backward(torch.ones(3))
    assert [weight.grad.tolist() for weight in weights[:2] if weight.grad is not None] == [[11.0] * 2, [11.5] * 2]
    assert weights[2].grad is None
    for weight in weights:
        weight.grad = None
    captured.replay_backward(torch.ones(3))
    assert weights[0].grad is not None
    assert weights[0].grad.tolist() == [100.0, 100.0]
