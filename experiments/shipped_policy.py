"""Shipped policies: warm-started built-in policies that are part of the package, so that a first
run needs no warm start.

    python -m experiments.shipped_policy experiment=grpo_aws seed=1

This command runs the warm start of these options, unless its result is cached, and writes the
policy in bfloat16 to the folder ``EnvironmentSpec.shipped_policy``. The file ``provenance.json``
records the inputs, the command, the commit and the SHA-256 of each file. A run uses the shipped
policy if its own warm start would have the same inputs.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence

from experiments.sft import Config, build_warm_start, warm_start_recipe
from realhf.backends.shipped_policy import ship
from realhf.base.installation import PACKAGE, git_state
from realhf.env.loader.load import chosen_environment
from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config
from realhf.launch.run import run_to_the_end

WARM_START_ONLY = (
    "warm_start.shipped=false",
    "total_train_steps=1",
    "evaluation.episodes_per_task=0",
    "evaluation.greedy_episodes_per_task=0",
)
"""Options that reduce a run to its warm start."""


def main(arguments: Sequence[str]) -> int:
    """Train and ship the warm start of a run with these ``key=value`` arguments. Return the exit
    code."""
    composed = compose_config([*arguments, *WARM_START_ONLY])
    config = composed.config
    folder = (
        chosen_environment(config.env).spec.shipped_policy if isinstance(config, Config) else None
    )
    if not isinstance(config, Config) or folder is None:
        sys.stderr.write(
            f"{config.experiment}: its environment has no folder for a policy that ships with it "
            "(EnvironmentSpec.shipped_policy)\n"
        )
        return 2
    spec = build_warm_start(config)
    assert spec.artifact is not None
    if not spec.artifact.exists() and (
        code := run_to_the_end(build_experiment(composed), arguments, time.time())
    ):
        return code
    ship(
        spec.artifact,
        folder,
        {
            "command": shlex.join(["python", "-m", "experiments.shipped_policy", *arguments]),
            "git": git_state(PACKAGE.parent),
            "policy": spec.artifact.name,
            "demonstrations": [job.artifact.name for job in spec.jobs],
            "seed": config.seed,
            "made_from": warm_start_recipe(config),
        },
    )
    print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
