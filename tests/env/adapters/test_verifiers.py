"""Numbers that come from an environment of the package verifiers."""

import pytest

from realhf.api.environment import FLOAT32_MAX, EnvironmentFailure
from realhf.env.adapters.verifiers_environment import _finite


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e300])
def test_a_reward_that_fp32_cannot_hold_is_a_failure_of_the_environment(value: float) -> None:
    with pytest.raises(EnvironmentFailure, match=r"exact_match is .*, not a finite number"):
        _finite("exact_match", value)
    assert _finite("exact_match", FLOAT32_MAX) == FLOAT32_MAX
