"""Check that a task keeps its promises: on paper, and against a real simulator.

Source: acceptance rule of docs/reference/environment.md 6.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, combinations
from queue import SimpleQueue
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from realhf.aws.cli.policy import check_command, operation_allowed
from realhf.aws.episode.episode import DEFAULT_MAX_STEPS, Episode
from realhf.aws.grading.criteria import criteria_of
from realhf.aws.grading.end_state import freedom_of, is_graded_by_end_state
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.captures import resolve
from realhf.aws.tasks.drift import FEWEST, MOST, repairs
from realhf.aws.tasks.loader import (
    SPLITS,
    Template,
    instantiate,
    mistakes,
    solve,
    whole_state,
    with_drifts,
)
from realhf.aws.tasks.names import is_name
from realhf.aws.tasks.task import SetupCommand, Task, TaskError

BLIND_RETURN = 0.9
"""Most that applying a desired state may earn, on average, without a look at what drifted."""
_HARMLESS = "aws sts get-caller-identity"
_PLACE = re.compile(r"(?<!\$)\{[a-z_]+\}")
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Failure:
    """Says in words why there is no result."""

    text: str


def template_problems(template: Template) -> list[str]:
    """Say in words what is wrong with a template on paper."""
    if template.split not in SPLITS:
        return [f"split is {template.split!r}"]
    try:
        task = instantiate(template.task_id, 0)
        freedom_of(task)
        operations = frozenset() if is_graded_by_end_state(task) else criteria_of(task).operations
    except (TaskError, KeyError, TypeError) as error:
        return [f"{type(error).__name__}: {error}"]
    return [*_policy_problems(task, operations), *_text_problems(task, operations), *_drift_promises(task)]


def _policy_problems(task: Task, operations: Iterable[str]) -> Iterator[str]:
    for command in task.setup + task.decoys + task.possible_drifts:
        if not _allowed(command):
            yield f"the policy does not allow {command}"
    for operation in operations:
        service, _, name = operation.partition(":")
        if not operation_allowed(service, name):
            yield f"the policy does not allow {operation}, so no command can earn it"
    for line in chain(task.solution, *task.any_of, repairs(task.possible_drifts)):
        rule = check_command(line).rule
        if rule is not None:
            yield f"refused ({rule}): {line}"


def _allowed(command: SetupCommand) -> bool:
    if command.command:
        return check_command(command.command).rule is None
    return operation_allowed(command.service, command.operation)


def _text_problems(task: Task, operations: Iterable[str]) -> Iterator[str]:
    for text in chain((task.description, task.desired_state_spec), task.solution, *task.any_of):
        place = _PLACE.search(text)
        if place:
            yield f"nothing fills the place {place[0]}"
    shown = f"{task.description} {task.desired_state_spec}"
    for secret in (*operations, *task.solution):
        if secret in shown:
            yield f"the description says {secret!r}"


def _drift_promises(task: Task) -> Iterator[str]:
    if not all(drift.repair for drift in task.possible_drifts):
        yield "a drift has no repair"
    if bool(task.desired_state_spec) is not bool(task.possible_drifts):
        yield "a desired state belongs to a task with drifts, and to no other"


def play(
    episode: Episode, task: Task, commands: Iterable[str], drifts: Sequence[int] | None = None, then: Iterable[str] = ()
) -> tuple[bool, float]:
    """Set the task up, with these drifts (None: those that its seed draws), and send the commands until it is done,
    ``then`` those of a second list; returns (achieved, return). Captures refer to a list's own commands. There is no
    chaos."""
    achieved, total = episode.reset(task, chaos=False, drifts=drifts).observation["task_achieved"], 0.0
    for script in (commands, then):
        outputs: list[str] = []
        for command in episode.fill(list(script)):
            if episode.done:
                break
            step = episode.step(resolve(command, outputs))
            outputs.append(step.observation["command_output"])
            achieved, total = step.observation["task_achieved"], total + step.reward
    return achieved, total


def problems(episode: Episode, task: Task, *, thorough: bool = False) -> list[str]:
    """Say in words what is wrong with an instance; empty for a sound one. ``thorough``: its wrong habits and their ways
    back are played too, and every set of drifts that could happen."""
    found = []
    achieved, total = play(episode, task, solve(task))
    if not achieved or total != 1.0:
        found.append(f"solution: achieved={achieved}, return {total}{_where_it_stands(episode)}")
    achieved, total = play(episode, task, [_HARMLESS])
    if achieved or total != 0.0:
        found.append(f"doing nothing: achieved={achieved}, return {total}")
    every_drift = range(len(task.possible_drifts)) if task.possible_drifts else None
    beginnings = [list(task.solution[:length]) for length in range(1, len(task.solution))]
    for commands in chain(beginnings, wrong_names(task)):
        achieved, total = play(episode, task, commands, every_drift)
        if achieved or total >= 1.0:
            found.append(f"{commands}: achieved={achieved}, return {total}")
    if thorough:
        found += _mistake_problems(episode, task) + _drift_problems(episode, task)
    return found


def wrong_names(task: Task) -> Iterator[list[str]]:
    """Yield the solution with each drawn name in turn followed by ``-2``: it does the right thing to the wrong
    resource."""
    for name in task.params.values():
        if is_name(name) and any(name in command for command in task.solution):
            yield [command.replace(name, f"{name}-2") for command in task.solution]


def _where_it_stands(episode: Episode) -> str:
    missing = episode.missing()
    return f"; missing: {'; '.join(missing)}" if missing else ""


def _mistake_problems(episode: Episode, task: Task) -> list[str]:
    found = []
    for mistake in mistakes(task):
        if play(episode, task, mistake.commands)[0]:
            found.append(f"mistake {list(mistake.commands)} achieves the task")
        if mistake.recovery and play(episode, task, mistake.commands, then=mistake.recovery) != (True, 1.0):
            found.append(f"mistake {list(mistake.commands)}: its recovery does not achieve the task")
    return found


def _drift_problems(episode: Episode, task: Task) -> list[str]:
    """Check that every drift breaks something, that the repairs of every set that a reset may draw mend it, and that
    applying the whole desired state without a look at what drifted earns less."""
    if not task.possible_drifts:
        return []
    found, unseen = [], []
    places = range(len(task.possible_drifts))
    for chosen in chain.from_iterable(combinations(places, count) for count in range(FEWEST, MOST + 1)):
        names = ", ".join(str(task.possible_drifts[i]) for i in chosen)
        try:
            result = play(episode, task, with_drifts(task, chosen).solution, chosen)
        except TaskError as error:
            found.append(f"drifts {names}: {error}")
            continue
        if result != (True, 1.0):
            found.append(f"drifts {names}: achieved={result[0]}, return {result[1]}{_where_it_stands(episode)}")
        if len(chosen) == FEWEST:
            unseen.append(play(episode, task, whole_state(task), chosen)[1])
    for place, drift in enumerate(task.possible_drifts):
        try:
            play(episode, task, [], [place])
        except TaskError as error:
            found.append(f"drift {drift} ({drift.description}): {error}")
    if unseen and sum(unseen) / len(unseen) > BLIND_RETURN:
        found.append(f"to apply the whole desired state without a look earns {sum(unseen) / len(unseen):.2f}")
    return found


def validate(templates: Sequence[Template], seeds: int, pool_size: int, console: Console) -> dict[int, list[str]]:
    """Return problems by template, of ``seeds`` training instances and one with held-out names; the first is played
    thoroughly."""
    drawn = [*((seed, "train") for seed in range(seeds)), (0, "heldout")]
    instances = [(template.task_id, seed, split) for template in templates for seed, split in drawn]
    found: dict[int, list[str]] = {template.task_id: [] for template in templates}
    results = played(instances, _check, pool_size, console)
    for (task_id, seed, split), wrong in zip(instances, results, strict=True):
        texts = [wrong.text] if isinstance(wrong, Failure) else wrong
        found[task_id] += [f"{split} {seed}: {text}" for text in texts]
    return found


def _check(episode: Episode, instance: tuple[int, int, str]) -> list[str]:
    return problems(episode, instantiate(*instance), thorough=instance[1:] == (0, "train"))


def played(
    items: Sequence[Item],
    work: Callable[[Episode, Item], Result],
    pool_size: int,
    console: Console,
    max_steps: int = DEFAULT_MAX_STEPS,
) -> Iterator[Result | Failure]:
    """Yield the result of ``work`` for each item, in their order, ``pool_size`` at a time, with a progress bar. An item
    that a busy machine did not answer in time is tried again. An interrupt ends it after the items that are being
    played."""

    def turn(item: Item) -> Result | Failure:
        episode = episodes.get()
        try:
            return _attempted(lambda: work(episode, item))
        finally:
            episodes.put(episode)

    with _episodes(pool_size, max_steps) as episodes:
        threads = ThreadPoolExecutor(pool_size)
        try:
            yield from track(threads.map(turn, items), "playing", total=len(items), console=console)
        finally:
            threads.shutdown(cancel_futures=True)


@contextmanager
def _episodes(pool_size: int, max_steps: int) -> Iterator[SimpleQueue[Episode]]:
    """Give episodes in ``pool_size`` simulators of their own, which end with the context."""
    pool = MiniStackPool(pool_size)
    try:
        pool.start()
        episodes: SimpleQueue[Episode] = SimpleQueue()
        for _ in range(pool_size):
            episodes.put(Episode(pool.acquire(), max_steps))
        yield episodes
    finally:
        pool.stop()


def _attempted(work: Callable[[], Result], attempts: int = 3) -> Result | Failure:
    for left in reversed(range(attempts)):
        try:
            return work()
        except Exception as error:
            if not isinstance(error, OSError) or not left:
                return Failure(f"{type(error).__name__}: {error} {error.__cause__ or ''}".strip())
    raise AssertionError("no attempt was made")
