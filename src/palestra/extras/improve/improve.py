"""`improve`: an agent with better instructions and tool descriptions, and the held-out cases as proof."""

from __future__ import annotations

import ast
import asyncio
import difflib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from palestra.agents.agent import Agent
from palestra.agents.openai_agents import as_agent
from palestra.agents.programs import ProgramAgent
from palestra.agents.texts import INSTRUCTIONS, TOOL, Texts, read_tool_text, texts_of, with_texts
from palestra.core.chat_model import POLICY, CallLimits, ChatModel, hosting
from palestra.core.config import RunConfig
from palestra.core.errors import RolloutError, SettingError, UnsupportedError
from palestra.core.files import refuse_in_import
from palestra.core.time_limit import outside_event_loop
from palestra.core.types import Problem, Rollout
from palestra.env_api import collectors
from palestra.envs.base import Split
from palestra.envs.suite_env import SuiteEnvironment
from palestra.evals.judge import conversation_text
from palestra.evals.report import EvalReport, pair
from palestra.evals.suite import EvalSuite, hold_out
from palestra.extras.improve.search import Candidate, Search, Trial
from palestra.policy.openai import OpenAISettings
from palestra.rollout.collect import Collector, require_one_good
from palestra.rollout.evaluate import evaluate

log = logging.getLogger("palestra")
_MAX_TRANSCRIPT = 4000  # characters of one attempt that the reflector reads
_MAX_TEXT = 8000  # characters of a new text
_FENCED = re.compile(r"```[\w-]*\n(.*?)```", re.DOTALL)
_TASK = """You improve the texts by which an assistant is told what to do. You are given its current {what}, and
attempts at tasks with feedback on each. Write a better one.
- Work out from the tasks what the assistant has to do, and from the feedback why attempts failed or succeeded.
- Keep what works. Add rules, facts and steps that hold for all such tasks; do not copy the answers of single tasks.
- The assistant sees only your text{beside}, so it must be complete.{form}
Answer with the new text in a block of three backticks, and nothing else in the block."""
_TOOL_FORM = "\n- Keep the form: first what the tool does and when to use it, then `name: text` for each parameter."


@dataclass(frozen=True)
class Improvement:
    """The result of a search. `agent` is the agent as it was where nothing better was found."""

    agent: Agent
    before_texts: Mapping[str, str]
    texts: Mapping[str, str]
    before: EvalReport  # on the held-out cases
    after: EvalReport
    candidates: Sequence[Candidate]
    attempts: int  # that the search took
    sampled_tokens: int  # of these attempts
    reflections: Mapping[str, float] = field(default_factory=dict)  # calls, tokens and cost of the reflector

    @property
    def changed(self) -> list[str]:
        return [name for name, text in self.texts.items() if text != self.before_texts[name]]

    @property
    def diff(self) -> str:
        """The changes, component by component."""
        parts: list[str] = []
        for name in self.texts:
            before, after = (text.get(name, "").splitlines() for text in (self.before_texts, self.texts))
            parts += difflib.unified_diff(before, after, f"before: {name}", f"after: {name}", lineterm="")
        return "\n".join(parts) + ("\n" if parts else "")

    def to_dict(self) -> dict[str, Any]:
        paired = pair(*({r.problem_id: r.passed for r in e.rollouts} for e in (self.before, self.after)))
        return {
            "changed": self.changed,
            "attempts": self.attempts,
            "sampled_tokens": self.sampled_tokens,
            "reflections": dict(self.reflections),
            "split": self.after.split,
            "before": asdict(self.before.pass_rate),
            "after": asdict(self.after.pass_rate),
            "paired": asdict(paired) | {"p_value": paired.p_value},
            "candidates": [
                {"number": c.number, "mean": c.mean, "parents": c.parents, "changed": c.changed, "how": c.how}
                for c in self.candidates
            ],
        }


def improve(
    agent: Any,
    suite: EvalSuite,
    measures: Sequence[Any] | None = None,
    *,
    reflect: str = POLICY,
    base_url: str | None = None,
    api_key_env: str = "OPENAI_API_KEY",
    agent_url: str | None = None,
    agent_key_env: str = "OPENAI_API_KEY",
    budget: int = 300,
    minibatch: int = 4,
    pareto_cases: int = 24,
    components: Sequence[str] | None = None,
    held_out: EvalSuite | float | None = 0.2,
    config: RunConfig | Mapping[str, Any] | None = None,
    reward_weights: Sequence[float] | Mapping[str, float] | None = None,
    on_event: Callable[[str], None] = lambda text: None,
    **limits: Any,
) -> Improvement:
    """Evolve the instructions and tool descriptions of an agent (GEPA); its weights stay as they are.

    `reflect` is the model that rewrites texts, as for a judge: a name at an endpoint (`base_url`), a local model, or
    "policy", the agent's own. With `agent_url` the agent's model is one at that endpoint. `budget` counts attempts of
    the search; scoring the held-out cases comes in addition. Candidates are compared on `pareto_cases` training cases.
    `components` are "instructions" and "tool NAME"; all unless named. `limits` are those of a judge: max_calls,
    max_cost, requests_per_minute, ….
    """
    refuse_in_import("an improvement")
    if "merges" in limits:
        raise SettingError("merges was removed: candidates are no longer merged; leave it out")
    own = as_agent(agent)
    if isinstance(own, ProgramAgent):
        raise UnsupportedError(f"{own.name} is a program, with texts in its own code; improve agents of our own loop")
    texts = texts_of(own)
    chosen = list(texts) if components is None else list(components)
    if unknown := [name for name in chosen if name not in texts]:
        raise SettingError(f"components has {unknown[0]!r}; the agent has {', '.join(texts)}")
    if not chosen:
        raise SettingError("components is empty; name at least one text to improve")
    settings = RunConfig.of(config).with_settings({"model.name": own.required_model})
    settings.refuse(["backend", "tinker", "ray"], "texts are tried on this machine")
    train, held = hold_out(suite, held_out)
    if agent_url is not None and reflect == POLICY and base_url is None:
        reflect, base_url, api_key_env = own.required_model, agent_url, agent_key_env
    reflector = ChatModel(
        reflect,
        base_url,
        purpose="reflect",
        api_key_env=api_key_env,
        temperature=1.0,
        cache=False,
        limits=CallLimits.of("improve", limits),
    )

    def run() -> Improvement:
        openai = None
        if agent_url is not None:
            openai = OpenAISettings(model_name=settings.model.name, base_url=agent_url, api_key_env=agent_key_env)
        make, host = collectors(settings, openai, training=False)
        trying = _Trying(own, train, held, measures, reward_weights, settings, make)
        cases = [case.id for case in train.cases]
        search = Search(
            trying.trials,
            partial(ask_for_text, reflector),
            cases[pareto_cases:] if len(cases) >= 2 * pareto_cases else cases,
            cases[:pareto_cases],
            chosen,
            on_event,
            budget,
            minibatch,
            settings.seed,
        )
        with hosting(host):
            return asyncio.run(_search(trying, search, reflector, texts))

    return outside_event_loop(run)


async def _search(trying: _Trying, search: Search, reflector: ChatModel, texts: Texts) -> Improvement:
    """Search from `texts`, and score the agent with them and with the best ones."""
    before = await trying.score(texts)
    best = await search.run(texts)
    is_better = best.mean > search.candidates[0].mean
    better, usage = best.texts if is_better else texts, reflector.usage
    return Improvement(
        agent=with_texts(trying.agent, better),
        before_texts=texts,
        texts=better,
        before=before,
        after=await trying.score(better) if is_better else before,
        candidates=search.candidates,
        attempts=search.used,
        sampled_tokens=search.sampled_tokens,
        reflections={
            "calls": usage.requests,
            "tokens": usage.tokens,
            "cost": reflector.cost,
            "completion_tokens": usage.completion_tokens,
        },
    )


@dataclass
class _Trying:
    """Attempts of the agent with other texts, by one policy."""

    agent: Agent
    train: EvalSuite
    held_out: EvalSuite | None
    measures: Sequence[Any] | None
    reward_weights: Sequence[float] | Mapping[str, float] | None
    config: RunConfig
    collector: Callable[[SuiteEnvironment], Collector]

    def _environment(self, texts: Texts) -> SuiteEnvironment:
        agent = with_texts(self.agent, texts)
        return SuiteEnvironment(agent, self.train, self.held_out, self.measures, self.reward_weights)

    async def trials(self, texts: Texts, cases: Sequence[str]) -> list[Trial]:
        """One attempt at each case. All without a verdict is an error: there would be nothing to compare."""
        by_id = {case.id: case for case in self.train.cases}
        with closing(self._environment(texts)) as environment:
            problems = [by_id[case] for case in cases]
            keys = [f"improve/{self.config.seed}/{case}" for case in cases]
            groups = await self.collector(environment).collect(problems, 1, keys)
        require_one_good(groups)
        return [_trial(group.rollouts[0], problem) for group, problem in zip(groups, problems, strict=True)]

    async def score(self, texts: Texts) -> EvalReport:
        """On the held-out cases, or on those of the training where there are none."""
        options = self.config.eval
        with closing(self._environment(texts)) as environment:
            split: Split = "held_out" if self.held_out is not None else "train"
            problems = environment.problems(split)[: options.cases]
            report = await evaluate(
                self.collector(environment), problems, samples_per_case=options.samples_per_case, seed=self.config.seed
            )
        return replace(report, split=split)


def _trial(rollout: Rollout, problem: Problem) -> Trial:
    if rollout.error is not None:
        return Trial(problem.id, None, "", rollout.error)
    verdicts = [f"{name}: {s.value:g}{f', {s.reason}' if s.reason else ''}" for name, s in rollout.scores.items()]
    notes = [f"The expected answer is {problem.expect}."] if problem.expect is not None else []
    notes += [f"It ended early: {rollout.stop}."] if rollout.stop != "answered" else []
    shown = [message for message in rollout.messages if message.role != "system"]
    transcript, feedback = conversation_text(shown)[:_MAX_TRANSCRIPT], "\n".join([*verdicts, *notes])
    return Trial(problem.id, rollout.reward, transcript, feedback, rollout.sampled_tokens)


async def ask_for_text(
    model: ChatModel, texts: Texts, component: str, trials: Sequence[Trial], seed: int
) -> str | None:
    """Ask a model for a new text of one component; None where it gives no text that could be used."""
    if component == INSTRUCTIONS:
        task = _TASK.format(what="instructions", beside=", its tools and the task", form="")
    else:
        what = f"description of the tool {component.removeprefix(TOOL)}"
        task = _TASK.format(what=what, beside=", its instructions and the task", form=_TOOL_FORM)
    others = [f"## {name}\n{text}" for name, text in texts.items() if name != component and text]
    listed = "\n\n".join(
        f"# Attempt {i}\n{trial.transcript}\n\n## Feedback\n{trial.feedback}"
        for i, trial in enumerate(trials, start=1)
        if trial.score is not None
    )
    context = "# Other texts, which stay as they are\n" + "\n\n".join(others) if others else ""
    question = f"# Current text\n```\n{texts[component]}\n```\n\n{context}\n\n{listed}"
    messages = [{"role": "system", "content": task}, {"role": "user", "content": question}]
    try:
        return await model.ask(messages, lambda text: read_text(text, texts[component]), seed=seed)
    except ValueError:
        return None
    except RolloutError as error:
        log.warning("no reflection: %s", error)
        return None


def read_text(answer: str, current: str) -> str:
    """The new text out of a reflector's answer; ValueError where there is none, or the same again."""
    blocks = _FENCED.findall(answer)
    text = (max(blocks, key=len) if blocks else answer.replace("```", "")).strip()
    if not text:
        raise ValueError("the answer has no text in a block of three backticks")
    if len(text) > _MAX_TEXT:
        raise ValueError(f"the text has {len(text)} characters; write at most {_MAX_TEXT}")
    if text == current.strip():
        raise ValueError("the text is the same as before")
    return text


def edit_source(source: str, old: Texts, new: Texts) -> tuple[str, list[str]]:
    """An agent file with the new texts in its literals, and the components that could not be placed.

    A literal is replaced where its value is the old text, or contains it, and no other literal does.
    """
    missing = []
    for name, text in new.items():
        for before, after in _replacements(name, old.get(name, ""), text):
            edited = _replace_literal(source, before, after) if before else None
            if edited is None:
                missing.append(name)
            else:
                source = edited
    return source, list(dict.fromkeys(missing))


def _replacements(name: str, old: str, new: str) -> list[tuple[str, str]]:
    if old == new:
        return []
    if name == INSTRUCTIONS:
        return [(old, new)]
    olds, news = old.splitlines(), new.splitlines()
    names = {line.partition(":")[0] for line in olds if ":" in line}
    (before, parts), (after, new_parts) = (read_tool_text("\n".join(t), dict.fromkeys(names)) for t in (olds, news))
    changed = [(parts.get(key, ""), text) for key, text in new_parts.items() if text and text != parts.get(key)]
    return [(before, after)] * (before != after) + changed


def _replace_literal(source: str, old: str, new: str) -> str | None:
    """The source with `new` for `old` in the one literal that has it; None where there is none, or several."""
    tree = ast.parse(source)
    in_formatted = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    literals = [
        (node, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in in_formatted
    ]
    matches = [each for each in literals if each[1] == old] or [each for each in literals if old in each[1]]
    if len(matches) != 1:
        return None
    node, value = matches[0]
    raw = source.encode()  # columns count bytes
    lines = raw.splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: (node.end_lineno or 0) - 1])) + (node.end_col_offset or 0)
    literal = _literal(value.replace(old, new, 1), triple=raw[start:end].endswith(b'"""'))
    return (raw[:start] + literal.encode() + raw[end:]).decode()


def _literal(value: str, triple: bool) -> str:
    literal = '"""' + value.replace("\\", "\\\\") + '"""'
    with suppress(SyntaxError):
        if ("\n" in value or triple) and ast.literal_eval(literal) == value:
            return literal
    return json.dumps(value, ensure_ascii=False)  # it is one line, or has quotes of its own
