"""Plays the attacks of ``red_team_attacks`` against a real pool and looks for their effects, not
their messages.

Every attack is tried at the agent's door and, where that refuses it, once more past the policy at
the worker itself, so that a second layer is seen to hold. ``python -m
tests.aws.red_team.firing_range [--sandbox plain] [--lambda sandbox]`` prints the whole table.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import select
import shlex
import socket
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from realhf.aws.cli.command_text import read_command
from realhf.aws.cli.executor import CommandResult, OutputLimits, SimulatorLost
from realhf.aws.simulator.pool import MiniStackPool
from realhf.env.containment.probe import LAMBDA_MODES, SANDBOX_MODES
from realhf.env.containment.sandbox import package_folder
from tests.aws.red_team.attacks import ATTACKS, HARMLESS, NO_CREDIT, ROWS, Attack, Tried
from tests.aws.red_team.inside import INSIDE_ROWS, play_inside
from tests.aws.red_team.web import WEB_ATTACKS, WEB_ROWS, WebRange

SECRET = "canary-content-7f3a"
LIMITS = OutputLimits(timeout_s=6.0)
_HOST_WORDS = (
    "Traceback (most recent",
    "realhf-env-",
    "site-packages",
    sys.prefix,
    sys.base_prefix,
)
_ANSWERS = Path(package_folder(), "aws", "tasks", "warmup.yaml")
_ANSWER_WORD = "success_criteria"
_TRIGGER_S = 0.15
_PATIENCE_S = 120.0


class FiringRange:
    """One session under attack and its sibling, with canaries all around. ``folder`` lies on the
    host."""

    def __init__(self, pool: MiniStackPool, folder: Path) -> None:
        self._pool = pool
        self.slot, self.sibling = pool.acquire(), pool.acquire()
        self._limits = self.slot.executor._limits
        self.slot.executor._limits = LIMITS
        self.secret = folder / "secret.txt"
        self.marker = folder / "marker"
        self.secret.write_text(SECRET)
        os.environ["REALHF_RED_TEAM_CANARY"] = SECRET
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.sibling.reset()
        self.sibling.state.call("s3", "CreateBucket", {"Bucket": "sibling-secret"})

    def close(self) -> None:
        self._listener.close()
        self.slot.executor._limits = self._limits
        del os.environ["REALHF_RED_TEAM_CANARY"]
        for slot in (self.slot, self.sibling):
            self._pool.release(slot)

    def attempt(self, attack: Attack) -> Tried:
        """Try it; what is observed at the door is a refusal rule, HARMLESS or NO_CREDIT. The
        session must be usable afterwards."""
        self._set_up(attack)
        command = read_command(self._fill(attack.command))
        before = self.slot.ministack.requests()["count"]
        result = self.slot.executor.run(command)
        door = _word(result, attack)
        behind = ""
        texts = [_said(result)]
        unseen = self._unseen(before, result)
        if result.refusal is not None:
            try:
                words = shlex.split(command)[1:]
            except ValueError:
                words = []
            if words and "\0" not in command:
                second = self._past_policy(words)
                behind = second.refusal or ("fails" if not second.success else "nothing came of it")
                texts.append(_said(second))
        if attack.before:
            time.sleep(_TRIGGER_S)
        effects = (*unseen, *self._effects(texts))
        return Tried(attack.row, attack.command[:300], attack.expected, door, effects, behind)

    def _unseen(self, before: int, result: CommandResult) -> list[str]:
        """What the simulator took for a request and the worker did not report; a rehearsal is not
        reported, and a worker that was killed reports nothing."""
        if result.timed_out or result.stopped:
            return []
        taken = [
            each
            for each in self.slot.ministack.requests(before)["requests"]
            if each["entrance"] == "port"
        ]
        rehearsed = sum(each["service"] == "ec2" for each in taken) if not result.requests else 0
        more = len(taken) - rehearsed > len(result.requests)
        return (
            [f"the simulator took {len(taken)} requests, {len(result.requests)} are known"]
            if more
            else []
        )

    def _set_up(self, attack: Attack) -> None:
        self.slot.reset()
        self.slot.files.put("code.zip", self._malicious_code())
        self.slot.state.call("s3", "CreateBucket", {"Bucket": "survivor"})
        self.slot.state.call("s3", "PutObject", {"Bucket": "survivor", "Key": "k", "Body": b"x"})
        for command in attack.before:
            self.slot.executor.run(self._fill(command))

    def _fill(self, command: str) -> str:
        places = {
            "secret": self.secret,
            "marker": self.marker,
            "url": self.url,
            "sibling": self.sibling.endpoint,
            "answers": _ANSWERS,
        }
        for name, value in places.items():
            command = command.replace(f"{{{name}}}", str(value))
        return command

    def _malicious_code(self) -> bytes:
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as packed:
            packed.writestr(
                "index.py",
                f"open({str(self.marker)!r}, 'w').write('x')\n"
                f"def handler(e, c): open({str(self.marker)!r}, 'w').write('x')\n",
            )
        return archive.getvalue()

    def _past_policy(self, words: Sequence[str]) -> CommandResult:
        try:
            return self.slot.executor._execute(tuple(words))
        except SimulatorLost as error:
            return CommandResult(exit_code=255, stdout="", stderr=str(error))

    def effects_outside(self, texts: Sequence[str]) -> list[str]:
        """What happened on the host: content that came out in ``texts``, files, connections,
        processes."""
        found = []
        if any(SECRET in text for text in texts):
            found.append("host content came out")
        if any(_ANSWER_WORD in text for text in texts):
            found.append("answers of tasks came out")
        if any(word in text for text in texts for word in _HOST_WORDS):
            found.append("a host path or traceback came out")
        if self.marker.exists() or Path("/dev/shm/marker").exists():
            found.append("a file was written on the host")
        if select.select([self._listener], [], [], 0)[0]:
            found.append("something connected out")
        for pid in (self.slot.worker_pid, self.slot.ministack.pid):
            if pid > 0 and psutil.pid_exists(pid) and psutil.Process(pid).children():
                found.append("a process was started")
        return found

    def _effects(self, texts: Sequence[str]) -> list[str]:
        found = self.effects_outside(texts)
        if [b["Name"] for b in self.sibling.state.call("s3", "ListBuckets")["Buckets"]] != [
            "sibling-secret"
        ]:
            found.append("the sibling changed")
        if not self.slot.ministack.alive():
            found.append("the simulator died")
        else:  # past the policy it may be busy for seconds with a service that it does not know
            self.slot.ministack.wait_healthy(_PATIENCE_S)
        after = self.slot.executor.run("aws s3api list-buckets --query Buckets[].Name")
        if not after.success or json.loads(after.stdout) != ["survivor"]:
            found.append("the session is not usable, or its world was reset")
        return found


def _word(result: CommandResult, attack: Attack) -> str:
    if result.refusal is not None:
        return result.refusal
    return NO_CREDIT if attack.expected == NO_CREDIT and not result.requests else HARMLESS


def _said(result: CommandResult) -> str:
    return f"{result.stdout}\n{result.stderr}\n{result.requests}"


def main() -> int:
    """Play everything; 0 when each attack ended as expected and without effect."""
    parser = argparse.ArgumentParser(
        description="Play the attacks and print attack, expected, observed."
    )
    parser.add_argument("--sandbox", choices=SANDBOX_MODES, default="auto")
    parser.add_argument("--lambda", dest="lambda_mode", choices=LAMBDA_MODES, default="stub")
    arguments = parser.parse_args()
    pool = MiniStackPool(2, sandbox=arguments.sandbox, lambda_mode=arguments.lambda_mode)
    try:
        pool.start()
        with tempfile.TemporaryDirectory() as folder:
            target = FiringRange(pool, Path(folder))
            tried = [target.attempt(attack) for attack in ATTACKS]
            target.close()
        pages = WebRange(pool)
        try:
            tried += [pages.attempt(attack) for attack in WEB_ATTACKS]
        finally:
            pages.close()
        tried += play_inside(pool)
        wrong = [one for one in tried if not one.held]
        Console(width=150).print(
            pool.containment(), _table(tried), f"{len(tried)} attacks, {len(wrong)} not as expected"
        )
    finally:
        pool.stop()
    for one in wrong:
        print(f"row {one.row}: {one}", file=sys.stderr)
    return 1 if wrong else 0


def _table(tried: Sequence[Tried]) -> Table:
    table = Table(title="Red team: what an agent tried")
    for column in (
        "row",
        "attack",
        "tries",
        "expected at the door",
        "observed",
        "past the policy",
        "effects",
    ):
        table.add_column(column, overflow="fold")
    for row, title in (ROWS | WEB_ROWS | INSIDE_ROWS).items():
        those = [one for one in tried if one.row == row]
        expected = _tally(one.expected for one in those)
        observed = _tally(one.observed for one in those)
        behind = _tally(one.behind for one in those if one.behind)
        effects = _tally(effect for one in those for effect in one.effects) or "none"
        style = "" if all(one.held for one in those) else "red"
        table.add_row(
            str(row), title, str(len(those)), expected, observed, behind, effects, style=style
        )
    return table


def _tally(words: Iterable[str]) -> str:
    return ", ".join(f"{word} {count}" for word, count in Counter(words).most_common())


if __name__ == "__main__":
    sys.exit(main())
