"""Grades how far an episode has come, by evidence (sent requests with a 2xx answer) and verified state, nothing else.

The populated field of a task's criteria decides the strategy: ``state_checks``, ``steps`` (multi_step),
``resource_exists`` (resource_creation), else ``operation`` (command_match). ``protected`` names, in every strategy,
what must stay as set-up left it: changing it is harm, which costs more than all progress is worth, and while it lasts
the task is not achieved. Where a task is ``sparing``, a write that changes nothing of what is checked costs too.
Source: docs/reference/environment.md 7.

The eight layers against reward hacking, each a function: 1 ground truth ``verifier.verified``, 2 dedup
``unspent_request``, 3 grader invisibility ``episode.masked_task``, 4 allow-list ``policy.check_command``, 5 no
verification reward ``earns_credit``, 6 monotone progress ``reward.monotone_progress``, 7 exact names
``tracker.same_resource``, 8 final state ``final_state_holds``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from realhf.aws.cli.state_client import StateCallError
from realhf.aws.grading.check_parser import parse_check, parse_unchanged
from realhf.aws.grading.cli_criteria import from_cli_words, names_drawn_id
from realhf.aws.grading.equivalents import asks, has_effect
from realhf.aws.grading.resource_identity import identity
from realhf.aws.grading.tracker import Evidence, is_read, mentions, same_resource
from realhf.aws.grading.unchanged_check import UnchangedCheck
from realhf.aws.grading.verifier import (
    AllOf,
    Check,
    CommandCheck,
    ResourceCheck,
    Snapshot,
    StateReader,
    of_one_object,
    reading_text,
    verified,
)
from realhf.aws.tasks.task import Task, TaskError

INCOMPLETE_CREATION = 0.5
"""Progress when the required create was accepted but the attributes are not right."""
MAX_CHECKS = 40
_TYPES: Mapping[str, type] = MappingProxyType(
    {"operation": str, "params": dict, "command_contains": str, "steps": list, "services": list, "state_checks": list}
    | {"protected": list, "sparing": bool}
)
STEP_SHARE = 0.7
"""Weight of the steps where a task has both steps and state checks."""


@dataclass(frozen=True)
class Step:
    """One step of a multi_step task. ``ordered``: its request must come after that of the step before; ``also``:
    operations that serve as well; ``anywhere``: any parameter may name the resource, not the identifying one alone."""

    operation: str
    resource: str | None = None
    verify: Check | None = None
    ordered: bool = False
    also: frozenset[str] = frozenset()
    anywhere: bool = False

    def asks_for(self, deed: Evidence) -> bool:
        """Return whether the request is of this step's operation and resource."""
        if not has_effect(deed.operation, self.operation) and deed.operation not in self.also:
            return False
        if self.resource is None or same_resource(deed.resource, identity(deed.service, self.resource)):
            return True
        return self.anywhere and mentions(deed.params, self.resource)


@dataclass(frozen=True)
class Criteria:
    """Holds parsed success criteria; see ``parse_criteria``."""

    operation: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    command_contains: str = ""
    resource: ResourceCheck | None = None
    steps: tuple[Step, ...] = ()
    services: frozenset[str] = frozenset()
    state_checks: tuple[Check, ...] = ()
    protected: tuple[UnchangedCheck, ...] = ()
    sparing: bool = False

    @property
    def strategy(self) -> str:
        """Name of the strategy that grades the task."""
        if self.state_checks:
            return "state_checks"
        if self.steps:
            return "multi_step"
        return "resource_creation" if self.resource else "command_match"

    @property
    def operations(self) -> frozenset[str]:
        """Every operation that the criteria name."""
        steps = {operation for step in self.steps for operation in (step.operation, *step.also)}
        return frozenset(steps | ({self.operation} - {""}))

    @property
    def checks(self) -> tuple[Check, ...]:
        """Everything that must hold in the end."""
        found = (self.resource, *(step.verify for step in self.steps), *self.state_checks, *self.protected)
        return tuple(check for check in found if check is not None)

    def bound(self, state: StateReader) -> Criteria:
        """Return criteria that compare what must not change with what there is now. Raises TaskError."""
        return replace(
            self,
            steps=tuple(replace(step, verify=step.verify and _bound(step.verify, state)) for step in self.steps),
            state_checks=tuple(_bound(check, state) for check in self.state_checks),
            protected=tuple(check.bound(state) for check in self.protected),
        )

    @property
    def named_services(self) -> frozenset[str]:
        """Every service that the criteria are about."""
        operations = {operation.partition(":")[0] for operation in self.operations}
        return self.services | operations | {check.service for check in self.checks}


@dataclass(frozen=True)
class Grade:
    """Holds the progress in [0, 1] as of now, whether the task is achieved, and whether something that it protects is
    harmed."""

    progress: float
    achieved: bool
    harmed: bool = False


def parse_criteria(data: Mapping[str, Any]) -> Criteria:
    """Parse criteria from the plain data of a task, in our words or in those of the CLI. Raises TaskError."""
    for key, kind in _TYPES.items():
        if not isinstance(data.get(key), kind | None):
            raise TaskError(f"task.success_criteria.{key} is not of type {kind.__name__}")
    data = from_cli_words(data)
    try:
        resource = parse_check(data["resource_exists"]) if data.get("resource_exists") else None
        if resource is not None and not isinstance(resource, ResourceCheck):
            raise TaskError("resource_exists is not a resource")
        criteria = Criteria(
            operation=data.get("operation") or "",
            params=data.get("params") or {},
            command_contains=data.get("command_contains") or "",
            resource=resource,
            steps=tuple(_parse_step(step) for step in data.get("steps") or ()),
            services=frozenset(data.get("services") or ()),
            state_checks=tuple(parse_check(check) for check in data.get("state_checks") or ()),
            protected=tuple(parse_unchanged(check) for check in data.get("protected") or ()),
            sparing=bool(data.get("sparing")),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise TaskError(f"task.success_criteria is malformed: {type(error).__name__}: {error}") from None
    if criteria.strategy == "command_match" and not (criteria.operation or criteria.command_contains):
        raise TaskError("task.success_criteria names no operation, resource, steps or state checks")
    if max(len(criteria.steps), len(criteria.state_checks), len(criteria.protected)) > MAX_CHECKS:
        raise TaskError(f"task.success_criteria has more than {MAX_CHECKS} steps, state checks or protected things")
    return criteria


def _parse_step(data: Mapping[str, Any]) -> Step:
    if not isinstance(data["operation"], str) or not isinstance(data.get("resource"), str | None):
        raise TaskError("operation and resource of a step are texts")
    verify = parse_check(data["verify"]) if data.get("verify") else None
    ordered, anywhere = bool(data.get("ordered", False)), bool(data.get("anywhere", False))
    also = data.get("also") or []
    if not isinstance(also, list) or not all(isinstance(operation, str) for operation in also):
        raise TaskError("also of a step is not a list of operations")
    return Step(data["operation"], data.get("resource"), verify, ordered, frozenset(also), anywhere)


def _bound(check: Check, state: StateReader) -> Check:
    if isinstance(check, AllOf):
        return AllOf(tuple(_bound(one, state) for one in check.checks))
    return check.bound(state) if isinstance(check, UnchangedCheck) else check


class Grader:
    """Grades one episode. Call ``evaluate`` after every command; verification runs only where a request could have
    changed something, otherwise the last grade stands."""

    def __init__(self, criteria: Criteria, state: StateReader) -> None:
        self.criteria = criteria
        self._state = state
        self._evidence: list[Evidence] = []
        self._credited: list[int] = []
        self._baseline = 0
        self._excused: set[int] = set()
        self._seen: list[str] = []
        self.needless_writes = 0
        self.lost_ground = True
        """Whether a rollback is charged: always, where credit was given for operations."""
        self.grade = Grade(0.0, False)

    def start(self) -> None:
        """Look at the world right after set-up. Raises TaskError for a task that is solved already or never will be,
        or that protects what does not exist."""
        self.criteria = self.criteria.bound(self._state)
        if self.criteria.state_checks:
            self._refuse_unreachable()
            self._baseline = self._checks_passing(self._state)
            self._seen = self._readings(self._state) if self.criteria.sparing else []
            if self._baseline == len(self.criteria.state_checks):
                raise TaskError("every state check of the task holds before the first command")

    def _refuse_unreachable(self) -> None:
        for check in self.criteria.state_checks:
            if isinstance(check, CommandCheck) and names_drawn_id(check.command):
                answer = self._state.run(check.command)
                if not answer.success and not answer.timed_out:
                    raise TaskError("a state check asks for an id that AWS draws and that the set-up has not made")

    @property
    def credited_operations(self) -> list[str]:
        """Return the operations that progress has been given for, in the order of the criteria."""
        if self.criteria.steps:
            return [step.operation for step in self.criteria.steps[: len(self._credited)]]
        return [self.criteria.operation] if self.criteria.operation and self.grade.progress else []

    def missing(self) -> list[str]:
        """Return in words what keeps the task from being achieved: steps without credit, checks that fail now,
        services."""
        criteria, now = self.criteria, Snapshot(self._state)
        found = [f"step {step.operation} {step.resource or ''}" for step in criteria.steps[len(self._credited) :]]
        found += [str(check) for check in criteria.checks if not verified(check, now)]
        return found + [f"service {s}" for s in sorted(criteria.services) if not services_reached([s], self._evidence)]

    def evaluate(self, added: Sequence[Evidence], *, lost: bool = False) -> Grade:
        """Return the grade after a command that sent the requests ``added``. Of a ``lost`` command nobody knows what it
        sent, so the state is read in any case. Raises StateCallError or ConnectionError when the simulator cannot be
        read."""
        self._evidence.extend(added)
        worthy = [deed for deed in added if earns_credit(deed, self.criteria)]
        if (worthy or lost) and not self.grade.achieved:
            self.grade = self._judge(worthy)
        if self.criteria.sparing and any(not is_read(deed.operation) for deed in added):
            self._count_needless(Snapshot(self._state))
        elif self.criteria.sparing and lost:
            self._seen = self._readings(Snapshot(self._state))
        return self.grade

    def _count_needless(self, now: StateReader) -> None:
        """Count a command that wrote, or tried to, and left everything that is checked as it was."""
        before, self._seen = self._seen, self._readings(now)
        self.needless_writes += before == self._seen

    def _readings(self, now: StateReader) -> list[str]:
        return [reading_text(check, now) for check in self.criteria.state_checks]

    def holding(self) -> frozenset[str]:
        """Return which checks hold now, by their places. Raises ConnectionError."""
        now = Snapshot(self._state)
        return frozenset(str(place) for place, check in enumerate(self.criteria.checks) if _holds(check, now))

    def excuse(self) -> None:
        """Excuse what is harmed by now and was not when last graded: it is not the agent's doing."""
        if not self.grade.harmed:
            self._excused |= self._changed(Snapshot(self._state))

    def _changed(self, now: StateReader) -> set[int]:
        """Return the places of the protected things that are not as set-up left them."""
        return {place for place, check in enumerate(self.criteria.protected) if not verified(check, now)}

    def _judge(self, worthy: Sequence[Evidence]) -> Grade:
        now = Snapshot(self._state)
        grade = self._progress(worthy, now)
        changed = self._changed(now)
        return replace(grade, achieved=grade.achieved and not changed, harmed=bool(changed - self._excused))

    def _progress(self, worthy: Sequence[Evidence], now: StateReader) -> Grade:
        criteria = self.criteria
        match criteria.strategy:
            case "command_match":
                achieved = any(matches_command(deed, criteria) for deed in worthy)
                return Grade(float(achieved), achieved)
            case "resource_creation":
                return self._judge_creation(now)
            case "multi_step":
                self._credit_steps(now)
                share = len(self._credited) / len(criteria.steps)
                complete = share == 1.0
                services = services_reached(criteria.services, self._evidence)
                if complete and not services:
                    share = (len(criteria.steps) - 1) / len(criteria.steps)
                return Grade(share, complete and services and final_state_holds(criteria, now))
            case _:
                return self._judge_checks(now)

    def _judge_creation(self, now: StateReader) -> Grade:
        resource = self.criteria.resource
        assert resource is not None
        if verified(resource, now):
            return Grade(1.0, True)
        accepted = any(
            deed.ok and deed.operation == self.criteria.operation and same_resource(deed.resource, resource.name)
            for deed in self._evidence
        )
        return Grade(INCOMPLETE_CREATION if accepted else 0.0, False)

    def _judge_checks(self, now: StateReader) -> Grade:
        criteria = self.criteria
        self._credit_steps(now)
        passing, total = self._checks_passing(now), len(criteria.state_checks)
        share = max(0.0, (passing - self._baseline) / (total - self._baseline))
        if criteria.steps:
            share = STEP_SHARE * len(self._credited) / len(criteria.steps) + (1 - STEP_SHARE) * share
        services = services_reached(criteria.services, self._evidence)
        return Grade(share, passing == total and services and final_state_holds(criteria, now))

    def _checks_passing(self, now: StateReader) -> int:
        return sum(verified(check, now) for check in self.criteria.state_checks)

    def _credit_steps(self, now: StateReader) -> None:
        """Credit steps in list order, each to a request of its own, as far as they go."""
        steps = self.criteria.steps
        while len(self._credited) < len(steps):
            step = steps[len(self._credited)]
            after = self._credited[-1] if step.ordered and self._credited else -1
            deed = unspent_request(step, self._evidence, self._credited, after)
            if deed is None or not verified(step.verify, now):
                return
            self._credited.append(deed.index)


def _holds(check: Check, state: StateReader) -> bool:
    try:
        return verified(check, state)
    except StateCallError:
        return False


def unspent_request(step: Step, evidence: Iterable[Evidence], spent: Sequence[int], after: int = -1) -> Evidence | None:
    """Return the first accepted request for this step that has not paid for another one (layer 2, dedup)."""
    for deed in evidence:
        if deed.ok and deed.index > after and deed.index not in spent and step.asks_for(deed):
            return deed
    return None


def earns_credit(deed: Evidence, criteria: Criteria) -> bool:
    """Return whether a request counts (layer 5, no verification reward): it must be accepted and able to have changed
    something, unless the task asks for a request and not for a state."""
    if criteria.strategy == "command_match":
        return deed.ok
    return deed.ok and (not is_read(deed.operation) or deed.operation in criteria.operations)


def matches_command(deed: Evidence, criteria: Criteria) -> bool:
    """Return whether a single request matches by exact names (layer 7): it asks the demanded question of the demanded
    resource, by its name, ARN or URL. A text that the command has to contain must be in the line that sent the request.
    """
    return criteria.command_contains in deed.command and asks(
        deed.operation, deed.params, criteria.operation, criteria.params
    )


def services_reached(services: Iterable[str], evidence: Iterable[Evidence]) -> bool:
    """Return whether an accepted request went to each of the services."""
    return set(services) <= {deed.service for deed in evidence if deed.ok}


def final_state_holds(criteria: Criteria, state: StateReader) -> bool:
    """Return whether the final state holds (layer 8): what the state checks, or else the steps, demand is true when
    graded, whatever was undone in between; and what they demand of one name is true of one object."""
    demands = list(criteria.state_checks) or [step.verify for step in criteria.steps if step.verify is not None]
    return all(verified(check, state) for check in [*demands, *of_one_object(demands)])


def criteria_of(task: Task) -> Criteria:
    """Return the parsed criteria of a task. Raises TaskError."""
    return parse_criteria(task.success)
