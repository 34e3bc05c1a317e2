"""Registers countdown, through the door for data sets with a verifier: its options, and what is made of them."""

from __future__ import annotations

from dataclasses import dataclass

from realhf.api.config.option import option
from realhf.api.environment import TRAIN, EnvironmentDefinition, EnvironmentSpec
from realhf.env.doors.dataset import VerifierEnvironment, read_verifier
from realhf.env.doors.threads import Threads
from realhf.environments.countdown.demonstrations import demonstrations
from realhf.environments.countdown.levels import LEVELS, PROMPT_COLUMN, CountdownTasks
from realhf.environments.countdown.verifier import PARTIAL_CREDIT, reward

SYSTEM_PROMPT = (
    "Reach the target with + - * / and the given numbers, each at most once. "
    "The last line of your reply is the steps, such as: 3*4=12, 12+5=17"
)


@dataclass
class CountdownOptions:
    """Countdown: reach a number by arithmetic on given numbers, in a single turn."""

    levels: list[str] = option([*LEVELS], "Puzzles are drawn from these levels.", choices=tuple(LEVELS))
    partial_credit: float = option(
        PARTIAL_CREDIT, "Right arithmetic that misses the target earns this much.", at_least=0, at_most=1
    )


def build(options: CountdownOptions) -> EnvironmentSpec:
    """Return the environment with these options. Raises ValueError for an unknown level."""
    verifier, threads = read_verifier(reward), Threads("countdown")

    def tasks(split: str) -> CountdownTasks:
        return CountdownTasks(options.levels, split, options.partial_credit)

    training = tasks(TRAIN)
    return EnvironmentSpec(
        name="countdown",
        make=lambda _: VerifierEnvironment(verifier, PROMPT_COLUMN, threads),
        tasks=tasks,
        system_prompt=SYSTEM_PROMPT,
        demonstrate=lambda request: demonstrations(training, request),
    )


DEFINITION = EnvironmentDefinition(CountdownOptions, build)
