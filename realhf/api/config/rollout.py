"""How episodes are played."""

from __future__ import annotations

from dataclasses import dataclass

from realhf.api.config.option import option

ON_FAILURE = ("drop", "retry", "raise")
"""What becomes of a rollout whose environment failed: left out, played once more, an error."""


@dataclass
class RolloutConfig:
    """Multi-turn episodes."""

    max_turns: int = option(6, "An episode ends after this many turns of the policy.", at_least=1)
    max_total_tokens: int = option(1024, "A sequence, prompt included, has at most this many tokens.", at_least=1)
    min_group_size: int = option(2, "A group with fewer valid rollouts gives no gradient.", at_least=1)
    on_failure: str = option(
        "retry", "A rollout whose environment failed is left out, played again, or ends the run.", choices=ON_FAILURE
    )
    message_timeout_s: float = option(60.0, "A message to the environment is answered within these seconds.", above=0)
    agent: str = option(
        "", "This agent plays, as module:function, in asynchronous experiments; empty is the built-in agent."
    )
