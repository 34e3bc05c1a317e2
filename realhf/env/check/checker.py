"""Runs the checks one after another, in the process that the environment lives in, and reports each."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from realhf.api.environment import Demonstration, DemonstrationRequest, EnvironmentSpec
from realhf.env.check.calls import Caller, CallFailed, LoopWatchdog, UserCode, described, folders_of
from realhf.env.check.checks import CHECKS, Run, fingerprints, play_again
from realhf.env.check.episodes import Arena
from realhf.env.check.mutation import MUTANTS, Mutation, missing, scripts_of
from realhf.env.check.report import (
    ABOUT,
    FAULT,
    FINDING,
    FINGERPRINTS,
    FOLDER,
    NOW,
    OK,
    SKIPPED,
    VERDICT,
    Finding,
    Findings,
    Order,
    quoted,
)
from realhf.env.check.task_sets import TaskSetJudge
from realhf.env.loader.load import build_environment

_LONG = 1000
_MOST_SCRIPTS = 10_000
_ONCE_S = 1.0
"""A block that was seen a single time, and shorter than this, is a note: importing a module, reading a word list."""
_CHECK_S = 20.0
"""Time of one check, in seconds: of an environment that is slow, less is played."""


class Checker:
    """Carries out an order; ``tell`` takes the events, and ``code`` tells the environment's lines from others."""

    def __init__(self, order: Order, tell: Callable[..., None]) -> None:
        self._order = order
        self._tell = tell
        self._findings = Findings()
        self._check, self._before = "", 0
        self.code = UserCode(folders_of(order.reference))

    def run(self) -> None:
        """Load the environment, judge its tasks, play it, and report all findings."""
        spec = self._load()
        if spec is None:
            self._skip((MUTANTS,) if self._order.mutants else ("tasks", *CHECKS), "it does not load")
        elif self._order.mutants:
            self._mutate(spec)
        else:
            self._judge(spec)

    def add(self, finding: Finding) -> None:
        """Take in and report a finding."""
        self._findings.add(finding)
        self._tell(FINDING, asdict(finding))

    def _load(self) -> EnvironmentSpec | None:
        self._begin("load", self._order.slow_s)
        spec = None
        try:
            spec = build_environment(self._order.reference, self._order.options)
        except (Exception, SystemExit) as error:
            what = quoted(error, _LONG) if isinstance(error, ValueError) else f"it raises {described(error)}"
            self.add(Finding("load", what, where=self.code.of_exception(error)))
        else:
            known = {"name": spec.name, "deterministic": spec.deterministic, "concurrency": spec.concurrency}
            known |= {"scripted": spec.demonstrate is not None, "service": spec.launch.module if spec.launch else ""}
            # The folder of ``module:Name`` holds the environment's code, also where it is an installed package.
            module = sys.modules.get(self._order.reference.rpartition(":")[0])
            if file := getattr(module, "__file__", None):
                known[FOLDER] = str(Path(file).parent)
                self.code.add(known[FOLDER])
            self._tell(ABOUT, known)
        self._end(spec.name if spec else "")
        return spec

    def _judge(self, spec: EnvironmentSpec) -> None:
        self._begin("tasks", self._order.slow_s)
        judge = TaskSetJudge(spec, self.code, self.add)
        judge.judge()
        self._tell(ABOUT, {"groups": judge.groups})
        self._end(judge.remark())
        tasks = judge.chosen(self._order.most_tasks)
        if self._lacks_service(spec, CHECKS):
            return
        if not tasks:
            self._skip(CHECKS, "there is no task to play")
            return
        run = Run(self._arena(spec, self.add), self._order, tasks, judge.twins, self._scripts(spec))
        # Whatever loop the environment's modules ask for, the watchdog knows this one.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self._play_again(run) if self._order.again else self._play(run))

    def _mutate(self, spec: EnvironmentSpec) -> None:
        """Play mutants of demonstrations and say what became of them."""
        self._begin(MUTANTS, self._order.slow_s)
        if (nothing := missing(spec)) is not None:
            self.add(nothing)
            self._end("")
            return
        if self._lacks_service(spec, (MUTANTS,)):
            return
        try:
            scripts = scripts_of(spec, self._order.seed)
        except (Exception, SystemExit) as error:
            self._blame_solver(error)
            self._end("")
            return
        # What the check without mutants notes, it notes there.
        arena = self._arena(spec, lambda finding: self.add(finding) if finding.is_fault else None)
        mutation = Mutation(arena, self._order.mutants, self._order.seed, self.add)
        begin = lambda what: self._begin(what, self._order.slow_s)
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(mutation.play(scripts, begin, lambda *verdict: self._tell(VERDICT, *verdict)))
        except CallFailed:
            self._skip((MUTANTS,), "an answer did not come")
        self._tell(ABOUT, {MUTANTS: asdict(mutation.outcome)})

    def _lacks_service(self, spec: EnvironmentSpec, names: Iterable[str]) -> bool:
        if spec.launch is None or self._order.address:
            return False
        self._skip(names, f"it is played on the service {spec.launch.module}; start it and give its --address")
        return True

    def _arena(self, spec: EnvironmentSpec, add: Callable[[Finding], None]) -> Arena:
        limit_s = self._order.timeout_s
        caller = Caller(self.code, limit_s, lambda call, task: self._tell(NOW, self._check, call, task, limit_s))
        return Arena(spec, caller, add, self._order.address)

    def _scripts(self, spec: EnvironmentSpec) -> list[Demonstration]:
        """One demonstration of every task and sort of script; a solver that raises is a fault."""
        if spec.demonstrate is None:
            return []
        self._tell(NOW, self._check, "demonstrate", "", self._order.slow_s)
        chosen: dict[tuple[str, str], Demonstration] = {}
        try:
            for request in (DemonstrationRequest(1, 0), DemonstrationRequest(1, 1, 0.3, 0.3)):
                for script in islice(spec.demonstrate(request), _MOST_SCRIPTS):
                    chosen.setdefault((script.task.id, script.kind), script)
        except (Exception, SystemExit) as error:
            self._blame_solver(error)
        if not chosen and not self._findings.faults("demonstrations"):
            self.add(Finding("demonstrations", "demonstrate yields nothing", "Yield a script per template"))
        return [*chosen.values()]

    def _blame_solver(self, error: BaseException) -> None:
        what = f"demonstrate raised {described(error)}"
        mend = "It yields a Demonstration for every template, whatever the seed"
        self.add(Finding("demonstrations", what, mend, self.code.of_exception(error)))

    async def _play_again(self, run: Run) -> None:
        run.arena.begin(_CHECK_S)
        try:
            self._tell(ABOUT, {FINGERPRINTS: fingerprints(await play_again(run))})
        except CallFailed:
            return  # it is a finding

    async def _play(self, run: Run) -> None:
        watchdog = LoopWatchdog(self.code)
        watchdog.start()
        why = ""
        for name, check in CHECKS.items():
            if why:
                self._skip((name,), why)
                continue
            if name == "instances" and self._findings.faults("event loop"):
                waits = "calls block the event loop, so many instances at once would only wait for each other"
                self._skip((name,), waits)
                continue
            self._begin(name, self._order.timeout_s)
            run.arena.begin(_CHECK_S)
            remark = ""
            try:
                remark = await check(run)
                if run.arena.was_cut:
                    remark = f"{remark}, cut short after {_CHECK_S:g} s".lstrip(", ")
            except CallFailed as error:
                why = f"an answer did not come in {name!r}" if error.hung else f"{name!r} could not be played"
            self._judge_blocks(watchdog)
            self._end(remark)
            if not run.playable:
                why = why or "no task could be opened"
        watchdog.stop()
        self._tell(ABOUT, {FINGERPRINTS: fingerprints(run.transcripts) if run.arena.spec.deterministic else {}})
        self._tell(ABOUT, {"tools": [*run.arena.tools.values()]})

    def _judge_blocks(self, watchdog: LoopWatchdog) -> None:
        blocks: dict[str, list[float]] = {}
        for block in watchdog.take():
            blocks.setdefault(block.where, []).append(block.seconds)
        for where, seconds in blocks.items():
            again = len(seconds) > 1 or seconds[0] > _ONCE_S
            what = f"it blocks the event loop for {1000 * max(seconds):.0f} ms, and no other episode goes on meanwhile"
            mend = "Await it, or hand it to a thread (asyncio.to_thread)"
            mend = mend if again else f"{mend}, if it happens more than once"
            times = len(seconds)
            self.add(Finding("event loop", what, mend, where, is_fault=again, times=times, kind="blocks"))

    def _begin(self, name: str, limit_s: float) -> None:
        self._check, self._before = name, self._findings.hits
        self._tell(NOW, name, name, "", limit_s)

    def _end(self, remark: str) -> None:
        self._tell(VERDICT, self._check, OK if self._findings.hits == self._before else FAULT, remark)

    def _skip(self, names: Iterable[str], why: str) -> None:
        for name in names:
            self._tell(VERDICT, name, SKIPPED, why)
