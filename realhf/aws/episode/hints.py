"""Writes hints: what an agent reads when it asks with exactly ``aws help --task-hint``.

Level 1 names the services, level 2 the operations in order, level 3 shows the commands with ``...`` for every value.
Names, checks and set-up are never revealed. Source: docs/reference/environment.md 7 (Hints).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from botocore import xform_name

from realhf.aws.grading.criteria import Criteria

HINT_COMMAND = "aws help --task-hint"
LEVELS = 3


def is_hint_request(command: str) -> bool:
    """Return whether a command asks for a hint; any other spelling is a command like others."""
    return command.strip() == HINT_COMMAND


def hint_text(level: int, criteria: Criteria, solution: Sequence[str]) -> str:
    """Return the hint of ``level`` 1 to 3; higher levels repeat the last. Operations and their order come from the
    canonical solution; a task without one is hinted at from its criteria."""
    skeletons = list(filter(None, map(_skeleton, solution))) or _from_criteria(criteria)
    operations = [" ".join(skeleton.split()[1:3]) for skeleton in skeletons]
    if level <= 1:
        services = dict.fromkeys(operation.split()[0] for operation in operations)
        return f"services: {', '.join(services)}"
    if level == 2:
        return f"operations in order: {', '.join(operations)}"
    return "commands: " + "; ".join(skeletons)


def _skeleton(command: str) -> str:
    """Return the command without its values; "" for text that is not a command."""
    try:
        words = shlex.split(command)
    except ValueError:
        return ""
    if len(words) < 3:
        return ""
    shown = words[:3]
    for word in words[3:]:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            shown.append(name + ("=..." if equals else ""))
        elif shown[-1] != "...":
            shown.append("...")
    return " ".join(shown)


def _from_criteria(criteria: Criteria) -> list[str]:
    named = [step.operation for step in criteria.steps] or [criteria.operation]
    skeletons = []
    for operation in filter(None, named):
        service, _, name = operation.partition(":")
        skeletons.append(f"aws {'s3api' if service == 's3' else service} {xform_name(name, '-')} ...")
    if skeletons:
        return skeletons
    services = dict.fromkeys(check.service for check in criteria.checks)
    return [f"aws {'s3api' if service == 's3' else service} help" for service in services]
