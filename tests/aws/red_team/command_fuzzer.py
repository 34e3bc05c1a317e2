"""An adversary that is no list: commands of ``command_grammar``, judged from outside by what must
stay true.

Whatever a command says, afterwards (1) every request that the simulator parsed is one that the
tracker recorded, (2) nobody called the sibling's simulator, and its state is what it was, (3) the
simulators' module switches are what they were, (4) a thing that only the environment knows is still
in the session's world, and (5) no file, process or connection was made and nothing of the host came
out. Each command is tried at the agent's door and, where that refuses it, at the worker itself.
``python -m tests.aws.red_team.command_fuzzer --commands 20000`` prints what it tried.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from realhf.aws.cli.command_text import read_command
from realhf.aws.cli.executor import CommandResult, SentRequest, SimulatorLost
from realhf.aws.simulator.pool import MiniStackPool, Slot
from tests.aws.red_team.command_grammar import Command, CommandGrammar
from tests.aws.red_team.firing_range import FiringRange

RESET_EVERY = 40
_FILLED_IN_LATER = frozenset({"ministack.app._VERSION"})
"""Module values that MiniStack looks up when they are first needed, always the same."""
_COUNTS = re.compile(r"\.services\..*(_counter|_seq|_sequence)$")
"""Numbers that a service counts up when its own operations are called; a reset puts them back."""
_OWN_FIGURES = re.compile(r"/proc/\d+/statm")
"""Read by the simulator about its own memory."""
_CANARY = "canary-that-no-command-names-5c1e"


@dataclass
class Tally:
    """What came of all commands: ``reached`` counts those that sent a request, ``refused`` by rule,
    ``parsed`` the requests, ``bytes_refused`` what the simulator took for no request, by its
    reason; ``lost`` are the commands after which the simulator was gone."""

    commands: int = 0
    reached: int = 0
    lost: list[str] = field(default_factory=list)
    parsed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    bytes_refused: Counter[str] = field(default_factory=Counter)
    breaches: list[str] = field(default_factory=list)


class Watch:
    """Looks at two simulators and their workers from outside."""

    def __init__(self, target: FiringRange) -> None:
        self._target = target
        self._seen = self._count(target.slot)
        self._sibling_seen = self._count(target.sibling)
        self.renew()

    def renew(self) -> None:
        """Empty the session's world and take down what is to stay true from here on."""
        self._target.slot.reset()
        for slot in (self._target.slot, self._target.sibling):
            parameter = {"Name": _CANARY, "Value": "x", "Type": "String", "Overwrite": True}
            slot.state.call("ssm", "PutParameter", parameter)
        self._target.slot.state.call("s3", "CreateBucket", {"Bucket": "survivor"})
        self._target.slot.executor.start()
        self._files = {slot.index: _open_files(slot) for slot in self._slots()}
        self._switches = {slot.index: slot.ministack.switches() for slot in self._slots()}
        self._seen = self._count(self._target.slot)

    def requests(self, results: Iterable[CommandResult], tally: Tally) -> Iterator[str]:
        """Breaches in what was sent: more, or something else, than the results tell."""
        report = self._target.slot.ministack.requests(self._seen)
        self._seen = report["count"]
        tally.bytes_refused = Counter(report["refused"])
        parsed = [request for request in report["requests"] if request["entrance"] == "port"]
        tally.parsed += len(parsed)
        results = list(results)
        if any(result.timed_out for result in results):
            return  # the worker was killed before it could tell
        told = [request for result in results for request in result.requests]
        for request in parsed:
            match = next((one for one in told if _is_of(request, one)), None)
            if match is None:
                yield f"the simulator took a request that was not recorded: {request}"
            else:
                told.remove(match)

    def world(self) -> Iterator[str]:
        """Breaches in what must not have changed."""
        for slot in self._slots():
            try:
                slot.state.call("ssm", "GetParameter", {"Name": _CANARY})
            except Exception as error:
                yield f"the world of slot {slot.index} was reset: {error}"
            before = self._switches[slot.index]
            after = slot.ministack.switches()
            changed = {
                name
                for name in after
                if before.get(name) != after[name] and not _COUNTS.search(name)
            }
            changed -= _FILLED_IN_LATER
            if changed:
                yield (
                    f"module switches of slot {slot.index} changed: "
                    f"{[(name, after[name]) for name in changed]}"
                )
            if _open_files(slot) - self._files[slot.index]:
                yield f"files were opened: {sorted(_open_files(slot) - self._files[slot.index])}"
        # Only what is new: lists of all requests take a simulator that lives this long over its
        # bound of CPU.
        report = self._target.sibling.ministack.requests(self._sibling_seen)
        self._sibling_seen = report["count"]
        if any(request["entrance"] == "port" for request in report["requests"]):
            yield "the sibling's simulator was called"

    def _slots(self) -> tuple[Slot, Slot]:
        return self._target.slot, self._target.sibling

    def _count(self, slot: Slot) -> int:
        return slot.ministack.requests()["count"]


def _is_of(parsed: dict[str, Any], told: SentRequest) -> bool:
    """Whether the tracker's record is of this request; a protocol that names no operation is known
    by its path."""
    return not parsed["operation"] or parsed["operation"] == told.operation


def _open_files(slot: Slot) -> set[str]:
    """Regular files that the simulator and the worker of a slot hold open, but for the slot's own
    folder."""
    found = set()
    for pid in (slot.worker_pid, slot.ministack.pid):
        folder = Path(f"/proc/{pid}/fd")
        for entry in folder.iterdir() if folder.exists() else ():
            try:
                path = os.readlink(entry)
            except OSError:
                continue
            allowed = path.startswith(
                ("/dev/null", os.path.realpath(slot.files.path))
            ) or _OWN_FIGURES.match(path)
            if path.startswith("/") and not allowed:
                found.add(path)
    return found


class Fuzzer:
    """Plays commands in one session and watches; ``tally`` is what came of it."""

    def __init__(
        self, target: FiringRange, seed: int, services: Iterable[str] | None = None
    ) -> None:
        self._target = target
        self._watch = Watch(target)
        sibling = target.sibling.endpoint.removeprefix("http://")
        places = {
            "secret": str(target.secret),
            "marker": str(target.marker),
            "url": target.url,
            "sibling": sibling,
        }
        self._grammar = CommandGrammar(seed, places, services)
        self.tally = Tally()

    def play(self, count: int, progress: Callable[[Iterable[int]], Iterable[int]] = iter) -> Tally:
        """Try ``count`` commands; every breach is told with the command that came before it."""
        for number in progress(range(count)):
            command = self._grammar.draw()
            found = list(self._attempt(command))
            self.tally.breaches += [f"{breach}\n    after {command.line!r}" for breach in found]
            if found or number % RESET_EVERY == RESET_EVERY - 1:
                self._watch.renew()
        return self.tally

    def _attempt(self, command: Command) -> Iterator[str]:
        slot = self._target.slot
        tally = self.tally
        tally.commands += 1
        lost = len(tally.lost)
        results = [self._run(command, lambda: slot.executor.run(read_command(command.line)))]
        if results[0].refusal is not None:
            tally.refused[results[0].refusal] += 1
            if not any("\0" in word or _unpaired(word) for word in command.words):
                results.append(self._run(command, lambda: self._target._past_policy(command.words)))
        tally.reached += any(result.requests for result in results)
        if len(tally.lost) > lost:
            yield from self._target.effects_outside(
                [f"{result.stdout}\n{result.stderr}" for result in results]
            )
            self._watch.renew()  # the slot has begun anew, so what was taken down of it is not true any longer
            return
        yield from self._watch.requests(results, tally)
        yield from self._target.effects_outside(
            [f"{result.stdout}\n{result.stderr}" for result in results]
        )
        if tally.commands % (RESET_EVERY // 4) == 0:
            yield from self._watch.world()

    def _run(self, command: Command, run: Callable[[], CommandResult]) -> CommandResult:
        try:
            return run()
        except SimulatorLost as error:
            self.tally.lost.append(command.line)
            return CommandResult(exit_code=255, stdout="", stderr=str(error))


def _unpaired(word: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in word)


def main() -> int:
    """Play until the commands or the minutes are over; 0 when nothing was breached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commands", type=int, default=20_000)
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="default: the time, printed"
    )
    parser.add_argument("--sandbox", default="auto")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    pool = MiniStackPool(2, sandbox=options.sandbox)
    started = time.monotonic()
    try:
        pool.start()
        with tempfile.TemporaryDirectory() as folder:
            target = FiringRange(pool, Path(folder))
            fuzzer = Fuzzer(target, options.seed)
            tally = fuzzer.tally
            try:
                fuzzer.play(
                    options.commands,
                    lambda numbers: track(numbers, "commands", total=options.commands),
                )
            except KeyboardInterrupt:
                print("stopped early")
            target.close()
    finally:
        pool.stop()
    _report(tally, time.monotonic() - started)
    return 1 if tally.breaches else 0


def _report(tally: Tally, seconds: float) -> None:
    console = Console(width=150)
    for breach in tally.breaches:
        console.print(breach, style="red", markup=False)
    for line in tally.lost:
        console.print(f"the simulator was lost after {line!r}", markup=False)
    refused = ", ".join(f"{rule} {count}" for rule, count in tally.refused.most_common())
    bytes_refused = (
        ", ".join(f"{reason} {count}" for reason, count in tally.bytes_refused.most_common())
        or "nothing"
    )
    console.print(
        f"refused at the door: {refused}\nrefused by the simulator: {bytes_refused}", markup=False
    )
    console.print(
        f"{tally.commands} commands in {seconds:.0f} s, {tally.reached} of them sent requests, "
        f"{tally.parsed} parsed; "
        f"simulator or worker lost {len(tally.lost)} times; {len(tally.breaches)} breaches",
        markup=False,
    )


if __name__ == "__main__":
    sys.exit(main())
