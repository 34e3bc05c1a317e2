"""Builds a pool from the variables that trainers of this environment share.

AWS_RL_ENV_URL and AWS_RL_ENV_TOKEN say where the server is; NUM_GENERATIONS (8), MAX_TURNS (6) and MAX_TOTAL_TOKENS
(4096) are rollouts of a group, policy turns and tokens of an episode. Source: docs/reference/environment.md 1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from realhf.aws.client.multi_turn_pool import MultiTurnEnvPool

DEFAULT_URL = "http://127.0.0.1:8100"
_NUMBERS = {
    "NUM_GENERATIONS": ("size", 8),
    "MAX_TURNS": ("max_turns", 6),
    "MAX_TOTAL_TOKENS": ("max_total_tokens", 4096),
}


def pool_arguments(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read arguments of ``MultiTurnEnvPool`` from variables. Raises ValueError naming a variable that is not a positive
    number."""
    found: dict[str, Any] = {
        "base_url": environ.get("AWS_RL_ENV_URL") or DEFAULT_URL,
        "token": environ.get("AWS_RL_ENV_TOKEN") or None,
    }
    for variable, (argument, default) in _NUMBERS.items():
        text = environ.get(variable) or str(default)
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{variable} is {text!r}; it must be a positive whole number")
        found[argument] = int(text)
    return found


def pool_from_environment(**arguments: Any) -> MultiTurnEnvPool:
    """Return an unconnected pool; ``arguments`` win over variables. Raises ValueError."""
    return MultiTurnEnvPool(**{**pool_arguments(os.environ), **arguments})
