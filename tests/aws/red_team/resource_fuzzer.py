"""An adversary that uses everything up: each number, list, map and text of every allowed operation
at its extreme.

The cases come from botocore's models and the policy's table: an operation with its required
members, and one member, however deep, at an extreme, in one of the spellings that the CLI knows.
After each the simulator must be within its memory, the command within its time, and the slot must
play: at once, and for the next lease. A simulator may be lost, which ends the agent's episode; a
slot never. ``python -m tests.aws.red_team.resource_fuzzer --cases 4000`` prints what it tried, the
largest, the slowest and what was lost.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from botocore import xform_name
from botocore.model import MapShape, Shape, StructureShape
from rich.console import Console
from rich.progress import track

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.cli.executor import OutputLimits, SimulatorLost
from realhf.aws.cli.state_client import StateCallError
from realhf.aws.simulator.ministack_process import SIMULATOR_MEMORY_MB
from realhf.aws.simulator.pool import MiniStackPool, Slot
from tests.aws.red_team.command_grammar import _input_shape

LIMITS = OutputLimits(timeout_s=6.0)
MAX_SECONDS = LIMITS.timeout_s + 24.0
"""A command that timed out is followed by a question to the simulator and by its replacement, on a
busy machine."""
LEASE_EVERY = 25
_MAX_DEPTH = 4
_THING = "own-thing"
_ROLE = f"arn:aws:iam::000000000000:role/{_THING}"
_NUMBERS = {"integer", "long", "float", "double"}
_LARGE_NUMBERS = (10**5, 3 * 10**6, 2**31 - 1, 2**63 - 1)
_MANY = 5000
_LONG_TEXTS = (
    "x" * 200_000,
    "*" * 30 + "a" * 30_000,
    "(a+)+$" * 2000,
    "[" * 50_000,
    "{" * 2000 + "}" * 2000,
    "$." + "..a" * 20_000,
    "0.0.0.0/0",
    "::/0",
    "1-1000000000",
    "9" * 4000,
    "arn:aws:" + ":" * 50_000,
    "&a " + "\n".join(f"k{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 400)),
    "<a>" * 20_000,
    "%" * 60_000,
)
_WORLD: Sequence[tuple[str, str, dict[str, Any]]] = (
    ("s3", "CreateBucket", {"Bucket": _THING}),
    ("s3", "PutObject", {"Bucket": _THING, "Key": _THING, "Body": b"x"}),
    ("sqs", "CreateQueue", {"QueueName": _THING}),
    ("sns", "CreateTopic", {"Name": _THING}),
    ("kinesis", "CreateStream", {"StreamName": _THING, "ShardCount": 1}),
    ("logs", "CreateLogGroup", {"logGroupName": _THING}),
    ("logs", "CreateLogStream", {"logGroupName": _THING, "logStreamName": _THING}),
    ("iam", "CreateRole", {"RoleName": _THING, "AssumeRolePolicyDocument": "{}"}),
    ("iam", "CreateUser", {"UserName": _THING}),
    ("ssm", "PutParameter", {"Name": _THING, "Value": "x", "Type": "String"}),
    ("ecs", "CreateCluster", {"clusterName": _THING}),
    ("events", "PutRule", {"Name": _THING, "EventPattern": '{"source": ["a"]}'}),
    ("secretsmanager", "CreateSecret", {"Name": _THING, "SecretString": "x"}),
    (
        "dynamodb",
        "CreateTable",
        {
            "TableName": _THING,
            "BillingMode": "PAY_PER_REQUEST",
            "AttributeDefinitions": [{"AttributeName": "k", "AttributeType": "S"}],
            "KeySchema": [{"AttributeName": "k", "KeyType": "HASH"}],
        },
    ),
)


@dataclass(frozen=True)
class Case:
    """``member``: what is at its extreme; ``files``: what lies in the session's folder, since a
    command line is short."""

    member: str
    command: str
    files: dict[str, str] = field(default_factory=dict)


class Cases:
    """Draws cases over ``services`` (CLI names; None: all of the table), each number of the models
    before any second draw of another kind."""

    def __init__(self, seed: int, services: Iterable[str] | None = None) -> None:
        self._random = random.Random(seed)
        chosen = sorted(ALLOWED) if services is None else sorted(services)
        self.members: list[tuple[str, str, tuple[str, ...], Shape]] = []
        for service in chosen:
            for operation in sorted(ALLOWED[service]) if service != "s3" else ():
                shape = _input_shape(service, operation)
                if shape is not None:
                    found = [
                        (service, operation, path, leaf)
                        for path, leaf in _places(shape, (), frozenset())
                    ]
                    self.members += self._random.sample(found, min(len(found), 60))
        self._random.shuffle(self.members)

    def __iter__(self) -> Iterator[Case]:
        while self.members:
            for service, operation, path, leaf in self.members:
                yield self._case(service, operation, path, leaf)

    def _case(self, service: str, operation: str, path: tuple[str, ...], leaf: Shape) -> Case:
        shape = _input_shape(service, operation)
        assert shape is not None
        params = {
            name: self._plain(name, shape.members[name], 0) for name in shape.required_members
        }
        _put(
            params,
            path,
            self._extreme(leaf),
            lambda name, inner: self._plain(name, inner, 0),
            shape,
        )
        words = [service, operation]
        files = {}
        for number, (name, value) in enumerate(params.items()):
            option = f"--{xform_name(name, '-')}"
            if isinstance(value, bool):
                words.append(option if value else option.replace("--", "--no-", 1))
                continue
            text = value if isinstance(value, str) else json.dumps(value)
            if len(text) > 1000:
                files[f"value{number}"] = text
                words += [option, f"file://value{number}"]
            elif isinstance(value, dict) and self._random.random() < 0.4:
                words += [option, _shorthand(value)]
            else:
                words += [f"{option}={text}"] if self._random.random() < 0.3 else [option, text]
        return Case(f"{service} {operation} {'.'.join(path)}", f"aws {shlex.join(words)}", files)

    def _extreme(self, shape: Shape) -> Any:
        if shape.type_name in _NUMBERS:
            return self._random.choice(_LARGE_NUMBERS)
        if shape.type_name == "list":
            return [self._plain(f"n{number}", shape.member, 0) for number in range(_MANY)]  # type: ignore[attr-defined]
        if isinstance(shape, MapShape):
            return {f"k{number}": self._plain("v", shape.value, 0) for number in range(_MANY)}
        return self._random.choice(_LONG_TEXTS)

    def _plain(self, name: str, shape: Shape, depth: int) -> Any:
        kind = shape.type_name
        if isinstance(shape, StructureShape):
            wanted = shape.required_members if depth < _MAX_DEPTH else ()
            return {inner: self._plain(inner, shape.members[inner], depth + 1) for inner in wanted}
        if isinstance(shape, MapShape):
            return {}
        if kind == "list":
            return [self._plain(name, shape.member, depth + 1)] if depth < _MAX_DEPTH else []  # type: ignore[attr-defined]
        if kind in _NUMBERS:
            return max(1, int(shape.metadata.get("min", 1)))
        if kind == "boolean":
            return True
        if kind == "timestamp":
            return "2026-01-01T00:00:00Z"
        if known := getattr(shape, "enum", None):
            return known[0]
        return _plain_text(name)


def _plain_text(name: str) -> str:
    lower = name.lower()
    for part, value in (
        ("queueurl", f"http://localhost:4566/000000000000/{_THING}"),
        ("topicarn", f"arn:aws:sns:us-east-1:000000000000:{_THING}"),
        ("cidr", "10.0.0.0/16"),
        ("arn", _ROLE),
        ("imageid", "ami-12345678"),
        ("policy", "{}"),
        ("document", "{}"),
        ("definition", "{}"),
        ("template", "{}"),
    ):
        if part in lower:
            return value
    return _THING


def _places(
    shape: Shape, path: tuple[str, ...], seen: frozenset[str]
) -> Iterator[tuple[tuple[str, ...], Shape]]:
    """Members that have an extreme, by their paths; what holds itself is entered once."""
    if shape.name in seen or len(path) > _MAX_DEPTH:
        return
    if isinstance(shape, StructureShape):
        for name, member in shape.members.items():
            yield from _places(member, (*path, name), seen | {shape.name})
        return
    if shape.type_name == "list":
        yield path, shape
        yield from _places(shape.member, (*path, "[]"), seen | {shape.name})  # type: ignore[attr-defined]
    elif isinstance(shape, MapShape):
        yield path, shape
        yield from _places(shape.value, (*path, "{}"), seen | {shape.name})
    elif shape.type_name in _NUMBERS or (
        shape.type_name == "string" and not getattr(shape, "enum", None)
    ):
        yield path, shape


def _put(
    into: dict[str, Any],
    path: Sequence[str],
    value: Any,
    plain: Callable[[str, Shape], Any],
    shape: Shape,
) -> None:
    """Put a value at a path, with what its surroundings require."""
    place: Any = into
    for position, name in enumerate(path):
        last = position == len(path) - 1
        if name == "[]":
            shape, key = shape.member, 0  # type: ignore[attr-defined]
            if not place:
                place.append(None)
        elif name == "{}":
            shape, key = shape.value, "key"  # type: ignore[attr-defined]
        else:
            shape, key = shape.members[name], name  # type: ignore[attr-defined]
        if last:
            place[key] = value
        else:
            held = place[key] if (key == 0 or key in place) else None
            if not isinstance(held, (dict, list)):
                held = plain(name, shape)
                place[key] = held
            place = held


def _shorthand(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}={_shorthand(item)}" for key, item in value.items())
    if isinstance(value, list):
        return f"[{','.join(_shorthand(item) for item in value)}]"
    return str(value)


def _peak_bytes(pid: int) -> int:
    """Most memory that a process had at once, 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next(
        (int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")), 0
    )


@dataclass
class Tally:
    """What came of all cases. ``reached``: sent a request; ``simulators_lost``: cases that were the
    end of one; ``slots_lost``: cases after which a slot did not play; ``breaches``: those and what
    went beyond a bound."""

    cases: int = 0
    reached: int = 0
    largest_mb: float = 0.0
    slowest_s: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    simulators_lost: list[str] = field(default_factory=list)
    slots_lost: int = 0
    breaches: list[str] = field(default_factory=list)
    large: list[tuple[float, str]] = field(default_factory=list)
    slow: list[tuple[float, str]] = field(default_factory=list)


class ResourceFuzzer:
    """Plays cases in one session after the other of a ``pool``."""

    def __init__(self, pool: MiniStackPool) -> None:
        self._pool = pool
        self.tally = Tally()
        self._slot = self._next_lease()

    def play(self, cases: Iterable[Case]) -> Tally:
        """Try the cases."""
        for case in cases:
            self.tally.cases += 1
            if self.tally.cases % LEASE_EVERY == 0:
                self._change_lease(case)
            self._attempt(case)
        return self.tally

    def close(self) -> None:
        self._give_back(self._slot)

    def _attempt(self, case: Case) -> None:
        slot = self._slot
        tally = self.tally
        for name, text in case.files.items():
            slot.files.put(name, text.encode()[: 1 << 20])
        before = _peak_bytes(slot.ministack.pid)
        began = time.monotonic()
        lost = False
        try:
            result = slot.executor.run(case.command)
        except SimulatorLost:
            lost = True
            tally.simulators_lost.append(case.command)
        else:
            lost = result.lost
            tally.reached += bool(result.requests)
            if result.refusal is not None:
                tally.refused[result.refusal] += 1
        seconds = time.monotonic() - began
        held = _peak_bytes(slot.ministack.pid)
        self._note(case, seconds, before, held)
        if lost or held - before > 32 << 20 or slot.ministack.is_worn_out():
            self._change_lease(case)
        else:
            slot.files.clear()

    def _note(self, case: Case, seconds: float, before: int, held: int) -> None:
        tally = self.tally
        named = f"{case.member}: {case.command[:300]}"
        tally.slowest_s = max(tally.slowest_s, seconds)
        tally.largest_mb = max(tally.largest_mb, held / (1 << 20))
        for kept, figure in (
            (tally.slow, seconds),
            (tally.large, max(0, held - before) / (1 << 20)),
        ):
            heapq.heappush(kept, (figure, named))
            while len(kept) > 12:
                heapq.heappop(kept)
        if seconds > MAX_SECONDS:
            tally.breaches.append(f"{seconds:.1f} s: {named}")
        if held > SIMULATOR_MEMORY_MB << 20:
            tally.breaches.append(f"{held >> 20} MB: {named}")

    def _change_lease(self, case: Case) -> None:
        """Give the slot back and take the next, which must play."""
        try:
            self._give_back(self._slot)
            self._slot = self._next_lease()
        except (OSError, RuntimeError, StateCallError, AssertionError) as error:
            self.tally.slots_lost += 1
            self.tally.breaches.append(
                f"a slot was lost ({error}) at or before {case.member}: {case.command[:300]}"
            )
            self._slot = self._next_lease()

    def _give_back(self, slot: Slot) -> None:
        slot.executor._limits = OutputLimits()
        self._pool.release(slot)

    def _next_lease(self) -> Slot:
        slot = self._pool.acquire()
        slot.reset(1)
        made = slot.executor.run("aws s3 mb s3://plays")
        assert made.success, f"the next lease does not play: {made.stderr}"
        slot.reset(1)
        slot.executor._limits = LIMITS
        for service, operation, params in _WORLD:
            slot.state.call(service, operation, params)
        return slot


def main() -> int:
    """Play the cases; 0 when nothing went beyond its bounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=4000)
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="default: the time, printed"
    )
    parser.add_argument("--services", nargs="*", help="of the table; default: all")
    parser.add_argument("--sandbox", default="auto")
    options = parser.parse_args()
    cases = Cases(options.seed, options.services)
    # what was found is told also when the time is over
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"seed {options.seed}; {len(cases.members)} members of the models have an extreme")
    pool = MiniStackPool(1, sandbox=options.sandbox)
    began = time.monotonic()
    try:
        pool.start()
        fuzzer = ResourceFuzzer(pool)
        numbered = zip(track(range(options.cases), "cases"), cases, strict=False)
        try:
            fuzzer.play(case for _, case in numbered)
        except KeyboardInterrupt:
            print("stopped early")
    finally:
        pool.stop()
    _report(fuzzer.tally, time.monotonic() - began)
    return 1 if fuzzer.tally.breaches else 0


def _report(tally: Tally, seconds: float) -> None:
    console = Console(width=150)
    for title, kept, unit in (("slowest", tally.slow, "s"), ("largest growth", tally.large, "MB")):
        for figure, named in sorted(kept, reverse=True):
            console.print(f"{title}: {figure:.1f} {unit}  {named}", markup=False)
    for command in tally.simulators_lost:
        console.print(f"the simulator was lost over {command[:300]!r}", markup=False)
    for breach in tally.breaches:
        console.print(breach, style="red", markup=False)
    refused = (
        ", ".join(f"{rule} {count}" for rule, count in tally.refused.most_common()) or "nothing"
    )
    console.print(
        f"{tally.cases} commands in {seconds:.0f} s, {tally.reached} of them sent requests; "
        f"refused: {refused}\n"
        f"largest memory {tally.largest_mb:.0f} MB of {SIMULATOR_MEMORY_MB}, slowest "
        f"{tally.slowest_s:.1f} s, "
        f"simulators lost {len(tally.simulators_lost)}, slots lost {tally.slots_lost}; "
        f"{len(tally.breaches)} breaches",
        markup=False,
    )


if __name__ == "__main__":
    sys.exit(main())
