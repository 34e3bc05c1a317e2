"""Child process of a check: ``python -m realhf.env.check.checker DESCRIPTOR FOLDER``.

It runs the checks one after another and reports each. It may hang, exit or crash at any time,
because the environment's code runs in it; ``supervisor`` watches it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from realhf.api.environment import EnvironmentSpec
from realhf.env.check.calls import Caller, CallFailed, LoopWatchdog, UserCode, described, folders_of
from realhf.env.check.checks import CHECKS, Run, fingerprints, play_again
from realhf.env.check.demonstrations import Scripts, choose_scripts
from realhf.env.check.episodes import CheckHarness
from realhf.env.check.mutation import MUTANTS, Mutation, missing, scripts_of
from realhf.env.check.report import (
    ABOUT,
    DUMP,
    ENDED,
    EXIT,
    FAULT,
    FINDING,
    FINGERPRINTS,
    FOLDER,
    NOW,
    OK,
    ORDER,
    PASSPORT,
    SKIPPED,
    VERDICT,
    Finding,
    Findings,
    Order,
    quoted,
    reporter,
)
from realhf.env.check.task_sets import TaskSetJudge
from realhf.env.containment.sandbox import die_with_parent
from realhf.env.loader.load import build_environment, passport_file

T = TypeVar("T")
_LONG = 1000
"""Maximum length of a loading error in characters."""
_READ_SHARE = 0.5
"""Share of the time limit for making tasks that reading the demonstrations of a launch may take."""
_ONCE_S = 1.0
"""Seconds below which a block that occurs only once is a note and not a fault, such as importing a
module or reading a word list."""
_CHECK_S = 20.0
"""Time limit of one check in seconds; fewer episodes of a slow environment are played."""
_WOULD_WAIT = "calls block the event loop, so many instances at once would only wait for each other"


class Checker:
    """Runner of the checks that an order asks for; ``tell`` sends the events.

    ``code`` classifies files as the environment's or other code.
    """

    def __init__(self, order: Order, tell: Callable[..., None]) -> None:
        self._order = order
        self._tell = tell
        self._findings = Findings()
        self._check = ""
        self.code = UserCode(folders_of(order.reference))

    def run(self) -> None:
        """Load the environment and run its checks, or the mutants if the order asks for them."""
        spec = self._load()
        if spec is None:
            self._skip(
                (MUTANTS,) if self._order.mutants else ("tasks", *CHECKS), "it does not load"
            )
        elif self._order.mutants:
            self._mutate(spec)
        else:
            self._judge(spec)

    def add(self, finding: Finding) -> None:
        """Record and report a finding."""
        self._findings.add(finding)
        self._tell(FINDING, asdict(finding))

    @contextmanager
    def _checking(self, name: str, limit_s: float) -> Iterator[list[str]]:
        """Announce a check with its time limit; on exit, report its verdict with the remarks in the
        yielded list."""
        before = self._findings.hits
        remarks = list[str]()
        self._begin(name, limit_s)
        yield remarks
        self._tell(
            VERDICT,
            name,
            OK if self._findings.hits == before else FAULT,
            ", ".join(filter(None, remarks)),
        )

    def _begin(self, name: str, limit_s: float) -> None:
        self._check = name
        self._tell(NOW, name, name, "", limit_s)

    def _skip(self, names: Iterable[str], why: str) -> None:
        for name in names:
            self._tell(VERDICT, name, SKIPPED, why)

    def _load(self) -> EnvironmentSpec | None:
        with self._checking("load", self._order.slow_s) as remarks:
            try:
                spec = build_environment(self._order.reference, self._order.options)
            except (Exception, SystemExit) as error:
                what = (
                    quoted(error, _LONG)
                    if isinstance(error, ValueError)
                    else f"it raises {described(error)}"
                )
                self.add(Finding("load", what, where=self.code.of_exception(error)))
                return None
            known = {
                "name": spec.name,
                "deterministic": spec.deterministic,
                "concurrency": spec.concurrency,
            }
            known |= {
                "scripted": spec.demonstrate is not None,
                "service": spec.launch.module if spec.launch else "",
            }
            # The folder of ``module:Name`` holds the environment's code, even if the module is an
            # installed package.
            module = sys.modules.get(self._order.reference.rpartition(":")[0])
            if file := getattr(module, "__file__", None):
                known[FOLDER] = str(Path(file).parent)
                self.code.add(known[FOLDER])
            self._tell(ABOUT, known)
            remarks.append(spec.name)
        return spec

    def _judge(self, spec: EnvironmentSpec) -> None:
        judge = TaskSetJudge(spec, self.code, self.add)
        with self._checking("tasks", self._order.slow_s) as remarks:
            judge.judge()
            self._tell(ABOUT, {"groups": judge.groups})
            remarks.append(judge.remark())
        tasks = judge.chosen(self._order.most_tasks)
        if self._lacks_service(spec, CHECKS):
            return
        if not tasks:
            self._skip(CHECKS, "there is no task to play")
            return
        run = Run(
            self._create_harness(spec, self.add),
            self._order,
            tasks,
            judge.twins,
            self._scripts(spec),
        )
        # The watchdog supports this event loop, whichever one the environment's modules ask for.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self._play_again(run) if self._order.again else self._play(run))

    def _mutate(self, spec: EnvironmentSpec) -> None:
        """Play mutants of demonstrations and report the results."""
        order = self._order
        nothing = missing(spec)
        if nothing is None and self._lacks_service(spec, (MUTANTS,)):
            return
        self._begin(MUTANTS, order.slow_s)
        scripts = (
            self.add(nothing) if nothing else self._solver(lambda: scripts_of(spec, order.seed))
        )
        if scripts is None:
            self._tell(VERDICT, MUTANTS, FAULT, "")
            return
        # Notes are left out here, because the check without mutants reports them.
        harness = self._create_harness(
            spec, lambda finding: self.add(finding) if finding.is_fault else None
        )
        mutation = Mutation(harness, order.mutants, order.seed, self.add)
        begin = lambda what: self._begin(what, order.slow_s)
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(
                    mutation.play(scripts, begin, lambda *verdict: self._tell(VERDICT, *verdict))
                )
        except CallFailed:
            self._skip((MUTANTS,), "an answer did not come")
        else:
            self._tell(ABOUT, {PASSPORT: str(passport_file(order.reference))})
        self._tell(ABOUT, {MUTANTS: asdict(mutation.outcome)})

    def _lacks_service(self, spec: EnvironmentSpec, names: Iterable[str]) -> bool:
        if spec.launch is None or self._order.address:
            return False
        self._skip(
            names,
            f"it is played on the service {spec.launch.module}; start it and give its --address",
        )
        return True

    def _create_harness(
        self, spec: EnvironmentSpec, add: Callable[[Finding], None]
    ) -> CheckHarness:
        limit_s = self._order.timeout_s
        caller = Caller(
            self.code, limit_s, lambda call, task: self._tell(NOW, self._check, call, task, limit_s)
        )
        return CheckHarness(spec, caller, add, self._order.address)

    def _scripts(self, spec: EnvironmentSpec) -> Scripts:
        """Choose the demonstrations to play; none if there is no solver or it raises."""
        demonstrate = spec.demonstrate
        if demonstrate is None:
            return Scripts()
        self._tell(NOW, self._check, "demonstrate", "", self._order.slow_s)
        scripts = (
            self._solver(lambda: choose_scripts(demonstrate, _READ_SHARE * self._order.slow_s))
            or Scripts()
        )
        if not scripts.played and not self._findings.faults("demonstrations"):
            self.add(
                Finding(
                    "demonstrations", "demonstrate yields nothing", "Yield a script per template"
                )
            )
        return scripts

    def _solver(self, ask: Callable[[], T]) -> T | None:
        """Call the environment's solver; report an error as a fault and return None."""
        try:
            return ask()
        except (Exception, SystemExit) as error:
            what = f"demonstrate raised {described(error)}"
            mend = "It yields a Demonstration for every template, whatever the seed"
            self.add(Finding("demonstrations", what, mend, self.code.of_exception(error)))
        return None

    async def _play_again(self, run: Run) -> None:
        run.harness.begin(_CHECK_S)
        with suppress(CallFailed):  # already reported as a finding
            self._tell(ABOUT, {FINGERPRINTS: fingerprints(await play_again(run))})

    async def _play(self, run: Run) -> None:
        watchdog = LoopWatchdog(self.code)
        watchdog.start()
        why = ""
        for name, check in CHECKS.items():
            blocked = name == "instances" and self._findings.faults("event loop")
            if why or blocked:
                self._skip((name,), why or _WOULD_WAIT)
                continue
            run.harness.begin(_CHECK_S)
            with self._checking(name, self._order.timeout_s) as remarks:
                try:
                    remarks.append(await check(run))
                    remarks.append(f"cut short after {_CHECK_S:g} s" if run.harness.was_cut else "")
                except CallFailed as error:
                    why = (
                        f"an answer did not come in {name!r}"
                        if error.hung
                        else f"{name!r} could not be played"
                    )
                self._judge_blocks(watchdog)
            if not run.playable:
                why = why or "no task could be opened"
        watchdog.stop()
        self._tell(
            ABOUT,
            {FINGERPRINTS: fingerprints(run.transcripts) if run.harness.spec.deterministic else {}},
        )
        self._tell(ABOUT, {"tools": [*run.harness.tools.values()]})

    def _judge_blocks(self, watchdog: LoopWatchdog) -> None:
        blocks: dict[str, list[float]] = {}
        for block in watchdog.take():
            blocks.setdefault(block.where, []).append(block.seconds)
        for where, seconds in blocks.items():
            again = len(seconds) > 1 or seconds[0] > _ONCE_S
            what = (
                f"it blocks the event loop for {1000 * max(seconds):.0f} ms, and no other episode "
                f"goes on meanwhile"
            )
            mend = "Await it, or hand it to a thread (asyncio.to_thread)"
            mend = mend if again else f"{mend}, if it happens more than once"
            times = len(seconds)
            self.add(
                Finding("event loop", what, mend, where, is_fault=again, times=times, kind="blocks")
            )


def main(argv: Sequence[str]) -> int:
    """Run the checks of the order and report the results. Return the exit status."""
    die_with_parent()
    descriptor = int(argv[0])
    folder = Path(argv[1])
    order = Order(**json.loads((folder / ORDER).read_text(encoding="utf-8")))
    os.set_inheritable(descriptor, False)
    tell = reporter(descriptor)
    # The file stays open for the life of the process, because faulthandler writes a crash to it.
    file = open(folder / DUMP, "w")  # noqa: SIM115
    faulthandler.enable(file, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    checker = Checker(order, tell)
    leave = os._exit

    def exits(status: int) -> Any:
        """Report the line of the caller, and exit."""
        tell(ABOUT, {EXIT: [status, checker.code.of_frame(sys._getframe(1))]})
        leave(status)

    os._exit = exits
    try:
        checker.run()
    except BaseException as error:
        what = f"the check itself failed: {quoted(traceback.format_exception_only(error)[-1])}"
        checker.add(Finding("check", what, "Report this, with the environment"))
    tell(ABOUT, {ENDED: True})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
