"""``python -m tests.pretended.mutants``: prove the tests on the pretended GPU with mutants of the
loss, the training engine and the transfer of weights.

A first run of the tests finds which of them reach which place, and where a mutant would change
anything at all. Then each mutant of such a place is played by the quickest of its tests, in a
process of its own, or by all of them if nobody has given a reason why it may survive. It counts as
caught if one of them fails with a message or a traceback that names a file and line of the product.
All are counted by rule, and survivors are listed."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported

import pytest
from rich.console import Console
from rich.table import Table

from tests.pretended.mutation import (
    DETACH,
    DEVICE,
    FLOAT,
    GRAD,
    KEPT,
    RELEASE,
    ROOT,
    WAIT,
    WITHOUT_EFFECT,
    Place,
    Switch,
    instrument,
)

FOLDER = "tests/pretended"
LEFT_OUT = tuple(f"--ignore={FOLDER}/{name}.py" for name in ("test_mutants", "test_step_trace"))
"""Options of pytest for tests that are about this program, or slow and about whole models."""
ALL_CASES = "--run-nightly"
"""Option of pytest for all cases of tests of which a plain run draws some."""
MEMORY_TESTS = "test_memory.py"
UNREACHED = "no test reaches it"
SURVIVES = "survives"
CAUGHT = "caught"
UNNAMED = "fails without naming a line"
OVERRUN = "overran its deadline"
_ENGINE = "realhf/backends/training/torch_engine.py"
_OPTIMIZER = "realhf/backends/training/optimizer.py"
_LORA = "realhf/backends/training/lora.py"
_FORWARD = "realhf/backends/training/packed_forward.py"
_ATTENTION = "realhf/backends/training/varlen_attention.py"
_OWN_WEIGHTS = "these are the model's own tensors, which stay"
_TRIAL = "a trial of few tokens when a role is loaded"
REASONS: Mapping[str, str] = {
    f"{DEVICE} realhf/algorithms/policy_loss.py _reference_loss": "CUDA takes a number of the host",
    f"{RELEASE} {_ENGINE} version": "numbers only: rows of old weights would be used again",
    f"{RELEASE} {_ENGINE} train_batch": "the step before has released them",
    f"{RELEASE} {_OPTIMIZER} publish": "the gradients are cleared after the step",
    f"{KEPT} {_ENGINE} weights": _OWN_WEIGHTS,
    f"{KEPT} realhf/backends/embedded/weight_copy.py collect_weights": _OWN_WEIGHTS,
    f"{KEPT} {_OPTIMIZER} tensors": _OWN_WEIGHTS,
    f"{WAIT} {_OPTIMIZER} tensors": "a checkpoint copies them to the host anyway",
    f"{GRAD} realhf/base/tensor_digest.py digest": "the tensor is detached before",
    f"{GRAD} {_OPTIMIZER} step": "AdamW and publish do so themselves, and gradients need none",
    f"{GRAD} {_LORA} check_weights": "a graph of at most 4,096 numbers of a layer",
    f"{GRAD} {_LORA} check_merge": "a graph of the eight tokens of a probe",
    f"{GRAD} {_LORA} _compute_merged": "a parameter is made of the result, which drops its graph",
    f"{GRAD} {_LORA} _overwrite_merged": "merged weights need no gradients",
    f"{GRAD} {_LORA} load": "the tensors of a state dict need no gradients",
    f"{DETACH} {_LORA} disturb": "gradients are off there",
    f"{FLOAT} {_LORA} _compute_hidden": "fp64 follows at once, of the same numbers",
    f"{KEPT} {_LORA} tensors": _OWN_WEIGHTS,
    f"{WAIT} {_LORA} _overwrite_merged": "tests of merges and updates, when a run begins",
    **{
        f"{WAIT} {_ATTENTION} {function}": _TRIAL
        for function in ("record", "reference_attention", "_run_trial")
    },
    f"{DETACH} {_ATTENTION} _run_trial": _TRIAL,
    **{f"{GRAD} {_FORWARD} {name}": _TRIAL for name in ("_find_layout_problem", "find_heads")},
    f"{DEVICE} {_FORWARD} _run_layout": "attention over packed rows ignores this mask",
    **{
        f"{DETACH} {file}": "changes numbers at most, and backward passes free what graphs hold"
        for file in (
            "realhf/algorithms/policy_loss.py",
            "realhf/algorithms/sft.py",
            "realhf/tinker/losses.py",
            _ENGINE,
            _FORWARD,
        )
    },
    **{
        f"{DETACH} {file}": "nothing is computed from it with gradients"
        for file in (
            _OPTIMIZER,
            "realhf/backends/embedded/weight_copy.py",
            "realhf/base/tensor_digest.py",
        )
    },
}
"""Why mutants survive that change something: reason by "rule file function", or by "rule file" for
all functions of a file."""
_LINE = re.compile(r"(realhf/[\w/]+\.py):(\d+)")
_FORK = get_context("fork")
Reached = dict[str, list[str]]
"""Names of tests by key of a place."""


@dataclass(frozen=True)
class Outcome:
    """What came of a mutant."""

    result: str
    """One of the constants above, or a reason of ``WITHOUT_EFFECT``."""
    test: str = ""
    """Name of the test that failed."""
    where: str = ""
    """How near the line that the failure names is to the mutant: ``function``, ``file`` or
    ``elsewhere``."""
    says: str = ""
    """End of the failure's text."""
    seconds: float = 0.0
    """Seconds that its tests took."""
    n_tests: int = 0
    """Number of tests that it was played by at most."""


@dataclass
class Survey:
    """What a run of the tests without any mutant found."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of processor time of each test."""
    reached: Reached = field(default_factory=dict)
    """Tests that reach each place."""
    effective: Reached = field(default_factory=dict)
    """Tests in which the mutant of each place would have an effect."""
    failed: list[str] = field(default_factory=list)
    """Tests that failed."""


class _Recorder:
    """Plugin of pytest that tells the switch which test runs, and notes times and failures."""

    def __init__(self, switch: Switch) -> None:
        self.seconds: dict[str, float] = {}
        self.failures: list[tuple[str, str, str]] = []
        self._switch = switch
        self._began = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Tell the switch the name of the test."""
        self._switch.test = item.nodeid
        self._began = time.process_time()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        """Note the time of a test, and how it fails."""
        outcome: Any = yield
        report = outcome.get_result()
        self.seconds[item.nodeid] = time.process_time() - self._began
        if report.failed and call.excinfo is not None:
            frames = [f"{Path(entry.path)}:{entry.lineno + 1}" for entry in call.excinfo.traceback]
            product = [frame for frame in frames if str(ROOT / "realhf") in frame]
            innermost = product[-1].removeprefix(f"{ROOT}/") if product else ""
            self.failures.append((item.nodeid, str(call.excinfo.value), innermost))


def _play(switch: Switch, tests: Sequence[str], stops: bool) -> _Recorder:
    """Run tests in this process, silently."""
    recorder = _Recorder(switch)
    options = [ALL_CASES, "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    options += ["-x"] if stops else []
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        pytest.main([*options, *tests], plugins=[recorder])
    return recorder


def _survey(switch: Switch, places: Sequence[Place], pipe: connection.Connection) -> None:
    """Run all tests without a mutant, and send what was found."""
    recorder = _play(switch, [FOLDER, *LEFT_OUT], stops=False)
    by_key = lambda found: {places[i].key: sorted(tests) for i, tests in found.items()}
    pipe.send(
        Survey(
            recorder.seconds,
            by_key(switch.reached),
            by_key(switch.effective),
            [f"{test}: {says}" for test, says, _ in recorder.failures],
        )
    )


def _try(switch: Switch, index: int, place: Place, tests: Sequence[str], pipe: Any) -> None:
    """Run tests with a mutant, and send what came of it."""
    began = time.monotonic()
    switch.active = index
    recorder = _play(switch, tests, stops=True)
    pipe.send(_judge(place, recorder.failures, time.monotonic() - began, len(tests)))


def _judge(
    place: Place, failures: Sequence[tuple[str, str, str]], seconds: float, n_tests: int
) -> Outcome:
    """Return what the failures of a mutant's tests say."""
    if not failures:
        return Outcome(SURVIVES, seconds=seconds, n_tests=n_tests)
    test, message, innermost = failures[0]
    lines = [(file, int(line)) for file, line in _LINE.findall(f"{message} {innermost}")]
    says = " ".join(message.split())[:300]
    if not lines:
        return Outcome(UNNAMED, test, says=says, seconds=seconds, n_tests=n_tests)
    own = [line for file, line in lines if file == place.file]
    where = "elsewhere" if not own else "file"
    if any(line in place.lines for line in own):
        where = "function"
    return Outcome(CAUGHT, test, where, says, seconds, n_tests)


def choose_tests(survey: Survey, key: str, most: int, seconds: float) -> list[str]:
    """Return the tests in which a mutant has an effect: at most ``most``, and as many as take
    ``seconds`` in all, but at least one. The quickest come first, but for memory that is held too
    long those about memory."""
    about_memory = key.startswith((GRAD, RELEASE))
    tests = sorted(
        survey.effective[key],
        key=lambda test: (
            about_memory and MEMORY_TESTS not in test,
            survey.seconds.get(test, 0.0),
        ),
    )
    chosen: list[str] = []
    left = seconds
    for test in tests[:most]:
        left -= survey.seconds.get(test, 0.0)
        if chosen and left < 0:
            break
        chosen.append(test)
    return chosen


def _run_all(
    work: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], jobs: int, deadline_s: float
) -> Iterator[tuple[int, Any]]:
    """Call functions with their arguments and a pipe, ``jobs`` at a time in processes of their own;
    yield the number of each and what it sent, None if nothing by its deadline."""
    waiting = list(enumerate(work))[::-1]
    running: dict[connection.Connection, tuple[int, Any, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, (function, arguments) = waiting.pop()
                ours, theirs = _FORK.Pipe(duplex=False)
                process = _FORK.Process(target=function, args=(*arguments, theirs))
                process.start()
                theirs.close()
                running[ours] = (number, process, time.monotonic() + deadline_s)
            ready = connection.wait([*running], timeout=0.5)
            for pipe, (number, process, deadline) in list(running.items()):
                late = time.monotonic() > deadline
                if pipe not in ready and not late:
                    continue
                sent = None
                if pipe in ready:
                    with contextlib.suppress(EOFError):
                        sent = pipe.recv()  # type: ignore[union-attr]
                process.kill()
                process.join()
                pipe.close()  # type: ignore[union-attr]
                del running[pipe]  # type: ignore[arg-type]
                yield number, sent
    finally:
        for _, process, _ in running.values():
            process.kill()
            process.join()


# ---- the record of an earlier run


def _digest_sources() -> str:
    """Return a digest of all code that decides what comes of a mutant."""
    state = hashlib.blake2b(digest_size=8)
    for folder in ("realhf/backends", "realhf/algorithms", "realhf/transport", FOLDER):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name not in ("mutants.py", "test_mutants.py"):
                state.update(path.read_bytes())
    return state.hexdigest()


def _read_record(path: Path | None, digest: str) -> tuple[Survey | None, dict[str, Outcome]]:
    """Return the survey and the outcomes in a file of an earlier run of the same code. Raises
    ValueError naming a line that is no record; the last one may be cut off."""
    survey: Survey | None = None
    outcomes: dict[str, Outcome] = {}
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if record["code"] != digest:
                continue
            if "survey" in record:
                survey = Survey(**record["survey"])
            else:
                outcomes[record["place"]] = Outcome(**record["outcome"])
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: {error}") from None
    return survey, outcomes


# ---- the report


def _reason(place: Place) -> str:
    """Return why a survivor is none that could be caught; "" if nobody has said."""
    of_file = f"{place.rule} {place.file}"
    return REASONS.get(f"{of_file} {place.function}", REASONS.get(of_file, ""))


def _table(places: Sequence[Place], outcomes: Mapping[str, Outcome]) -> Table:
    found = Table(
        "rule",
        "made",
        "caught",
        "line of the function",
        "of the file",
        "of another",
        "changes nothing",
        "not reached",
        "survives",
        "overran",
    )
    for rule in (*WITHOUT_EFFECT, "all"):
        of_rule = [place for place in places if rule in (place.rule, "all")]
        results = Counter(outcomes[place.key].result for place in of_rule if place.key in outcomes)
        where = Counter(outcomes[place.key].where for place in of_rule if place.key in outcomes)
        without = sum(results[reason] for reason in {*WITHOUT_EFFECT.values()})
        numbers = (
            len(of_rule),
            results[CAUGHT],
            *(where[each] for each in ("function", "file", "elsewhere")),
            without,
            results[UNREACHED],
            results[SURVIVES] + results[UNNAMED],
            results[OVERRUN],
        )
        if rule == "all":
            found.add_section()
        found.add_row(rule, *map(str, numbers))
    return found


def _report(
    console: Console, places: Sequence[Place], outcomes: Mapping[str, Outcome], every: bool
) -> None:
    for place in places:
        outcome = outcomes.get(place.key)
        if outcome is None:
            continue
        survives = outcome.result in (SURVIVES, UNNAMED, OVERRUN)
        if survives or every:
            reason = (_reason(place) if survives else "") or outcome.says
            text = f"{outcome.result}: {place}" + (f" ({reason})" if reason else "")
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(_table(places, outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.pretended.mutants", description=__doc__)
    parser.add_argument(
        "--rules",
        nargs="+",
        choices=[*WITHOUT_EFFECT],
        metavar="RULE",
        help=f"default: all: {', '.join(WITHOUT_EFFECT)}",
    )
    parser.add_argument(
        "--files", nargs="+", metavar="TEXT", help="only files whose name contains one of these"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants that are played in parallel")
    parser.add_argument(
        "--deadline", type=float, default=240.0, metavar="S", help="for a mutant (%(default)s s)"
    )
    parser.add_argument(
        "--most-tests",
        type=int,
        default=6,
        metavar="N",
        help="tests of a mutant that has a reason to survive (%(default)s)",
    )
    parser.add_argument(
        "--test-seconds",
        type=float,
        default=12.0,
        metavar="S",
        help="seconds that these tests take without it (%(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON lines; a file that is there is gone on with",
    )
    parser.add_argument("--list", action="store_true", help="list all mutants, and play none")
    parser.add_argument("--every", action="store_true", help="list what came of every mutant")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Returns the exit status: 0 if each mutant is caught or has a reason not to
    be, 1 otherwise, 130 after an interrupt."""
    parser = _parser()
    options = parser.parse_args(argv)
    for name in ("jobs", "deadline", "most_tests"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} is above 0")
    console = Console() if sys.stdout.isatty() else Console(width=160)
    try:
        switch, places = instrument()
        digest = _digest_sources()
        survey, outcomes = _read_record(options.output, digest)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    chosen = [
        place
        for place in places
        if place.rule in (options.rules or WITHOUT_EFFECT)
        and any(text in place.file for text in options.files or [""])
    ]
    if options.list:
        for place in chosen:
            console.print(str(place), markup=False, highlight=False, soft_wrap=True)
        return 0
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(options.output.open("a")) if options.output else None

        def record(**what: Any) -> None:
            if file is not None:
                print(json.dumps({"code": digest, **what}), file=file, flush=True)

        if survey is None:
            _preload()
            ((_, survey),) = _run_all([(_survey, (switch, places))], 1, 100 * options.deadline)
            if survey is None or survey.failed:
                reason = survey.failed[0] if survey else "the process of the tests ended early"
                parser.error(f"the tests fail without a mutant: {reason}")
            record(survey=asdict(survey))
        left: list[tuple[Place, list[str]]] = []
        for place in chosen:
            if place.key not in survey.reached:
                outcomes[place.key] = Outcome(UNREACHED)
                continue
            if place.key not in survey.effective:
                outcomes[place.key] = Outcome(WITHOUT_EFFECT[place.rule])
                continue
            limits = (options.most_tests, options.test_seconds)
            if not _reason(place):
                limits = (len(survey.effective[place.key]), math.inf)
            tests = choose_tests(survey, place.key, *limits)
            known = outcomes.get(place.key)
            if known is None or (known.result == SURVIVES and known.n_tests < len(tests)):
                left.append((place, tests))
        console.print(f"{len(chosen)} mutants, {len(left)} to be played")
        if left:
            _preload()
        work: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        for place, tests in left:
            work.append((_try, (switch, places.index(place), place, tests)))
        began = time.monotonic()
        interrupted = False
        try:
            for number, sent in _run_all(work, options.jobs, options.deadline):
                place = left[number][0]
                outcomes[place.key] = sent or Outcome(OVERRUN, seconds=options.deadline)
                record(place=place.key, outcome=asdict(outcomes[place.key]))
        except KeyboardInterrupt:
            interrupted = True
    _report(console, chosen, outcomes, options.every)
    console.print(f"{len(left)} mutants played in {time.monotonic() - began:.0f} s")
    if interrupted:
        return 130
    unexplained = [
        place
        for place in chosen
        if outcomes[place.key].result in (SURVIVES, UNNAMED, OVERRUN) and not _reason(place)
    ]
    return 1 if unexplained else 0


def _preload() -> None:
    """Import what the tests import, so that the processes of mutants need not."""
    import peft  # noqa: F401
    import torch._dynamo  # noqa: F401

    nowhere = Path(os.devnull)
    with nowhere.open("w") as file, contextlib.redirect_stdout(file):
        options = ["--collect-only", ALL_CASES, "-q", "-p", "no:cacheprovider"]
        pytest.main([*options, FOLDER, *LEFT_OUT])


if __name__ == "__main__":
    sys.exit(main())
