"""Registers countdown: its options, and what is made of them."""

from __future__ import annotations

from dataclasses import dataclass

from realhf.api.config.option import option
from realhf.api.environment import TRAIN, EnvironmentDefinition, EnvironmentSpec
from realhf.environments.countdown.demonstrations import demonstrations
from realhf.environments.countdown.environment import SYSTEM_PROMPT, CountdownEnvironment
from realhf.environments.countdown.levels import LEVELS, CountdownTasks
from realhf.environments.countdown.verifier import PARTIAL_CREDIT


@dataclass
class CountdownOptions:
    """Countdown: reach a number by arithmetic on given numbers, in a single turn."""

    levels: list[str] = option([*LEVELS], "Puzzles are drawn from these levels.", choices=tuple(LEVELS))
    partial_credit: float = option(
        PARTIAL_CREDIT, "Right arithmetic that misses the target earns this much.", at_least=0, at_most=1
    )


def build(options: CountdownOptions) -> EnvironmentSpec:
    """Return the environment with these options. Raises ValueError for an unknown level."""
    training = CountdownTasks(options.levels, TRAIN)
    return EnvironmentSpec(
        name="countdown",
        make=lambda _: CountdownEnvironment(options.partial_credit),
        tasks=lambda split: CountdownTasks(options.levels, split),
        system_prompt=SYSTEM_PROMPT,
        demonstrate=lambda request: demonstrations(training, request),
    )


DEFINITION = EnvironmentDefinition(CountdownOptions, build)
