"""Training an agent that is a program: its attempts are the source of groups, and they score the model as well."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.agents.programs import CommandAgent, ProgramAgent, ProgramLimits
from palestra.core.config import RunConfig
from palestra.core.errors import SettingError, UnsupportedError
from palestra.core.http import is_loopback
from palestra.core.run_folder import RunKind, last_checkpoint
from palestra.envs.sandbox.program import ProgramSandbox
from palestra.envs.sandbox.sandbox import why_not
from palestra.envs.suite_env import SuiteEnvironment
from palestra.models.loading import LoadedModel
from palestra.policy.local import LocalPolicy
from palestra.rollout.collect import Collector
from palestra.rollout.local_models import LocalModels
from palestra.rollout.rewards import RewardFunction
from palestra.servers.gateway.gateway import Gateway
from palestra.servers.gateway.workers import default_workers
from palestra.servers.openai.completer import Completer
from palestra.servers.openai.inference import completer_of, load_completer
from palestra.sources.programs.runner import CHECKPOINT, START, ProgramRunner, Roles, hidden_columns
from palestra.train.evaluation import Evaluator
from palestra.train.group_source import ProblemSource
from palestra.train.limits import attempt_limits
from palestra.train.tasks import Parts, evaluator_of, rewards_of, source_of

_OF_OUR_LOOP = ("rollout.max_tool_rounds", "rollout.tool_timeout_s", "rollout.max_tool_result_chars")


@dataclass(slots=True)
class ProgramTask:
    """The cases of a suite, attempted by a program."""

    environment: SuiteEnvironment
    program: ProgramAgent
    loaded: LoadedModel
    reward_functions: Sequence[RewardFunction] = ()
    gateway: Gateway | None = field(default=None, init=False)
    roles: Roles | None = field(default=None, init=False)

    @property
    def kind(self) -> RunKind:
        return "program"

    @property
    def problem_count(self) -> int:
        return len(self.environment.problems("train"))

    def source(self, parts: Parts) -> ProblemSource:
        config = parts.config
        config.refuse(_OF_OUR_LOOP, "the agent runs its tools itself")
        config.refuse(["rollout.constrain_tool_calls", "rollout.max_open_episodes"], "the agent is a program")
        collector = self._collector(parts, training=True)
        return source_of(self.environment, collector, parts, on_close=lambda: self.close(parts.runner))

    def evaluator(self, parts: Parts) -> Evaluator:
        return evaluator_of(self.environment, self._collector(parts, training=False), parts)

    def close(self, runner: asyncio.Runner) -> None:
        if self.gateway is not None:
            runner.run(self.gateway.close())

    def _collector(self, parts: Parts, *, training: bool) -> Collector:
        agent, gateway = parts.config.agent, self._gateway(parts)
        sandbox = None
        if gateway.socket_path and isinstance(self.program, CommandAgent):
            run = [] if parts.checkpoints is None else [parts.checkpoints.parent.parent, parts.checkpoints.parent]
            sandbox = ProgramSandbox(gateway.port, gateway.socket_path, [*self.program.answer_files, *run]).command
        runner = ProgramRunner(
            self.environment,
            self.program,
            gateway,
            attempt_limits(parts.config, training=training).sampling,
            ProgramLimits(agent.timeout_s, agent.max_output_bytes, sandbox),
            asyncio.Semaphore(agent.max_at_once),
            hidden_columns([*self.environment.problems("train"), *self.environment.problems("held_out")]),
            self._roles(parts),
        )
        rewards = rewards_of(self.environment, self.reward_functions, parts)
        host = LocalModels(parts.policy, parts.chat)
        return Collector(self.environment, runner, rewards, agent.max_at_once, host)

    def _roles(self, parts: Parts) -> Roles:
        """One for training and evaluation, so that frozen models are loaded once."""
        if self.roles is None:
            model = parts.config.model

            def load(name: str) -> Completer:
                return load_completer(model.name if name == START else name, dtype=model.dtype, device=model.device)

            roles, folder = parts.config.agent.roles, parts.checkpoints
            if CHECKPOINT in roles.values() and not parts.config.checkpoint.every:
                raise SettingError("agent.roles: checkpoint needs checkpoints; set checkpoint.every above 0")
            self.roles = Roles(roles, load, lambda: None if folder is None else last_checkpoint(folder))
            self.roles.load_models()
        return self.roles

    def _gateway(self, parts: Parts) -> Gateway:
        """One for training and evaluation. It serves in the runner's event loop, so it pauses during an update."""
        if self.gateway is None:
            if not isinstance(parts.policy, LocalPolicy):
                raise UnsupportedError(
                    "an agent that is a program needs the paged engine in this process; set model.engine to auto or "
                    "paged, use a model that it supports, and leave rollout.policy_url and backend out"
                )
            sampling = attempt_limits(parts.config, training=True).sampling
            in_sandbox = parts.config.agent.sandbox
            model, program = completer_of(self.loaded, parts.policy), self.program
            model.check_tool_calls()
            model.unexpected_calls = parts.config.rollout.unexpected_call_format
            if in_sandbox:
                if not isinstance(program, CommandAgent):
                    raise SettingError("agent.sandbox is for commands (--agent-cmd, command_agent); leave it out")
                if (reason := why_not()) is not None:
                    raise UnsupportedError(
                        f"agent.sandbox needs namespaces, which do not work here: {reason}; leave it out"
                    )
            address: dict[str, Any] = {"host": program.host, "port": program.port, "token": program.token}
            if isinstance(program, CommandAgent) and program.answer_files and not in_sandbox:
                files = ", ".join(file.name for file in program.answer_files if file.suffix != ".pyc" and file.exists())
                parts.watcher.warn(f"the agent's program can read the answers in {files}; agent.sandbox hides them")
            address |= {"routes": program.routes(), "unix_socket": in_sandbox}
            workers = self._workers(parts.config)
            if workers:
                parts.policy.turns_at_once = sys.maxsize  # other processes deliver them
            self.gateway = Gateway(model, sampling, **address, workers=workers)
            if program.posts_reward:
                parts.watcher.note(f"agents take their cases with POST {self.gateway.url}/attempts")
        return self.gateway

    def _workers(self, config: RunConfig) -> int:
        """The number of the gateway's workers; 0 where agents need the gateway's own port or socket."""
        program, reason = self.program, ""
        if config.agent.sandbox:
            reason = "agents in a sandbox reach the gateway's socket alone"
        elif program.posts_reward:
            reason = "external agents know the gateway's own address alone"
        elif program.port or not is_loopback(program.host):
            reason = "agents use the gateway's own address and port"
        if reason:
            if config.agent.gateway_workers:
                config.refuse(["agent.gateway_workers"], reason)
            return 0
        if config.agent.gateway_workers is not None:
            return config.agent.gateway_workers
        return default_workers() if self.loaded.model.device.type != "cpu" else 0
