"""Task validation: checks of the templates alone, and plays on a real simulator.

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

import botocore.loaders
from botocore.exceptions import UnknownServiceError
from rich.console import Console
from rich.progress import track

from realhf.aws.cli.policy import check_command, operation_allowed
from realhf.aws.episode.episode import DEFAULT_MAX_STEPS, Episode, EpisodeError
from realhf.aws.episode.world import SetupError, TargetError, make_targets
from realhf.aws.grading.criteria import parse_criteria
from realhf.aws.grading.differences import has_field
from realhf.aws.grading.grader import build_freedom, is_graded_by_end_state, parse_free_field
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.captures import resolve
from realhf.aws.tasks.loader import (
    SPLITS,
    Template,
    instantiate,
    is_name,
    line_of,
    mistakes,
    whole_state,
    with_drifts,
)
from realhf.aws.tasks.task import MAX_DRIFTS, MIN_DRIFTS, SetupCommand, Task, TaskError

BLIND_RETURN = 0.7
"""Maximum mean return for applying the whole desired state without looking at what drifted."""
_HARMLESS = "aws sts get-caller-identity"
_PLACEHOLDER = re.compile(r"(?<!\$)\{[a-z_]+\}")
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Fault:
    """A problem of a task, and where it is."""

    text: str
    """Description of the problem."""
    key: str = ""
    """Key of the template that contains the problem; "" for the template as a whole."""
    index: int | None = None
    """Index in the list under that key."""

    def __str__(self) -> str:
        return self.text

    def describe(self, template: Template) -> str:
        """Return the problem, prefixed with file, line and task."""
        line = line_of(template, self.key, self.index)
        return f"{template.file}:{line}: task {template.task_id}: {self.text}"


@dataclass(frozen=True)
class Failure:
    """Why an item has no result."""

    text: str
    """Type, message and cause of the error."""


def template_problems(template: Template) -> list[Fault]:
    """Return the problems of a template that can be found without a simulator."""
    if template.split not in SPLITS:
        return [Fault(f"split is {template.split!r}", "split")]
    try:
        task = instantiate(template.task_id, 0)
        operations = (
            frozenset() if is_graded_by_end_state(task) else parse_criteria(task.success).operations
        )
    except (TaskError, KeyError, TypeError) as error:
        return [
            Fault(
                f"{type(error).__name__}: {error}",
                "success_criteria" if template.success_criteria else "",
            )
        ]
    for index, line in enumerate(task.free):
        try:
            parse_free_field(line)
        except TaskError as error:
            return [Fault(str(error), "free", index)]
    return [
        *_policy_problems(task, operations),
        *_text_problems(task, operations),
        *_drift_field_problems(task),
    ]


def _policy_problems(task: Task, operations: Iterable[str]) -> Iterator[Fault]:
    lists = {
        "setup_commands": task.setup,
        "decoys": task.decoys,
        "possible_drifts": task.possible_drifts,
    }
    for key, commands in lists.items():
        for index, command in enumerate(commands):
            if not _is_allowed(command):
                yield Fault(f"the policy does not allow {command}", key, index)
    for operation in operations:
        service, _, name = operation.partition(":")
        if not operation_allowed(service, name):
            text = f"the policy does not allow {operation}, so no command can earn it"
            yield Fault(text, "success_criteria")
    for key, index, line in _command_lines(task):
        rule = check_command(line).rule
        if rule is not None:
            yield Fault(f"refused ({rule}): {line}", key, index)


def _is_allowed(command: SetupCommand) -> bool:
    if command.command:
        return check_command(command.command).rule is None
    return operation_allowed(command.service, command.operation)


def _command_lines(task: Task) -> Iterator[tuple[str, int, str]]:
    """Yield (key, index, command line) for every reference command. The solution of a drift task
    consists of the repairs of its drifts."""
    if not task.possible_drifts:
        yield from (("solution", index, line) for index, line in enumerate(task.solution))
    for index, drift in enumerate(task.possible_drifts):
        yield from (("possible_drifts", index, line) for line in drift.repair)
    for index, commands in enumerate(task.any_of):
        yield from (("any_of", index, line) for line in commands)


def _text_problems(task: Task, operations: Iterable[str]) -> Iterator[Fault]:
    texts = [
        ("description", None, task.description),
        ("desired_state_spec", None, task.desired_state_spec),
    ]
    for key, index, text in (*texts, *_command_lines(task)):
        unfilled = _PLACEHOLDER.search(text)
        if unfilled:
            yield Fault(f"nothing fills the placeholder {unfilled[0]}", key, index)
    shown = f"{task.description} {task.desired_state_spec}"
    for secret in (*operations, *task.solution):
        if secret in shown:
            yield Fault(f"the description says {secret!r}", "description")


def _drift_field_problems(task: Task) -> Iterator[Fault]:
    for index, drift in enumerate(task.possible_drifts):
        if not drift.repair:
            yield Fault("a drift has no repair", "possible_drifts", index)
    if bool(task.desired_state_spec) is not bool(task.possible_drifts):
        yield Fault(
            "a desired state belongs to a task with drifts, and to no other", "desired_state_spec"
        )


def play(
    episode: Episode,
    task: Task,
    commands: Iterable[str],
    drifts: Sequence[int] | None = None,
    then: Iterable[str] = (),
) -> tuple[bool, float]:
    """Set up a task, send commands until the episode is done, and return (achieved, return). Chaos
    is off.

    ``drifts``: indices of the drifts that happen (None: drawn from the task's seed). ``then``:
    commands to send after ``commands``. A capture refers to a command in its own list.
    """
    achieved = episode.reset(task, chaos=False, drifts=drifts).observation["task_achieved"]
    total = 0.0
    for script in (commands, then):
        outputs: list[str] = []
        for command in episode.fill(list(script)):
            if episode.done:
                break
            step = episode.step(resolve(command, outputs))
            outputs.append(step.observation["command_output"])
            achieved = step.observation["task_achieved"]
            total = total + step.reward
    return achieved, total


def find_problems(episode: Episode, task: Task, *, thorough: bool = False) -> list[Fault]:
    """Return the problems of a task instance; empty if it is sound.

    ``thorough``: also check the fields that are left free, the listed mistakes and their
    recoveries, and every possible set of drifts.
    """
    try:
        return _find_problems(episode, task, thorough)
    except EpisodeError as error:
        cause = error.__cause__
        if isinstance(cause, SetupError | TargetError):
            return [Fault(str(cause), cause.field, cause.index)]
        raise


def _find_problems(episode: Episode, task: Task, thorough: bool) -> list[Fault]:
    found = []
    achieved, total = play(episode, task, task.solution)
    if not achieved or total != 1.0:
        text = (
            f"the solution, played again, does not reach its own end state: achieved={achieved}, "
            f"return {total}"
        )
        found.append(Fault(text + _missing_note(episode), "solution"))
    achieved, total = play(episode, task, [_HARMLESS])
    if achieved or total != 0.0:
        found.append(Fault(f"doing nothing: achieved={achieved}, return {total}", "solution"))
    every_drift = range(len(task.possible_drifts)) if task.possible_drifts else None
    beginnings = [list(task.solution[:length]) for length in range(1, len(task.solution))]
    for commands in chain(beginnings, wrong_names(task)):
        achieved, total = play(episode, task, commands, every_drift)
        if achieved or total >= 1.0:
            found.append(Fault(f"{commands}: achieved={achieved}, return {total}", "solution"))
    if thorough:
        for find_faults in (_freedom_problems, _mistake_problems, _drift_problems):
            found += find_faults(episode, task)
    return found


def _freedom_problems(episode: Episode, task: Task) -> Iterator[Fault]:
    """Yield problems of the fields that a task leaves free, and of its ``verbatim`` kinds.

    A free field is wrong if no resource in a solution's account has it, because a misspelt field
    frees nothing. It is also wrong if no solution's own value is among the permitted ones.
    """
    free = build_freedom(task).free
    ends = (
        [target.end for target in make_targets(episode.slot, task, task.seed)]
        if free or task.verbatim
        else []
    )
    kinds = {f"{key[0]}/{key[1]}" for end in ends for key in end.resources}
    for index, kind in enumerate(task.verbatim):
        if kind not in kinds:
            yield Fault(f"verbatim: no solution leaves a {kind}", "verbatim", index)
    for index, (kind, path, values) in enumerate(free):
        if kind not in kinds:
            others = sorted(one for one in kinds if one.partition("/")[0] == kind.partition("/")[0])
            yield Fault(
                f"free: no solution leaves a {kind}, but {', '.join(others) or 'other services'}",
                "free",
                index,
            )
        elif any(has_field(end, kind, path) for end in ends):
            if not any(has_field(end, kind, path, values) for end in ends):
                yield Fault(f"free: a solution's own {path} is not {values}", "free", index)
        elif not _may_be_empty(kind, path):
            yield Fault(f"free: no {kind} that a solution leaves has a field {path}", "free", index)


def _may_be_empty(kind: str, path: str) -> bool:
    """Return whether the service's API has such a field, or it belongs to the simulator. Snapshots
    leave out empty fields, so a missing field may still exist."""
    if path.startswith("_"):
        return True
    try:
        model = botocore.loaders.create_loader().load_service_model(
            kind.partition("/")[0], "service-2"
        )
    except UnknownServiceError:
        return False
    shapes = model["shapes"]
    types = {
        (name, shapes[member["shape"]]["type"])
        for shape in shapes.values()
        for name, member in shape.get("members", {}).items()
    }
    *steps, last = path.replace("[]", "").split(".")
    return any(name == last for name, _ in types) or any((step, "map") in types for step in steps)


def wrong_names(task: Task) -> Iterator[list[str]]:
    """Yield, for each drawn name, the solution with ``-2`` appended to that name: the right actions
    on the wrong resource."""
    for name in task.params.values():
        if is_name(name) and any(name in command for command in task.solution):
            yield [command.replace(name, f"{name}-2") for command in task.solution]


def _missing_note(episode: Episode) -> str:
    missing = episode.missing()
    return f"; missing: {'; '.join(missing)}" if missing else ""


def _mistake_problems(episode: Episode, task: Task) -> Iterator[Fault]:
    for index, mistake in enumerate(mistakes(task)):
        if play(episode, task, mistake.commands)[0]:
            yield Fault(f"mistake {list(mistake.commands)} achieves the task", "mistakes", index)
        if mistake.recovery and play(episode, task, mistake.commands, then=mistake.recovery) != (
            True,
            1.0,
        ):
            text = f"mistake {list(mistake.commands)}: its recovery does not achieve the task"
            yield Fault(text, "mistakes", index)


def _drift_problems(episode: Episode, task: Task) -> Iterator[Fault]:
    """Yield problems of a task's drifts.

    Every drift must break something. For every set of drifts that a reset may draw, the repairs
    must fix everything. Applying the whole desired state without looking at what drifted must earn
    no more than BLIND_RETURN on average.
    """
    blind_returns = []
    indices = range(len(task.possible_drifts))
    for chosen in chain.from_iterable(
        combinations(indices, count) for count in range(MIN_DRIFTS, MAX_DRIFTS + 1)
    ):
        names = ", ".join(str(task.possible_drifts[i]) for i in chosen)
        try:
            achieved, total = play(episode, task, with_drifts(task, chosen).solution, chosen)
        except TaskError as error:
            yield Fault(f"drifts {names}: {error}", "possible_drifts", chosen[0])
            continue
        if (achieved, total) != (True, 1.0):
            text = f"drifts {names}: achieved={achieved}, return {total}{_missing_note(episode)}"
            yield Fault(text, "possible_drifts", chosen[0])
        if len(chosen) == MIN_DRIFTS:
            blind_returns.append(play(episode, task, whole_state(task), chosen)[1])
    for index in indices:
        try:
            play(episode, task, [], [index])
        except TaskError as error:
            yield Fault(f"drift {task.possible_drifts[index]}: {error}", "possible_drifts", index)
    if blind_returns and sum(blind_returns) / len(blind_returns) > BLIND_RETURN:
        mean_return = sum(blind_returns) / len(blind_returns)
        yield Fault(
            f"applying the whole desired state without looking first earns {mean_return:.2f}",
            "solution",
        )


def validate(
    templates: Sequence[Template], seeds: int, pool_size: int, console: Console
) -> dict[int, list[str]]:
    """Validate templates and return their problems by task id, each prefixed with file, line and
    task.

    Each template is checked without a simulator first. If it has no problems, ``seeds`` training
    instances and one instance with held-out names are played; the first instance is checked
    thoroughly.
    """
    drawn = [*((seed, "train") for seed in range(seeds)), (0, "heldout")]
    problems = {
        one.task_id: [fault.describe(one) for fault in template_problems(one)] for one in templates
    }
    sound = [template for template in templates if not problems[template.task_id]]
    instances = [(template, seed, split) for template in sound for seed, split in drawn]
    results = play_in_parallel(instances, _validate_instance, pool_size, console)
    for (template, seed, split), result in zip(instances, results, strict=True):
        faults = [Fault(result.text)] if isinstance(result, Failure) else result
        problems[template.task_id] += [
            f"{fault.describe(template)} ({split} {seed})" for fault in faults
        ]
    return problems


def _validate_instance(episode: Episode, instance: tuple[Template, int, str]) -> list[Fault]:
    template, seed, split = instance
    return find_problems(
        episode, instantiate(template.task_id, seed, split), thorough=(seed, split) == (0, "train")
    )


def play_in_parallel(
    items: Sequence[Item],
    work: Callable[[Episode, Item], Result],
    pool_size: int,
    console: Console,
    max_steps: int = DEFAULT_MAX_STEPS,
) -> Iterator[Result | Failure]:
    """Yield the result of ``work`` for each item, in order, with a progress bar. ``pool_size``
    items run at a time.

    Items that fail with an OSError, such as a timeout on a busy machine, are retried. After an
    interrupt, only the items in progress are finished.
    """

    def turn(item: Item) -> Result | Failure:
        episode = episodes.get()
        try:
            return _run_with_retries(lambda: work(episode, item))
        finally:
            episodes.put(episode)

    with _episode_queue(pool_size, max_steps) as episodes:
        threads = ThreadPoolExecutor(pool_size)
        try:
            yield from track(threads.map(turn, items), "playing", total=len(items), console=console)
        finally:
            threads.shutdown(cancel_futures=True)


@contextmanager
def _episode_queue(pool_size: int, max_steps: int) -> Iterator[SimpleQueue[Episode]]:
    """Context manager that provides a queue of ``pool_size`` episodes, each in a new simulator. The
    simulators are stopped on exit."""
    pool = MiniStackPool(pool_size)
    try:
        pool.start()
        episodes: SimpleQueue[Episode] = SimpleQueue()
        for _ in range(pool_size):
            episodes.put(Episode(pool.acquire(), max_steps))
        yield episodes
    finally:
        pool.stop()


def _run_with_retries(work: Callable[[], Result], attempts: int = 3) -> Result | Failure:
    try:
        return work()
    except Exception as error:
        if isinstance(error, OSError) and attempts > 1:
            return _run_with_retries(work, attempts - 1)
        return Failure(f"{type(error).__name__}: {error} {error.__cause__ or ''}".strip())
