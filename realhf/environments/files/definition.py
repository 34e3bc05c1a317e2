"""Registers files: its options, what is made of them, and a scripted solver for the warm start.

- *solution*: the calls that solve the task.
- *recovery*: one wrong call, which is not to be learned, then the right way.
- *habit*: the mistake in every call, and the first call that fails is sent again and again.

A mistake is one that is possible in every template: the last word of every name is left out, or the ending of every
path; whoever makes it also counts one too many. Each script is played on a workspace as it is written, so what a
mistake does is seen and not guessed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from realhf.api.environment import (
    HABIT,
    RECOVERY,
    TRAIN,
    Demonstration,
    DemonstrationRequest,
    EnvironmentDefinition,
    EnvironmentSpec,
)
from realhf.api.option import option
from realhf.base.installation import PACKAGE
from realhf.env.loader.threads import Threads
from realhf.env.loader.tool_env import ToolClassEnvironment, read_class
from realhf.environments.files.tasks import GROUPS, NAME, Call, FilesTasks, Instance, delete
from realhf.environments.files.workspace import FilesWorkspace

SHORTENED_SHARE = 0.6
"""Share of the mistakes that shorten names; the others leave out endings where there are any."""
PERSISTENCE = 2
"""A habit sends a call that fails until the episode has this many calls."""
_ENDING = re.compile(r"\.(txt|log)\b")
_SEED_BITS = 31
_Mistake = Callable[[Call], Call]


def demonstrations(tasks: FilesTasks, request: DemonstrationRequest) -> Iterator[Demonstration]:
    """Yield what ``request`` asks for, in mixed order; of every template the rounded share of each kind, but solutions
    where a template has no call that could be recovered from."""
    rng = random.Random(f"files demonstrations {request.seed}")
    wanted = [(template, kind) for template in tasks.group_of for kind in request.kinds()]
    rng.shuffle(wanted)
    for template, kind in wanted:
        yield demonstration(tasks, template, rng.getrandbits(_SEED_BITS), kind, rng)


def demonstration(tasks: FilesTasks, template: str, seed: int, kind: str, rng: random.Random) -> Demonstration:
    """Return a script of a kind for the instance of a template that ``seed`` draws."""
    instance, task = tasks.instance(template, seed), tasks.instantiate(template, seed)
    if kind == HABIT:
        calls = habit(instance, drawn_mistake(instance, rng))
        return Demonstration(task, tuple(map(written, calls)), kind=HABIT, succeeds=False)
    if kind == RECOVERY and (found := recovery(instance, drawn_mistake(instance, rng))):
        calls, wrong = found
        learned = tuple(number != wrong for number in range(len(calls)))
        return Demonstration(task, tuple(map(written, calls)), learned, kind=RECOVERY)
    return Demonstration(task, tuple(map(written, instance.solution)))


def written(call: Call) -> str:
    """Return a call as a policy writes it."""
    text = json.dumps({"name": call.tool, "arguments": dict(call.arguments)}, ensure_ascii=False)
    return f"<tool_call>{text}</tool_call>"


def with_short_names(call: Call) -> Call:
    """Return the call with the last word of every name left out."""
    return _changed(call, lambda text: NAME.sub(r"\1-\2", text))


def without_endings(call: Call) -> Call:
    """Return the call with the ending of every path left out."""
    return _changed(call, lambda text: _ENDING.sub("", text))


def drawn_mistake(instance: Instance, rng: random.Random) -> _Mistake:
    """Draw the mistake of an episode, one that changes a call of the solution."""
    if rng.random() < SHORTENED_SHARE or not any(without_endings(call) != call for call in instance.solution):
        return with_short_names
    return without_endings


def habit(instance: Instance, mistake: _Mistake) -> list[Call]:
    """Return the solution with the mistake in every call, up to the first that fails, which is repeated."""
    workspace, calls = _opened(instance), []
    for call in map(mistake, instance.solution):
        calls.append(call)
        if play(workspace, call).startswith("error:"):
            return calls + [call] * (PERSISTENCE - len(calls))
    return calls


def recovery(instance: Instance, mistake: _Mistake) -> tuple[list[Call], int] | None:
    """Return the solution with a wrong call before the first that the mistake could spoil and that may be sent again,
    and the place of the wrong one. None where there is no such call. A file that it left is deleted."""
    workspace = _opened(instance)
    for place, call in enumerate(instance.solution):
        wrong = mistake(call)
        if call.tool == "answer":
            return None
        if wrong != call and call.tool != "search_files":
            calls = [*instance.solution[:place], wrong]
            if not play(workspace, wrong).startswith("error:"):
                calls.append(delete(wrong.arguments["path"]))
            return [*calls, *instance.solution[place:]], place
        play(workspace, call)
    return None


def play(workspace: FilesWorkspace, call: Call) -> str:
    """Run a call and return what the tool says; a refusal begins with ``error:``."""
    try:
        return getattr(workspace, call.tool)(**call.arguments)
    except ValueError as error:
        return f"error: {error}"


def _opened(instance: Instance) -> FilesWorkspace:
    workspace = FilesWorkspace()
    workspace.reset(**instance.row)
    return workspace


def _changed(call: Call, change: Callable[[str], str]) -> Call:
    return Call(call.tool, {name: _miscounted(change(text)) for name, text in call.arguments.items()})


def _miscounted(text: str) -> str:
    return str(int(text) + 1) if text.isdecimal() else text


SYSTEM_PROMPT = (
    "You work on a folder of text files with tools. Call one tool at a time. "
    "Answer a question with the tool answer, and with nothing but the answer."
)


@dataclass
class FilesOptions:
    """Files: a scratch folder with tools, and tasks such as renaming, counting, editing and moving."""

    groups: list[str] = option([*GROUPS], "Tasks are drawn from the templates of these groups.", choices=GROUPS)


def build(options: FilesOptions) -> EnvironmentSpec:
    """Return the environment with these options. Raises ValueError for an unknown group."""
    about, threads = read_class(FilesWorkspace), Threads("files")
    training = FilesTasks(options.groups, TRAIN)
    return EnvironmentSpec(
        name="files",
        make=lambda _: ToolClassEnvironment(about, FilesWorkspace, threads),
        tasks=lambda split: FilesTasks(options.groups, split),
        system_prompt=SYSTEM_PROMPT,
        demonstrate=lambda request: demonstrations(training, request),
        shipped_policy=PACKAGE / "environments" / "policies" / "files",
        tools=about.schemas,
    )


DEFINITION = EnvironmentDefinition(FilesOptions, build)
