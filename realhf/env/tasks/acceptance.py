"""Does a task hold what it promises? Played against a real simulator, for the tests and for ``validate``.

Source: acceptance rule of environment spec section 6.
"""

from __future__ import annotations

from collections.abc import Iterable

from realhf.env.captures import resolve
from realhf.env.episode import Episode
from realhf.env.task import Task
from realhf.env.tasks.loader import mistakes, partial_solutions, solve

_HARMLESS = "aws sts get-caller-identity"
_SOLUTION_LENGTHS = {"warmup": (1, 1), "beginner": (1, 1), "intermediate": (2, 3), "advanced": (4, 7), "expert": (1, 8)}


def play(episode: Episode, task: Task, commands: Iterable[str]) -> tuple[bool, float]:
    """Set the task up and send the commands until it is done; (achieved, return)."""
    achieved, total = episode.reset(task).observation["task_achieved"], 0.0
    outputs: list[str] = []
    for command in episode.fill(list(commands)):
        step = episode.step(resolve(command, outputs))
        outputs.append(step.observation["command_output"])
        achieved, total = step.observation["task_achieved"], total + step.reward
        if step.done:
            break
    return achieved, total


def problems(episode: Episode, task: Task, *, with_mistakes: bool = False) -> list[str]:
    """What is wrong with an instance, in words; empty for a sound one. ``with_mistakes`` plays its wrong habits
    and their ways back too."""
    found = []
    low, high = _SOLUTION_LENGTHS[task.tier]
    if not low <= len(task.solution) <= high:
        found.append(f"solution has {len(task.solution)} commands, a {task.tier} task has {low} to {high}")
    achieved, total = play(episode, task, solve(task))
    if not achieved or total != 1.0:
        found.append(f"solution: achieved={achieved}, return {total}")
    achieved, total = play(episode, task, [_HARMLESS])
    if achieved or total != 0.0:
        found.append(f"doing nothing: achieved={achieved}, return {total}")
    must_fail = partial_solutions(task) + [[command.replace(name, f"{name}-2") for command in solve(task)]
                                           for key, name in task.params.items() if key == "name"]  # fmt: skip
    for commands in must_fail:
        achieved, total = play(episode, task, commands)
        if achieved or not 0.0 <= total < 1.0:
            found.append(f"{commands}: achieved={achieved}, return {total}")
    return found + (_mistake_problems(episode, task) if with_mistakes else [])


def _mistake_problems(episode: Episode, task: Task) -> list[str]:
    found = []
    for mistake in mistakes(task):
        if play(episode, task, mistake.commands)[0]:
            found.append(f"mistake {list(mistake.commands)} achieves the task")
        if mistake.recovery and play(episode, task, mistake.commands + mistake.recovery) != (True, 1.0):
            found.append(f"mistake {list(mistake.commands)}: its recovery does not achieve the task")
    return found
