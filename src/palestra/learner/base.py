"""The Learner seam: gradients from a batch and a loss, one optimizer step, weights for the sampler.

What is learned when (schedules, minibatches, iterations, coefficients) is the loop's business: `train/update.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from palestra.algo.batch import Batch
from palestra.algo.step_loss import Loss
from palestra.core.types import Array
from palestra.core.weights import Weights


class Outputs(Protocol):
    """The results of a forward_backward. All may wait for the device, so ask after `optim_step`."""

    def logprobs(self) -> Array:
        """[T] of the batch's tokens (or targets), before any step; NaN at tokens that no loss reads."""
        ...

    def entropies(self) -> Array:
        """[T] the entropy of the distribution at each token; all NaN where it is unknown."""
        ...

    def metrics(self) -> dict[str, float]:
        """This batch's share of the loss and its parts; means and maxima over its tokens."""
        ...


def noop() -> None:
    """No work for the host."""


class Learner(Protocol):
    """Something that improves a model. It may live in another process, or in many."""

    def forward(self, batch: Batch, *, reference: bool = False) -> Array:
        """[T] log-probabilities of the batch's tokens under the current or the initial weights."""
        ...

    def forward_backward(self, batch: Batch, loss: Loss) -> Outputs:
        """Add the gradient of this batch's share of the loss to those accumulated since the last `optim_step`.

        A batch that raises discards its gradient and those accumulated before it.
        """
        ...

    def optim_step(self, learning_rate: float, *, max_grad_norm: float, host_work: Callable[[], None] = noop) -> float:
        """Clip, update the weights, forget the gradient; gives its norm before clipping, NaN where it is not known.

        `host_work` is called before the host waits for a device or a server: work that has nothing to do with weights.
        A NaN or an infinity in the loss or the gradient raises PalestraError, and the weights stay as they are.
        """
        ...

    def weights(self, version: int) -> Weights:
        """The weights as they are now, for a policy to sample with."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state into an existing folder, exact to the bit."""
        ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> Path:
        """Write the model for others to load: a Hugging Face folder, of the adapter where only that is trained."""
        ...
