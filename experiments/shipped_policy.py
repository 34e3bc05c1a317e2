"""Ships the warm-started built-in policy of an environment inside the package, so that a first run trains at once.

    python -m experiments.shipped_policy experiment=grpo_aws seed=1

makes the warm start of these options, unless it is made already, and writes it in bfloat16 where the environment says
that its policy lies (``EnvironmentSpec.shipped_policy``), with ``provenance.json``: what it was made from, by which
command, at which commit, and the SHA-256 of each file. A run whose own warm start would be made from the same takes it.
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
"""What a policy was taught, in ``made_from``: a digest of the system prompt, the tasks and the scripts."""
ONLY_THE_WARM_START = (
    "warm_start.shipped=false",
    "total_train_steps=1",
    "evaluation.episodes_per_task=0",
    "evaluation.greedy_episodes_per_task=0",
)


def shipped_policy(folder: Path | None, made_from: Mapping[str, Any]) -> Path | None:
    """Return the policy that ships with an environment if it was made from the same, else None. Raises ConfigError for
    files that are not those that were shipped."""
    if folder is None or not (folder / PROVENANCE).is_file():
        return None
    try:
        provenance = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{folder / PROVENANCE}: {error}; install the package anew") from None
    if provenance["made_from"] != json.loads(json.dumps(made_from)):
        return None
    found = file_digests(folder)
    for name, digest in provenance["sha256"].items():
        if found.get(name) != digest:
            raise ConfigError(
                f"{folder / name}: SHA-256 {found.get(name, 'of no such file')}, shipped with {digest}; install the "
                "package anew, or make a policy of your own with warm_start.shipped=false"
            )
    return folder


def is_outdated(folder: Path, made_from: Mapping[str, Any]) -> bool:
    """Return whether a policy that ships with an environment would be taken if it had been taught what is taught
    today."""
    if not (folder / PROVENANCE).is_file():
        return False
    shipped = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))["made_from"]
    asked = json.loads(json.dumps(made_from))
    return shipped.pop(LESSONS, None) != asked.pop(LESSONS) and shipped == asked


def file_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a shipped policy, without its provenance."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != PROVENANCE)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def ship(policy: Path, folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write a trained policy as bfloat16 into ``folder``, which is replaced when the new one is whole."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with whole_folder(folder) as whole:
        AutoModelForCausalLM.from_pretrained(policy, dtype="bfloat16").save_pretrained(whole)
        AutoTokenizer.from_pretrained(policy).save_pretrained(whole)
        for file in whole.iterdir():
            file.chmod(0o644)  # what installs the package may be another user than who trains
        content = {**provenance, "sha256": file_digests(whole)}
        (whole / PROVENANCE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Make and ship the warm start of a run with these ``key=value`` arguments. Returns the exit code."""
    from experiments.sft import Config, chosen_environment, warm_start, warm_start_recipe
    from realhf.base.installation import PACKAGE, git_state
    from realhf.launch.build import build_experiment
    from realhf.launch.compose import compose_config
    from realhf.launch.run import run_to_the_end

    composed = compose_config([*arguments, *ONLY_THE_WARM_START])
    config = composed.config
    folder = chosen_environment(config.env).spec.shipped_policy if isinstance(config, Config) else None
    if not isinstance(config, Config) or folder is None:
        sys.stderr.write(f"{config.experiment}: its environment says no folder for a policy that ships with it\n")
        return 2
    spec = warm_start(config)
    assert spec.artifact is not None
    if not spec.artifact.exists() and (code := run_to_the_end(build_experiment(composed), arguments, time.time())):
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
