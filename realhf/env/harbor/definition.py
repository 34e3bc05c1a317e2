"""Harbor task folders as an environment: ``env.path=harbor:FOLDER``. The policy has one tool, a
shell in the task's container; the verifier runs when the policy sends a message without a call,
has used up its turns, or its time."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from realhf.api.environment import (
    SPLITS,
    TRAIN,
    AssistantMessage,
    ChatMessage,
    Demonstration,
    DemonstrationRequest,
    EnvironmentDefinition,
    EnvironmentFailure,
    EnvironmentSpec,
    Opening,
    Task,
    TaskRemark,
    TaskSet,
    ToolCall,
    Turn,
)
from realhf.api.option import option
from realhf.base import process_clock
from realhf.base.json_rows import Row
from realhf.env.harbor.dockerfile import read_text
from realhf.env.harbor.episode import HarborEpisode, Limits, Verdict, longest_call_s
from realhf.env.harbor.task import HarborTask, find_tasks, read_task
from realhf.env.loader.tasks import RowTaskSet, split_rows
from realhf.env.loader.threads import Threads
from realhf.env.loader.validation import replace_surrogates

T = TypeVar("T")
TOOL = "shell"
"""Name of the policy's tool."""
SYSTEM_PROMPT = (
    "You work on a Linux machine with the tool shell. Call it to look and to change things, one "
    "call at a time. When the task is done, reply without a call."
)
_SOLVED = 1 - 1e-9
"""Minimum reward of an episode that counts as success."""
_MAX_PROBLEMS = 8
"""Maximum number of tasks that one error lists."""
_SHELL_SHEBANGS = ("#!/bin/bash", "#!/bin/sh", "#!/usr/bin/env bash", "#!/usr/bin/env sh")


@dataclass
class HarborOptions:
    """Harbor task folders, played without Docker; the policy works in a shell."""

    needs: ClassVar[str] = "folder"

    folder: str = option("", "A task folder, or a folder of task folders.")
    tasks: list[str] = option([], "The tasks that are played, by the names of their folders.")
    unplayable: str = option(
        "refuse",
        "What happens to a folder with a task that cannot be played here: refuse the folder, or "
        "skip the task.",
        choices=("refuse", "skip"),
    )
    heldout_fraction: float = option(
        0.1,
        "This part of the tasks is held out, decided by a hash of the name.",
        at_least=0,
        at_most=0.9,
    )
    max_turns: int = option(
        30, "The verifier runs after this many turns of the policy.", at_least=1
    )
    command_timeout_s: float = option(
        30.0,
        "The commands of a message together are ended after this time (s).",
        above=0,
        at_most=3600,
    )
    observation_chars: int = option(
        4000, "The policy reads at most this much of a command's output.", at_least=100
    )
    memory_mb: int = option(
        2048, "The processes of an episode use at most this memory (MiB).", at_least=64
    )
    storage_mb: int = option(
        512,
        "The files that an episode writes take at most this much (MiB); they lie in memory.",
        at_least=16,
    )
    processes: int = option(
        256, "An episode has at most this many processes and threads.", at_least=16
    )
    network: str = option(
        "none",
        "Whether tasks that ask for the internet get it: none, or the host's network, with all "
        "that listens on the host's loopback.",
        choices=("none", "host"),
    )
    instances: int = option(
        8, "At most this many containers run in one process.", at_least=1, on_resume="free"
    )

    def limits(self) -> Limits:
        """Return the limits of an episode."""
        return Limits(
            command_timeout_s=self.command_timeout_s,
            output_bytes=self.observation_chars,
            memory_mb=self.memory_mb,
            storage_mb=self.storage_mb,
            processes=self.processes,
            network=self.network == "host",
        )


SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Run a command in a shell and return its output. Every call starts in the "
        "same folder; processes in the background keep running.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The command, of one or more lines."}
            },
            "required": ["command"],
        },
    },
}


class HarborEnvironment:
    """``realhf.api.environment.Environment`` that plays a task folder in a container."""

    def __init__(
        self, tasks: Mapping[str, HarborTask], limits: Limits, max_turns: int, threads: Threads
    ) -> None:
        self._tasks = tasks
        self._limits = limits
        self._max_turns = max_turns
        self._threads = threads
        self._episode: HarborEpisode | None = None
        self._turns = 0

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Build the container of a task. ``seed`` is not used. Raises EnvironmentFailure."""
        await self.close()
        harbor_task = self._tasks.get(str(task.get("task")))
        if harbor_task is None:
            raise EnvironmentFailure("internal", f"there is no task {task.get('task')!r}")
        self._turns = 0
        episode = self._episode = HarborEpisode(harbor_task, self._limits)
        await self._run(episode, episode.open)
        return Opening([{"role": "user", "content": harbor_task.instruction}], [SCHEMA])

    async def step(self, message: AssistantMessage) -> Turn:
        """Run the commands of a message, or the verifier. Raises EnvironmentFailure if no episode
        is open, or if it fails for another reason than the policy."""
        episode = self._episode
        if episode is None:
            raise EnvironmentFailure("internal", "no episode is open; call reset first")
        self._turns += 1
        answers = await self._answer_all(episode, message.tool_calls)
        if answers and self._turns < self._max_turns and not episode.is_over:
            return Turn(answers)
        verdict = await self._run(episode, episode.verify)
        await self.close()
        return _last_turn(answers, verdict)

    async def close(self) -> None:
        """End the container. Idempotent."""
        episode = self._episode
        self._episode = None
        if episode is not None:
            await self._run(episode, episode.close)

    async def _answer_all(
        self, episode: HarborEpisode, calls: Sequence[ToolCall]
    ) -> list[ChatMessage]:
        """Run the calls of a message and return the messages with their results."""
        left_s = self._limits.command_timeout_s
        answers: list[ChatMessage] = []
        for call in calls:
            began = process_clock.now()
            answers.append(await self._answer(episode, call, left_s))
            left_s -= process_clock.now() - began
        return answers

    async def _answer(self, episode: HarborEpisode, call: ToolCall, left_s: float) -> ChatMessage:
        """Run a call for ``left_s`` seconds at most and return the message with its result."""
        text = _find_call_problem(call)
        if not text and episode.is_over:
            text = "error: the time of the task is used up"
        elif not text and left_s <= 0:
            text = "error: the calls before have used up the time of the message"
        text = text or await self._run(
            episode, partial(episode.run, call.arguments["command"], left_s)
        )
        message = {"role": "tool", "name": TOOL, "content": replace_surrogates(text)}
        return message | {"tool_call_id": call.id} if call.id else message

    async def _run(self, episode: HarborEpisode, work: Callable[[], T]) -> T:
        """Run a blocking call in a thread. If it is cancelled, the container ends soon."""
        try:
            return await self._threads.run(work, after=episode.close)
        except asyncio.CancelledError:
            episode.interrupt()
            self._episode = None
            raise


def _last_turn(answers: Sequence[ChatMessage], verdict: Verdict) -> Turn:
    reward = verdict.rewards["reward"]
    metrics = {
        "success": float(reward >= _SOLVED),
        "progress": min(1.0, max(0.0, reward)),
        "verifier_failed": float(bool(verdict.problem)),
    }
    others = {name: value for name, value in verdict.rewards.items() if name != "reward"}
    info = {"verifier": verdict.problem} if verdict.problem else {}
    return Turn(answers, done=True, reward=reward, rewards=others, metrics=metrics, info=info)


def _find_call_problem(call: ToolCall) -> str:
    """Return the error that answers a wrong call; "" for a call that can be run."""
    if call.problem:
        return f"error: {call.problem}"
    if call.name != TOOL:
        return f"error: there is no tool {call.name[:60]!r}, only {TOOL}"
    command = call.arguments.get("command")
    if not isinstance(command, str) or not command.strip():
        return f"error: {TOOL} needs the argument command, a text"
    if "\0" in command:
        return "error: a command holds no NUL"
    if surplus := [name for name in call.arguments if name != "command"]:
        return f"error: {TOOL} has no argument {str(surplus[0])[:60]!r}"
    try:
        size = len(command.encode())
    except UnicodeEncodeError:
        return "error: a command holds no half of a surrogate pair"
    return "" if size < _MAX_COMMAND_BYTES else "error: the command is too long"


_MAX_COMMAND_BYTES = 100_000
"""Maximum bytes of a command; Linux takes at most 128 KiB in one argument."""


class _Examiner:
    """Player of what a check sees of a task: nothing, and the task's solution."""

    def __init__(
        self, tasks: Mapping[str, HarborTask], limits: Limits, *, network: bool, threads: Threads
    ) -> None:
        self._tasks = tasks
        self._limits = limits
        self._network = network
        self._threads = threads

    async def examine(self, task: Task) -> Sequence[TaskRemark]:
        """Return what is wrong with a task, and what differs from a run in Docker. Raises
        EnvironmentFailure."""
        harbor_task = self._tasks[task.payload["task"]]
        warnings = harbor_task.find_warnings(
            memory_mb=self._limits.memory_mb, storage_mb=self._limits.storage_mb
        )
        remarks = [TaskRemark(text, is_fault=False) for text in warnings]
        if harbor_task.network and not self._network:
            text = "the task asks for the internet, which env.network=none does not give it"
            remarks.append(TaskRemark(text, is_fault=False))
        remarks += await self._play(harbor_task, solve=False)
        if harbor_task.solution is None:
            return [*remarks, TaskRemark("the task has no solution/solve.sh")]
        return [*remarks, *await self._play(harbor_task, solve=True)]

    async def _play(self, task: HarborTask, *, solve: bool) -> list[TaskRemark]:
        episode = HarborEpisode(task, self._limits)

        def play() -> list[TaskRemark]:
            """Play the task, with its solution or without a command."""
            try:
                episode.open()
                output = episode.solve() if solve else ""
                return [*_judge(episode.verify().rewards["reward"], output, solved=solve)]
            except ValueError as error:
                return [TaskRemark(str(error))]
            finally:
                episode.close()

        try:
            return await self._threads.run(play)
        except asyncio.CancelledError:
            episode.interrupt()
            raise


def _judge(reward: float, output: str, *, solved: bool) -> Iterator[TaskRemark]:
    if not solved and reward > 0:
        yield TaskRemark(f"a policy that does nothing earns {reward:g}")
    elif solved and reward <= 0:
        end = " ".join(output.split())[-200:]
        yield TaskRemark(f"the solution earns {reward:g}; its output ends: {end or 'nothing'}")
    elif solved and not math.isclose(reward, 1.0) and reward < _SOLVED:
        text = f"the solution earns {reward:g}, and an episode succeeds with 1"
        yield TaskRemark(text, is_fault=False)


def demonstrate(
    tasks: Mapping[str, HarborTask], names: Sequence[str], request: DemonstrationRequest
) -> Iterator[Demonstration]:
    """Yield the solutions that one command can hold: those of a single shell script."""
    for name in names:
        command = _solution_command(tasks[name])
        if command is not None:
            call = json.dumps({"name": TOOL, "arguments": {"command": command}}, ensure_ascii=False)
            turns = (f"<tool_call>{call}</tool_call>", "Done.")
            for _ in range(request.episodes_per_task):
                yield Demonstration(_build_task(tasks[name]), turns)


def _solution_command(task: HarborTask) -> str | None:
    """Return the solution of a task as a command; None if it is not a single shell script."""
    folder = task.solution
    if folder is None or task.solution_variables or len([*folder.iterdir()]) > 1:
        return None
    text = read_text(folder / "solve.sh", folder)
    first, _, rest = text.partition("\n")
    if not first.startswith("#!"):
        return text.strip()
    return rest.strip() if first.strip() in _SHELL_SHEBANGS else None


def _build_task(task: HarborTask) -> Task:
    return Task(task.name, task.category, {"task": task.name})


def read_tasks(options: HarborOptions) -> dict[str, HarborTask]:
    """Read the chosen tasks, by name. Raises ValueError for a name that does not exist, and for
    tasks that are not played here, unless they are to be skipped."""
    folders = {path.name: path for path in find_tasks(Path(options.folder).expanduser())}
    if unknown := [name for name in options.tasks if name not in folders]:
        raise ValueError(f"env.tasks: {options.folder} has no task {unknown[0]!r}")
    tasks: dict[str, HarborTask] = {}
    problems = []
    for name in options.tasks or folders:
        try:
            tasks[name] = read_task(folders[name])
        except ValueError as error:
            problems.append(str(error))
    if problems and (options.unplayable == "refuse" or not tasks):
        more = len(problems) - _MAX_PROBLEMS
        end = f"; and {more} more" if more > 0 else ""
        hint = "; env.unplayable=skip plays the others" if tasks else ""
        raise ValueError("; ".join(problems[:_MAX_PROBLEMS]) + end + hint)
    return tasks


def build(options: HarborOptions) -> EnvironmentSpec:
    """Return the environment of a folder. Raises ValueError for a folder that is not played."""
    tasks = read_tasks(options)
    rows = [Row({"id": name}, str(task.folder)) for name, task in tasks.items()]
    parts = split_rows(rows, options.heldout_fraction, lambda values: values["id"])
    names = {split: [row.values["id"] for row in parts[split]] for split in SPLITS}
    limits = options.limits()
    threads = Threads("harbor", options.instances)

    def task_set(split: str) -> TaskSet:
        """Return the tasks of a split. Raises ValueError for a split without tasks."""
        if not names[split]:
            raise ValueError(
                f"{options.folder} leaves no task for the split {split!r} with "
                f"env.heldout_fraction={options.heldout_fraction:g}: change it, or add tasks"
            )
        return RowTaskSet([_build_task(tasks[name]) for name in names[split]])

    has_solver = any(_solution_command(tasks[name]) is not None for name in names[TRAIN])
    examiner = _Examiner(tasks, limits, network=options.network == "host", threads=threads)
    return EnvironmentSpec(
        "harbor",
        lambda _: HarborEnvironment(tasks, limits, options.max_turns, threads),
        task_set,
        system_prompt=SYSTEM_PROMPT,
        concurrency=options.instances,
        deterministic=False,
        demonstrate=partial(demonstrate, tasks, names[TRAIN]) if has_solver else None,
        max_turns=options.max_turns,
        tools=[SCHEMA],
        examine=examiner.examine,
        longest_call_s=max(longest_call_s(task, limits) for task in tasks.values()),
    )


DEFINITION = EnvironmentDefinition(HarborOptions, build)
