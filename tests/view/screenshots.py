"""The pictures of the page over runs in ``docs/images``, taken of real runs: ``make screenshots`` (needs Chromium).

    python -m tests.view.screenshots [RUN RUN]

Without folders two short runs are trained first, on the SQL environment with the built-in policy, which takes minutes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from tests.chromium import Chromium
from tests.view.runs import served

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PAGES = (
    ("overview", "light", "#/overview?runs=0", ()),
    ("compare", "dark", "#/overview?runs=0,1&smooth=0.6", ()),
    ("advisories", "light", "#/advisories?runs=1", ()),
    ("timeline", "dark", "#/timeline?runs=0", ("n",)),
    ("rollouts", "light", "#/rollouts?runs=0&split=train", ("ArrowDown",)),
    ("rollout", "dark", "#/rollout?runs=0", ("g",)),
    ("tokens", "light", "#/tokens?runs=0", ("ArrowRight",)),
    ("tasks", "dark", "#/tasks?runs=0", ()),
)
_SETTLED_S = 0.6


def main() -> None:
    """Photograph every page."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(name) for name in sys.argv[1:]] or [train(Path(folder), seed) for seed in (1, 2)]
        with served(*runs, follow=False) as url, closing(Chromium()) as page:
            for name, scheme, place, keys in PAGES:
                page.look(1280, 800, scheme)
                page.open(f"{url}/?{name}{place}")
                page.wait(f"document.documentElement.dataset.page === '{place[2:].partition('?')[0]}'")
                for key in keys:
                    page.press(key)
                time.sleep(_SETTLED_S)
                path = IMAGES / f"view-{name}.png"
                page.screenshot(path)
                print(f"{path}: {path.stat().st_size // 1000} kB")
            if page.problems:
                raise SystemExit(f"the page complained: {page.problems}")


def train(folder: Path, seed: int) -> Path:
    """Train for some steps and return the run folder."""
    options = [f"seed={seed}", f"trial_name=seed{seed}", f"fileroot={folder}", "total_train_steps=12"]
    options += ["dataset.train_bs_n_seqs=8", "evaluation.episodes_per_task=8", "evaluation.greedy_episodes_per_task=0"]
    options += ["monitor.progress=false", "monitor.rollout_tokens=1", f"actor.optimizer.lr={seed}e-3"]
    subprocess.run([sys.executable, "-m", "realhf.launch", "experiment=grpo", "env=sql", *options], check=True)
    return folder / "grpo" / f"seed{seed}"


if __name__ == "__main__":
    main()
