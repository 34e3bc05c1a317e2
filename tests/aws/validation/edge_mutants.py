"""Generates mutants at the edges of the grading: what is left beside the work, and settings that
the simulator may not keep. Of most of them it is known by how they are made whether they are to be
paid."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, islice

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.grading.member_notes import read_notes
from realhf.aws.grading.sent_settings import ELEMENT, NOT_KEPT, member_table
from realhf.aws.real_aws.describe_walker import members
from realhf.aws.tasks.loader import is_name
from realhf.aws.tasks.task import Task
from tests.aws.validation.command_line import moved, operation_model, option_of
from tests.aws.validation.field_changes import EVERYWHERE, Words, line_changes
from tests.aws.validation.makings import MAKES_ANEW, Making, makings
from tests.aws.validation.mutant import Expected, Mutant, inserted, replaced, request_of, words_of
from tests.aws.validation.play import is_look
from tests.aws.validation.resource_deeds import Deed, cli_service, deeds

OWN_NAME = "side-project-7"
_WAYS = 2
"""Most ways in which one operation is sent."""
_OPENINGS = 4
"""Most ways in which one thing that is made is open."""
_OPENS = re.compile(
    rf'{re.escape(EVERYWHERE)}|"Wide"|\\?"(Principal|AWS)\\?": ?\\?"\*|public-read|[pP]ublicly-?[aA]ccessible|::/0'
)
_NOTHING = Words((), (), ())
_STEPS = re.compile(r"\[\d+\]|[^.\[]+")
_PLACE = re.compile(r"\[\d+\]")
_REMOVES = re.compile(
    r"^(delete|terminate|release|deregister|unsubscribe|schedule|remove|revoke|rb)-?"
)


def beside(task: Task) -> Iterator[Mutant]:
    """Yield the solution with something else made, in each service of the task by each operation
    that makes something: with names of its own, with the target's and with nearly those; also open
    to anybody; and removed again. In other services, with names of its own."""
    names = [str(value) for value in task.params.values() if is_name(value)]
    used = {(words[1], words[2]) for words in map(str.split, _all_lines(task))}
    stacks = any(service == "cloudformation" for service, _ in used)
    last = len(task.solution) - 1
    services = _services(task)
    for service in sorted(services):
        for operation, making in makings(service, _WAYS):
            where = f"{service} {operation}"
            own = making.called(OWN_NAME)
            anew = MAKES_ANEW.match(operation) is not None
            left: Expected = "unpaid" if own != making.lines or anew else ""
            as_asked = stacks or (service, operation) in used or len(making.lines) > 1 or not anew
            namesake: Expected = "" if as_asked else left
            yield _with(task, "own names", where, "before", own, 0, left)
            yield _with(task, "own names", where, "after", own, last, left)
            for name in names[:2]:
                yield _with(
                    task, "the target's names", where, name, making.called(name), last, namesake
                )
                yield _with(
                    task,
                    "nearly its names",
                    where,
                    f"{name}-2",
                    making.called(f"{name}-2"),
                    last,
                    left,
                )
            for what, opened in _opened(making):
                yield _with(task, "own and open", where, what, opened.called(OWN_NAME), last, left)
                for name in names[:1]:
                    yield _with(
                        task,
                        "the target's names, open",
                        where,
                        what,
                        opened.called(name),
                        last,
                        namesake,
                    )
            for removal, gone in _removed(making):
                lines = gone.called(OWN_NAME)
                yield _with(
                    task,
                    "made and removed again",
                    where,
                    removal,
                    lines,
                    last,
                    "paid" if left else "",
                )
    for service in sorted(ALLOWED.keys() - services):
        for operation, making in makings(service, 1):
            own = making.called(OWN_NAME)
            left = "unpaid" if own != making.lines or MAKES_ANEW.match(operation) else ""
            yield _with(task, "in another service", f"{service} {operation}", "", own, last, left)


def _all_lines(task: Task) -> Iterator[str]:
    yield from task.solution
    for lines in task.any_of:
        yield from lines
    for command in (*task.setup, *task.decoys, *task.possible_drifts):
        yield command.command or f"aws {cli_service(command.service)} {_dashed(command.operation)}"


def _dashed(operation: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", operation).lower()


def _services(task: Task) -> set[str]:
    """Return the command line's names of the services that a task uses."""
    return {cli_service(line.split()[1]) for line in _all_lines(task)}


def _with(
    task: Task,
    about: str,
    where: str,
    what: str,
    extra: Sequence[str],
    place: int,
    expected: Expected,
) -> Mutant:
    lines = [moved(line, place) for line in extra]
    proof = tuple(range(place, place + len(lines)))
    commands = inserted(task.solution, place, lines)
    return Mutant("beside", about, where, what, commands, expected, proof)


@cache
def _opened(making: Making) -> tuple[tuple[str, Making], ...]:
    """Return (what, lines) where what is made is open to anybody: made so, or opened afterwards."""
    *before, line = making.lines
    found = chain(
        (
            (f"{path}: {what}", (changed,))
            for path, what, changed in line_changes(line, _NOTHING)
            if _opens(changed, line)
        ),
        ((deed, (line, deed)) for _, _, deed in _deeds(making, "updated") if _opens(deed, line)),
    )
    return tuple(
        (what, Making((*before, *lines), making.names)) for what, lines in islice(found, _OPENINGS)
    )


def _opens(changed: str, line: str) -> bool:
    return len(_OPENS.findall(changed)) > len(_OPENS.findall(line))


def _deeds(making: Making, kind: Deed) -> Iterator[tuple[Deed, str, str]]:
    request = request_of(making.lines[-1], f"step{len(making.lines)}")
    return (deed for deed in deeds(request, _NOTHING) if deed[0] == kind)


@cache
def _removed(making: Making) -> tuple[tuple[str, Making], ...]:
    """Return (operation, lines) where what one line made is removed by the next."""
    *before, line = making.lines
    if before:
        return ()
    made = line.split()[2].partition("-")[2].removesuffix("s")
    return tuple(
        (operation, Making((*making.lines, deed), making.names))
        for _, operation, deed in _deeds(making, "undone")
        if _REMOVES.match(operation) and made.endswith(_noun(operation))
    )


def _noun(operation: str) -> str:
    return _REMOVES.sub("", operation).removesuffix("-deletion").removesuffix("s")


def member_changes(task: Task) -> Iterator[Mutant]:
    """Yield the solution with a member of one of its commands given, changed or left out, each
    once."""
    words = words_of(task)
    for place, line in enumerate(task.solution):
        if is_look(line):
            continue
        seen: set[tuple[str, str]] = set()
        for path, what, changed in line_changes(line, words.before(place)):
            how = (
                "added"
                if what.startswith("added")
                else "removed"
                if what == "removed"
                else "changed"
            )
            if (path, how) in seen:
                continue
            seen.add((path, how))
            where = f"command {place + 1} {path}"
            expected: Expected = "unpaid" if how == "added" and _is_dropped(line, path) else ""
            yield Mutant(
                "members",
                how,
                where,
                what,
                replaced(task.solution, place, changed),
                expected,
                (place,),
            )


def _is_dropped(line: str, path: str) -> bool:
    """Return whether the simulator drops a member that has no documented default, by the table of
    members."""
    service, operation = line.split()[1:3]
    model = operation_model(service, operation)
    if model is None:
        return False
    option, *below = path.split(".")
    named = (
        name for name in members(model.input_shape) if option_of(service, operation, name) == option
    )
    member = next(named, "")
    steps = (
        ELEMENT if _PLACE.fullmatch(step) else step
        for step in _STEPS.findall(".".join((member, *below)))
    )
    name = f"{model.service_model.service_name}:{model.name}"
    if any(
        operation == name and its.startswith(member) for operation, its in read_notes().defaults
    ):
        return False  # what is added may be the default
    return (
        bool(member)
        and name not in member_table().uses
        and member_table().fate(name, tuple(steps)) == NOT_KEPT
    )
