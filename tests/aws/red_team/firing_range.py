"""Plays the attacks of ``red_team_attacks`` against a real pool and looks for their effects, not their messages.

Every attack is tried at the agent's door and, where that refuses it, once more past the policy at the worker
itself, so that a second layer is seen to hold. ``python -m tests.aws.red_team.firing_range [--sandbox plain]
[--lambda sandbox]`` prints the whole table.
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
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from realhf.aws.cli.executor import CommandResult, OutputLimits, SimulatorLost
from realhf.aws.simulator.pool import MiniStackPool
from realhf.env.containment.probe import LAMBDA_MODES, SANDBOX_MODES
from realhf.env.containment.sandbox import own_package
from tests.aws.red_team.attacks import ATTACKS, HARMLESS, NO_CREDIT, ROWS, Attack
from tests.aws.red_team.inside import INSIDE_ROWS, not_as_expected, play_inside
from tests.aws.red_team.web import WEB_ATTACKS, WEB_ROWS, WebRange

SECRET = "canary-content-7f3a"
LIMITS = OutputLimits(timeout_s=6.0)
_HOST_WORDS = ("Traceback (most recent", "realhf-env-", "site-packages", sys.prefix, sys.base_prefix)
_ANSWERS, _ANSWER_WORD = Path(own_package(), "aws", "tasks", "warmup.yaml"), "success_criteria"
_TRIGGER_S = 0.15
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Observed:
    """``door``: refusal rule, HARMLESS or NO_CREDIT; ``behind``: the same past the policy, "" when not tried;
    ``effects``: what must not have happened."""

    door: str
    behind: str
    effects: tuple[str, ...]


class FiringRange:
    """One session under attack and its sibling, with canaries all around. ``folder`` lies on the host."""

    def __init__(self, pool: MiniStackPool, folder: Path) -> None:
        self._pool = pool
        self.slot, self.sibling = pool.acquire(), pool.acquire()
        self._limits = self.slot.executor._limits
        self.slot.executor._limits = LIMITS
        self.secret, self.marker = folder / "secret.txt", folder / "marker"
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

    def attempt(self, attack: Attack) -> Observed:
        """Try it. The session must be usable afterwards."""
        self._set_up(attack)
        command = self._fill(attack.command)
        before = self.slot.ministack.requests()["count"]
        result = self.slot.executor.run(command)
        door, behind, texts = _word(result, attack), "", [_said(result)]
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
        return Observed(door, behind, (*unseen, *self._effects(texts)))

    def _unseen(self, before: int, result: CommandResult) -> list[str]:
        """What the simulator took for a request and the worker did not report; a rehearsal is not reported, and a
        worker that was killed reports nothing."""
        if result.timed_out or result.stopped:
            return []
        taken = [each for each in self.slot.ministack.requests(before)["requests"] if each["entrance"] == "port"]
        rehearsed = sum(each["service"] == "ec2" for each in taken) if not result.requests else 0
        more = len(taken) - rehearsed > len(result.requests)
        return [f"the simulator took {len(taken)} requests, {len(result.requests)} are known"] if more else []

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
        return command.replace("{{", "{").replace("}}", "}")

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
        """What happened on the host: content that came out in ``texts``, files, connections, processes."""
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
        if [b["Name"] for b in self.sibling.state.call("s3", "ListBuckets")["Buckets"]] != ["sibling-secret"]:
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
    parser = argparse.ArgumentParser(description="Play the attacks and print attack, expected, observed.")
    parser.add_argument("--sandbox", choices=SANDBOX_MODES, default="auto")
    parser.add_argument("--lambda", dest="lambda_mode", choices=LAMBDA_MODES, default="stub")
    arguments = parser.parse_args()
    wrong = 0
    table = Table(title="Red team: what an agent tried")
    for column in ("row", "attack", "tries", "expected at the door", "observed", "past the policy", "effects"):
        table.add_column(column, overflow="fold")
    pool = MiniStackPool(2, sandbox=arguments.sandbox, lambda_mode=arguments.lambda_mode)
    try:
        pool.start()
        with tempfile.TemporaryDirectory() as folder:
            target = FiringRange(pool, Path(folder))
            for row, title in ROWS.items():
                attacks = [attack for attack in ATTACKS if attack.row == row]
                observed = [target.attempt(attack) for attack in attacks]
                effects = [effect for one in observed for effect in one.effects]
                bad = [
                    (attack, one)
                    for attack, one in zip(attacks, observed, strict=True)
                    if one.door != attack.expected or one.effects
                ]
                wrong += len(bad)
                table.add_row(
                    str(row),
                    title,
                    str(len(attacks)),
                    _tally(a.expected for a in attacks),
                    _tally(o.door for o in observed),
                    _tally(o.behind for o in observed if o.behind),
                    ", ".join(effects) or "none",
                    style="red" if bad else "",
                )
                for attack, one in bad:
                    print(f"row {row}: {attack.command[:150]!r}: {one}", file=sys.stderr)
            target.close()
        wrong += _play_pages(pool, table)
        inside = _play_inside(pool, table)
        wrong += inside[1]
        count = len(ATTACKS) + len(WEB_ATTACKS) + inside[0]
        Console(width=150).print(pool.containment(), table, f"{count} attacks, {wrong} not as expected")
    finally:
        pool.stop()
    return 1 if wrong else 0


def _play_pages(pool: MiniStackPool, table: Table) -> int:
    """Add the rows of web pages to the table; how many attacks did not end as expected."""
    target, wrong = WebRange(pool), 0
    try:
        for row, title in WEB_ROWS.items():
            attacks = [attack for attack in WEB_ATTACKS if attack.row == row]
            observed = [target.attempt(attack) for attack in attacks]
            bad = [
                (attack, *seen) for attack, seen in zip(attacks, observed, strict=True) if seen != (attack.expected, ())
            ]
            wrong += len(bad)
            effects = ", ".join(effect for _, found in observed for effect in found)
            table.add_row(
                str(row),
                title,
                str(len(attacks)),
                _tally(f"HTTP {a.expected}" for a in attacks),
                _tally(f"HTTP {status}" for status, _ in observed),
                "",
                effects or "none",
                style="red" if bad else "",
            )
            for attack, status, found in bad:
                print(
                    f"row {row}: {attack.method} {attack.to}{attack.path} {attack.headers}: {status} {found}",
                    file=sys.stderr,
                )
    finally:
        target.close()
    return wrong


def _play_inside(pool: MiniStackPool, table: Table) -> tuple[int, int]:
    """Add the rows of those who had won somewhere; how many attempts there were, and how many not as expected."""
    tried = list(play_inside(pool))
    for row, title in INSIDE_ROWS.items():
        attempts = [one for one in tried if one.row == row]
        effects = ", ".join(effect for one in attempts for effect in one.effects)
        table.add_row(
            str(row),
            title,
            str(len(attempts)),
            _tally(one.expected for one in attempts),
            _tally(one.observed for one in attempts),
            "",
            effects or "none",
            style="red" if not_as_expected(attempts) else "",
        )
    for one in not_as_expected(tried):
        print(f"row {one.row}: {one}", file=sys.stderr)
    return len(tried), len(not_as_expected(tried))


def _tally(words: Iterable[str]) -> str:
    return ", ".join(f"{word} {count}" for word, count in Counter(words).most_common())


if __name__ == "__main__":
    sys.exit(main())
