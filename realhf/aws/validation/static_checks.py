"""Finds what can be wrong with templates on paper, before anything is played. Source: loader validation of
docs/reference/environment.md 6."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from realhf.aws.cli.policy import check_command
from realhf.aws.grading.end_state import freedom_of, is_graded_by_end_state, services_of
from realhf.aws.grading.grader import Criteria, criteria_of
from realhf.aws.grading.verifier import operation_allowed
from realhf.aws.tasks.drift import repairs
from realhf.aws.tasks.loader import SPLITS, Template, instantiate
from realhf.aws.tasks.task import TIERS, SetupCommand, Task, TaskError

DRIFT = "drift"
COUNTS: Mapping[str, int] = MappingProxyType(
    {"warmup": 25, "beginner": 25, "intermediate": 25, "advanced": 25, "expert": 24, DRIFT: 9}
)
"""Least number of templates of each kind; drift tasks are of the tier expert."""
HELDOUT_SHARE = (0.15, 0.25)
FEWEST_SERVICES, FEWEST_WARMUP_SERVICES = 24, 20

Range = tuple[int, int]
_ANY: Range = (0, 40)
_SHAPES: Mapping[str, tuple[str, Range, Range, Range]] = MappingProxyType(
    {
        "warmup": ("command_match", (0, 0), (0, 0), (1, 1)),
        "beginner": ("resource_creation", (0, 0), (0, 0), (1, 1)),
        "intermediate": ("multi_step", (2, 3), (0, 0), (2, 3)),
        "advanced": ("multi_step", (4, 7), (0, 0), (4, 7)),
        "expert": ("state_checks", (0, 4), (2, 4), (1, 8)),
        DRIFT: ("state_checks", (0, 0), (4, 6), (1, 8)),
    }
)
"""For each kind, the strategy, and how many steps, state checks and commands of the solution there may be."""
_NONE = Criteria()
_PLACE = re.compile(r"(?<!\$)\{[a-z_]+\}")


def kind_of(template: Template) -> str:
    """Return the tier, or "drift"."""
    return DRIFT if template.possible_drifts else template.tier


def template_problems(template: Template) -> list[str]:
    """Say in words what is wrong with one template."""
    if template.split not in SPLITS:
        return [f"split is {template.split!r}"]
    try:
        task = instantiate(template.task_id, 0)
        by_end_state = is_graded_by_end_state(task)
        freedom_of(task)
        criteria = Criteria() if by_end_state else criteria_of(task)
    except (TaskError, KeyError, TypeError) as error:
        return [f"{type(error).__name__}: {error}"]
    if by_end_state:
        return [*_amount_problems(kind_of(template), task), *_policy_problems(task), *_text_problems(task)]
    return [
        *_shape_problems(kind_of(template), criteria, task),
        *_policy_problems(task, criteria),
        *_text_problems(task, criteria),
    ]


def _shape_problems(kind: str, criteria: Criteria, task: Task) -> Iterator[str]:
    strategy, steps, checks, _ = _SHAPES[kind]
    if criteria.strategy != strategy:
        yield f"a task of the kind {kind} is graded by {strategy}, not {criteria.strategy}"
    for what, (low, high), number in (
        ("steps", steps, len(criteria.steps)),
        ("state checks", checks, len(criteria.state_checks)),
    ):
        if not low <= number <= high:
            yield f"{number} {what}; {low} to {high} are usual for {kind}"
    yield from _amount_problems(kind, task)


def _amount_problems(kind: str, task: Task) -> Iterator[str]:
    """Say what is unusual in a task of this kind, whatever grades it."""
    for what, (low, high), number in (
        ("commands", _SHAPES[kind][3], len(task.solution)),
        ("drifts", (4, 6) if kind == DRIFT else (0, 0), len(task.possible_drifts)),
    ):
        if not low <= number <= high:
            yield f"{number} {what}; {low} to {high} are usual for {kind}"
    if kind == "advanced" and len(services_of(task.solution)) < 2:
        yield "an advanced task is about at least two services"
    if not all(drift.repair for drift in task.possible_drifts):
        yield "a drift has no repair"
    if bool(task.desired_state_spec) is not (kind == DRIFT):
        yield "a desired state belongs to a drift task, and to no other"


def _policy_problems(task: Task, criteria: Criteria = _NONE) -> Iterator[str]:
    for command in task.setup + task.decoys + task.possible_drifts:
        if not _allowed(command):
            yield f"the policy does not allow {command}"
    for operation in criteria.operations:
        service, _, name = operation.partition(":")
        if not operation_allowed(service, name):
            yield f"the policy does not allow {operation}, so no command can earn it"
    for line in (*task.solution, *repairs(task.possible_drifts)):
        rule = check_command(line).rule
        if rule is not None:
            yield f"refused ({rule}): {line}"
    reached = {operation.partition(":")[0] for operation in criteria.operations}
    for service in criteria.services - reached - services_of(task.solution):
        yield f"nothing in the solution reaches the service {service}"


def _allowed(command: SetupCommand) -> bool:
    if command.command:
        return check_command(command.command).rule is None
    return operation_allowed(command.service, command.operation)


def _text_problems(task: Task, criteria: Criteria = _NONE) -> Iterator[str]:
    for text in (task.description, task.desired_state_spec, *task.solution):
        place = _PLACE.search(text)
        if place:
            yield f"nothing fills the place {place[0]}"
    shown = f"{task.description} {task.desired_state_spec}"
    for secret in (*criteria.operations, *task.solution):
        if secret in shown:
            yield f"the description says {secret!r}"


def collection_problems(templates: Sequence[Template]) -> list[str]:
    """Say in words what is wrong with all templates together: how many there are, how many held out, over how many
    services."""
    found = []
    for kind, count in COUNTS.items():
        own = [template for template in templates if kind_of(template) == kind]
        heldout = sum(template.split == "heldout" for template in own)
        if len(own) < count:
            found.append(f"{kind}: {len(own)} templates of {count}")
        if own and not HELDOUT_SHARE[0] <= heldout / len(own) <= HELDOUT_SHARE[1]:
            found.append(f"{kind}: {heldout} of {len(own)} templates are held out, not a fifth")
    for fewest, tiers, what in ((FEWEST_SERVICES, TIERS, "all"), (FEWEST_WARMUP_SERVICES, TIERS[:1], "warmup")):
        services = {name for t in templates if t.tier in tiers for name in services_of(t.solution)}
        if len(services) < fewest:
            found.append(f"{what} templates use {len(services)} services, at least {fewest} are wanted")
    names = [template.name for template in templates]
    return found + [f"the name {name} is taken twice" for name in sorted(set(names)) if names.count(name) > 1]
