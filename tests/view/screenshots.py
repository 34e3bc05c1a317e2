"""The pictures of the page over runs in ``docs/images``, light and dark, taken of real runs: ``make
screenshots``, with Chromium.

    python -m tests.view.screenshots [RUN RUN RUN [CUT_OFF [AWS [KILLED]]]]

Runs that are not named are trained first, which takes minutes: three on the SQL environment with
the built-in policy; one whose answers are cut off, for the advisories; one on AWS by a policy that
knows two commands, for the state of the account; and one that is killed and goes on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from benchmarks.harness.killed_run import make_policy
from tests.chromium import Chromium
from tests.process_family import family, gone
from tests.view.runs import served

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
FIRST, SECOND, THIRD, CUT_OFF, AWS, KILLED = range(6)
DIFFERENCE = "difference"
TELLING = "split=train&sort=advantage"
"""First the rollout that was better than its group."""
PAGES = (
    ("overview", f"#/overview?runs={FIRST}", ()),
    ("compare", f"#/overview?runs={FIRST},{SECOND}&smooth=0.6", ()),
    ("seeds", f"#/overview?runs={FIRST},{THIRD}", ()),
    (DIFFERENCE, f"#/overview?runs={FIRST},{SECOND}", ()),
    ("killed", f"#/overview?runs={KILLED}", ()),
    ("advisories", f"#/advisories?runs={CUT_OFF}", ("j",)),
    ("timeline", f"#/timeline?runs={FIRST}", ("n",)),
    ("rollouts", f"#/rollouts?runs={FIRST}&split=train", ("ArrowDown",)),
    ("rollout", f"#/rollouts?runs={FIRST}&{TELLING}", ("Enter", "g")),
    ("account", f"#/rollout?runs={AWS}", ("e",)),
    ("tokens", f"#/rollouts?runs={FIRST}&{TELLING}", ("Enter", "t", "ArrowRight")),
    ("tasks", f"#/tasks?runs={FIRST}", ()),
)
SIZE_LIMIT = 200_000
_SETTLED_S = 0.6
_PATIENCE_S = 1800.0
COMMON = (
    "evaluation.greedy_episodes_per_task=0",
    "monitor.progress=false",
    "monitor.rollout_tokens=1",
    "torch_threads=1",
)
SQL = (
    "experiment=grpo",
    "env=sql",
    "dataset.train_bs_n_seqs=8",
    "evaluation.episodes_per_task=8",
    *COMMON,
)
UNTAUGHT = (
    "evaluation.episodes_per_task=0",
    "dataset.train_bs_n_seqs=4",
    "ppo.group_size=4",
    *COMMON,
)


def main() -> None:
    """Photograph every page."""
    with tempfile.TemporaryDirectory() as folder:
        named = [Path(name) for name in sys.argv[1:]]
        makers = (first, second, third, cut_off, aws, killed)
        runs = [*named, *(make(Path(folder)) for make in makers[len(named) :])]
        with served(*runs, follow=False) as url, closing(Chromium()) as page:
            for name, place, keys in PAGES:
                for scheme in ("light", "dark"):
                    page.look(1280, 800, scheme)
                    picture(page, url, name, scheme, place, keys)
            if page.problems:
                raise SystemExit(f"the page complained: {page.problems}")


def picture(
    page: Chromium, url: str, name: str, scheme: str, place: str, keys: tuple[str, ...]
) -> None:
    """Write the picture of one page; the light one has no word for it in its name."""
    page.open(f"{url}/?{name}-{scheme}{place}")
    page.wait(f"document.documentElement.dataset.page === '{place[2:].partition('?')[0]}'")
    for key in keys:
        page.press(key)
        time.sleep(_SETTLED_S)
    if name == DIFFERENCE:
        page.js("document.getElementById('difference').scrollIntoView({block: 'end'})")
    time.sleep(_SETTLED_S)
    path = IMAGES / f"view-{name}{'' if scheme == 'light' else '-dark'}.png"
    page.screenshot(path)
    size = path.stat().st_size
    print(f"{path}: {size // 1000} kB", flush=True)
    if size > SIZE_LIMIT:
        raise SystemExit(f"{path.name} has more than {SIZE_LIMIT // 1000} kB")


def first(folder: Path) -> Path:
    """Train for some steps."""
    return on_sql(folder, "seed1", "seed=1")


def second(folder: Path) -> Path:
    """The same with another seed and twice the learning rate."""
    return on_sql(folder, "seed2", "seed=2", "actor.optimizer.lr=6e-4")


def third(folder: Path) -> Path:
    """The first one with the second one's seed."""
    return on_sql(folder, "seed2-same", "seed=2")


def on_sql(folder: Path, name: str, *options: str) -> Path:
    """Train on SQL from a policy that is taught once."""
    taught = [*(folder / "warm_start").glob("policy-*")]
    if not taught:
        trained(
            folder,
            "taught",
            *SQL,
            "seed=1",
            "total_train_steps=1",
            "evaluation.episodes_per_task=0",
        )
        taught = [*(folder / "warm_start").glob("policy-*")]
    return trained(folder, name, *SQL, f"actor.path={taught[0]}", "total_train_steps=12", *options)


def cut_off(folder: Path) -> Path:
    """A run whose answers may have six tokens, which is too few for any query."""
    few = ("gen.max_new_tokens=6", "actor.path=builtin_tiny", "total_train_steps=8")
    return trained(folder, "cut-off", "experiment=grpo", "env=sql", *few, *UNTAUGHT)


def aws(folder: Path) -> Path:
    """A run on AWS whose policy knows two commands, of which one makes a queue."""
    policy = make_policy(folder / "policy")
    few = (
        "env.pool_size=2",
        "env.tiers=[warmup]",
        "rollout.max_turns=3",
        "rollout.max_total_tokens=900",
    )
    few += ("gen.max_new_tokens=24", "total_train_steps=2", f"actor.path={policy}")
    return trained(folder, "account", "experiment=grpo_aws", *few, *UNTAUGHT)


def killed(folder: Path) -> Path:
    """A run that is killed with all its processes in the middle, and is left so."""
    few = (
        "gen.max_new_tokens=8",
        "actor.path=builtin_tiny",
        "total_train_steps=40",
        "rollout.max_total_tokens=900",
    )
    launcher = subprocess.Popen(
        launch(folder, "killed", "experiment=grpo", "env=countdown", *few, *UNTAUGHT)
    )
    run = folder / "grpo" / "killed"
    end = time.monotonic() + _PATIENCE_S
    try:
        while (
            len(
                (run / "metrics.jsonl").read_text().splitlines()
                if (run / "metrics.jsonl").exists()
                else ()
            )
            < 12
        ):
            if launcher.poll() is not None or time.monotonic() > end:
                raise SystemExit("the run that is to be killed does not get on")
            time.sleep(0.1)
    finally:
        others = family(launcher.pid)
        launcher.kill()
        launcher.wait()
        if not gone(others, 60.0):
            raise SystemExit("a killed run left processes behind")
    an_hour_ago = time.time() - 3600
    for path in (run, *run.rglob("*")):
        os.utime(path, (an_hour_ago, an_hour_ago))
    return run


def trained(folder: Path, name: str, *options: str) -> Path:
    """Run the launcher to its end and return the run folder."""
    subprocess.run(launch(folder, name, *options), check=True)
    return folder / "grpo" / name


def launch(folder: Path, name: str, *options: str) -> list[str]:
    """Return the command line of a run."""
    where = (f"fileroot={folder}", "experiment_name=grpo", f"trial_name={name}")
    return [sys.executable, "-m", "realhf.launch", *options, *where]


if __name__ == "__main__":
    main()
