"""Registration of the files environment: its options, its specification, and a scripted solver for
the warm start.

- *solution*: the calls that solve the task.
- *recovery*: one wrong call, which is not learned, then the right way.
- *habit*: the mistake in every call; the first call that fails is repeated.

A mistake is one that is possible in every template: the last word of every name is left out, or the
ending of every path; numbers are also one too large. Each script is played on a workspace while it
is written, so the effect of a mistake is observed, not assumed.
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
from realhf.environments.files.tasks import (
    GROUPS,
    NAME,
    FilesCall,
    FilesInstance,
    FilesTasks,
    delete,
)
from realhf.environments.files.workspace import FilesWorkspace

SHORTENED_SHARE = 0.6
"""Share of mistakes that shorten names; the other mistakes leave out endings, if there are any."""
PERSISTENCE = 2
"""Minimum number of calls of a habit; the failing call is repeated."""
_ENDING = re.compile(r"\.(txt|log)\b")
_SEED_BITS = 31
_Mistake = Callable[[FilesCall], FilesCall]


def demonstrations(tasks: FilesTasks, request: DemonstrationRequest) -> Iterator[Demonstration]:
    """Yield the requested demonstrations in random order. Every template gets the rounded share of
    each kind. If a template has no call that can be repeated after a mistake, it gets solutions
    instead of recoveries."""
    rng = random.Random(f"files demonstrations {request.seed}")
    draws = [(template, kind) for template in tasks.group_of for kind in request.kinds()]
    rng.shuffle(draws)
    for template, kind in draws:
        yield demonstration(tasks, template, rng.getrandbits(_SEED_BITS), kind, rng)


def demonstration(
    tasks: FilesTasks, template: str, seed: int, kind: str, rng: random.Random
) -> Demonstration:
    """Return a script of kind ``kind`` for the instance that ``seed`` draws."""
    instance = tasks.instance(template, seed)
    task = tasks.instantiate(template, seed)
    if kind == HABIT:
        calls = habit(instance, draw_mistake(instance, rng))
        return Demonstration(task, tuple(map(format_call, calls)), kind=HABIT, succeeds=False)
    if kind == RECOVERY and (plan := recovery(instance, draw_mistake(instance, rng))):
        calls, wrong = plan
        learned = tuple(number != wrong for number in range(len(calls)))
        return Demonstration(task, tuple(map(format_call, calls)), learned, kind=RECOVERY)
    return Demonstration(task, tuple(map(format_call, instance.solution)))


def format_call(call: FilesCall) -> str:
    """Return a call as a policy writes it in a turn."""
    text = json.dumps({"name": call.tool, "arguments": dict(call.arguments)}, ensure_ascii=False)
    return f"<tool_call>{text}</tool_call>"


def shorten_names(call: FilesCall) -> FilesCall:
    """Return the call with the last word of every name left out."""
    return _map_arguments(call, lambda text: NAME.sub(r"\1-\2", text))


def drop_endings(call: FilesCall) -> FilesCall:
    """Return the call with the ending of every path left out."""
    return _map_arguments(call, lambda text: _ENDING.sub("", text))


def draw_mistake(instance: FilesInstance, rng: random.Random) -> _Mistake:
    """Draw the mistake for an episode; it must change at least one call of the solution."""
    if rng.random() < SHORTENED_SHARE or not any(
        drop_endings(call) != call for call in instance.solution
    ):
        return shorten_names
    return drop_endings


def habit(instance: FilesInstance, mistake: _Mistake) -> list[FilesCall]:
    """Return the solution with the mistake in every call, up to the first call that fails, which is
    repeated."""
    workspace = _open_workspace(instance)
    calls = []
    for call in map(mistake, instance.solution):
        calls.append(call)
        if play(workspace, call).startswith("error:"):
            return calls + [call] * (PERSISTENCE - len(calls))
    return calls


def recovery(instance: FilesInstance, mistake: _Mistake) -> tuple[list[FilesCall], int] | None:
    """Return (calls, index of the wrong call): the solution with a wrong call inserted before the
    first call that the mistake changes and that can be sent again. If the wrong call creates a
    file, it is deleted afterwards. None if there is no such call."""
    workspace = _open_workspace(instance)
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


def play(workspace: FilesWorkspace, call: FilesCall) -> str:
    """Run a call and return the tool's text; a refusal starts with ``error:``."""
    try:
        return getattr(workspace, call.tool)(**call.arguments)
    except ValueError as error:
        return f"error: {error}"


def _open_workspace(instance: FilesInstance) -> FilesWorkspace:
    workspace = FilesWorkspace()
    workspace.reset(**instance.row)
    return workspace


def _map_arguments(call: FilesCall, change: Callable[[str], str]) -> FilesCall:
    return FilesCall(
        call.tool, {name: _miscount(change(text)) for name, text in call.arguments.items()}
    )


def _miscount(text: str) -> str:
    return str(int(text) + 1) if text.isdecimal() else text


SYSTEM_PROMPT = (
    "You work on a folder of text files with tools. Call one tool at a time. "
    "Answer a question with the tool answer, and with nothing but the answer."
)


@dataclass
class FilesOptions:
    """Files: a scratch folder with tools, and tasks such as renaming, counting, editing and
    moving."""

    groups: list[str] = option(
        [*GROUPS], "Tasks are drawn from the templates of these groups.", choices=GROUPS
    )


def build(options: FilesOptions) -> EnvironmentSpec:
    """Return the environment with these options. Raises ValueError for an unknown group."""
    about = read_class(FilesWorkspace)
    threads = Threads("files")
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
