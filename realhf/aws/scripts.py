"""Scripts of demonstrations: the commands that a scripted agent sends in a task. ``sft_data`` plays
them; nothing here starts or sends anything.

- *canonical*: the solution, nothing else.
- *continuation*: a solution whose first steps are context; only the rest is learned.
- *recovery*: a mistake, its result, the removal of what it made, and then the right way.
- *verification*: a look at the account before the last step.
- *hint*: the first command requests a hint.
- *habit*: a mistake that is repeated and achieves nothing, so that the policy has room for
  improvement.

A mistake is one of the template, or a generic one: the last word of a name is left out. A recovery
may instead start from a slip of the command line: a nonexistent operation, after which the
operations of the service are listed, or a missing required option. The error text is context for
the right command, and the slip itself is never imitated. This teaches to read errors and help,
which also works with commands that were never demonstrated.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import botocore.loaders
from botocore import xform_name
from botocore.exceptions import UnknownServiceError
from botocore.model import ServiceModel

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.cli.pinned_http import REGION
from realhf.aws.cli.policy import check_command
from realhf.aws.messages import HINT_COMMAND, OBSERVATION_CHARS
from realhf.aws.tasks.captures import setup_captures
from realhf.aws.tasks.loader import Template, instantiate, is_name, load_templates, mistakes
from realhf.aws.tasks.task import ACCOUNT_ID, Task
from realhf.base.text import shorten

CANONICAL = "canonical"
CONTINUATION = "continuation"
RECOVERY = "recovery"
VERIFICATION = "verification"
HINT = "hint"
HABIT = "habit"
KINDS = (RECOVERY, HABIT, VERIFICATION, HINT, CONTINUATION, CANONICAL)
"""-"""
DEFAULT_MIX: Mapping[str, float] = MappingProxyType(
    {CONTINUATION: 0.2, RECOVERY: 0.15, VERIFICATION: 0.05, HINT: 0.05}
)
"""Shares of the kinds; the rest is canonical."""
SHORTENED_SHARE = 0.6
"""Share of the mistakes that shorten a name; the others are the template's."""
LEFT_OUT_SHARE = 0.5
"""Share of the slips that leave out a required option, if the operation has one."""
PERSISTENCE = 3
"""Fewest commands of a habit episode; its last command is repeated."""
_SEED_BITS = 31


@dataclass(frozen=True)
class Line:
    """One command of a script."""

    command: str
    """The command line, possibly with captures."""
    number: int = 0
    """Place (from 1) in the list that its captures refer to; 0 for a command outside any list."""
    learned: bool = True
    """Whether a trainer should imitate it."""


@dataclass(frozen=True)
class Script:
    """One episode to play."""

    task: Task
    """The task instance."""
    kind: str
    """One of KINDS."""
    lines: tuple[Line, ...]
    """The commands of the scripted agent."""


def write_scripts(
    episodes_per_task: int,
    seed: int,
    tiers: Sequence[str] | None = None,
    *,
    tags: Sequence[str] = (),
    split: str = "train",
    mix: Mapping[str, float] = MappingProxyType({}),
    learn_mistakes: bool = False,
    slips: bool = False,
    rephrased: bool = False,
    shown: int = OBSERVATION_CHARS,
) -> list[Script]:
    """Return scripted episodes of every template of a split, in an order shuffled by ``seed``.

    Templates whose solution needs an id that the task's description does not mention are left out,
    because imitating them would teach the policy to invent ids.

    Args:
        episodes_per_task: Number of episodes of each template.
        seed: Seed of the order and of everything drawn.
        tiers: Tiers of the templates; None for all.
        tags: Tags that a template must have.
        split: Split of the templates. Names of resources are those of training in every split.
        mix: Fraction of the episodes of each kind of ``KINDS``. The others are canonical: they play
            the task's solution. So are those of a template to which a kind cannot be applied, such
            as the continuation of a solution with one step.
        learn_mistakes: Whether the wrong command before a recovery is imitated as well.
        slips: Whether recoveries start from a mistyped command line, which is never imitated.
        rephrased: Whether to use further wordings of the tasks, see ``instantiate``.
        shown: Number of characters of a command's output that the policy sees.

    Raises ValueError for an invalid mix.
    """
    unknown = set(mix) - set(KINDS)
    if unknown:
        raise ValueError(
            f"unknown kind {sorted(unknown)[0]!r} in the mix; known: {', '.join(sorted(KINDS))}"
        )
    if any(share < 0 for share in mix.values()) or sum(mix.values()) > 1 + 1e-9:
        raise ValueError(
            "the fractions of the mix must not be negative and must add up to at most 1"
        )
    rng = random.Random(f"sft:{seed}")
    mixed = [kind for kind in KINDS for _ in range(round(mix.get(kind, 0.0) * episodes_per_task))]
    kinds = (mixed + [CANONICAL] * episodes_per_task)[:episodes_per_task]
    scripts = []
    for template in load_templates(tiers, tags=tags, split=split):
        if not _states_all_ids(template):
            continue
        for kind in kinds:
            task = instantiate(template.task_id, rng.getrandbits(_SEED_BITS), rephrased=rephrased)
            scripts.append(
                write_script(
                    task, kind, rng, learn_mistakes=learn_mistakes, slips=slips, shown=shown
                )
            )
    rng.shuffle(scripts)
    return scripts


def _states_all_ids(template: Template) -> bool:
    """Return whether the texts of a template state every id of the set-up that its commands
    need."""
    repairs = [command for drift in template.possible_drifts for command in drift.get("repair", ())]
    stated = [setup_captures([text, template.desired_state_spec]) for text in template.description]
    return setup_captures([*template.solution, *repairs]) <= set.intersection(*stated)


def write_script(
    task: Task,
    kind: str,
    rng: random.Random,
    *,
    learn_mistakes: bool = False,
    slips: bool = False,
    shown: int = OBSERVATION_CHARS,
) -> Script:
    """Return one episode of this kind, or a canonical one if the task does not allow the kind."""
    solution = number_lines(task.solution)
    if kind == HABIT:
        wrong = _choose_mistake(task, rng, any_way_back=False).commands
        return Script(task, kind, number_lines(wrong + wrong[-1:] * (PERSISTENCE - len(wrong))))
    if kind == RECOVERY and slips:
        place = rng.randrange(len(solution))
        return Script(
            task,
            kind,
            solution[:place] + slip(solution[place].command, rng, shown) + solution[place:],
        )
    if kind == RECOVERY:
        mistake = _choose_mistake(task, rng, any_way_back=True)
        wrong = number_lines(mistake.commands, learned=learn_mistakes)
        return Script(task, kind, wrong + mistake.removal + number_lines(mistake.recovery))
    if kind == HINT:
        return Script(task, kind, (Line(HINT_COMMAND), *solution))
    if kind == VERIFICATION:
        return Script(task, kind, (*solution[:-1], Line(look_command(task)), solution[-1]))
    if kind == CONTINUATION and len(solution) > 1:
        cut = rng.randrange(1, len(solution))
        return Script(task, kind, number_lines(task.solution[:cut], learned=False) + solution[cut:])
    return Script(task, CANONICAL, solution)


def number_lines(commands: Sequence[str], *, learned: bool = True) -> tuple[Line, ...]:
    """Return the lines of one list, whose captures refer to each other."""
    return tuple(Line(command, number, learned) for number, command in enumerate(commands, start=1))


class _Mistake(NamedTuple):
    """A wrong way and how to get back."""

    commands: tuple[str, ...]
    """The wrong commands."""
    removal: tuple[Line, ...]
    """Command that removes what they made."""
    recovery: tuple[str, ...]
    """The right commands."""


def _choose_mistake(task: Task, rng: random.Random, *, any_way_back: bool) -> _Mistake:
    own_mistakes = [mistake for mistake in mistakes(task) if mistake.recovery or not any_way_back]
    if own_mistakes and rng.random() >= SHORTENED_SHARE:
        mistake = rng.choice(own_mistakes)
        return _Mistake(mistake.commands, (), mistake.recovery)
    wrong = shorten_names(task)
    if not any_way_back:
        return _Mistake(wrong, (), ())
    if wrong[0] == task.solution[0]:
        return _Mistake((_misspell(task.solution[0]),), (), task.solution)
    if wrong[0].split(" ")[2].startswith(_LOOKS):
        return _Mistake(wrong[:1], (), task.solution)
    removal = removal_of(wrong[0])
    if removal is None:
        # A resource with a wrong name that cannot be deleted by name would be left behind, so use a
        # misspelt operation, which creates nothing.
        return _Mistake((_misspell(task.solution[0]),), (), task.solution)
    return _Mistake(wrong[:1], (Line(removal),), task.solution)


_REMOVALS: Mapping[str, str] = MappingProxyType(
    {
        "athena create-work-group": "athena delete-work-group --work-group {name}",
        "backup "
        "create-backup-vault": "backup delete-backup-vault --backup-vault-name {backup-vault-name}",
        "cloudwatch put-metric-alarm": "cloudwatch delete-alarms --alarm-names {alarm-name}",
        "dynamodb create-table": "dynamodb delete-table --table-name {table-name}",
        "ecr create-repository": "ecr delete-repository --repository-name {repository-name}",
        "ecs create-cluster": "ecs delete-cluster --cluster {cluster-name}",
        "events create-event-bus": "events delete-event-bus --name {name}",
        "events put-rule": "events delete-rule --name {name}",
        "iam create-group": "iam delete-group --group-name {group-name}",
        "iam create-role": "iam delete-role --role-name {role-name}",
        "iam create-user": "iam delete-user --user-name {user-name}",
        "kinesis create-stream": "kinesis delete-stream --stream-name {stream-name}",
        "logs create-log-group": "logs delete-log-group --log-group-name {log-group-name}",
        "opensearch create-domain": "opensearch delete-domain --domain-name {domain-name}",
        "s3api create-bucket": "s3api delete-bucket --bucket {bucket}",
        "scheduler create-schedule-group": "scheduler delete-schedule-group --name {name}",
        "secretsmanager create-secret": (
            "secretsmanager delete-secret --secret-id {name} --force-delete-without-recovery"
        ),
        "sns "
        "create-topic": f"sns delete-topic --topic-arn arn:aws:sns:{REGION}:{ACCOUNT_ID}:{{name}}",
        "sqs create-queue": f"sqs delete-queue --queue-url "
        f"http://localhost:4566/{ACCOUNT_ID}/{{queue-name}}",
        "ssm put-parameter": "ssm delete-parameter --name {name}",
    }
)
"""For commands that create a resource under a name of the caller's choice, the command that deletes
it, with options of the former in braces."""
_OPTION = re.compile(r"--([\w-]+)[ =](\S+)")


def removal_of(command: str) -> str | None:
    """Return the command that deletes what ``command`` created, or None if the names in ``command``
    do not suffice for that."""
    service, operation = command.split(" ")[1:3]
    removal = _REMOVALS.get(f"{service} {operation}")
    return None if removal is None else "aws " + removal.format_map(dict(_OPTION.findall(command)))


def shorten_names(task: Task) -> tuple[str, ...]:
    """Return the solution with the last word of every drawn name left out. If no command contains a
    drawn name (it may use ids only), leave out the last letter of its operations instead."""
    drawn = [value for value in task.params.values() if is_name(value)]
    commands = task.solution
    for value in drawn:
        commands = tuple(command.replace(value, value.rpartition("-")[0]) for command in commands)
    return (
        commands if commands != task.solution else tuple(_misspell(command) for command in commands)
    )


def _misspell(command: str) -> str:
    words = command.split(" ")
    return " ".join([*words[:2], words[2][:-1], *words[3:]])


_LOOKS = ("describe-", "get-", "head-", "list-", "ls")
_VERBS = ("get", "describe", "list", "create", "put", "add", "update", "set", "delete", "remove")


def slip(command: str, rng: random.Random, shown: int) -> tuple[Line, ...]:
    """Return the slip to play before ``command``, not to be imitated.

    Either the command without one of its required options, or the command with a nonexistent
    operation. In the latter case a look at the service's operations follows, if the right one is
    among the ``shown`` characters that the policy reads of the list.
    """
    service, operation = command.split(" ")[1:3]
    options = command.split(" --")
    needed = [
        place
        for place, text in enumerate(options)
        if place and text.split(" ")[0] in _required_options(service, operation)
    ]
    if needed and rng.random() < LEFT_OUT_SHARE:
        left_out = rng.choice(needed)
        return (Line(" --".join(options[:left_out] + options[left_out + 1 :]), learned=False),)
    verb, _, rest = operation.partition("-")
    others = [
        f"{other}-{rest}"
        for other in _VERBS
        if other != verb and f"{other}-{rest}" not in ALLOWED[service]
    ]
    wrong = (
        command.replace(f" {operation}", f" {rng.choice(others)}", 1)
        if rest and others
        else _misspell(command)
    )
    look = f"aws {service} help"
    is_listed = operation in shorten(check_command(look).answer or "", shown).split("\n")
    return (Line(wrong, learned=False), *((Line(look),) if is_listed else ()))


@functools.cache
def _service_model(service: str) -> Any:
    """Return botocore's ``ServiceModel`` of a CLI service (pyright cannot follow its types). Raises
    UnknownServiceError."""
    name = "s3" if service == "s3api" else service
    return ServiceModel(
        botocore.loaders.create_loader().load_service_model(name, "service-2"), name
    )


@functools.cache
def _required_options(service: str, operation: str) -> frozenset[str]:
    """Return the required options of an operation, without hyphens; none for a command that is not
    in botocore's models."""
    try:
        model = _service_model(service)
    except UnknownServiceError:
        return frozenset()
    name = next(
        (name for name in model.operation_names if xform_name(name, "-") == operation), None
    )
    shape = model.operation_model(name).input_shape if name is not None else None
    if shape is None:
        return frozenset()
    # The command line generates idempotency tokens itself.
    return frozenset(
        xform_name(member, "-")
        for member in shape.required_members
        if not shape.members[member].metadata.get("idempotencyToken")
    )


def look_command(task: Task) -> str:
    """Return a listing of the service of the task's last step, or its help if the listing is itself
    part of the solution."""
    service = task.solution[-1].split()[1]
    listing = _listing("s3api" if service == "s3" else service)
    return listing if listing and listing not in task.solution else f"aws {service} help"


@functools.cache
def _listing(service: str) -> str:
    """Return a listing command of this CLI service that needs no argument, "" if there is none."""
    model = _service_model(service)
    needs = {
        xform_name(name, "-"): model.operation_model(name).input_shape
        for name in model.operation_names
    }
    looks = sorted(
        (op for op in ALLOWED[service] if op.startswith(("list-", "describe-")) and op in needs),
        key=lambda op: (op.startswith("describe-"), op),
    )
    free = [op for op in looks if needs[op] is None or not needs[op].required_members]
    return f"aws {service} {free[0]}" if free else ""
