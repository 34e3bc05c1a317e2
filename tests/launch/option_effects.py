"""Gives each option of an experiment another value and says by what its effect was seen: the table
of ``python -m tests.launch.option_effects --table EXPERIMENT ...`` (all of them where none is
named).

- ``loss``, ``batch``, ``file``: what a tiny policy does with the plan differs
  (``tests/launch/acting_parts.py``): its statistics or weights after some steps, what is drawn and
  played, or the files that are made.
- ``plan``: the workers of the run are told something else, and ``TOLD`` says which test shows that
  they act on it.
- ``message``: the launcher refuses the value, and says why.
- ``listed``: none of these; ``ELSEWHERE`` says where the option acts.

Options without any of these do nothing, or nobody has said what.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from realhf.api.config import ConfigError
from realhf.api.experiment import ExperimentSpec
from realhf.api.option import NamedOption, walk
from realhf.base.dataclass_json import to_json_value
from realhf.launch.build import build_experiment
from realhf.launch.checks import check_config
from realhf.launch.compose import ComposedConfig, compose_config, experiment_names
from realhf.registry import registered_names
from tests.launch.acting_parts import BATCH, FILE, LOSS, ActingParts
from tests.launch.options_elsewhere import ELSEWHERE, ONE_VALUE, TOLD

PLAN = "plan"
MESSAGE = "message"
LISTED = "listed"
NOTHING = "nothing"
DEEP = (LOSS, BATCH, FILE)
AT_WORK = ("dpo", "grpo", "grpo_async", "ppo", "sft")
"""Experiments whose plans are played; the others have the same calls with other values, on other
environments."""
SMALL = (
    "warm_start.episodes_per_task=4",
    "evaluation.episodes_per_task=4",
    "evaluation.greedy_episodes_per_task=2",
    "evaluation.templates=2",
)
"""What only makes the table cost less."""
OWN: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "ppo.feedback_tokens": (16,),
        "ppo.eps_clip": (0.01,),
        "ppo.eps_clip_higher": (0.01,),
        "ppo.c_clip": (1.1,),
        "ppo.max_reward_clip": (0.6,),
        "ppo.overlong_buffer": (0.9,),
        "ppo.overlong_length": (3,),
        "ppo.loss_scale_len": (7,),
        "ppo.behav_imp_weight_cap": (1.05,),
        "ppo.behav_imp_weight_floor": (0.95,),
        "ppo.behav_imp_sequence_cap": (1.01,),
        "ppo.behav_imp_sequence_floor": (0.99,),
        "ppo.kl_horizon": (400.0,),
        "ppo.discount": (0.5,),
        "ppo.rl_weight": (0.5,),
        "critic.value_clip": (1e-4,),
        "env.tiers": (["warmup"],),
        "env.tags": ([],),
        "env.groups": (["one_call"],),
        "mb_spec.max_tokens_per_mb": (48,),
        "rollout.max_total_tokens": (40, 600),
        "warm_start.batch_size": (16,),
        "dataset.priority": ({"preset": "slow"},),
        "stream.url": ("http://127.0.0.1:9",),
        "teacher.url": ("http://127.0.0.1:9",),
        "engine.vllm_url": ("http://127.0.0.1:9",),
        "stream.token_file": (__file__,),
        "stream.ca_file": (__file__,),
        "teacher.token_file": (__file__,),
    }
)
"""Other values of options, by their names, or by their last part below; the general ones may be too
near, or no such thing."""
OWN_LAST: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "gradient_clipping": (0.001,),
        "warmup_steps_proportion": (0.3,),
        "beta1": (0.5,),
        "beta2": (0.5,),
        "lr": (2e-3,),
        "targets": (["q_proj"],),
    }
)
PPO = {"ppo.algo": "ppo"}
SDPO = {"ppo.algo": "sdpo"}
DECOUPLED = {"ppo.use_decoupled_loss": True}
POLICY = "a policy"
REWARD_MODEL = "a reward model"
OPD = {"ppo.algo": "opd", "actor.path": POLICY}
COMPANIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "actor.lora.": {"actor.lora.rank": 2},
        "critic.": PPO,
        "critic.value_clip": {**PPO, "critic.n_minibatches": 2},
        "ppo.gae_lambda": PPO,
        "ppo.discount": PPO,
        "ppo.pass_at_k": {"ppo.adv_estimator": "pass_at_k"},
        "ppo.kl_target": {"ppo.kl_ctl": 0.1},
        "ppo.kl_horizon": {"ppo.kl_ctl": 0.1, "ppo.kl_target": 0.01},
        "ppo.kl_estimator": {"ppo.kl_loss_coef": 0.1},
        "ppo.kl_loss_coef": {"ppo.kl_estimator": "k3"},
        "ppo.step_advantage_weight": {"ppo.credit": "state"},
        "ppo.feedback": SDPO,
        "ppo.feedback_tokens": SDPO,
        "ppo.distill_weight": {**OPD, "teacher.path": POLICY},
        "ppo.rl_weight": {**OPD, "teacher.path": POLICY},
        "ppo.behav_imp_": DECOUPLED,
        "ppo.behav_imp_weight_mode": {**DECOUPLED, "ppo.behav_imp_weight_cap": 1.05},
        "ppo.prox_logp_method": {**DECOUPLED, "ppo.ppo_n_minibatches": 2},
        "ppo.correction": DECOUPLED,
        "ppo.loss_scale_len": {"ppo.loss_agg": "constant"},
        "ppo.overlong_length": {"ppo.overlong_buffer": 0.5},
        "ppo.overlong_buffer": {"ppo.overlong_length": 6},
        "ppo.count": {"rollout.keep_reasoning": False},
        "ppo.eps_clip": {"ppo.ppo_n_minibatches": 2},
        "ppo.eps_clip_higher": {"ppo.ppo_n_minibatches": 2},
        "ppo.c_clip": {"ppo.ppo_n_minibatches": 2},
        "teacher.": {**OPD, "teacher.path": POLICY},
        "teacher.url": {**OPD, "gen.temperature": 1.0},
        "teacher.model": {**OPD, "teacher.url": "http://127.0.0.1:9", "gen.temperature": 1.0},
        "teacher.token_file": {**OPD, "teacher.url": "http://127.0.0.1:9", "gen.temperature": 1.0},
        "teacher.connections": {**OPD, "teacher.url": "http://127.0.0.1:9", "gen.temperature": 1.0},
        "reward_model.": {"reward_model.path": REWARD_MODEL, "actor.path": POLICY},
        "dataset.priority": {"dataset.curriculum": "priority"},
        "network.": {"network.bind": "10.0.0.1"},
    }
)
"""Options, or beginnings of names, that act only beside others: these are set first, and the effect
is that of the option alone. The longest name that fits counts."""


class Effect(NamedTuple):
    """How one option showed: the value that it was given, beside what, and what was seen."""

    experiment: str
    option: str
    value: Any
    kind: str
    detail: str
    beside: str = ""


class Sight(NamedTuple):
    """An experiment whose options are looked at: its configuration, and its plan as it is and as
    text."""

    composed: ComposedConfig
    spec: ExperimentSpec
    text: str


def base_of(experiment: str) -> ComposedConfig:
    """The experiment with its defaults, on a small environment where it takes any."""
    environment = [] if experiment.endswith(("aws", "aws_async", "http")) else ["env=files"]
    return compose_config([f"experiment={experiment}", "trial_name=effects", *environment])


def sight_of(composed: ComposedConfig) -> Sight:
    """Raises ConfigError where the experiment cannot be built."""
    check_config(composed.config)
    spec = build_experiment(composed).spec
    return Sight(composed, spec, as_text(spec))


def with_values(composed: ComposedConfig, values: Mapping[str, Any]) -> ComposedConfig:
    """The same with other values of options, as a person sets them."""
    config = copy.deepcopy(composed.config)
    for name, value in values.items():
        *path, last = name.split(".")
        section: Any = config
        for part in path:
            section = getattr(section, part)
        setattr(section, last, value)
    return composed._replace(config=config, overridden=(*composed.overridden, *values))


def other_values(composed: ComposedConfig, found: NamedOption) -> Iterator[Any]:
    """Values that an option may have beside its own, the likeliest first."""
    last = found.name.rpartition(".")[2]
    for value in (*OWN.get(found.name, ()), *OWN_LAST.get(last, ())):
        if value != found.value:
            yield value
    yield from general_values(found, types_of(composed.config, found.name))


def types_of(config: Any, name: str) -> tuple[Any, ...]:
    """The types that an option without a value may have."""
    *path, last = name.split(".")
    for part in path:
        config = getattr(config, part)
    return typing.get_args(typing.get_type_hints(type(config)).get(last))


def general_values(found: NamedOption, types: tuple[Any, ...]) -> Iterator[Any]:
    """Values that follow from the type and the bounds of an option."""
    about = found.option
    value = found.value
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
        yield from (number for number in kept if number != value and about.is_within_bounds(number))
    elif isinstance(value, str):
        yield f"{value}other"
    elif str in types:
        yield "other"
    elif bool in types:
        yield from (True, False)
    elif any(typing.get_origin(each) is list for each in types):
        yield from (["other"], [])
    else:
        yield from (number for number in (2, 1, 0.5) if about.is_within_bounds(number))


def as_text(spec: Any) -> str:
    """All that the workers are told of the experiment."""
    return json.dumps(to_json_value(spec), sort_keys=True)


class Table:
    """Looks at options of experiments, and keeps what parts of their plans do."""

    def __init__(self, folder: Path) -> None:
        self.parts = ActingParts(folder)
        self._shown: set[str] = set()  # refused in one experiment, they need no companions there
        self._places = {POLICY: str(self.parts.policy), REWARD_MODEL: str(self.parts.reward_model)}

    def effects(self, experiment: str) -> Iterator[Effect]:
        """How each option of an experiment showed: the deepest way that was seen, or in experiments
        that are not in ``AT_WORK``, by plan and message alone."""
        composed = with_small(base_of(experiment))
        sights: dict[str, Sight | None] = {"": sight_of(composed)}
        for found in walk(composed.config):
            best = self._best(experiment, sights[""], found, "")
            seen_elsewhere = found.name in self._shown and best.kind == MESSAGE
            companions = (
                {}
                if seen_elsewhere or experiment not in AT_WORK
                else self._companions(found.name, composed)
            )
            if best.kind not in DEEP and companions:
                beside = " ".join(f"{name}={value}" for name, value in companions.items())
                if beside not in sights:
                    try:
                        sights[beside] = sight_of(with_values(composed, self._placed(companions)))
                    except ConfigError:  # the experiment has no use for what the option belongs to
                        sights[beside] = None
                second = self._best(experiment, sights[beside], found, beside)
                best = min(best, second, key=lambda effect: RANK[effect.kind])
            if best.kind in DEEP:
                self._shown.add(found.name)
            if best.kind == NOTHING and (why := self._reason(composed, found)):
                best = best._replace(kind=LISTED, detail=why)
            yield best

    def _best(
        self, experiment: str, sight: Sight | None, found: NamedOption, beside: str
    ) -> Effect:
        best = Effect(experiment, found.name, None, NOTHING, "", beside)
        if sight is None:
            return best
        found = next(every for every in walk(sight.composed.config) if every.name == found.name)
        looked = 0
        for value in other_values(sight.composed, found):
            kind, detail = self._seen(sight, found.name, value)
            looked += kind == PLAN
            if RANK[kind] < RANK[best.kind]:
                best = Effect(experiment, found.name, value, kind, detail, beside)
            if kind in DEEP or looked == 3 or (kind == MESSAGE and "has no effect" in detail):
                break
        return best

    def _seen(self, sight: Sight, name: str, value: Any) -> tuple[str, str]:
        """What happens with another value of an option: the kind, and the first difference or the
        message."""
        try:
            changed = sight_of(
                with_values(sight.composed, {name: self._places.get(str(value), value)})
            )
        except (ConfigError, ValueError) as error:
            return MESSAGE, str(error).splitlines()[0]
        if changed.text == sight.text:
            return NOTHING, ""
        if sight.composed.config.experiment not in AT_WORK:
            return PLAN, ""
        try:
            difference = self.parts.difference(sight.spec, changed.spec)
        except (ValueError, RuntimeError) as error:
            return MESSAGE, f"(at work) {str(error).splitlines()[0]}"
        return (PLAN, "") if difference is None else (difference.kind, difference.detail)

    def _companions(self, name: str, composed: ComposedConfig) -> dict[str, Any]:
        """What is set beside an option; only what this experiment has."""
        fitting = [
            each
            for each in COMPANIONS
            if name == each or (each[-1] in "._" and name.startswith(each))
        ]
        if not fitting:
            return {}
        there = {found.name for found in walk(composed.config)}
        chosen = COMPANIONS[max(fitting, key=len)]
        return (
            {each: value for each, value in chosen.items() if each != name}
            if there.issuperset(chosen)
            else {}
        )

    def _placed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._places.get(str(value), value) for name, value in values.items()}

    def _reason(self, composed: ComposedConfig, found: NamedOption) -> str:
        if not any(True for _ in other_values(composed, found)):
            return ONE_VALUE
        return entry(ELSEWHERE, found.name)


RANK: Mapping[str, int] = MappingProxyType(
    {kind: rank for rank, kind in enumerate((LOSS, BATCH, FILE, PLAN, MESSAGE, LISTED, NOTHING))}
)


def with_small(composed: ComposedConfig) -> ComposedConfig:
    """The same, cheaper to look at where the experiment has what costs."""
    values = {name: int(value) for name, value in (each.split("=") for each in SMALL)}
    small = composed
    for name, value in values.items():
        try:
            sight_of(with_values(small, {name: value}))
        except ConfigError:  # no effect in this experiment
            continue
        # as if that were the default
        small = composed._replace(config=with_values(small, {name: value}).config)
    return small


def entry(entries: Mapping[str, str], option: str) -> str:
    """What a list says about an option, itself or its section: "" for others."""
    return next(
        (
            why
            for name, why in entries.items()
            if option == name or (name.endswith(".") and option.startswith(name))
        ),
        "",
    )


def line_of(effect: Effect) -> str:
    """The row of the table."""
    value = f"{effect.value} beside {effect.beside}" if effect.beside else effect.value
    return f"| {effect.experiment} | {effect.option} | {value} | {effect.kind} | {effect.detail} |"


def main() -> int:
    """Print the table and its counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="print a line for each option, too")
    parser.add_argument("experiments", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = Table(Path(folder))
        for experiment in arguments.experiments or experiment_names():
            found = []
            for effect in table.effects(experiment):
                found.append(effect)
                if arguments.table:
                    print(line_of(effect), flush=True)
            print(
                f"{experiment}: {len(found)} options, "
                f"{dict(Counter(effect.kind for effect in found))}",
                flush=True,
            )
            unsaid = [
                effect.option
                for effect in found
                if effect.kind == PLAN and not entry(TOLD, effect.option)
            ]
            print(f"{experiment}: plan only, and nobody says which test: {unsaid}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
