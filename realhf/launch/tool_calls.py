"""Checks before any process starts that the policy's calls of an environment's tools will be found.

The check runs in a process of its own: it loads the tokenizer, and the launcher stays without torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from realhf.api.config import ConfigError
from realhf.api.tool_parser import PLAIN
from realhf.env.loader.load import chosen_environment
from realhf.launch.build import BuiltExperiment
from realhf.launch.checks import is_builtin

_CHECK = "realhf.rollout.tool_call_check"
_LONGEST_S = 300.0
_SCRIPTS_PER_TASK = 3
"""So many scripts of each task show all kinds of them."""


def check_tool_calls(built: BuiltExperiment) -> None:
    """Raise ConfigError where the chat template of the model in ``actor.path`` writes calls that its parser does not
    read, or shows no tools, and the environment has some. The built-in policy is not looked at, nor is a hub id, nor an
    environment whose tools are known in its episodes only: of these, the training data and the first episodes tell."""
    config = built.config
    chosen: Any = getattr(config, "env", None)
    path = config.actor.path
    if not hasattr(chosen, "path") or not Path(path).expanduser().is_dir() or is_builtin(path):
        return
    environment = chosen_environment(chosen)
    supervised = any(mfc.interface == "sft" for spec in (*built.spec.before, built.spec) for mfc in spec.mfcs)
    learns = supervised and environment.spec.demonstrate is not None
    if not environment.spec.tools or (config.actor.tool_parser == PLAIN and not learns):
        return
    arguments = [environment.reference, "--options", json.dumps(dict(environment.options))]
    arguments += ["--model", str(Path(path).expanduser()), "--tool-parser", config.actor.tool_parser]
    arguments += ["--template-kwargs", json.dumps(dict(config.actor.chat_template_kwargs))]
    if learns:
        options: Any = config.warm_start  # type: ignore[attr-defined]
        request = {
            "episodes_per_task": min(options.episodes_per_task, _SCRIPTS_PER_TASK),
            "seed": config.seed,
            "habit_fraction": options.habit_fraction,
            "recovery_fraction": options.recovery_fraction,
        }
        arguments += ["--request", json.dumps(request)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", _CHECK, *arguments], capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"actor.path={path}: to check its calls of tools took longer than {_LONGEST_S:g} s; "
            f"python -m {_CHECK} {environment.reference} --model {path} does it alone"
        ) from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["the check of its calls of tools died without a word"]
        raise ConfigError(
            f"actor.path={path}: {said[-1]}; the environment {environment.spec.name} would see no call of its tools"
        )
