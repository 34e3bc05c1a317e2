"""A damaged run folder, as a class: every kind of file of a finished and of a killed run, with
every kind of damage.

A resume either goes on, and says in one line what it does without, or is refused with file, cause
and remedy. It never begins at step 0 by itself, never overwrites what it could not read, and never
trains a sample twice without a word. A flipped bit that leaves a figure of a report a figure need
not be noticed; in checkpoint and journal it must.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from realhf.api.config import ExperimentConfig
from realhf.dataflow.journal.journal import Consume, Draw, read_segment, segments
from tests.faults import run_folders
from tests.faults.run_folders import FIGURES, READ, Damage, Outcome, RunFolders, damages, kind_of

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(900)]

NAMES = ("sync-killed", "sync-finished", "async-killed", "async-finished")
UNUSED = {"best figures"}
"""Kinds that only runs with other options have."""
REMEDIES = ("recover_mode=disabled", "another trial_name")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> RunFolders:
    return RunFolders(tmp_path_factory.mktemp("run-folders"), policy)


class Scene:
    """One of the folders, with what a resume of it finds where nothing is damaged."""

    def __init__(self, name: str, folder: Path, tmp: Path, policy: Path) -> None:
        self.name = name
        self.folder = folder
        self._tmp = tmp / "e"
        self._asynchronous = name.startswith("async")
        self._config: ExperimentConfig = run_folders.config_of(name.partition("-")[0], tmp, policy)
        self._trials = 0
        self.files = sorted(
            path.relative_to(folder) for path in folder.rglob("*") if path.is_file()
        )
        self.sound = self.go_on(self.copy())
        assert not self.sound.error and not self.sound.told, self.sound

    def copy(self) -> Path:
        self._trials += 1
        return run_folders.copied(self.folder, self._tmp / str(self._trials))

    def go_on(self, folder: Path, unreadable: Path | None = None) -> Outcome:
        with run_folders.unreadable(unreadable):
            return run_folders.resume(folder, self._config, asynchronous=self._asynchronous)

    def damaged(self, name: Path, damage: Damage) -> tuple[Outcome, Path]:
        folder = self.copy()
        run_folders.apply(damage, folder / name)
        self.before = contents(folder)
        outcome = self.go_on(folder, folder / name if damage.name == "unreadable" else None)
        return outcome, folder


@pytest.fixture(
    scope="module",
    params=[
        name if name.endswith("killed") else pytest.param(name, marks=pytest.mark.nightly)
        for name in NAMES
    ],
)
def scene(
    request: pytest.FixtureRequest,
    folders: RunFolders,
    tmp_path_factory: pytest.TempPathFactory,
    policy: Path,
) -> Iterator[Scene]:
    """Without the waits for the disk and the lines of the log, of which there would be
    thousands."""
    logging.disable(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr(os, "fdatasync", lambda handle: None)
        yield Scene(
            request.param, folders[request.param], tmp_path_factory.mktemp(request.param), policy
        )
    logging.disable(logging.NOTSET)


def contents(folder: Path) -> dict[str, bytes]:
    """The plain files of a folder that have something in them."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.stat().st_size
    }


def digests(data: dict[str, bytes]) -> set[str]:
    return {hashlib.sha256(text).hexdigest() for text in data.values()}


@pytest.mark.sampled(1)
def test_every_file_of_a_run_folder_has_a_kind(scene: Scene) -> None:
    """A new kind of file is noticed here: say in ``run_folders`` whether a resume reads it."""
    kinds = {str(name): kind_of(str(name)) for name in scene.files}
    assert not [name for name, kind in kinds.items() if kind is None]
    wanted = (
        {*READ}
        - UNUSED
        - (set() if scene.name.startswith("async") else {"journal", "payloads", "weights"})
    )
    assert {*kinds.values()} >= wanted


opened: set[str] = set()
sys.addaudithook(lambda event, details: opened.add(str(details[0])) if event == "open" else None)


def test_what_a_resume_reads_is_known(scene: Scene) -> None:
    folder = scene.copy()
    opened.clear()
    scene.go_on(folder)
    names = [
        str(Path(path).relative_to(folder))
        for path in sorted(opened)
        if path.startswith(f"{folder}/")
    ]
    kinds = {
        kind_of(name)
        for name in names
        if (folder / name).is_file() and (scene.folder / name).is_file()
    }
    assert kinds <= {*READ, "lock"}, kinds
    assert kinds >= {"checkpoint", "LATEST", "metrics", "evaluations", "launches", "trackers"}


def problems(
    scene: Scene, name: Path, damage: Damage, outcome: Outcome, folder: Path
) -> Iterator[str]:
    """Say what is wrong with how a resume took a damage."""
    kind = kind_of(str(name))
    after = contents(folder)
    lines = [outcome.error] if outcome.error else outcome.told
    words = {name.name, *(part for part in name.parts if part.startswith(("ckpt-", "journal")))}
    if any("\n" in line for line in lines):
        yield "more than one line"
    if lines and not any(
        word in line for line in lines for word in words | {"samples that had arrived are lost"}
    ):
        yield f"the file is not named: {lines}"
    if outcome.error:
        if not any(remedy in outcome.error for remedy in REMEDIES):
            yield f"no remedy: {outcome.error}"
        if lost := digests(scene.before) - digests(after):
            yield f"refused, and {len(lost)} files were changed: {outcome.error}"
        return
    flipped_figure = damage.name == "flip" and kind in FIGURES
    if not outcome.told and outcome.found != scene.sound.found and not flipped_figure:
        yield f"nothing was said: {outcome.found}"
    if len(outcome.told) > 1:
        yield f"more than one line: {outcome.told}"
    steps = {scene.sound.found["step"], scene.sound.found["step"] - 1 if outcome.told else 0} - {0}
    if outcome.found["step"] not in steps:
        yield f"goes on from step {outcome.found['step']}"
    data = scene.before.get(str(name), b"")
    if outcome.told and data and kind in READ and kind not in ("options", "LATEST"):
        cut = any(data.startswith(text) for text in after.values()) and any(
            data.endswith(text) for text in after.values()
        )
        complete = kind in FIGURES and data.split(b"\n")[0] in (after.get(str(name)) or b"")
        if data not in after.values() and not cut and not complete:
            yield "what could not be read is gone"
    yield from twice(scene, outcome)


def twice(scene: Scene, outcome: Outcome) -> Iterator[str]:
    """Say which samples a resume would train a second time, relative to the weights that it goes on
    from."""
    if "source" not in outcome.found:
        return
    frames = [
        frame for path in segments(scene.folder / "journal") for frame in read_segment(path)[0]
    ]
    step = outcome.found["step"]
    trained = {
        id
        for frame in frames
        for record in frame
        if isinstance(record, Consume) and record.step < step
        for id in record.ids
    }
    # The journal begins at the oldest checkpoint kept; what was trained before is forgotten.
    oldest = min(
        int(path.name.split("-")[1]) for path in scene.folder.glob("checkpoints/ckpt-*[0-9]")
    )
    assert trained or step == oldest
    if again := trained & set(outcome.found["open"]):
        yield f"trained again: {again}"
    later = [record.state for frame in frames for record in frame if isinstance(record, Draw)]
    known = [*later, *kept_states(scene)]
    if json.dumps(outcome.found["source"], sort_keys=True) not in {
        json.dumps(s["source"], sort_keys=True) for s in known
    }:
        yield f"tasks are drawn from {outcome.found['source']}"


def kept_states(scene: Scene) -> list[dict[str, Any]]:
    found = scene.folder.glob("checkpoints/ckpt-*/journal.snapshot")
    records = [record for path in found for frame in read_segment(path)[0] for record in frame]
    return [record.state for record in records if isinstance(record, Draw)]


def representatives(scene: Scene) -> list[Path]:
    """Return the files of a folder, one of those that are alike by kind and by name without
    numbers."""
    alike: dict[tuple[str | None, str], Path] = {}
    for name in scene.files:
        plain = "".join("#" if character.isdigit() else character for character in name.name)
        kind = kind_of(str(name))
        alike[kind, plain if kind in ("checkpoint", "policy") else ""] = name
    return sorted(alike.values())


@pytest.mark.nightly
def test_every_damage_of_every_kind_of_file(scene: Scene) -> None:
    """The newest file of each kind; of a checkpoint, of a policy each file."""
    counted: Counter[tuple[str | None, str, str]] = Counter()
    wrong: list[str] = []
    for name in representatives(scene):
        for damage in damages((scene.folder / name).stat().st_size):
            outcome, folder = scene.damaged(name, damage)
            what = "refused" if outcome.error else "told" if outcome.told else "same"
            counted[kind_of(str(name)), damage.name, what] += 1
            wrong += [
                f"{name} {damage}: {problem}"
                for problem in problems(scene, name, damage, outcome, folder)
            ]
            shutil.rmtree(folder)
    print(
        f"{scene.name}: {counted.total()} damages",
        Counter(what for _, _, what in counted.elements()),
    )
    for kind in sorted({str(kind) for kind, _, _ in counted}):
        print(
            f"  {kind}: ",
            {f"{d} {w}": n for (k, d, w), n in sorted(counted.items(), key=str) if k == kind},
        )
    assert not wrong, "\n".join(wrong[:40])
    assert counted.total() > 100
    strict = [
        key
        for key in counted
        if key[0] in ("checkpoint", "journal") and key[1] == "flip" and key[2] == "same"
    ]
    assert not strict, "one bit in a checkpoint or a journal is always noticed"


@pytest.mark.sampled(1)
def test_no_checkpoint_that_can_be_used_is_no_run_that_begins(scene: Scene) -> None:
    """Each damage of each file of a checkpoint, in all checkpoints."""
    names = {
        name.relative_to(*name.parts[:1]).as_posix().partition("/")[2]
        for name in scene.files
        if kind_of(str(name)) == "checkpoint"
    }
    assert len(names) >= 4
    for rest in sorted(names):
        for damage in (
            Damage("missing"),
            Damage("empty"),
            Damage("cut"),
            Damage("flip", 77),
            Damage("folder"),
            Damage("link"),
        ):
            folder = scene.copy()
            # The kill may have come while the oldest checkpoint was removed, so that only a part of
            # it is there.
            found = [
                path for path in folder.glob(f"checkpoints/ckpt-*[0-9]/{rest}") if path.exists()
            ]
            assert len(found) >= 2
            for path in found:
                run_folders.apply(damage, path)
            before = contents(folder)
            outcome = scene.go_on(folder)
            assert (
                "none can be used" in outcome.error and "recover_mode=disabled" in outcome.error
            ), (rest, damage)
            assert contents(folder) == before
            shutil.rmtree(folder)


class Launched(NamedTuple):
    """A damage that the command itself meets: ``told`` are words of its line, ``goes_on`` says how
    it ends."""

    folder: str
    files: str
    damage: Damage
    goes_on: bool
    told: str


CUT, FLIP = Damage("cut"), Damage("flip", 8 * 40 + 7)
LAUNCHES = {
    "all checkpoints": Launched(
        "sync-killed", "checkpoints/ckpt-*[0-9]/state.json", FLIP, False, "none can be used"
    ),
    "journal": Launched(
        "async-killed", "journal/journal-*.log", FLIP, True, "samples that the checkpoint of step"
    ),
    "one checkpoint": Launched(
        "sync-killed",
        f"checkpoints/ckpt-*{run_folders.KILLED_AFTER}/state.json",
        FLIP,
        True,
        "later ones cannot be used",
    ),
    "LATEST": Launched(
        "sync-killed", "checkpoints/LATEST", Damage("empty"), True, "does not name the newest"
    ),
    "journal that cannot be read": Launched(
        "async-killed", "journal/*.log", Damage("folder"), False, "cannot be read"
    ),
    "payloads": Launched(
        "async-killed",
        "stream/payload-*.log",
        Damage("empty"),
        True,
        "samples that had arrived are lost",
    ),
    "metrics": Launched("sync-killed", "metrics.jsonl", FLIP, True, "is damaged in line 1"),
    "metrics that are a folder": Launched(
        "sync-killed", "metrics.jsonl", Damage("folder"), False, "should be a file"
    ),
    "evaluations": Launched("sync-killed", "evaluations.json", CUT, True, "cannot be parsed"),
    "launches": Launched("sync-killed", "provenance.json", CUT, True, "cannot be parsed"),
    "trackers": Launched(
        "sync-killed", "trackers.json", CUT, True, "for its trackers the run is a new one"
    ),
    "weights": Launched(
        "async-killed", "weights.jsonl", Damage("missing"), True, "does not say which weights"
    ),
    "a finished run": Launched(
        "sync-finished", "checkpoints/ckpt-*[0-9]/MANIFEST.json", CUT, False, "none can be used"
    ),
}
FIRST = ("all checkpoints",)


@pytest.mark.parametrize(
    "name",
    [name if name in FIRST else pytest.param(name, marks=pytest.mark.nightly) for name in LAUNCHES],
)
def test_the_command_goes_on_or_says_what_to_do(
    folders: RunFolders, tmp_path: Path, policy: Path, name: str
) -> None:
    case = LAUNCHES[name]
    kind = case.folder.partition("-")[0]
    folder = tmp_path / kind / "t"
    shutil.copytree(folders[case.folder], folder, symlinks=True)
    for path in sorted(folder.glob(case.files)):
        run_folders.apply(case.damage, path)
    before = contents(folder)
    done = run_folders.launch(kind, tmp_path, policy)
    said = [line for line in (done.stdout + done.stderr).splitlines() if case.told in line]
    assert len(said) == 1, done.stdout[-3000:] + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    if case.goes_on:
        assert done.returncode == 0, done.stderr
        steps = [
            json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        assert steps[-1] == run_folders.STEPS and len(set(steps)) == len(steps)
        assert "resumed after step" in done.stdout
        return
    assert done.returncode != 0 and "recover_mode=disabled" in said[0]
    learned = {name for name in before if kind_of(name) in READ}
    after = contents(folder)
    assert {name: before[name] for name in learned} == {name: after.get(name) for name in learned}
