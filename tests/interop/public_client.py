"""Runs beside a checkout of the public AWS RL environment: its own client plays its own tasks on
our server.

    python public_client.py CHECKOUT URL      (in an environment with openenv-core, pydantic, pyyaml and pytest)

For every task it asks the checkout for the next command of the canonical solution, as its own web
page and its own tests do, and sends it. A drift task has none: there the client looks at everything
and sends the set-up again, first as the update of what exists. Prints one JSON line a task:
``{"tier", "task_id", "verdict": "solved"|"refused"|"unsolved", "reward", "reason", "commands"}``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

TIERS = ("warmup", "beginner", "intermediate", "advanced", "expert", "drift")


def loaded(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class NotLookedUp(Exception):
    """A solution asks what this command prints."""


class Recorder:
    """What the checkout's solutions ask of a backend: look-ups, answered by the commands of the
    same session."""

    def __init__(self, client: Any, action: Any) -> None:
        self.client = client
        self.action = action
        self.waiting = ""
        self.answers: dict[str, tuple[bool, str, str]] = {}

    def execute_command(self, command: str) -> tuple[bool, str, str]:
        if command not in self.answers:
            self.waiting = command
            raise NotLookedUp(command)
        return self.answers[command]


class Steps:
    def __init__(self) -> None:
        self.step_count = 0


async def next_command(
    solutions: dict[str, ModuleType], task_id: int, steps: Steps, recorder: Recorder
) -> str | None:
    """The next canonical command, None after the last; what it needs to know is looked up in the
    world first."""
    recorder.answers.clear()
    while True:
        try:
            answer = solutions["task_solutions"].get_next_solution(task_id, recorder, steps)
            later = steps.step_count - answer["total_steps"]
            rest = (
                solutions["test_expert_tasks"]._resolve_dynamic_commands(task_id, recorder, {})
                if later >= 0
                else []
            )
            return answer["command"] or (rest[later] if later < len(rest) else None)
        except NotLookedUp:
            pass
        seen = (await recorder.client.step(recorder.action(command=recorder.waiting))).observation
        recorder.answers[recorder.waiting] = (seen.command_success, seen.command_output, seen.error)


_REPAIRS = {
    "dynamodb create-table": (
        "update-table",
        {"--table-name": "", "--provisioned-throughput": ""},
        "",
    ),
    "lambda create-function": (
        "update-function-configuration",
        {
            "--function-name": "",
            "--memory-size": "",
            "--timeout": "",
            "--runtime": "",
            "--environment": "",
        },
        "",
    ),
    "rds create-db-instance": (
        "modify-db-instance",
        {
            "--db-instance-identifier": "",
            "--multi-az": "",
            "--backup-retention-period": "",
            "--db-instance-class": "",
        },
        "--apply-immediately",
    ),
    "secretsmanager create-secret": (
        "update-secret",
        {"--name": "--secret-id", "--description": ""},
        "",
    ),
    "ecs create-service": (
        "update-service",
        {"--cluster": "", "--service-name": "--service", "--desired-count": ""},
        "",
    ),
    "ssm put-parameter": (
        "put-parameter",
        {"--name": "", "--type": "", "--value": ""},
        "--overwrite",
    ),
}
"""How what a set-up command made is put right: the operation, the options it takes over, and one
more."""


def repairs(line: str) -> list[str]:
    """Commands that bring what a set-up command made back to what it was made as, the command
    itself last."""
    words = shlex.split(line)
    found = []
    verb, options, more = _REPAIRS.get(" ".join(words[1:3]), ("", {}, ""))
    if verb:
        kept = [words[0], words[1], verb]
        for place, word in enumerate(words):
            if word in options:
                following = words[place + 1] if place + 1 < len(words) else "--"
                kept += [options[word] or word] + (
                    [] if following.startswith("--") else [following]
                )
        found.append(shlex.join([*kept, *([more] if more else [])]))
    if "--global-secondary-indexes" in words:
        table = words[words.index("--table-name") + 1]
        indexes = json.loads(words[words.index("--global-secondary-indexes") + 1])
        updates = [
            {"Update": {key: index[key] for key in ("IndexName", "ProvisionedThroughput")}}
            for index in indexes
        ]
        command = [
            "aws",
            "dynamodb",
            "update-table",
            "--table-name",
            table,
            "--global-secondary-index-updates",
        ]
        found.append(shlex.join([*command, json.dumps(updates)]))
    return [*found, line]


async def play(
    client: Any, checkout: dict[str, Any], tier: str, entry: dict[str, Any]
) -> dict[str, Any]:
    models = checkout["models"]
    solutions = checkout["solutions"]
    setup = [
        {"command": line} if isinstance(line, str) else line
        for line in entry.get("setup_commands", [])
    ]
    difficulty = "expert" if tier == "drift" else tier
    task = models.Task(**{**entry, "setup_commands": setup, "difficulty": difficulty})
    found: dict[str, Any] = {
        "tier": tier,
        "task_id": entry["task_id"],
        "reward": 0.0,
        "reason": "",
        "commands": [],
    }
    try:
        await client.reset(task=task)
    except Exception as error:
        return found | {"verdict": "refused", "reason": str(error)[:300]}
    recorder = Recorder(client, models.AwsRlAction)
    steps = Steps()
    looks = [check["command"] for check in entry["success_criteria"].get("state_checks", [])]
    again = (
        [*looks, *(fix for line in setup for fix in repairs(line["command"]))]
        if tier == "drift"
        else []
    )
    while True:
        command = again[steps.step_count] if steps.step_count < len(again) else None
        command = command or (
            None if again else await next_command(solutions, entry["task_id"], steps, recorder)
        )
        if command is None:
            return found | {"verdict": "unsolved"}
        result = await client.step(models.AwsRlAction(command=command))
        steps.step_count += 1
        found["reward"] += result.reward or 0.0
        success = result.observation.command_success
        error = result.observation.error
        found["commands"].append([command, success, error[:200]])
        if result.observation.task_achieved or result.done:
            return found | {"verdict": "solved" if result.observation.task_achieved else "unsolved"}


async def main(folder: Path, url: str) -> None:
    sys.path.insert(0, str(folder))
    models = loaded("models", folder / "models.py")
    solutions = {
        "task_solutions": loaded("task_solutions", folder / "server/services/task_solutions.py"),
        "test_expert_tasks": loaded(
            "test_expert_tasks", folder / "tests_tasks/test_expert_tasks.py"
        ),
    }
    checkout = {"models": models, "solutions": solutions}
    client = loaded("client", folder / "client.py").AwsRlEnv(base_url=url)
    await client.connect()
    try:
        for tier in TIERS:
            for entry in yaml.safe_load(
                (folder / f"server/services/tasks/{tier}.yaml").read_text()
            ):
                print(json.dumps(await play(client, checkout, tier, entry)), flush=True)
    finally:
        await client.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).resolve(), sys.argv[2]))
