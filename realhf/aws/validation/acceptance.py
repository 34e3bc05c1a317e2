"""Checks whether a task holds what it promises, against a real simulator, for the tests and for ``validate``.

Source: acceptance rule of docs/reference/environment.md 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations

from realhf.aws.episode.episode import Episode
from realhf.aws.grading.end_state import is_graded_by_end_state
from realhf.aws.tasks.captures import resolve
from realhf.aws.tasks.drift import FEWEST, MOST
from realhf.aws.tasks.loader import mistakes, partial_solutions, solve, whole_state, with_drifts
from realhf.aws.tasks.names import is_name
from realhf.aws.tasks.task import Task, TaskError

BLIND_RETURN = 0.9
"""Most that applying a desired state may earn, on average, without a look at what drifted."""
_HARMLESS = "aws sts get-caller-identity"


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
    for commands in partial_solutions(task) + list(wrong_names(task)):
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
    if is_graded_by_end_state(task):
        return found
    try:
        play(episode, task, [], ())
    except TaskError:
        return found
    return [*found, f"without any drift the desired state does not hold{_where_it_stands(episode)}"]
