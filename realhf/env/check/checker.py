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
from realhf.env.check.calls import (
    Caller,
    CallFailed,
    LoopWatchdog,
    UserCode,
    describe_error,
    environment_folders,
)
from realhf.env.check.checks import (
    CHECKS,
    EXAMINATIONS,
    CheckRun,
    check_examinations,
    fingerprints,
    play_again,
)
from realhf.env.check.demonstrations import DemonstrationChoice, choose_demonstrations
from realhf.env.check.episodes import CheckHarness
from realhf.env.check.mutation import MUTANTS, Mutation, collect_solutions, find_obstacle
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
    build_reporter,
    quote,
)
from realhf.env.check.task_sets import TaskSetChecker
from realhf.env.containment.sandbox import die_with_parent
from realhf.env.loader.load import build_environment, passport_file
from realhf.env.loader.reference import split_scheme

T = TypeVar("T")
_MAX_ERROR_CHARS = 1000
"""Maximum length of a loading error in characters."""
_READ_SHARE = 0.5
"""Part of the time limit for making tasks that may be spent on reading a launch's
demonstrations."""
_ONCE_S = 1.0
"""Seconds; a shorter block of the event loop that occurs only once, such as importing a module or
reading a word list, is a note instead of a fault."""
_CHECK_S = 20.0
"""Time limit of one check in seconds. If an environment is slow, fewer episodes are played."""
_WOULD_WAIT = "calls block the event loop, so many instances at once would only wait for each other"


class Checker:
    """Runner of the checks that an order asks for. ``report`` sends the events.

    ``code`` tells files of the environment from other code.
    """

    def __init__(self, order: Order, report: Callable[..., None]) -> None:
        self._order = order
        self._report = report
        self._findings = Findings()
        self._check = ""
        self.code = UserCode(environment_folders(order.reference))

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
            self._run_checks(spec)

    def add(self, finding: Finding) -> None:
        """Record and report a finding."""
        self._findings.add(finding)
        self._report(FINDING, asdict(finding))

    @contextmanager
    def _announced_check(self, name: str, limit_s: float) -> Iterator[list[str]]:
        """Context manager that announces a check with its time limit. On exit it reports the
        check's verdict, with the remarks that were added to the yielded list."""
        before = self._findings.hits
        remarks = list[str]()
        self._announce(name, limit_s)
        yield remarks
        self._report(
            VERDICT,
            name,
            OK if self._findings.hits == before else FAULT,
            ", ".join(filter(None, remarks)),
        )

    def _announce(self, name: str, limit_s: float) -> None:
        self._check = name
        self._report(NOW, name, name, "", limit_s)

    def _skip(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self._report(VERDICT, name, SKIPPED, reason)

    def _load(self) -> EnvironmentSpec | None:
        with self._announced_check("load", self._order.slow_s) as remarks:
            try:
                spec = build_environment(self._order.reference, self._order.options)
            except (Exception, SystemExit) as error:
                problem = (
                    quote(error, _MAX_ERROR_CHARS)
                    if isinstance(error, ValueError)
                    else f"it raises {describe_error(error)}"
                )
                self.add(Finding("load", problem, where=self.code.find_in_exception(error)))
                return None
            properties = {
                "name": spec.name,
                "deterministic": spec.deterministic,
                "concurrency": spec.concurrency,
            }
            properties |= {
                "scripted": spec.demonstrate is not None,
                "service": spec.launch.module if spec.launch else "",
            }
            # The folder of ``module:Name`` holds the environment's code, even if the module is an
            # installed package.
            place = self._order.reference.rpartition(":")[0]
            module = None if split_scheme(self._order.reference) else sys.modules.get(place)
            if file := getattr(module, "__file__", None):
                properties[FOLDER] = str(Path(file).parent)
                self.code.add(properties[FOLDER])
            self._report(ABOUT, properties)
            remarks.append(spec.name)
        return spec

    def _run_checks(self, spec: EnvironmentSpec) -> None:
        task_sets = TaskSetChecker(spec, self.code, self.add)
        with self._announced_check("tasks", self._order.slow_s) as remarks:
            task_sets.check()
            self._report(ABOUT, {"groups": task_sets.groups})
            remarks.append(task_sets.summary())
        tasks = task_sets.choose_tasks(self._order.most_tasks)
        if self._lacks_service(spec, CHECKS):
            return
        if not tasks:
            self._skip(CHECKS, "there is no task to play")
            return
        run = CheckRun(
            self._create_harness(spec, self.add),
            self._order,
            tasks,
            task_sets.twins,
            self._choose_demonstrations(spec),
        )
        # The watchdog needs this event loop, whichever one the environment's modules have set.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self._play_again(run) if self._order.again else self._play_checks(run))

    def _mutate(self, spec: EnvironmentSpec) -> None:
        """Play mutants of demonstrations and report the results."""
        order = self._order
        obstacle = find_obstacle(spec)
        if obstacle is None and self._lacks_service(spec, (MUTANTS,)):
            return
        self._announce(MUTANTS, order.slow_s)
        scripts = (
            self.add(obstacle)
            if obstacle
            else self._call_solver(lambda: collect_solutions(spec, order.seed))
        )
        if scripts is None:
            self._report(VERDICT, MUTANTS, FAULT, "")
            return
        # Notes are left out here, because the check without mutants reports them.
        harness = self._create_harness(
            spec, lambda finding: self.add(finding) if finding.is_fault else None
        )
        mutation = Mutation(harness, order.mutants, order.seed, self.add)
        begin = lambda what: self._announce(what, order.slow_s)
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(
                    mutation.play(scripts, begin, lambda *verdict: self._report(VERDICT, *verdict))
                )
        except CallFailed:
            self._skip((MUTANTS,), "a call did not return in time")
        else:
            self._report(ABOUT, {PASSPORT: str(passport_file(order.reference))})
        self._report(ABOUT, {MUTANTS: asdict(mutation.outcome)})

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
            self.code,
            limit_s,
            lambda call, task: self._report(NOW, self._check, call, task, limit_s),
        )
        return CheckHarness(spec, caller, add, self._order.address)

    def _choose_demonstrations(self, spec: EnvironmentSpec) -> DemonstrationChoice:
        """Choose the demonstrations to play; none if there is no solver or if it raises an
        error."""
        demonstrate = spec.demonstrate
        if demonstrate is None:
            return DemonstrationChoice()
        self._report(NOW, self._check, "demonstrate", "", self._order.slow_s)
        scripts = (
            self._call_solver(
                lambda: choose_demonstrations(demonstrate, _READ_SHARE * self._order.slow_s)
            )
            or DemonstrationChoice()
        )
        if not scripts.played and not self._findings.faults("demonstrations"):
            self.add(
                Finding(
                    "demonstrations", "demonstrate yields nothing", "Yield a script per template"
                )
            )
        return scripts

    def _call_solver(self, ask: Callable[[], T]) -> T | None:
        """Call the environment's solver; report an error as a fault and return None."""
        try:
            return ask()
        except (Exception, SystemExit) as error:
            what = f"demonstrate raised {describe_error(error)}"
            mend = "It yields a Demonstration for every template, whatever the seed"
            self.add(Finding("demonstrations", what, mend, self.code.find_in_exception(error)))
        return None

    async def _play_again(self, run: CheckRun) -> None:
        run.harness.start_check(_CHECK_S)
        with suppress(CallFailed):  # already reported as a finding
            self._report(ABOUT, {FINGERPRINTS: fingerprints(await play_again(run))})

    async def _play_checks(self, run: CheckRun) -> None:
        watchdog = LoopWatchdog(self.code)
        watchdog.start()
        skip_reason = ""
        examines = run.harness.spec.examine is not None
        checks = {**CHECKS, **({EXAMINATIONS: check_examinations} if examines else {})}
        for name, check in checks.items():
            blocked = name == "instances" and self._findings.faults("event loop")
            if skip_reason or blocked:
                self._skip((name,), skip_reason or _WOULD_WAIT)
                continue
            run.harness.start_check(_CHECK_S)
            with self._announced_check(name, self._order.timeout_s) as remarks:
                try:
                    remarks.append(await check(run))
                    remarks.append(
                        f"cut short after {_CHECK_S:g} s" if run.harness.is_cut_short else ""
                    )
                except CallFailed as error:
                    skip_reason = (
                        f"a call did not return in time in {name!r}"
                        if error.hung
                        else f"{name!r} could not be played"
                    )
                self._report_blocks(watchdog)
            if not run.playable:
                skip_reason = skip_reason or "no task could be opened"
        watchdog.stop()
        self._report(
            ABOUT,
            {FINGERPRINTS: fingerprints(run.repeatable)},
        )
        self._report(ABOUT, {"tools": [*run.harness.tools.values()]})

    def _report_blocks(self, watchdog: LoopWatchdog) -> None:
        blocks: dict[str, list[float]] = {}
        for block in watchdog.take_blocks():
            blocks.setdefault(block.where, []).append(block.seconds)
        for where, seconds in blocks.items():
            again = len(seconds) > 1 or seconds[0] > _ONCE_S
            what = (
                f"it blocks the event loop for {1000 * max(seconds):.0f} ms, and all other "
                f"episodes wait for it"
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
    report = build_reporter(descriptor)
    # The file stays open for the life of the process, because faulthandler writes a crash to it.
    file = open(folder / DUMP, "w")  # noqa: SIM115
    faulthandler.enable(file, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    checker = Checker(order, report)
    leave = os._exit

    def exit_with_report(status: int) -> Any:
        """Report the status and the line that called this function, then exit the process."""
        report(ABOUT, {EXIT: [status, checker.code.find_in_frame(sys._getframe(1))]})
        leave(status)

    os._exit = exit_with_report
    try:
        checker.run()
    except BaseException as error:
        what = f"the check itself failed: {quote(traceback.format_exception_only(error)[-1])}"
        checker.add(Finding("check", what, "Report this, with the environment"))
    report(ABOUT, {ENDED: True})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
