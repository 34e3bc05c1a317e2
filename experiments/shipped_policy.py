"""Shipped policies: warm-started built-in policies that are part of the package, so that a first
run needs no warm start.

    python -m experiments.shipped_policy experiment=grpo_aws seed=1

This command runs the warm start of these options, unless its result is cached, and writes the
policy in bfloat16 to the folder ``EnvironmentSpec.shipped_policy``. The file ``provenance.json``
records the inputs, the command, the commit and the SHA-256 of each file. A run uses the shipped
policy if its own warm start would have the same inputs.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.api.config import ConfigError
from realhf.base.files import whole_folder

PROVENANCE = "provenance.json"
LESSONS = "lessons"
"""Key in ``made_from`` for the digest of the system prompt, the tasks and the scripts."""
WARM_START_ONLY = (
    "warm_start.shipped=false",
    "total_train_steps=1",
    "evaluation.episodes_per_task=0",
    "evaluation.greedy_episodes_per_task=0",
)
"""Options that reduce a run to its warm start."""


def find_shipped_policy(folder: Path | None, made_from: Mapping[str, Any]) -> Path | None:
    """Return the shipped policy's folder if the policy was made from the inputs ``made_from``, else
    None.

    Raises ConfigError if its files do not match their recorded SHA-256.
    """
    if folder is None or not (folder / PROVENANCE).is_file():
        return None
    try:
        provenance = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{folder / PROVENANCE}: {error}; reinstall the package") from None
    if provenance["made_from"] != json.loads(json.dumps(made_from)):
        return None
    digests = hash_files(folder)
    for name, digest in provenance["sha256"].items():
        if digests.get(name) != digest:
            raise ConfigError(
                f"{folder / name}: SHA-256 {digests.get(name, 'of no such file')}, shipped with "
                f"{digest}; reinstall "
                "the package, or make a policy of your own with warm_start.shipped=false"
            )
    return folder


def is_outdated(folder: Path, made_from: Mapping[str, Any]) -> bool:
    """Return whether a shipped policy matches ``made_from`` in everything but the system prompt,
    tasks and scripts, which means that those have changed since."""
    if not (folder / PROVENANCE).is_file():
        return False
    shipped = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))["made_from"]
    current = json.loads(json.dumps(made_from))
    return shipped.pop(LESSONS, None) != current.pop(LESSONS) and shipped == current


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a shipped policy by file name, except for its provenance
    file."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != PROVENANCE)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def ship(policy: Path, folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write a trained policy in bfloat16 to ``folder``, replacing the folder atomically."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with whole_folder(folder) as whole:
        AutoModelForCausalLM.from_pretrained(policy, dtype="bfloat16").save_pretrained(whole)
        AutoTokenizer.from_pretrained(policy).save_pretrained(whole)
        for file in whole.iterdir():
            # The package may be installed by another user than the one who trains.
            file.chmod(0o644)
        content = {**provenance, "sha256": hash_files(whole)}
        (whole / PROVENANCE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Train and ship the warm start of a run with these ``key=value`` arguments. Return the exit
    code."""
    from experiments.sft import Config, build_warm_start, chosen_environment, warm_start_recipe
    from realhf.base.installation import PACKAGE, git_state
    from realhf.launch.build import build_experiment
    from realhf.launch.compose import compose_config
    from realhf.launch.run import run_to_the_end

    composed = compose_config([*arguments, *WARM_START_ONLY])
    config = composed.config
    folder = (
        chosen_environment(config.env).spec.shipped_policy if isinstance(config, Config) else None
    )
    if not isinstance(config, Config) or folder is None:
        sys.stderr.write(
            f"{config.experiment}: its environment says no folder for a policy that ships with it\n"
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
