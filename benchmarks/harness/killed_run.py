"""An asynchronous run of a tiny model whose processes are killed or stopped, and the checks of its
journal at the end.

Everything is real: launcher, master, workers, environment, training and, with AWS, the environment
server and its simulators. Their latency is simulated, so that episodes last long enough to be
killed. An environment that runs inside the rollout workers, such as ``sql``, has no processes of
its own to kill.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from realhf.api.config import BuiltinModelConfig
from realhf.backends.builtin_policy import build_builtin_policy
from realhf.dataflow.journal.audit import JournalTally, audit_folder
from realhf.dataflow.journal.journal import ARCHIVE, JournalError
from realhf.monitor.run_files import read_deaths

MARKS = {
    "master": "workers.master_worker",
    "model_worker": "workers.model_worker",
    "rollout_worker": "workers.rollout_worker",
    "generation": "workers.generation_worker",
    "env": "workers.env_worker",
    "ministack": "realhf.aws.simulator.ministack_server",
}
"""Kinds of processes that are killed, with the word in their command line that identifies them."""
FROZEN_ONLY = {"executor": "realhf.aws.cli.zygote"}
"""Kinds of processes that are stopped but not killed here; killing them is covered by their own
tests."""
SERVICE = ("env", "ministack")
"""Kinds of processes that exist only if the environment has a server."""
VERIFIER = "verifier"
"""Fault of an environment that is a file with a verifier: the verifier starts a computation that
holds the interpreter lock and never ends."""
FROZEN = "frozen "
"""Prefix of faults that stop a process for ever, so that the run has to notice and kill it."""
LAUNCHER = "launcher"
CTRL_C = "ctrl_c"
"""Faults of the launcher: it is killed, or interrupted. The same command then resumes the run."""
BATCH = 2
GROUP = 2
TINY = (
    f"dataset.train_bs_n_seqs={BATCH}",
    f"ppo.group_size={GROUP}", "gen.max_new_tokens=12",
    "evaluation.episodes_per_task=0", "evaluation.greedy_episodes_per_task=0", "torch_threads=1",
    "monitor.trackers=[]", "monitor.progress=false", "ppo.entropy_coef=0.05", "actor.optimizer.lr=0.0003",
    "exp_ctrl.ckpt_freq_steps=2", "async_rl.keep_journal=true", "async_rl.recover_retries=1000",
)  # fmt: skip
AWS = "aws"
ON_AWS = (
    "experiment=grpo_aws_async", "env.pool_size=4", "env.tiers=[warmup]", "env.step_latency_ms=300",
    "rollout.max_turns=2", "rollout.max_total_tokens=640",
)  # fmt: skip
HANGING = Path(__file__).with_name("hanging_verifier.py")
"""Environment that hangs on request, see ``VERIFIER``. Each run uses a copy of its own."""
ELSEWHERE = (
    "experiment=grpo_async",
    "rollout.sessions=4",
    "rollout.max_turns=8",
    "rollout.max_total_tokens=2000",
)
"""Options for environments without simulated latency; more turns make the episodes long enough to
be killed."""
SAYINGS = {
    AWS: ("aws s3api list-buckets", "aws sqs create-queue --queue-name a-b"),
    "sql": ("select 1", "select 2"),
}
"""Replies that the policy is taught, by environment. Other environments get those of AWS; their
answer does not matter."""
TAUGHT_STEPS = 200
GONE_WITHIN_S = 20.0
"""Seconds within which all processes of a stopped run must have ended. Ranks of a trainer may shut
down one after the other and take five seconds each, because a rank that waits in a collective
learns of its own end only afterwards."""
LOOK_S = 0.15
"""Interval in seconds at which the run's processes are listed, so that leftover ones can be found
at the end."""
SILENCE_S = 12.0
"""Seconds after which a stopped process must have been noticed, with the default options."""
ANY_MOMENT = 0.3
"""Fraction of the kills that come at any moment. Before the others the run must have made progress
since the previous kill."""


def make_policy(folder: Path, environment: str = AWS) -> Path:
    """Create a very small model with its tokenizer and return its folder. The model is taught to
    answer any message with one of ``SAYINGS``, because an untrained model would never step the
    environment."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = folder.with_suffix(".jsonl")
    commands = SAYINGS.get(environment, SAYINGS[AWS])
    talks = [
        [{"role": "user", "content": "A task"}, {"role": "assistant", "content": command}]
        for command in commands
    ]
    texts.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks * 9))
    config = BuiltinModelConfig(
        vocab_size=320,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=64,
        max_positions=2048,
    )
    build_builtin_policy(texts, folder, config, seed=3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(talks[0][:1], add_generation_prompt=True, tokenize=False)
    start = tokenizer(asked)["input_ids"][-1]
    replies = [
        [start, *tokenizer(command)["input_ids"], tokenizer.eos_token_id] for command in commands
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(3)
    torch.set_num_threads(1)  # for such a small model, more threads only add waiting
    for step in range(TAUGHT_STEPS):
        reply = torch.tensor(replies[step % len(replies)])
        noise = torch.randint(len(tokenizer), (int(torch.randint(1, 300, ())),))
        ids = torch.cat([noise, reply])[None]
        labels = torch.cat([torch.full_like(noise, -100), reply])[None]
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


class Stuck(RuntimeError):
    """The run made no progress or did not end in time. The message ends with the last lines of its
    log."""


@dataclass
class Verdict:
    """Result of a run. ``problems`` is empty if the run is correct. ``stop_s``: for each of
    ``LAUNCHER`` and ``CTRL_C``, the seconds from each stop until all processes had ended."""

    tally: JournalTally | None
    kills: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    stop_s: dict[str, list[float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class KilledRun:
    """One run below the folder ``runs``, with a policy from ``make_policy``.

    ``start`` starts it, and resumes it after the launcher was stopped. The attribute ``options``
    holds additional launcher options; it may be changed between starts.
    """

    def __init__(
        self,
        runs: Path,
        trial: str,
        policy: Path,
        *options: str,
        seed: int = 3,
        steps: int = 8,
        environment: str = AWS,
        synchronous: bool = False,
    ) -> None:
        self.folder = runs / "killed" / trial
        self._synchronous = synchronous
        if environment == VERIFIER:
            self._hang = runs / f"{trial}-environment" / "hang"
            self._hang.parent.mkdir()
            copy = shutil.copy(HANGING, self._hang.parent)
            options = (*options, f"env.path={copy}:reward")
        self.steps = steps
        self.kills: Counter[str] = Counter()
        self.stop_s: dict[str, list[float]] = {}
        self.output = runs / f"{trial}.log"
        self._command = [
            sys.executable,
            "-m",
            "realhf.launch",
            *(ON_AWS if environment == AWS else ELSEWHERE),
            *((f"env={environment}",) if environment not in (AWS, VERIFIER) else ()),
            *(option for option in TINY if not (synchronous and option.startswith("async_rl."))),
            "experiment_name=killed",
            f"seed={seed}",
            f"trial_name={trial}",
            f"fileroot={runs}",
            f"total_train_steps={steps}",
            f"actor.path={policy}",
        ]
        if synchronous:
            self._command[3] = self._command[3].removesuffix("_async")
        self.options = options
        self._seen: set[psutil.Process] = set()
        self._named_memory: set[str] = set()
        self._launcher: psutil.Popen | None = None
        self._began = time.monotonic()

    def start(self) -> None:
        """Start the launcher; the second and later times it resumes the run."""
        with self.output.open("ab") as log:
            self._launcher = psutil.Popen(
                [*self._command, *self.options],
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_heed_ctrl_c,
            )

    @property
    def running(self) -> bool:
        """Whether the launcher is alive."""
        return self._launcher is not None and self._launcher.poll() is None

    def processes(self) -> set[psutil.Process]:
        """Return all current descendants of the launcher."""
        assert self._launcher is not None
        found: set[psutil.Process] = set()
        with contextlib.suppress(psutil.Error):
            found = set(self._launcher.children(recursive=True))
        self._seen |= found
        return found

    def _look_at_memory(self) -> None:
        for process in self.processes():
            self._named_memory |= _named_memory(process.pid)

    def alive(self, kind: str) -> list[psutil.Process]:
        """Return the processes of this kind, ordered by pid."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if (MARKS | FROZEN_ONLY)[kind] in process.cmdline():
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def kill(self, kind: str, choice: random.Random) -> bool:
        """Send SIGKILL to a random process of this kind. Return False if there is none at the
        moment."""
        victims = self.alive(kind)
        if not victims:
            return False
        self._look_at_memory()
        with contextlib.suppress(psutil.NoSuchProcess):
            choice.choice(victims).kill()
            self.kills[kind] += 1
        return True

    def freeze(self, kind: str, choice: random.Random) -> psutil.Process | None:
        """Send SIGSTOP to a random process of this kind and return the process; None if there is
        none at the moment. For ``VERIFIER``, make the verifier hang and return None."""
        if kind == VERIFIER:
            self._hang.touch()
            return None
        with contextlib.suppress(IndexError, psutil.NoSuchProcess):
            victim = choice.choice(self.alive(kind))
            victim.suspend()
            self.kills[kind] += 1
            return victim
        return None

    def stop(self, how: str, timeout_s: float) -> None:
        """Kill the launcher (``LAUNCHER``) or interrupt it as Ctrl-C does (``CTRL_C``), wait until
        all processes have ended, and start it again. If the run finishes first, it is not started
        again. Raises Stuck."""
        assert self._launcher is not None
        self._look_at_memory()
        number = signal.SIGKILL if how == LAUNCHER else signal.SIGINT
        began = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            self._launcher.send_signal(number)
        code = self.wait(timeout_s)
        if code == 0:
            return
        self.kills[how] += 1
        if code not in (
            (-signal.SIGKILL,) if how == LAUNCHER else (128 + signal.SIGINT, -signal.SIGINT)
        ):
            raise Stuck(f"exit code {code} of a run that was stopped by {how}:\n{self.tail()}")
        if left := self.left_over():
            raise Stuck(f"left running {GONE_WITHIN_S:g} s after {how}: {'; '.join(left)}")
        self.stop_s.setdefault(how, []).append(time.monotonic() - began)
        self.start()

    def wait(self, timeout_s: float) -> int:
        """Wait for the launcher's end and return its exit code. Raises Stuck."""
        assert self._launcher is not None
        deadline = time.monotonic() + timeout_s
        while self.running:
            if time.monotonic() > deadline:
                raise Stuck(
                    f"{self.folder.name} did not end within {timeout_s:g} s:\n{self.tail()}"
                )
            self.processes()
            time.sleep(LOOK_S)
        return int(self._launcher.wait())

    def journal_bytes(self) -> int:
        """Return the size of the journal, which grows as long as the run makes progress."""
        folder = self.folder / "journal"
        total = 0
        for path in [*folder.glob("*.log"), *(folder / ARCHIVE).glob("*.log")]:
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def wait_for_progress(self, since: int, timeout_s: float) -> None:
        """Wait until the journal has more than ``since`` bytes or the run has ended. Raises
        Stuck."""
        deadline = time.monotonic() + timeout_s
        while self.running and self.journal_bytes() <= since:
            if time.monotonic() > deadline:
                raise Stuck(
                    f"{self.folder.name} did not get on within {timeout_s:g} s:\n{self.tail()}"
                )
            self.processes()
            time.sleep(LOOK_S)

    def left_over(self, within_s: float = GONE_WITHIN_S) -> list[str]:
        """Return the command lines of processes that are still alive ``within_s`` seconds later,
        and kill those processes."""
        _, alive = psutil.wait_procs(list(self._seen), timeout=within_s)
        names = []
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(" ".join(process.cmdline())[:160])
                process.kill()
        return names

    def end(self) -> None:
        """Kill all remaining processes of the run."""
        self.processes()
        for process in [
            *([self._launcher] if self._launcher and self.running else []),
            *self._seen,
        ]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._launcher is not None:
            self._launcher.wait(GONE_WITHIN_S)

    def verdict(self, exit_code: int) -> Verdict:
        """Return the result of a run that has ended: whether all steps were done and the journal is
        consistent."""
        result = Verdict(None, self.kills, time.monotonic() - self._began, self.stop_s)
        if exit_code != 0:
            result.problems.append(f"exit code {exit_code}: {self.tail()}")
        result.problems += [f"left running: {line}" for line in self.left_over()]
        result.problems += [
            f"left in /dev/shm: {name}"
            for name in sorted(self._named_memory)
            if Path(name).exists()
        ]
        steps = self.finished_steps()
        if steps != list(range(1, self.steps + 1)):
            result.problems.append(f"steps in metrics.jsonl: {steps}")
        if self._synchronous:
            return result
        try:
            result.tally = audit_folder(self.folder / "journal")
        except JournalError as error:
            result.problems.append(str(error))
        else:
            result.problems += _faults(result.tally, self.steps * BATCH)
        return result

    def finished_steps(self) -> list[float]:
        """Return the numbers of the steps that have a row in the metrics file."""
        return [row["step"] for row in self.rows()]

    def pause(self, seconds: float) -> int:
        """Stop the launcher and all its processes for ``seconds``, as if the machine had been
        suspended. Return the number of processes."""
        assert self._launcher is not None
        stopped: set[psutil.Process] = set()
        # Stopped processes start no others, so all are stopped once no new ones are found.
        while fresh := {psutil.Process(self._launcher.pid), *self.processes()} - stopped:
            for process in fresh:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            stopped |= fresh
        time.sleep(seconds)
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        return len(stopped)

    def rows(self) -> list[dict[str, float]]:
        """Return the metrics of the finished steps."""
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def deaths(self) -> list[str]:
        """Return a description of each worker that ended before the run, with the launcher's
        reason."""
        return [
            f"{death.process}: {death.why.partition(' (log:')[0]}; {death.then}"
            for death in read_deaths(self.folder)
        ]

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of the launcher's output."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])


def kill_at_random(
    run: KilledRun, kinds: Sequence[str], choice: random.Random, *, every_s: float, timeout_s: float
) -> None:
    """Apply the faults ``kinds`` to the run, one after the other, on average ``every_s`` seconds
    apart. Returns when the run ends.

    Each fault is a kill, or a stop if it begins with ``FROZEN``. A fraction ``ANY_MOMENT`` of the
    faults come at any moment; before the others the run must have made progress since the previous
    fault. Raises Stuck if it makes none for ``timeout_s`` seconds.
    """
    before = 0
    for kind in kinds:
        # A process that hangs before it has registered is noticed only after rpc.connect_timeout_s.
        if choice.random() >= ANY_MOMENT or kind.startswith(FROZEN):
            run.wait_for_progress(before, timeout_s)
        until = time.monotonic() + choice.uniform(0.2, 1.8) * every_s
        while run.running and time.monotonic() < until:
            run.processes()
            time.sleep(min(LOOK_S, max(0.0, until - time.monotonic())))
        if kind in (LAUNCHER, CTRL_C):
            run.stop(kind, timeout_s)
        elif kind.startswith(FROZEN):
            _freeze_until_it_is_killed(run, kind.removeprefix(FROZEN), choice, timeout_s)
        else:
            _kill_when_there(run, kind, choice, timeout_s)
        before = run.journal_bytes()


def freeze_for(
    run: KilledRun, kind: str, seconds: float, choice: random.Random, *, timeout_s: float
) -> float:
    """Stop a random process of this kind for ``seconds``, and wait until the run has made progress
    after it was resumed, or has ended. Return the longest time without progress, in seconds.

    Raises Stuck if that time exceeds ``timeout_s`` plus the duration of the freeze, or plus
    ``SILENCE_S`` if that is shorter, because the run should then have noticed.
    """
    began = moved = time.monotonic()
    victim = run.freeze(kind, choice)
    while victim is None and kind != VERIFIER and run.running:
        if time.monotonic() > began + timeout_s:
            raise Stuck(f"{run.folder.name} had no {kind} for {timeout_s:g} s:\n{run.tail()}")
        time.sleep(0.05)
        victim = run.freeze(kind, choice)
    began = moved = time.monotonic()
    thaw = began + seconds
    limit_s = min(seconds, SILENCE_S) + timeout_s
    longest = 0.0
    before = 0
    after = None
    while run.running and (after is None or run.journal_bytes() <= after):
        now = time.monotonic()
        size = run.journal_bytes()
        if size > before:
            moved = now
            before = size
        longest = max(longest, now - moved)
        if longest > limit_s:
            raise Stuck(
                f"{run.folder.name} stood still for {limit_s:g} s since {kind} hung for "
                f"{seconds:g} s:\n{run.tail()}"
            )
        if after is None and now >= thaw:
            with contextlib.suppress(psutil.NoSuchProcess):
                if victim is not None:
                    victim.resume()
            after = size
        run.processes()
        time.sleep(LOOK_S)
    return longest


def pause_again_and_again(
    run: KilledRun, moments: int, seconds: float, choice: random.Random, timeout_s: float
) -> int:
    """Pause the whole run ``moments`` times at random moments, each time for ``seconds``: twice
    during its start, and later within a second after a step. Return the number of steps finished
    after the last pause, at least one more than before. Raises Stuck if the run ends, or finishes
    no step for ``timeout_s`` seconds."""
    steps = 0
    for moment in range(moments + 1):
        deadline = time.monotonic() + timeout_s
        while run.running and moment > 1 and len(run.finished_steps()) <= steps:
            if time.monotonic() > deadline:
                raise Stuck(f"no step for {timeout_s:g} s after pause {moment}:\n{run.tail()}")
            time.sleep(0.05)
        if not run.running:
            raise Stuck(f"it ended after pause {moment}:\n{run.tail()}")
        steps = len(run.finished_steps())
        if moment < moments:
            time.sleep(choice.uniform(0.5, 4.0) if moment < 2 else choice.uniform(0.0, 1.0))
            run.pause(seconds)
    return steps


def _heed_ctrl_c() -> None:
    """Make the child process react to Ctrl-C. Processes that a shell starts in the background
    ignore it, and so would their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _freeze_until_it_is_killed(
    run: KilledRun, kind: str, choice: random.Random, timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    victim = None
    while run.running and (victim is None or victim.is_running()):
        if time.monotonic() > deadline:
            raise Stuck(
                f"{run.folder.name}: {kind} stands still, and nobody ends it:\n{run.tail()}"
            )
        victim = victim or run.freeze(kind, choice)
        run.processes()
        time.sleep(LOOK_S)


def _kill_when_there(run: KilledRun, kind: str, choice: random.Random, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while run.running and not run.kill(kind, choice):
        if time.monotonic() > deadline:
            raise Stuck(f"{run.folder.name} had no {kind} for {timeout_s:g} s:\n{run.tail()}")
        time.sleep(0.05)


def _faults(tally: JournalTally, samples: int) -> list[str]:
    expected = {
        "lost": 0,
        "twice": 0,
        "impossible": 0,
        "rejected": 0,
        "dropped": 0,
        "accepted": 0,
        "outstanding": 0,
        "consumed": samples,
        "admitted": samples,
        "ended": True,
        "complete": True,
    }
    return [
        f"journal: {name} is {getattr(tally, name)}, not {value}"
        for name, value in expected.items()
        if getattr(tally, name) != value
    ]


def _named_memory(pid: int) -> set[str]:
    """Return the files in /dev/shm that a process has mapped."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
            return {line.split()[5] for line in maps if "/dev/shm/" in line}
    except OSError:
        return set()
