"""Gives each option of an experiment another value and says by what its effect was seen: the table of
``python -m tests.launch.option_effects --table EXPERIMENT ...`` (all of them where none is named).

- ``plan``: the workers of the run are told something else.
- ``message``: the launcher refuses the value beside the others, and says why.
- ``listed``: neither; ``ELSEWHERE`` says where the option acts.

Options without any of these do nothing, or nobody has said what.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from realhf.api.config import ConfigError
from realhf.api.option import Found, walk
from realhf.base.dataclass_json import to_json_value
from realhf.launch.build import build_experiment
from realhf.launch.checks import check_config
from realhf.launch.compose import Composed, compose_config, experiment_names
from realhf.registry import registered_names

PLAN, MESSAGE, LISTED, NOTHING = "plan", "message", "listed", "nothing"
_WORKER = "workers read it in the section of the plan beside the experiment"
ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "experiment": "chooses the file of the experiment, before there is a configuration",
        "experiment_path": "names the file of the experiment, before there is a configuration",
        "mode": "the launcher's: it runs, checks or prints the graph",
        "torch_threads": _WORKER,
        "recover_mode": _WORKER,
        "exp_ctrl.": _WORKER,
        "network.": _WORKER,
        "rpc.": _WORKER,
        "monitor.": _WORKER,
        "scheduler.": "the launcher's: who starts the processes",
        "allocation.": "the launcher's: which GPUs a worker sees",
        "actor.parallel.": "1 is what 0 stands for where the role has one worker",
        "critic.parallel.": "1 is what 0 stands for where the role has one worker",
        "reward_model.parallel.": "1 is what 0 stands for where the role has one worker",
        "warm_start.shipped": "only where the environment ships a policy that was made with the same settings",
    }
)
"""Options, or sections (with a point), of which the experiment's own plan says nothing, and where they act."""
ONE_VALUE = "has no other value in this experiment"
OWN: Mapping[str, tuple[Any, ...]] = MappingProxyType({"ppo.feedback_tokens": (300,), "env.tiers": (["warmup"],)})
"""Other values of options that none of the general ones fits."""


class Effect(NamedTuple):
    """How one option showed: the value that it was given, and what was seen."""

    experiment: str
    option: str
    value: Any
    kind: str
    detail: str


def base_of(experiment: str) -> Composed:
    """The experiment with its defaults, on a small environment where it takes any."""
    environment = [] if experiment.endswith(("aws", "aws_async", "http")) else ["env=files"]
    return compose_config([f"experiment={experiment}", "trial_name=effects", *environment])


def other_values(found: Found) -> Iterator[Any]:
    """Values that an option may have beside its own, the likeliest first."""
    about, value = found.option, found.value
    yield from OWN.get(found.name, ())
    if isinstance(value, bool):
        yield not value
        return
    if isinstance(value, Enum):
        yield from (each for each in type(value) if each is not value)
        return
    if isinstance(value, list):
        numbers = found.name.endswith(("workers", "_ids", "gpus"))
        yield from ([*value, 1], [1]) if numbers else ([*value, "other"], ["other"], [])
        return
    if isinstance(value, dict):
        yield {**value, "other": 1}
        return
    if names := registered_names(about.registry) if about.registry else about.choices:
        yield from (each for each in names if each != value)
    elif isinstance(value, (int, float)):
        numbers = (value + 1, value * 2, value / 2, value - 1, (value + (about.at_most or 1)) / 2)
        kept = (type(value)(number) for number in numbers)
        yield from (number for number in kept if number != value and about.holds(number))
    elif isinstance(value, str):
        yield f"{value}other"
    else:
        yield from (number for number in (2, 1, 0.5) if about.bound() and about.holds(number))
        yield from (True, "other")


def seen(composed: Composed, plain: str, found: Found, value: Any) -> tuple[str, str]:
    """What happens with another value of an option: the kind, and the message."""
    config = copy.deepcopy(composed.config)
    *path, last = found.name.split(".")
    section: Any = config
    for name in path:
        section = getattr(section, name)
    setattr(section, last, value)
    try:
        check_config(config)
        built = build_experiment(composed._replace(config=config, overridden=(*composed.overridden, found.name)))
    except (ConfigError, ValueError, TypeError) as error:
        return MESSAGE, str(error).splitlines()[0]
    return (PLAN, "") if as_text(built.spec) != plain else (NOTHING, "")


def as_text(spec: Any) -> str:
    """All that the workers are told of the experiment."""
    return json.dumps(to_json_value(spec), sort_keys=True)


def effects(experiment: str) -> Iterator[Effect]:
    """How each option of an experiment showed; a change of the plan counts more than a message."""
    composed = base_of(experiment)
    plain = as_text(build_experiment(composed).spec)
    for found in walk(composed.config):
        best = Effect(experiment, found.name, None, NOTHING, "")
        for value in other_values(found):
            kind, detail = seen(composed, plain, found, value)
            if kind == PLAN or best.kind == NOTHING:
                best = Effect(experiment, found.name, value, kind, detail)
            if kind == PLAN or (kind == MESSAGE and "has no effect" in detail):
                break
        why = where_else(found.name) if any(True for _ in other_values(found)) else ONE_VALUE
        if best.kind == NOTHING and why:
            best = best._replace(kind=LISTED, detail=why)
        yield best


def where_else(option: str) -> str:
    """The reason of an option that is listed, "" for others."""
    return next(
        (why for name, why in ELSEWHERE.items() if option == name or (name.endswith(".") and option.startswith(name))),
        "",
    )


def main() -> int:
    """Print the table and its counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print a line for each option, too")
    parser.add_argument("experiments", nargs="*")
    arguments = parser.parse_args()
    for experiment in arguments.experiments or experiment_names():
        found = [*effects(experiment)]
        for effect in found if arguments.table else ():
            print(f"| {experiment} | {effect.option} | {effect.value} | {effect.kind} | {effect.detail} |")
        print(f"{experiment}: {len(found)} options, {dict(Counter(effect.kind for effect in found))}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
