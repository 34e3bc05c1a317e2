"""How episodes are played."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from realhf.api.config.option import option

ON_FAILURE = ("minimum_group", "retry", "fail_fast")
"""What a failed rollout means for its group, see ``RolloutConfig.on_failure``."""


@dataclass
class RolloutConfig:
    """Multi-turn episodes."""

    max_turns: int = option(6, "An episode ends after this many turns of the policy.", at_least=1)
    max_total_tokens: int = option(1024, "A sequence, prompt included, has at most this many tokens.", at_least=1)
    min_group_size: int = option(2, "A group with fewer valid rollouts gives no gradient.", at_least=1)
    on_failure: str = option(
        "minimum_group",
        "minimum_group plays a failed rollout again, then leaves it out if rollout.min_group_size others are valid; "
        "retry wants the whole group; fail_fast ends the run.",
        choices=ON_FAILURE,
        on_resume="warns",
    )
    retries: int = option(
        2,
        "A failed rollout is played again, and a lost session resumed, this many times.",
        at_least=0,
        on_resume="warns",
    )
    message_timeout_s: float = option(
        60.0, "A message to the environment is answered within these seconds.", above=0, on_resume="free"
    )
    sessions: int = option(
        0,
        "At most this many episodes are played at once; 0: as many as the environment allows, and 32 "
        "where it sets no bound.",
        at_least=0,
        on_resume="free",
    )
    agent: str = option(
        "",
        "This agent plays, as file.py:function or module:function, in asynchronous experiments; empty is the built-in "
        "agent.",
    )

    keep_reasoning: bool = option(
        True,
        "The policy reads all that it said; if false, its old reasoning is dropped as its chat template does, and an "
        "episode trains as several sequences.",
    )

    def problems(self, name: str) -> Iterator[str]:
        """Nothing is played again by the policy that fails fast, and an agent keeps its conversations itself."""
        if self.agent and not self.keep_reasoning:
            yield f"{name}.keep_reasoning=False: no effect with {name}.agent, which sends whole conversations itself"
        if self.on_failure == "fail_fast" and self.retries != RolloutConfig.retries:
            yield f"{name}.retries={self.retries}: no effect with {name}.on_failure=fail_fast"
