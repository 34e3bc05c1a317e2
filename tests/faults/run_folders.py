"""Makes run folders, damages one file in them, and goes on from them as a launch does, in this
process."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from realhf.api.calls import Arrival
from realhf.api.config import ConfigError, ExperimentConfig, MonitorConfig
from realhf.api.experiment import Launch
from realhf.base.files import RunFolderError, convert_run_folder_errors
from realhf.data.payload_log import PayloadDamaged, PayloadLog
from realhf.dataflow.checkpoint import CheckpointError, CheckpointStore
from realhf.dataflow.journal.journal import JournalError
from realhf.dataflow.rollouts.async_rollouts import AsyncRollouts
from realhf.launch.compose import compose_config
from realhf.launch.resume import check_resume, plain_options
from realhf.launch.run import check_kinds
from realhf.monitor.events import EventStream, parse_event
from realhf.monitor.provenance import record_launch
from realhf.monitor.run_log import RunLog, read_metrics
from realhf.monitor.trackers import run_info
from tests.dataflow.rollouts.toy_streamed_run import FakeWorkers, meta_of, plan_of

STEPS = 4
BATCH = 2
OPTIONS = (
    "env=sql", "seed=3", "trial_name=t",
    f"dataset.train_bs_n_seqs={BATCH}", "ppo.group_size=2", "gen.max_new_tokens=12",
    "evaluation.episodes_per_task=1", "evaluation.templates=2", "evaluation.greedy_episodes_per_task=0",
    "torch_threads=1", "monitor.progress=false", "ppo.entropy_coef=0.05", "exp_ctrl.ckpt_freq_steps=1",
    "rollout.sessions=4", "rollout.max_turns=2", "rollout.max_total_tokens=600", f"total_train_steps={STEPS}",
)  # fmt: skip
EXPERIMENTS = {
    "sync": ("experiment=grpo",),
    "async": ("experiment=grpo_async", "async_rl.recover_retries=0"),
}
KILLED_AFTER = 3
"""The run is killed when the checkpoint of this step is there, so that two of them are."""


def arguments(kind: str, root: Path, policy: Path) -> list[str]:
    """Return the options of a launch of ``kind`` (sync, async) below ``root``."""
    return [
        *EXPERIMENTS[kind],
        *OPTIONS,
        f"experiment_name={kind}",
        f"fileroot={root}",
        f"actor.path={policy}",
    ]


def launch(
    kind: str, root: Path, policy: Path, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, in ``folder``, to which relative paths belong."""
    command = [sys.executable, "-m", "realhf.launch", *arguments(kind, root, policy)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=folder
    )


class RunFolders:
    """Makes the folders of a killed and of a finished run of both kinds below ``root`` when they
    are asked for, by names such as ``sync-killed``. The finished one is the killed one gone on
    with."""

    def __init__(self, root: Path, policy: Path) -> None:
        self._root = root
        self._policy = policy

    def __getitem__(self, name: str) -> Path:
        kind, _, end = name.partition("-")
        made = self._root / name
        folder = self._root / "runs" / kind / "t"
        if made.exists():
            return made
        if end == "killed":
            launch_and_kill(kind, self._root / "runs", self._policy)
        else:
            assert self[f"{kind}-killed"].exists()
            done = launch(kind, self._root / "runs", self._policy)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr
        shutil.copytree(folder, made, symlinks=True)
        return made


def launch_and_kill(kind: str, root: Path, policy: Path) -> None:
    """Run the command until the checkpoint of ``KILLED_AFTER`` is there, and kill all of its
    processes."""
    command = [sys.executable, "-m", "realhf.launch", *arguments(kind, root, policy)]
    launched = psutil.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    record = root / kind / "t" / "checkpoints.json"
    deadline = time.monotonic() + 300
    while not (record.exists() and json.loads(record.read_text())["step"] >= KILLED_AFTER):
        assert launched.poll() is None and time.monotonic() < deadline, (
            "the run did not reach its checkpoint"
        )
        time.sleep(0.02)
    victims = [launched, *launched.children(recursive=True)]
    for process in victims:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(victims, timeout=60)


READ = {
    "options": r"config\.yaml",
    "checkpoint": r"checkpoints/ckpt-\d+/.+",
    "LATEST": r"checkpoints/LATEST",
    "journal": r"journal/journal-\d+\.log",
    "payloads": r"stream/payload-\d+\.log",
    "metrics": r"metrics\.jsonl",
    "evaluations": r"evaluations\.json",
    "launches": r"provenance\.json",
    "trackers": r"trackers\.json",
    "weights": r"weights\.jsonl",
    "best figures": r"best_policy\.json",
}
"""Kinds of files that a resume reads, or may read."""
WRITTEN = {
    "plan": r"plan\.json",
    "graph": r"graph\.(md|dot)",
    "lock": r"\.lock",
    "logs": r"logs/[\w-]+\.log",
    "episodes": r"episodes\.txt",
    "skipped updates": r"nonfinite\.jsonl",
    "deaths": r"deaths\.jsonl",
    "trace": r"trace/[\w.-]+\.jsonl|trace\.json",
    "rollouts": r"rollouts/(play|train)-[\w.-]+\.(jsonl\.gz|index\.jsonl)",
    "tensorboard": r"tensorboard/events\.out\.tfevents\..+",
    "draft": r"checkpoints/ckpt-\d+\.tmp/.+",
    "record": r"checkpoints\.json",
    "passport": r"passport\.json",
    "summary": r"summary\.json",
    "report": r"report\.html",
    "policy": r"(best_)?policy/.+|\.policy\.\d+\.(tmp|old)/.+|\.best_policy\.candidate/.+",
    "weights on their way": r"weights/.+",
    "half": r".+\.partial",
}
"""Kinds that it never reads: it replaces them, appends to them or leaves them alone."""
FIGURES = ("metrics", "evaluations", "launches", "trackers", "weights", "options")
"""Reports: a bit in them may make another figure that is as good as the one before."""


def kind_of(name: str) -> str | None:
    """Return the kind of a file by its path in the run folder; None where nobody has thought of
    it."""
    return next((kind for kind, form in (READ | WRITTEN).items() if re.fullmatch(form, name)), None)


class Damage(NamedTuple):
    """One way to damage a file; ``bit`` is that of a flip."""

    name: str
    bit: int = -1


FLIPS = 20
OTHERS = ("missing", "empty", "cut", "folder", "unreadable", "link")


def damages(size: int) -> list[Damage]:
    """Return all ways to damage a file of so many bytes, with flipped bits at places that are
    spread over it."""
    bits = sorted(
        {(8 * size * number // FLIPS + 7 * number % 8) for number in range(FLIPS)} if size else ()
    )
    return [
        *(Damage(name) for name in OTHERS),
        *(Damage("flip", min(bit, 8 * size - 1)) for bit in bits),
    ]


def apply(damage: Damage, path: Path) -> None:
    """Damage a file, whose contents other folders may share by a link."""
    data = path.read_bytes()
    path.unlink()
    if damage.name == "folder":
        path.mkdir()
    elif damage.name == "link":
        path.symlink_to(path.parent / "not" / "mounted")
    elif damage.name == "flip":
        changed = bytearray(data)
        changed[damage.bit // 8] ^= 1 << damage.bit % 8
        path.write_bytes(changed)
    elif damage.name != "missing":
        path.write_bytes(
            {"empty": b"", "cut": data[: len(data) // 2], "unreadable": data}[damage.name]
        )


@contextlib.contextmanager
def unreadable(path: Path | None) -> Iterator[None]:
    """Let this file be opened by nobody: the tests may run as root, who may read everything."""
    if path is None:
        yield
        return
    ordinary = {
        (module, name): getattr(module, name) for module, name in ((io, "open"), (os, "open"))
    }

    def refusing(open_: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, *args: Any, **more: Any) -> Any:
            if not isinstance(file, int) and os.fspath(file) == str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return open_(file, *args, **more)

        return call

    try:
        for (module, name), open_ in ordinary.items():
            setattr(module, name, refusing(open_))
        yield
    finally:
        for (module, name), open_ in ordinary.items():
            setattr(module, name, open_)


def copied(folder: Path, target: Path) -> Path:
    """Copy a run folder. What a resume replaces or leaves alone shares its contents with the
    original."""
    shutil.copytree(folder, target, symlinks=True, copy_function=_copied)
    return target


def _copied(source: str, target: str) -> None:
    in_place = re.search(r"/(journal|stream|logs|trace)/|\.jsonl$|/episodes\.txt$|/\.lock$", target)
    shutil.copyfile(source, target) if in_place else os.link(source, target)


class KeptSource:
    """Keeps whatever state it is given."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def next_batch(self, n: int) -> list[Any]:
        del n
        return []

    def record(self, results: Sequence[Any]) -> None:
        del results

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def stats(self) -> dict[str, float]:
        return {}


class Trainer(FakeWorkers):
    """Reads the payloads of a run folder as the trainer does."""

    def __init__(self, stream: Path) -> None:
        super().__init__()
        self._folder = stream

    def _restored(self, id: str, attempt: int, ref: list[int]) -> Arrival:
        log = PayloadLog(self._folder)
        try:
            with convert_run_folder_errors(self._folder):
                log.read(ref)
        except PayloadDamaged as error:
            return Arrival(id, attempt, "", error=str(error))
        finally:
            log.close()
        return Arrival(id, attempt, "", ref, meta_of(id))


@dataclass
class Outcome:
    """What a resume did: ``error`` is why it was refused, "" where it went on; ``told`` are the
    lines on the terminal; ``found`` is what it goes on from."""

    error: str = ""
    told: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)


def config_of(kind: str, root: Path, policy: Path) -> ExperimentConfig:
    """Return the configuration of the runs of a kind."""
    return compose_config(arguments(kind, root, policy)).config


def resume(folder: Path, config: ExperimentConfig, *, asynchronous: bool) -> Outcome:
    """Go on from a run folder as far as reading it goes: the launcher's part, then the master's, in
    their order."""
    config = copy.copy(config)
    config.fileroot, config.experiment_name, config.trial_name = map(
        str, (folder.parents[1], folder.parent.name, folder.name)
    )
    outcome = Outcome()
    try:
        resumption = check_resume(config)
        outcome.told += resumption.warnings() if resumption else ()
        check_kinds(folder)
        with convert_run_folder_errors(folder):
            _master(folder, config, asynchronous, outcome)
    except (ConfigError, CheckpointError, JournalError, RunFolderError) as error:
        outcome.error = str(error)
    return outcome


def _master(folder: Path, config: ExperimentConfig, asynchronous: bool, outcome: Outcome) -> None:
    checkpoint = CheckpointStore.for_run(folder).latest()
    completed = checkpoint.step if checkpoint else 0
    outcome.told += checkpoint.warnings if checkpoint else ()
    outcome.found |= {"step": completed, "state": checkpoint and checkpoint.state}
    if asynchronous:
        asyncio.run(
            _rollouts(folder, checkpoint.folder if checkpoint else None, completed, outcome)
        )
    origin = {"git": {"commit": ""}, "arguments": []}
    record_launch(
        folder,
        Launch("now", "now: 1\n", plain_options(config), {}, origin),
        completed,
        outcome.told.append,
    )
    outcome.found["launches"] = [
        entry["at"] for entry in json.loads((folder / "provenance.json").read_text())["launches"]
    ]
    events = io.StringIO()
    log = RunLog(
        folder,
        MonitorConfig(trackers=[]),
        EventStream(events),
        completed_steps=completed,
        total_steps=STEPS,
    )
    outcome.found |= {"rows": read_metrics(folder), "evaluations": log.evaluations.all()}
    outcome.found["tracker"] = run_info(folder, completed, (), outcome.told.append).id
    log.close()
    messages = [parse_event(line) for line in events.getvalue().splitlines()]
    outcome.told += [
        message["text"] for message in messages if message and message["kind"] == "warning"
    ]


async def _rollouts(
    folder: Path, checkpoint: Path | None, completed: int, outcome: Outcome
) -> None:
    source = KeptSource()
    plan = plan_of(folder / "journal", batch=BATCH, steps=STEPS, completed=completed)
    plan = replace(plan, archive=False, checkpoint=checkpoint)
    rollouts = await AsyncRollouts.open(
        plan, Trainer(folder / "stream"), source, outcome.told.append
    )
    state = rollouts._ledger.state
    outcome.found |= {
        "open": sorted([*state.accepted, *state.outstanding]),
        "planned": state.planned,
        "dropped": state.totals()["dropped"],
        "source": source.state,
    }
    await rollouts.close()
