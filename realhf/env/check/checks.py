"""Checks that play episodes, in the order in which they run.

Each check takes a ``CheckRun`` and returns a remark for display. It raises CallFailed if no further
check can be played.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realhf.api.environment import SPLITS, Demonstration, Task, Turn
from realhf.env.check.calls import CallFailed
from realhf.env.check.contract import ends_episode, is_solved, to_plain_json
from realhf.env.check.demonstrations import DemonstrationChoice
from realhf.env.check.episodes import Case, CheckHarness, first_difference
from realhf.env.check.leaks import check_concurrency
from realhf.env.check.report import Finding, Order, format_count, quote
from realhf.env.check.scripts import (
    WrongMessage,
    policy_turn,
    random_turns,
    talking_turns,
    wrong_messages,
)
from realhf.env.loader.threads import MAX_THREADS

_WRONG_TASKS = 2
"""Number of tasks on which wrong messages are tried."""
_MAX_QUOTED_CHARS = 120
"""Maximum length in characters of an answer quoted in a finding."""
_MAX_FINGERPRINT_CHARS = 4000
"""Maximum number of characters of a turn that a fingerprint includes."""
_SCRIPTED_CASES = 4
"""Number of demonstrations played as cases."""


@dataclass
class CheckRun:
    """State shared by the checks."""

    harness: CheckHarness
    """Player of episodes that reports the findings."""
    order: Order
    """What to check, and limits."""
    tasks: Sequence[Task] = ()
    """Tasks to play."""
    twins: Sequence[tuple[Task, Task]] = ()
    """Pairs of tasks with the same id and different seeds."""
    demonstrations: DemonstrationChoice = field(default_factory=DemonstrationChoice)
    """Demonstrations to play."""
    playable: list[Task] = field(default_factory=list)
    """Tasks whose reset succeeded."""
    transcripts: dict[str, list[Any]] = field(default_factory=dict)
    """Transcripts of the cases played alone, by ``Case.key``."""
    comparable: bool = True
    """Whether every repetition gave the same transcripts."""
    busy_s: float = 0.0
    """Mean processor time of a turn in seconds."""

    @property
    def repeatable(self) -> Mapping[str, Sequence[Any]]:
        """Transcripts of the cases whose environment is declared to be deterministic."""
        is_deterministic = self.harness.spec.is_deterministic
        keys = [case.key for case in self.cases() if is_deterministic(case.task)]
        return {key: self.transcripts[key] for key in keys if key in self.transcripts}

    @property
    def scripts(self) -> Sequence[Demonstration]:
        """Demonstrations to play."""
        return self.demonstrations.played

    def cases(self) -> list[Case]:
        """Return the cases to play: all tasks whose reset succeeded, and the first few
        demonstrations, which include the longest one of each kind."""
        scripted = self.scripts[:_SCRIPTED_CASES]
        return [
            *map(Case, self.playable),
            *(Case(script.task, script.turns, script.kind) for script in scripted),
        ]


async def check_openings(run: CheckRun) -> str:
    """Reset every task. Also close an instance that was never reset."""
    harness = run.harness
    await harness.close(harness.make())
    for task in run.tasks:
        if harness.is_over(bool(run.playable)):
            break
        async with harness.instance(task.id) as environment:
            await harness.reset(environment, task)
            run.playable.append(task)
    for twins in run.twins if run.playable else ():
        if await _has_different_openings(harness, *twins):
            break
    actions = format_count(len(harness.tools), "tool") if harness.tools else "plain text"
    return f"{format_count(len(run.playable), 'task')}, {actions}"


async def _has_different_openings(harness: CheckHarness, first: Task, second: Task) -> bool:
    """Open two tasks with the same id and different seeds; report and return whether their openings
    differ."""
    openings = []
    for task in (first, second):
        async with harness.instance(task.id) as environment:
            openings.append(to_plain_json(await harness.reset(environment, task)))
    if len(openings) < 2 or openings[0] == openings[1]:
        return False
    what = (
        f"one id names two episodes: the seeds {first.seed} and {second.seed} give different "
        f"openings"
    )
    place = harness.place(None, "reset")
    harness.add(
        Finding("tasks", what, "Make the seed part of the id", place, first.id, kind="one id")
    )
    return True


async def check_determinism(run: CheckRun) -> str:
    """Play every case three times: on a new instance, on another new instance, and on an instance
    that left another episode unfinished. Report differences."""
    harness = run.harness
    cases = run.cases()
    turns = harness.turns
    busy_s = time.process_time()
    for case, unfinished in zip(cases, [*cases[1:], *cases[:1]], strict=True):
        if harness.is_over(bool(run.transcripts)):
            break
        try:
            alone = run.transcripts[case.key] = (await harness.play(case)).transcript
            if not harness.spec.is_deterministic(case.task):
                continue
            again = (await harness.play(case)).transcript
            reused = (await harness.play(case, unfinished=unfinished, turns=1)).transcript
        except CallFailed as error:
            harness.count_failure(error)
            continue
        if differs := first_difference(alone, again):
            what = f"the same task, seed and messages give other turns: {differs}"
            mend = "Draw from random.Random(seed) alone; or declare deterministic=False"
        elif differs := first_difference(alone, reused):
            what = f"an instance that has played before answers differently: {differs}"
            mend = "Set everything that an episode changes in reset"
        else:
            continue
        run.comparable = False
        kind = what.partition(":")[0]
        place = harness.place(None, "reset")
        harness.add(Finding("determinism", what, mend, place, case.task.id, kind=kind))
    run.busy_s = (time.process_time() - busy_s) / max(1, harness.turns - turns)
    if cases and not any(harness.spec.is_deterministic(case.task) for case in cases):
        return "declared not to be deterministic"
    return f"{format_count(len(run.repeatable), 'episode')}, played three times"


async def check_instances(run: CheckRun) -> str:
    """Play many instances concurrently.

    Their number is limited to what can answer in time: turns that compute run one after another,
    and an env format's loader runs a limited number of blocking calls concurrently.
    """
    harness = run.harness
    requested = run.order.instances
    half_s = run.order.timeout_s / 2
    waiting = MAX_THREADS * half_s / max(harness.slowest_s, 1e-6)
    bearable = max(2, int(min(half_s / max(run.busy_s, 1e-6), waiting)))
    count = min(requested, harness.spec.concurrency or requested, bearable)
    alone = run.repeatable if run.comparable else {}
    turns = await check_concurrency(harness, run.cases(), alone, count)
    return f"{count} at once, {turns:,.0f} turns per second"


async def check_wrong_messages(run: CheckRun) -> str:
    """Send wrong messages of each kind that a policy can write. If an episode has ended or failed,
    a new one is started.

    A task that is solved by an empty message is a fault, unless a demonstration solves it that way.
    """
    harness = run.harness
    before = run.harness.turns
    solved_by_silence = [
        script.task
        for script in run.scripts
        if script.succeeds and not "".join(script.turns).strip()
    ]
    for task in run.playable[:_WRONG_TASKS]:
        is_solution = any(
            task.id == other.id or task.payload == other.payload for other in solved_by_silence
        )
        waiting = wrong_messages([*harness.tools.values()])
        while waiting and not harness.is_over():
            async with harness.instance(task.id) as environment:
                is_open = False
                while waiting and not harness.is_late():
                    wrong = waiting.pop(0)
                    if not is_open:
                        await harness.reset(environment, task)
                    turn = await harness.step(environment, task, wrong.message, wrong.name)
                    _check_reward_for_noise(
                        harness,
                        harness.place(environment, "step"),
                        task,
                        wrong,
                        turn,
                        is_solution=is_solution,
                    )
                    is_open = not ends_episode(turn)
    return format_count(harness.turns - before, "message")


def _check_reward_for_noise(
    harness: CheckHarness,
    place: str,
    task: Task,
    wrong: WrongMessage,
    turn: Turn,
    *,
    is_solution: bool,
) -> None:
    """Report a reward for a message without readable content. If ``is_solution``, solving the task
    with it is not a fault."""
    name, message = wrong
    if message.tool_calls or (message.content.strip() and message.content.isprintable()):
        return
    if is_solved(turn):
        mend = (
            "Look at what the grader takes for a solution; where nothing is to be done, let a "
            "demonstration say so"
        )
        what = f"the task is solved by {name}"
        harness.add(
            Finding("rewards", what, mend, place, task.id, is_fault=not is_solution, kind="solved")
        )
    elif turn.reward is not None and turn.reward > 0:
        mend = "A policy finds such rewards first; pay for what the task asks"
        what = f"{turn.reward:g} is earned by {name}"
        harness.add(Finding("rewards", what, mend, place, task.id, is_fault=False, kind="earned"))


async def check_end(run: CheckRun) -> str:
    """Play a policy that only talks and a policy that tries the tools; at least one of the two
    episodes must end.

    If there are demonstrations, an episode that does not end is a note instead of a fault.
    """
    harness = run.harness
    task = run.playable[0]
    max_turns = run.order.most_turns
    tools = [*harness.tools.values()]
    scripts = [talking_turns(max_turns), *([random_turns(tools, 0, max_turns)] if tools else ())]
    async with harness.instance(task.id) as environment:
        for script in scripts:
            await harness.reset(environment, task)
            for turns, text in enumerate(script, 1):
                if ends_episode(await harness.step(environment, task, policy_turn(text, tools))):
                    return f"after {format_count(turns, 'turn')}"
                if harness.is_late():
                    return ""
        what = f"no episode ended within {max_turns} turns"
        mend = "End an episode after a number of turns (done=True), whatever the policy says"
        if run.scripts:
            what = f"{what}, unless it was solved"
            mend = f"{mend}, or rely on rollout.max_turns"
        place = harness.place(environment, "step")
        harness.add(Finding("end", what, mend, place, task.id, is_fault=not run.scripts))
    return ""


async def check_demonstrations(run: CheckRun) -> str:
    """Play the demonstrations. Each must end with its last turn, and must succeed or fail as
    labelled."""
    played = Counter[str]()
    for script in run.scripts:
        if run.harness.is_over():
            break
        played[script.kind] += 1
        episode = await run.harness.follow(Case(script.task, script.turns))
        if episode is None:
            continue
        if episode.ended and len(episode.policy_texts) < len(script.turns):
            verdict = f"is over after turn {len(episode.policy_texts)} of {len(script.turns)}"
        elif episode.solved != script.succeeds:
            verdict = "does not succeed" if script.succeeds else "succeeds, though succeeds=False"
        elif script.succeeds and not episode.ended:
            verdict = "does not end the episode"
        elif episode.solved and episode.episode_return <= 0:
            verdict = f"succeeds and earns {episode.episode_return:g}"
        else:
            continue
        answer = quote(episode.answer, _MAX_QUOTED_CHARS)
        what = (
            f"a demonstration of the kind {script.kind!r} {verdict}: the last answer is {answer!r}"
        )
        mend = "Play what the solver writes with `play`, and fix the solver or the grading"
        place = run.harness.code.find_definition(
            getattr(run.harness.spec.demonstrate, "__code__", None)
        )
        run.harness.add(Finding("demonstrations", what, mend, place, script.task.id, kind=verdict))
    if not run.scripts:
        return "no scripted solver"
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(played.items()))
    chosen = run.demonstrations
    longest = f"the longest of {format_count(chosen.longest, 'turn')}"
    longest += f" among the first {chosen.read_count:,}" if chosen.is_cut_short else ""
    return f"{format_count(played.total(), 'script')} ({kinds}), {longest}"


async def check_examinations(run: CheckRun) -> str:
    """Let the environment examine every task of both splits, and report its remarks."""
    tasks = [
        task_set.instantiate(template, 0)
        for task_set in map(run.harness.spec.tasks, SPLITS)
        for template in task_set.group_of
    ]
    for task in tasks:
        for remark in await run.harness.examine(task):
            what = f"{remark.text} ({task.id})" if remark.is_fault else remark.text
            run.harness.add(Finding(EXAMINATIONS, what, task=task.id, is_fault=remark.is_fault))
    return format_count(len(tasks), "task")


CHECKS: Mapping[str, Callable[[CheckRun], Awaitable[str]]] = {
    "openings": check_openings,
    "determinism": check_determinism,
    "instances": check_instances,
    "wrong messages": check_wrong_messages,
    "end": check_end,
    "demonstrations": check_demonstrations,
}
"""Checks by name, in the order in which they run."""
EXAMINATIONS = "examinations"
"""Name of the last check, ``check_examinations``, of environments that examine their tasks."""


async def play_again(run: CheckRun) -> dict[str, list[Any]]:
    """Play again those cases of another process's determinism check that exist here. Return the
    transcripts."""
    await check_openings(run)
    return {
        case.key: (await run.harness.play(case)).transcript
        for case in run.cases()
        if case.key in run.order.again
    }


def fingerprints(transcripts: Mapping[str, Sequence[Any]]) -> dict[str, list[tuple[str, str]]]:
    """Return, for each case, a list of (SHA-256, beginning of the text) of its opening and of every
    turn, for comparison with another process."""
    texts = {
        key: [json.dumps(turn, sort_keys=True) for turn in turns]
        for key, turns in transcripts.items()
    }
    return {
        key: [
            (hashlib.sha256(text.encode()).hexdigest(), text[:_MAX_FINGERPRINT_CHARS])
            for text in each
        ]
        for key, each in texts.items()
    }
