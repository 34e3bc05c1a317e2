"""Check before the launch that the policy's tool calls can be parsed.

The check loads the tokenizer, so it runs in its own process. In this way the launcher need not
import torch.
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
"""Module that is run as the check."""
_TIMEOUT_S = 300.0
"""Timeout of the check in seconds."""
_SCRIPTS_PER_TASK = 3
"""Number of demonstrations to check per task, which is enough for every kind to occur."""


def check_tool_calls(built: BuiltExperiment) -> None:
    """Raise ConfigError if the environment has tools, but the chat template of ``actor.path`` does
    not show them or writes calls that the parser cannot read.

    The built-in policy, hub ids, and environments whose tools are only known during episodes are
    not checked. Their problems become visible in the training data or in the first episodes.
    """
    config = built.config
    chosen: Any = getattr(config, "env", None)
    path = config.actor.path
    if not hasattr(chosen, "path") or not Path(path).expanduser().is_dir() or is_builtin(path):
        return
    environment = chosen_environment(chosen)
    supervised = any(
        mfc.interface == "sft" for spec in (*built.spec.before, built.spec) for mfc in spec.mfcs
    )
    demonstrates = supervised and config.dataset.path is None
    learns = demonstrates and environment.spec.demonstrate is not None
    if not environment.spec.tools or (config.actor.tool_parser == PLAIN and not learns):
        return
    arguments = [environment.reference, "--options", json.dumps(dict(environment.options))]
    arguments += [
        "--model",
        str(Path(path).expanduser()),
        "--tool-parser",
        config.actor.tool_parser,
    ]
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
            [sys.executable, "-m", _CHECK, *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"actor.path={path}: the check of its tool calls took longer than {_TIMEOUT_S:g} s; "
            f"python -m {_CHECK} {environment.reference} --model {path} runs it alone"
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [
            "the check of its tool calls failed without a message"
        ]
        raise ConfigError(
            f"actor.path={path}: {lines[-1]}; the environment {environment.spec.name} would see no "
            f"call of its tools"
        )
