"""Writes the scripts of demonstrations: which commands a scripted agent sends in which task. Playing them is
``sft_data``'s; nothing here starts or sends anything.

- *canonical*: the solution, nothing else.
- *continuation*: a solution of which the first steps are context and only the rest is to be learned.
- *recovery*: a mistake, what came of it, the removal of what it made, and then the right way.
- *verification*: a look at the account before the last step.
- *hint*: a hint is asked for first.
- *habit*: a mistake that is stuck to (nothing achieved): what a policy with room for improvement also does.

A mistake is one of the template's own or one that is possible everywhere: the last word of a name is left out. A
recovery may be from a slip of the command line instead: an operation that there is not, after which the operations of
the service are looked up, or a required option that is left out. What the command line says of it is context for the
right command, and the slip itself is never to be imitated: this teaches to read errors and help, which serve with
commands that were never demonstrated.
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

CANONICAL, CONTINUATION, RECOVERY = "canonical", "continuation", "recovery"
VERIFICATION, HINT, HABIT = "verification", "hint", "habit"
KINDS = (RECOVERY, HABIT, VERIFICATION, HINT, CONTINUATION, CANONICAL)
DEFAULT_MIX: Mapping[str, float] = MappingProxyType({CONTINUATION: 0.2, RECOVERY: 0.15, VERIFICATION: 0.05, HINT: 0.05})
"""Shares of the trajectory types; the rest is canonical."""
SHORTENED_SHARE = 0.6
"""Share of the mistakes that shorten a name; the others are the template's."""
LEFT_OUT_SHARE = 0.5
"""Share of the slips that leave out a required option, where the operation has one."""
PERSISTENCE = 3
"""Least number of commands of a habit episode: its last command is sent again."""
_SEED_BITS = 31


@dataclass(frozen=True)
class Line:
    """Is one command. ``number`` is its place (from 1) in the list that its captures refer to, 0 for one of no list;
    ``learned``: whether a trainer should imitate it."""

    command: str
    number: int = 0
    learned: bool = True


@dataclass(frozen=True)
class Script:
    """Is one episode to be played: the task and the lines of the scripted agent."""

    task: Task
    kind: str
    lines: tuple[Line, ...]


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
    """Return the episodes to play, shuffled, decided by ``seed``. Templates whose solutions need ids that no text tells
    are left out: to imitate those would be to make ids up.

    Each template has exactly the rounded shares of each kind in ``mix``, the rest canonical. A template to which a kind
    cannot be applied (continuation of one step) gets canonical ones instead. ``split`` chooses templates, never rows.
    ``learn_mistakes``: the mistakes that are recovered from are to be imitated too; ``slips``: they are slips of the
    command line, and never are. ``rephrased``: tasks are worded in further ways, see ``instantiate``. ``shown``: so
    many characters of an answer are read. Raises ValueError for an impossible mix.
    """
    unknown = set(mix) - set(KINDS)
    if unknown:
        raise ValueError(f"unknown kind {sorted(unknown)[0]!r} in the mix; known: {', '.join(sorted(KINDS))}")
    if any(share < 0 for share in mix.values()) or sum(mix.values()) > 1 + 1e-9:
        raise ValueError("the mix holds shares of one: not negative, together at most 1")
    rng = random.Random(f"sft:{seed}")
    counted = [kind for kind in KINDS for _ in range(round(mix.get(kind, 0.0) * episodes_per_task))]
    kinds = (counted + [CANONICAL] * episodes_per_task)[:episodes_per_task]
    scripts = []
    for template in load_templates(tiers, tags=tags, split=split):
        if not _tells_ids(template):
            continue
        for kind in kinds:
            task = instantiate(template.task_id, rng.getrandbits(_SEED_BITS), rephrased=rephrased)
            scripts.append(write_script(task, kind, rng, learn_mistakes=learn_mistakes, slips=slips, shown=shown))
    rng.shuffle(scripts)
    return scripts


def _tells_ids(template: Template) -> bool:
    """Return whether its words tell every id of the set-up that its commands need."""
    repairs = [command for drift in template.possible_drifts for command in drift.get("repair", ())]
    told = [setup_captures([text, template.desired_state_spec]) for text in template.description]
    return setup_captures([*template.solution, *repairs]) <= set.intersection(*told)


def write_script(
    task: Task,
    kind: str,
    rng: random.Random,
    *,
    learn_mistakes: bool = False,
    slips: bool = False,
    shown: int = OBSERVATION_CHARS,
) -> Script:
    """Return one episode of this kind, or a canonical one where the task does not allow the kind."""
    solution = numbered(task.solution)
    if kind == HABIT:
        wrong = _mistake(task, rng, any_way_back=False).commands
        return Script(task, kind, numbered(wrong + wrong[-1:] * (PERSISTENCE - len(wrong))))
    if kind == RECOVERY and slips:
        place = rng.randrange(len(solution))
        return Script(task, kind, solution[:place] + slip(solution[place].command, rng, shown) + solution[place:])
    if kind == RECOVERY:
        mistake = _mistake(task, rng, any_way_back=True)
        wrong = numbered(mistake.commands, learned=learn_mistakes)
        return Script(task, kind, wrong + mistake.removal + numbered(mistake.recovery))
    if kind == HINT:
        return Script(task, kind, (Line(HINT_COMMAND), *solution))
    if kind == VERIFICATION:
        return Script(task, kind, (*solution[:-1], Line(look_command(task)), solution[-1]))
    if kind == CONTINUATION and len(solution) > 1:
        cut = rng.randrange(1, len(solution))
        return Script(task, kind, numbered(task.solution[:cut], learned=False) + solution[cut:])
    return Script(task, CANONICAL, solution)


def numbered(commands: Sequence[str], *, learned: bool = True) -> tuple[Line, ...]:
    """Return the lines of one list, whose captures refer to each other."""
    return tuple(Line(command, number, learned) for number, command in enumerate(commands, start=1))


class _Mistake(NamedTuple):
    """A wrong way, the command that removes what was made there, and the way back."""

    commands: tuple[str, ...]
    removal: tuple[Line, ...]
    recovery: tuple[str, ...]


def _mistake(task: Task, rng: random.Random, *, any_way_back: bool) -> _Mistake:
    written = [mistake for mistake in mistakes(task) if mistake.recovery or not any_way_back]
    if written and rng.random() >= SHORTENED_SHARE:
        mistake = rng.choice(written)
        return _Mistake(mistake.commands, (), mistake.recovery)
    wrong = with_short_names(task)
    if not any_way_back:
        return _Mistake(wrong, (), ())
    if wrong[0] == task.solution[0]:
        return _Mistake((_misspelt(task.solution[0]),), (), task.solution)
    if wrong[0].split(" ")[2].startswith(_LOOKS):
        return _Mistake(wrong[:1], (), task.solution)
    removal = removal_of(wrong[0])
    if removal is None:
        # What is made under a wrong name and cannot be removed by name would be left behind, so nothing is made.
        return _Mistake((_misspelt(task.solution[0]),), (), task.solution)
    return _Mistake(wrong[:1], (Line(removal),), task.solution)


_REMOVALS: Mapping[str, str] = MappingProxyType(
    {
        "athena create-work-group": "athena delete-work-group --work-group {name}",
        "backup create-backup-vault": "backup delete-backup-vault --backup-vault-name {backup-vault-name}",
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
        "sns create-topic": f"sns delete-topic --topic-arn arn:aws:sns:{REGION}:{ACCOUNT_ID}:{{name}}",
        "sqs create-queue": f"sqs delete-queue --queue-url http://localhost:4566/{ACCOUNT_ID}/{{queue-name}}",
        "ssm put-parameter": "ssm delete-parameter --name {name}",
    }
)
"""For commands that make something under a name of the caller's, what removes it, with their options in braces."""
_OPTION = re.compile(r"--([\w-]+)[ =](\S+)")


def removal_of(command: str) -> str | None:
    """Return the command that removes what ``command`` made, None where no name that it gave is enough for that."""
    service, operation = command.split(" ")[1:3]
    removal = _REMOVALS.get(f"{service} {operation}")
    return None if removal is None else "aws " + removal.format_map(dict(_OPTION.findall(command)))


def with_short_names(task: Task) -> tuple[str, ...]:
    """Return the solution with the last word of every drawn name left out; where no command has a drawn name (it may
    use identifiers alone), with the last letter of its operations left out."""
    drawn = [value for value in task.params.values() if is_name(value)]
    commands = task.solution
    for value in drawn:
        commands = tuple(command.replace(value, value.rpartition("-")[0]) for command in commands)
    return commands if commands != task.solution else tuple(_misspelt(command) for command in commands)


def _misspelt(command: str) -> str:
    words = command.split(" ")
    return " ".join([*words[:2], words[2][:-1], *words[3:]])


_LOOKS = ("describe-", "get-", "head-", "list-", "ls")
_VERBS = ("get", "describe", "list", "create", "put", "add", "update", "set", "delete", "remove")


def slip(command: str, rng: random.Random, shown: int) -> tuple[Line, ...]:
    """Return what goes wrong before this command is sent: it without one of the options that its operation requires, or
    by a name that no operation of the service has, which is not to be imitated, and then a look at those that there
    are, if the right one is among the ``shown`` characters that are read of it."""
    service, operation = command.split(" ")[1:3]
    options = command.split(" --")
    needed = [
        place for place, text in enumerate(options) if place and text.split(" ")[0] in _required(service, operation)
    ]
    if needed and rng.random() < LEFT_OUT_SHARE:
        left_out = rng.choice(needed)
        return (Line(" --".join(options[:left_out] + options[left_out + 1 :]), learned=False),)
    verb, _, rest = operation.partition("-")
    others = [f"{other}-{rest}" for other in _VERBS if other != verb and f"{other}-{rest}" not in ALLOWED[service]]
    wrong = command.replace(f" {operation}", f" {rng.choice(others)}", 1) if rest and others else _misspelt(command)
    look = f"aws {service} help"
    found = operation in shorten(check_command(look).answer or "", shown).split("\n")
    return (Line(wrong, learned=False), *((Line(look),) if found else ()))


@functools.cache
def _service_model(service: str) -> Any:
    """Return botocore's ``ServiceModel``, whose types pyright cannot follow, of a CLI service. Raises
    UnknownServiceError."""
    name = "s3" if service == "s3api" else service
    return ServiceModel(botocore.loaders.create_loader().load_service_model(name, "service-2"), name)


@functools.cache
def _required(service: str, operation: str) -> frozenset[str]:
    """Return the options, without their hyphens, that an operation of botocore's models does not do without; none for a
    command that is not one of them."""
    try:
        model = _service_model(service)
    except UnknownServiceError:
        return frozenset()
    name = next((name for name in model.operation_names if xform_name(name, "-") == operation), None)
    shape = model.operation_model(name).input_shape if name is not None else None
    if shape is None:
        return frozenset()
    # The command line itself makes up what only keeps a request from being carried out twice.
    return frozenset(
        xform_name(member, "-")
        for member in shape.required_members
        if not shape.members[member].metadata.get("idempotencyToken")
    )


def look_command(task: Task) -> str:
    """Return a listing of the service that the task's last step is about, or its help where the listing is the task."""
    service = task.solution[-1].split()[1]
    listing = _listing("s3api" if service == "s3" else service)
    return listing if listing and listing not in task.solution else f"aws {service} help"


@functools.cache
def _listing(service: str) -> str:
    """Return a command of this CLI service that lists something and needs no argument, "" where there is none."""
    model = _service_model(service)
    needs = {xform_name(name, "-"): model.operation_model(name).input_shape for name in model.operation_names}
    looks = sorted(
        (op for op in ALLOWED[service] if op.startswith(("list-", "describe-")) and op in needs),
        key=lambda op: (op.startswith("describe-"), op),
    )
    free = [op for op in looks if needs[op] is None or not needs[op].required_members]
    return f"aws {service} {free[0]}" if free else ""
