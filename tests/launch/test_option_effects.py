"""Every option of every experiment does something that is seen, or is listed with where it acts."""

import pytest

from realhf.launch.compose import experiment_names
from tests.launch.option_effects import ELSEWHERE, LISTED, MESSAGE, NOTHING, ONE_VALUE, PLAN, effects

pytestmark = [pytest.mark.nightly, pytest.mark.slow]


@pytest.mark.parametrize("experiment", experiment_names())
def test_every_option_shows_or_is_listed(experiment, tmp_path):
    found = [*effects(experiment)]
    lines = [f"| {e.option} | {e.value} | {e.kind} | {e.detail} |" for e in found]
    (tmp_path / "options.md").write_text("\n".join(lines), encoding="utf-8")
    assert [effect.option for effect in found if effect.kind == NOTHING] == []
    kinds = [effect.kind for effect in found]
    assert len(found) > 100 and kinds.count(PLAN) > 30 and kinds.count(MESSAGE) > 20
    listed = [effect for effect in found if effect.kind == LISTED]
    assert listed and all(effect.detail in (ONE_VALUE, *ELSEWHERE.values()) for effect in listed)
