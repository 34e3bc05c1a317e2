"""An episode of a Harbor task in a container: building it, the agent's commands, the verifier."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from realhf.api.environment import EnvironmentFailure
from realhf.base import process_clock
from realhf.base.installation import PACKAGE
from realhf.env.containment.container import (
    GRACE_S,
    CommandResult,
    Container,
    ContainerError,
    StageEnded,
    UnreadableFile,
)
from realhf.env.containment.container_stage import Order
from realhf.env.harbor.dockerfile import Copy, MakeFolder, Run
from realhf.env.harbor.task import HarborTask, InvalidReward, parse_reward

_VARIABLES = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "DEBIAN_FRONTEND": "noninteractive",
}
"""Environment variables of all commands; a task may set them otherwise."""
_VERIFY = "chmod +x /tests/test.sh && exec /tests/test.sh"
_SOLVE = "chmod +x /solution/solve.sh && exec /solution/solve.sh"
_LOG_BYTES = 2000
"""Maximum bytes of the output of a verifier or a build that an error quotes."""
_SETUP_S = 10.0
"""Seconds in which a container and its stages begin and end on a busy host."""


@dataclass(frozen=True)
class Limits:
    """Limits of an episode, where the task does not set a lower one."""

    command_timeout_s: float
    """Time in seconds that the commands of a message may take together."""
    output_bytes: int
    """Maximum bytes of a command's output that the policy reads."""
    memory_mb: int
    """Memory of the processes, in MiB."""
    storage_mb: int
    """Files that differ from the image, in MiB."""
    processes: int
    """Processes and threads."""
    network: bool
    """Whether a task that asks for the internet uses the host's network."""


@dataclass(frozen=True)
class Verdict:
    """What a verifier said."""

    rewards: Mapping[str, float]
    """Rewards by name, among them ``reward``."""
    problem: str = ""
    """Why the verifier gave none, so that the reward is 0; "" if it gave one."""


def longest_call_s(task: HarborTask, limits: Limits) -> float:
    """Return the seconds that the longest call for a task, building it or a message with its
    verifier, takes at most on a host that is not overloaded. A second run of the verifier shares
    the time of the first one."""
    build_s = task.build_timeout_s if task.build.runs else 0.0
    commands_s = min(limits.command_timeout_s, task.agent_timeout_s)
    return _SETUP_S + max(build_s + GRACE_S, commands_s + task.verifier_timeout_s + 2 * GRACE_S)


class HarborEpisode:
    """An episode of one task. All methods block; ``interrupt`` may be called from another thread.

    ``EnvironmentFailure`` is raised only for what the agent cannot have done, so that the episode
    has no reward. All else is graded: a command after which the container's stage is gone is one
    that was ended, and a verifier that gives no reward after a command of the agent, twice, gives 0.
    """

    def __init__(self, task: HarborTask, limits: Limits) -> None:
        self.task = task
        self._limits = limits
        self._left_s = task.agent_timeout_s
        self._has_acted = False
        self._container = Container(
            Order(
                storage_bytes=min(task.storage_mb, limits.storage_mb) << 20,
                memory_bytes=min(task.memory_mb, limits.memory_mb) << 20,
                processes=limits.processes,
                image=task.image,
                network=task.network and limits.network,
                hidden=(str(PACKAGE), str(task.folder.parent)),
            )
        )

    @property
    def is_over(self) -> bool:
        """Whether the agent's time is used up."""
        return self._left_s <= 0

    def open(self) -> None:
        """Build the container as the Dockerfile says."""
        container = self._container
        try:
            container.start()
        except ContainerError as error:
            raise EnvironmentFailure(
                "internal",
                f"a Harbor task cannot be contained here: {error}; it needs Linux 5.14 or later "
                f"with unprivileged user namespaces and overlayfs in them",
            ) from None
        try:
            container.begin()
            deadline = process_clock.now() + self.task.build_timeout_s
            has_run = False
            for step in self.task.build.steps:
                if isinstance(step, MakeFolder):
                    container.make_folder(step.path)
                elif isinstance(step, Copy):
                    container.copy_in(step.source, step.target)
                else:
                    self._run_step(step, deadline)
                    has_run = True
            container.make_folder(self.task.build.folder)
            if has_run:
                container.end()
                container.begin()
        except (ContainerError, OSError) as error:
            raise self._failure(f"the container could not be built: {error}") from None

    def run(self, command: str, limit_s: float) -> str:
        """Run a command of the agent for ``limit_s`` seconds at most and return what it reads."""
        self._has_acted = True
        began = process_clock.now()
        try:
            result = self._run(command, min(limit_s, self._left_s), {})
        except StageEnded as error:
            self._begin_again()
            return f"[ended, with all processes: {error}]"
        finally:
            self._left_s -= process_clock.now() - began
        if result.code is None:
            return f"{result.output}\n[ended: {result.ended}]".lstrip("\n")
        if result.code:
            return f"{result.output.rstrip()}\n[exit code {result.code}]".lstrip("\n")
        return result.output or "[no output]"

    def solve(self) -> str:
        """Run the task's solution in place of an agent and return the end of its output. Raises
        ValueError if it is ended."""
        assert self.task.solution is not None
        try:
            self._container.copy_in(self.task.solution, "/solution")
        except (ContainerError, OSError) as error:
            raise self._failure(f"the solution could not be copied: {error}") from None
        try:
            result = self._run(_SOLVE, self.task.agent_timeout_s, self.task.solution_variables)
        except StageEnded as error:
            raise ValueError(f"the solution was ended, with all processes: {error}") from None
        if result.code is None:
            raise ValueError(f"the solution was ended: {result.ended}")
        return result.output[-_LOG_BYTES:]

    def verify(self) -> Verdict:
        """End the processes of the agent, run the verifier, and return its verdict.

        A verifier that gives no reward runs once more on the same files, since the host may have
        kept it from its work. Both runs share its time, so no call takes longer; there is thus no
        second one after a run that has used up the time, which an agent could double at will.
        """
        try:
            self._begin_verifier()
        except (ContainerError, OSError) as error:
            raise self._failure(f"the verifier could not begin: {error}") from None
        began = process_clock.now()
        limit_s = self.task.verifier_timeout_s
        try:
            return Verdict(self._find_rewards(limit_s))
        except (InvalidReward, StageEnded, UnreadableFile) as error:
            if not self._has_acted:
                raise self._failure(str(error)) from None
            problem = str(error)
        except ContainerError as error:
            raise self._lost(error) from None
        left_s = limit_s - (process_clock.now() - began)
        if left_s > 0:
            # What the agent left behind may have kept the verifier from its work.
            with suppress(InvalidReward, ContainerError, OSError):
                self._begin_verifier()
                return Verdict(self._find_rewards(left_s))
        return Verdict({"reward": 0.0}, problem)

    def _begin_verifier(self) -> None:
        """Begin the verifier's stage. Raises ContainerError and OSError."""
        self._container.end()
        self._container.begin(verifying=True)
        self._container.copy_in(self.task.tests, "/tests")

    def _find_rewards(self, limit_s: float) -> Mapping[str, float]:
        """Run the verifier, end all that it has started, and return the rewards that it wrote."""
        container = self._container
        result = self._run(_VERIFY, limit_s, self.task.verifier_variables)
        if result.code is None:
            raise InvalidReward(f"the verifier was ended: {result.ended}")
        container.clear()
        text = container.read("/logs/verifier/reward.txt")
        mapping = container.read("/logs/verifier/reward.json") if text is None else None
        try:
            return parse_reward(text, mapping)
        except InvalidReward as error:
            output = result.output[-_LOG_BYTES:].strip() or "nothing"
            raise InvalidReward(f"{error}; exit code {result.code}, output: {output}") from None

    def interrupt(self) -> None:
        """Let a call that runs in another thread fail, without waiting for it."""
        self._container.interrupt()

    def close(self) -> None:
        """End the container. Idempotent."""
        self._container.close()

    def _run_step(self, step: Run, deadline: float) -> None:
        left_s = max(0.0, deadline - process_clock.now())
        result = self._container.run(
            step.words,
            folder=step.folder,
            variables={**_VARIABLES, **step.variables},
            timeout_s=left_s,
            output_bytes=_LOG_BYTES,
        )
        if result.code != 0:
            how = f"was ended, {result.ended}" if result.ended else f"ends with {result.code}"
            words = step.words if isinstance(step.words, str) else " ".join(step.words)
            raise self._failure(f"RUN {words[:80]} {how}: {result.output.strip()}")

    def _run(self, command: str, limit_s: float, variables: Mapping[str, str]) -> CommandResult:
        """Run a command in the task's folder. Raises StageEnded."""
        build = self.task.build
        try:
            return self._container.run(
                command,
                folder=str(PurePosixPath(build.folder)),
                variables={**_VARIABLES, **build.variables, **variables},
                timeout_s=limit_s,
                output_bytes=self._limits.output_bytes,
            )
        except StageEnded:
            raise
        except ContainerError as error:
            raise self._lost(error) from None

    def _begin_again(self) -> None:
        """Begin a new stage in place of one that has ended."""
        try:
            self._container.end()
            self._container.begin()
        except ContainerError as error:
            raise self._lost(error) from None

    def _lost(self, error: ContainerError) -> EnvironmentFailure:
        return EnvironmentFailure("lost", f"{self.task.name}: {error}")

    def _failure(self, text: str) -> EnvironmentFailure:
        return EnvironmentFailure("internal", f"{self.task.name}: {text}")
