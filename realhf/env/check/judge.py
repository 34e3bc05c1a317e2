"""Runs the checks one after another, in the process that the environment lives in, and reports each."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from realhf.api.environment import Demonstration, DemonstrationRequest, EnvironmentSpec
from realhf.env.check.calls import Caller, LoopWatchdog, UserCode, described, folders_of
from realhf.env.check.contract import TaskSetJudge, choose
from realhf.env.check.episodes import Arena, Broken
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
    STAGE,
    TIMES,
    VERDICT,
    Finding,
    Findings,
    Order,
    Reporter,
    quoted,
)
from realhf.env.check.stages import DEMONSTRATIONS, EVENT_LOOP, OPENINGS, PLAYED, NotRun, Stages, fingerprints
from realhf.env.loader.load import build_environment

LOAD, TASKS = "load", "tasks"
_LONG = 1000
_SERVICE = "it is played on the service {}; start it and give its --address"
_MOST_SCRIPTS = 10_000
_ONCE_S = 1.0
"""A block that was seen a single time, and shorter than this, is a note: importing a module, reading a word list."""


class Judge:
    """Carries out an order; ``code`` tells the environment's lines from others."""

    def __init__(self, order: Order, reporter: Reporter) -> None:
        self._order = order
        self._tell = reporter.tell
        self._findings = Findings(lambda index, finding: reporter.tell(FINDING, index, finding.to_json()))
        self._before = 0
        self.code = UserCode(folders_of(order.reference))

    def run(self) -> None:
        """Load the environment, judge its tasks, play it, and report all findings."""
        spec = self._load()
        if spec is None:
            self._skip((MUTANTS,) if self._order.mutants else (TASKS, *PLAYED), "it does not load")
        elif self._order.mutants:
            self._mutate(spec)
        else:
            self._run(spec)
        for index, finding in enumerate(self._findings.all):
            self._tell(TIMES, index, finding.times)

    def _run(self, spec: EnvironmentSpec) -> None:
        self._begin(TASKS, self._order.slow_s)
        judge = TaskSetJudge(spec, self.code, self._findings.add)
        judge.judge()
        self._tell(ABOUT, {"groups": judge.groups()})
        self._end(TASKS, judge.remark())
        tasks = choose(judge.instances, judge.sets, self._order.most_tasks)
        if spec.launch is not None and not self._order.address:
            self._skip(PLAYED, _SERVICE.format(spec.launch.module))
        elif not tasks:
            self._skip(PLAYED, "there is no task to play")
        else:
            scripts = self._scripts(spec)
            caller = Caller(self.code, self._order.timeout_s, self._announce)
            arena = Arena(spec, self._order.address, caller, self.code, self._findings.add)
            stages = Stages(arena, tasks, judge.twins, scripts, self._order, self._findings.faults)
            # Whatever loop the environment's modules ask for, the watchdog knows this one.
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._play_again(stages) if self._order.again else self._play(arena, stages))

    def _mutate(self, spec: EnvironmentSpec) -> None:
        """Play mutants of demonstrations and say what became of them."""
        self._begin(MUTANTS, self._order.slow_s)
        if (nothing := missing(spec)) is not None:
            self._findings.add(nothing)
            self._end(MUTANTS, "")
            return
        if spec.launch is not None and not self._order.address:
            self._skip((MUTANTS,), _SERVICE.format(spec.launch.module))
            return
        try:
            scripts = scripts_of(spec, self._order.seed)
        except (Exception, SystemExit) as error:
            self._blame_solver(error)
            self._end(MUTANTS, "")
            return
        caller = Caller(self.code, self._order.timeout_s, self._announce)
        arena = Arena(spec, self._order.address, caller, self.code, self._add_fault)
        mutation = Mutation(arena, self._order.mutants, self._order.seed, self._findings.add)
        begin, end = partial(self._tell, STAGE), partial(self._tell, VERDICT)
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(mutation.play(scripts, lambda what: begin(what, self._order.slow_s), end))
        except Broken:
            self._skip((MUTANTS,), "an answer did not come")
        self._tell(ABOUT, {MUTANTS: mutation.outcome.to_json()})

    def _announce(self, call: str, task: str) -> None:
        self._tell(NOW, call, task, self._order.timeout_s)

    def _load(self) -> EnvironmentSpec | None:
        self._begin(LOAD, self._order.slow_s)
        try:
            spec = build_environment(self._order.reference, self._order.options)
        except (Exception, SystemExit) as error:
            what = quoted(error, _LONG) if isinstance(error, ValueError) else f"it raises {described(error)}"
            self._findings.add(Finding(LOAD, what, where=self.code.of_exception(error)))
            self._end(LOAD, "")
            return None
        known = {"name": spec.name, "deterministic": spec.deterministic, "concurrency": spec.concurrency}
        known |= {"scripted": spec.demonstrate is not None, "service": spec.launch.module if spec.launch else ""}
        self._tell(ABOUT, known)
        self._tell_folder()
        self._end(LOAD, spec.name)
        return spec

    def _tell_folder(self) -> None:
        """Count the folder of ``module:Name`` to the environment's code, also where it is an installed package."""
        module = sys.modules.get(self._order.reference.rpartition(":")[0])
        if file := getattr(module, "__file__", None):
            self.code.add(str(Path(file).parent))
            self._tell(FOLDER, str(Path(file).parent))

    def _scripts(self, spec: EnvironmentSpec) -> list[Demonstration]:
        """One demonstration of every task and sort of script; a solver that raises is a fault."""
        if spec.demonstrate is None:
            return []
        self._tell(NOW, "demonstrate", "", self._order.slow_s)
        chosen: dict[tuple[str, str], Demonstration] = {}
        try:
            for request in (DemonstrationRequest(1, 0), DemonstrationRequest(1, 1, 0.3, 0.3)):
                for script in islice(spec.demonstrate(request), _MOST_SCRIPTS):
                    chosen.setdefault((script.task.id, script.kind), script)
        except (Exception, SystemExit) as error:
            self._blame_solver(error)
        if not chosen and not self._findings.faults(DEMONSTRATIONS):
            self._findings.add(Finding(DEMONSTRATIONS, "demonstrate yields nothing", "Yield a script per template"))
        return [*chosen.values()]

    def _add_fault(self, finding: Finding) -> None:
        """Take in what breaks an episode; what the check without mutants notes, it notes there."""
        if finding.is_fault:
            self._findings.add(finding)

    def _blame_solver(self, error: BaseException) -> None:
        what = f"demonstrate raised {described(error)}"
        mend = "It yields a Demonstration for every template, whatever the seed"
        self._findings.add(Finding(DEMONSTRATIONS, what, mend, self.code.of_exception(error)))

    async def _play_again(self, stages: Stages) -> None:
        try:
            self._tell(FINGERPRINTS, fingerprints(await stages.play_again()))
        except Broken:
            self._tell(FINGERPRINTS, {})

    async def _play(self, arena: Arena, stages: Stages) -> None:
        watchdog = LoopWatchdog(self.code)
        watchdog.start()
        why = ""
        for name, check in stages.all().items():
            if why:
                self._skip((name,), why)
                continue
            self._begin(name, self._order.timeout_s)
            remark = ""
            try:
                remark = await check()
            except NotRun as reason:
                self._skip((name,), str(reason))
                continue
            except Broken as error:
                why = f"an answer did not come in {name!r}" if error.hung else f"{name!r} could not be played"
            self._judge_blocks(watchdog)
            self._end(name, remark)
            if name == OPENINGS and not stages.playable:
                why = why or "no task could be opened"
        watchdog.stop()
        self._tell(FINGERPRINTS, fingerprints(stages.transcripts) if arena.spec.deterministic else {})
        self._tell(ABOUT, {"tools": [*arena.tools.values()]})

    def _judge_blocks(self, watchdog: LoopWatchdog) -> None:
        blocks: dict[str, list[float]] = {}
        for block in watchdog.take():
            blocks.setdefault(block.where, []).append(block.seconds)
        for where, seconds in blocks.items():
            again = len(seconds) > 1 or seconds[0] > _ONCE_S
            what = f"it blocks the event loop for {1000 * max(seconds):.0f} ms, and no other episode goes on meanwhile"
            mend = "Await it, or hand it to a thread (asyncio.to_thread)"
            mend = mend if again else f"{mend}, if it happens more than once"
            self._findings.add(
                Finding(EVENT_LOOP, what, mend, where, is_fault=again, times=len(seconds), kind="blocks")
            )

    def _begin(self, name: str, limit_s: float) -> None:
        self._before = self._findings.hits
        self._tell(STAGE, name, limit_s)

    def _end(self, name: str, remark: str) -> None:
        outcome = OK if self._findings.hits == self._before else FAULT
        self._tell(VERDICT, name, outcome, remark)

    def _skip(self, names: Sequence[str], why: str) -> None:
        for name in names:
            self._tell(VERDICT, name, SKIPPED, why)
