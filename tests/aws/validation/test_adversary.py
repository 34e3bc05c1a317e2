"""Plays against the grader, a sample of every tier and all that ever paid or was refused wrongly.

``python -m tests.aws.validation.adversarial`` plays every play of every template.
"""

import pytest

from realhf.aws.episode.episode import Episode
from realhf.aws.simulator.slot import Slot
from realhf.aws.tasks.loader import Template, get_template, load_templates
from tests.aws.validation.adversarial import MAX_STEPS, plays_of
from tests.aws.validation.play import Play, instance_to_play, perform

pytestmark = pytest.mark.sim

WHOLE = (6, 112, 207, 214, 413, 507)
"""Templates all of whose plays are played."""
SPELLED = (1, 2, 8, 9, 13, 14, 15, 20, 22, 24)
"""Questions that another right way once answered in vain."""
GRANTING = (301, 304, 305, 306, 307, 308, 316, 318, 319, 324, 325)
"""Policies that were once read as they are written, not as what they permit."""
REPAIRS = tuple(template.task_id for template in load_templates(["expert"]))
SAMPLE = sorted({*WHOLE, *SPELLED, *GRANTING, *REPAIRS})
SEED = 0


def chosen(template: Template, play: Play) -> bool:
    """A repair is tried with what is beside the point or harms; the other tiers where they were broken."""
    if template.task_id in WHOLE or play.name == "policies with single values":
        return True
    if template.tier == "expert":
        return play.kind in ("nothing", "harmful")
    return template.tier == "warmup" and (play.name == "ARN for name" or (play.written and play.kind == "equivalent"))


@pytest.mark.parametrize("template_id", SAMPLE)
def test_every_play_scores_within_the_bounds_of_its_class(slot: Slot, template_id: int) -> None:
    template, task = get_template(template_id), instance_to_play(template_id, SEED)
    outcomes = [perform(Episode(slot, MAX_STEPS), task, play) for play in plays_of(task) if chosen(template, play)]
    assert outcomes
    assert not [f"{one.play.kind}, {one.play.name}: {one.problem}" for one in outcomes if one.problem]
