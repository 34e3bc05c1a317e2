"""Options of rollouts travel as plain arguments and come back whole; what nobody knows is refused."""

import json

import pytest

from realhf.api.config import GenConfig
from realhf.api.experiment import HeldOutOptions, RolloutOptions
from realhf.rollout.interface import EnvRolloutInterface


def test_options_survive_json():
    options = RolloutOptions("sql", 8, 16, {"rows": 3}, gen=GenConfig(max_new_tokens=9), retries=0, seed=3)
    assert RolloutOptions.from_args(json.loads(json.dumps(options.to_args()))) == options
    held_out = HeldOutOptions("heldout", 2, 0, 40)
    assert HeldOutOptions.from_args(json.loads(json.dumps(held_out.to_args()))) == held_out


def test_an_unknown_or_a_missing_option_is_named():
    args = RolloutOptions("sql", group_size=8, sessions=16).to_args()
    with pytest.raises(TypeError, match="RolloutOptions has no field 'max_turn'; did you mean 'max_turns'"):
        EnvRolloutInterface(**args, max_turn=3)
    with pytest.raises(TypeError, match="GenConfig has no field 'temp'"):
        EnvRolloutInterface(**{**args, "gen": {"temp": 1.0}})
    with pytest.raises(TypeError, match="sessions"):
        EnvRolloutInterface(environment="sql", group_size=8)
