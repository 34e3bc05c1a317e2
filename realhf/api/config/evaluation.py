"""How often and how much is evaluated."""

from __future__ import annotations

from dataclasses import dataclass

from realhf.api.config.option import option


@dataclass
class EvaluationConfig:
    """Held-out evaluation, before the first and after the last train step."""

    episodes_per_task: int = option(
        12, "Every task template is played this many times at the training temperature.", at_least=0
    )
    greedy_episodes_per_task: int = option(12, "Every task template is played this many times greedily.", at_least=0)
    templates: int = option(
        200, "At most this many task templates (rows of a data set) are evaluated, spread evenly.", at_least=1
    )
    every_steps: int = option(
        0, "The policy is evaluated every so many steps too; 0 leaves these evaluations out.", at_least=0
    )
