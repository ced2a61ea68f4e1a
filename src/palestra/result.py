"""What a training gives back: the model, the proof, and methods to use both."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.agents.agent import Agent
from palestra.agents.tools.tool import Tool, as_tool
from palestra.core.errors import InputError, SettingError, StateError
from palestra.core.extras import provided
from palestra.core.files import slug
from palestra.core.messages import as_messages
from palestra.core.run_folder import RunFolder
from palestra.core.types import Message, SamplingParams
from palestra.core.weights import Weights
from palestra.evals.report import EvalReport

if TYPE_CHECKING:
    from palestra.policy.base import Policy
    from palestra.train.run import Outcome

log = logging.getLogger("palestra")


@dataclass(frozen=True, repr=False)
class GRPOTrainingResult:
    """The trained model with its run folder and its before/after reports."""

    agent: Agent
    run: RunFolder
    outcome: Outcome
    trainer: Any = field(default=None, compare=False)  # the GRPOTrainer that made it

    def __repr__(self) -> str:
        scored = "" if self.outcome.after is None else f", {_percent(self.before)} → {_percent(self.after)} passed"
        steps = max((int(row["step"]) for row in self.metrics), default=0)
        return f"GRPOTrainingResult({self.agent.name!r}, {steps} steps{scored}, {str(self.run.path)!r})"

    def _repr_html_(self) -> str:
        """For notebooks: before and after with their intervals, the curves, and what kept it from learning more."""
        from palestra.evals.report import compare
        from palestra.evals.run_report.charts import charts, fragment, table, text

        rows = []
        if self.outcome.before is not None and self.outcome.after is not None:
            changes = compare(self.before, self.after)
            changes = changes if len(changes) > 2 else changes[:1]  # with one measure, "all measures" is the same again
            rows = [(c.name, str(c.before), str(c.after), f"{100 * c.gain:+.1f}") for c in changes]
        heads = ("measure", "before", "after (95 % intervals)", "points")
        findings = (f'<div class="warn">! {text(finding)}</div>' for finding in self.findings)
        where = f'<div class="soft">{text(self.run.path)}</div>'
        return fragment(f"<b>{text(self.agent.name)}</b>", table(heads, rows), charts(self.metrics), *findings, where)

    @cached_property
    def model(self) -> Any:
        """The module; one that was trained on another machine is loaded here when it is asked for."""
        if self.outcome.model is not None:
            return self.outcome.model
        from palestra.models.loading import load_model

        return load_model(str(self.model_path)).model

    @property
    def tokenizer(self) -> Any:
        return self.outcome.tokenizer

    @property
    def model_path(self) -> Path:
        return self.outcome.model_path

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One row a step."""
        return self.outcome.metrics

    @property
    def findings(self) -> list[str]:
        """Why it did not learn more: what happened, what to change, and an example."""
        return [str(finding) for finding in self.outcome.findings]

    @property
    def final_loss(self) -> float | None:
        """The loss of the last step that trained."""
        return next((row["loss"] for row in reversed(self.metrics) if "loss" in row), None)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The JSON schemas of the agent's tools."""
        return [tool.schema for tool in self.agent.tools]

    @property
    def instructions(self) -> str | None:
        """The system message; None if the agent has none."""
        return None if self.agent.instructions is None else self.agent.fixed_instructions

    @property
    def before(self) -> EvalReport:
        return _scored(self.outcome.before)

    @property
    def after(self) -> EvalReport:
        return _scored(self.outcome.after)

    def report(self) -> dict[str, Any]:
        """Held-out results before and after, per measure, as JSON data."""
        return {"before": self.before.to_dict(), "after": self.after.to_dict()}

    def save_model(self, path: str | Path, *, merged: bool = False) -> Path:
        """Save weights and tokenizer.

        An adapter run saves the adapter; with `merged` the folder holds the whole model, and the adapter in `adapter/`.
        Gives the absolute path.
        """
        from palestra.models.export.hf import save_hf

        if self.outcome.model is None and not merged:  # the files are all there is of it here
            return Path(shutil.copytree(self.model_path, path, dirs_exist_ok=True)).absolute()
        return save_hf(self.model, self.tokenizer, Path(path).absolute(), merge=merged, record=self.run.record)

    def generate(
        self,
        prompt: str | Sequence[Message | Mapping[str, Any]],
        max_new_tokens: int = 256,
        temperature: float = 0.7,
        repetition_penalty: float = 1.0,
        tools: Sequence[Any] | None = None,
        instructions: str | None = None,
        seed: int = 0,
        context: Any = None,
    ) -> str:
        """Answer `prompt`, a text or messages, with the trained model, calling tools as it goes; thinking is stripped.

        `tools` are functions, or schemas of the agent's own tools, as `result.tools` has them; default all of these.
        `context` is the state that tools with a Context parameter work on.
        """
        from palestra.core.time_limit import outside_event_loop
        from palestra.models.chat.template import ChatFormat
        from palestra.models.chat.toolcalls import strip_reasoning
        from palestra.rollout.agent_loop import AttemptLimits
        from palestra.rollout.converse import converse

        chat = ChatFormat(self.tokenizer)
        chosen = self.agent.tools if tools is None else [self._as_tool(t) for t in tools]
        if context is None and (needing := next((t.name for t in chosen if t.needs_context), None)):
            raise SettingError(f"tool {needing!r} takes a context; pass one: generate(…, context=…)")
        chosen = [tool.bind(context) for tool in chosen]
        system = self.instructions if instructions is None else instructions
        messages = [*([Message("system", system)] if system else []), *as_messages(prompt)]
        penalty: dict[str, Any] = {"repetition_penalty": repetition_penalty}
        sampling = SamplingParams(max_new_tokens, temperature, stop_token_ids=chat.stop_token_ids, seed=seed, **penalty)
        policy = self._policy
        policy.wake()
        policy.update(Weights(policy.version + 1, dict, self.model))
        try:
            answering = converse(policy, chat, messages, chosen, AttemptLimits(sampling))
            rollout = outside_event_loop(lambda: asyncio.run(answering))
        finally:
            policy.sleep()
        if rollout.error:
            raise StateError(f"the model could not answer: {rollout.error}")
        return strip_reasoning(rollout.messages[-1].text).strip()

    @cached_property
    def _policy(self) -> Policy[Any]:
        """The sampler that all calls of `generate` share; between calls it holds no KV cache."""
        from palestra.policy.build import build_policy

        return build_policy(self.model, self.tokenizer, "auto")

    def _as_tool(self, tool: Any) -> Tool:
        if not isinstance(tool, Mapping):
            return as_tool(tool)
        name = tool.get("function", tool).get("name")
        known = {own.name: own for own in self.agent.tools}
        if name not in known:
            raise InputError(
                f"the schema of a tool {name!r} has no function behind it: the agent's tools are "
                f"{', '.join(known) or 'none'}. Pass the function itself"
            )
        return known[name]

    def push_to_hub(self, repo: str, *, private: bool = True, adapter: bool = False) -> Any:
        """Upload the model to the hub, with a card that has the evaluation; gives the repository's name and URL.

        An adapter is merged into its base, unless `adapter`. A repository that does not exist is made.
        """
        to_hub = provided("an upload to the hub")
        return to_hub(str(self.model_path), repo, private=private, adapter=adapter, report=self.run.report())

    def to_ollama(
        self,
        model_name: str,
        model_path: str | Path | None = None,
        llama_cpp_path: str | None = None,
        quantization: str = "q8_0",
    ) -> Any:
        """Export for Ollama into the run's folder, and create the model where Ollama is installed; gives its name.

        `model_path` is another saved model than the run's own; `llama_cpp_path` is needed for quantisations other than
        f32, f16, bf16 and q8_0.
        """
        source = provided("a conversion to GGUF")(str(model_path or self.model_path), model_name)
        if not source.instructions:
            source = replace(source, instructions=self.instructions or "")
        folder = self.run.export / "ollama" / slug(model_name)
        made = provided("to_ollama")(source, model_name, folder, type=quantization, llama_cpp=llama_cpp_path)
        if not made.created:
            log.warning("Ollama is not installed here; the files are ready. Where it is, run: %s", made.command)
        return made


def _percent(report: EvalReport) -> str:
    return f"{report.pass_rate.rate:.1%}"


def _scored(report: EvalReport | None) -> EvalReport:
    if report is None:
        raise StateError("this run was not scored: its environments, over the wire, have the problems")
    return report
