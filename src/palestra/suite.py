"""The public suite of cases: what `evals` knows of it, and a function to score an agent on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from palestra.evals import suite

if TYPE_CHECKING:
    from palestra.evals.report import EvalReport


class EvalSuite(suite.EvalSuite):
    """Cases with measures: from records, JSONL, CSV, Parquet or a dataset."""

    def evaluate(self, agent: Any, **options: Any) -> EvalReport:
        """Score an agent on every case, without training."""
        from palestra.api import evaluate

        return evaluate(agent, self, **options)
