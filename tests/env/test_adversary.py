"""Plays against the grader, a sample of every tier and all that ever paid or was refused wrongly.

``python -m realhf.env.tasks validate --adversarial`` plays every play of every template.
"""

import pytest

from realhf.env.episode import Episode
from realhf.env.slot import Slot
from realhf.env.tasks import instantiate, load_templates
from realhf.env.tasks.adversarial import MAX_STEPS
from realhf.env.tasks.loader import Template
from realhf.env.tasks.plays.collection import plays_of
from realhf.env.tasks.plays.play import Play, perform

WHOLE = frozenset({6, 112, 207, 214, 306, 413, 503})
"""Templates all of whose plays are played."""
ANYWHERE = frozenset({"policies with single values", "policies with lists", "policy: deny for allow", "ARN for name"})
SEED = 0


def chosen(template: Template, play: Play) -> bool:
    """A repair is tried with everything that is beside the point or harms; the other tiers where they were broken."""
    if template.task_id in WHOLE or play.name in ANYWHERE:
        return True
    if template.tier == "expert":
        return play.kind in ("unrelated", "harmful")
    return play.written and play.kind == "equivalent"


SAMPLE = {
    template.name: (task, plays)
    for template in load_templates()
    for task in [instantiate(template.task_id, SEED)]
    for plays in [[play for play in plays_of(task) if chosen(template, play)]]
    if plays
}


@pytest.mark.parametrize("name", SAMPLE)
def test_every_play_scores_within_the_bounds_of_its_class(slot: Slot, name: str) -> None:
    task, plays = SAMPLE[name]
    outcomes = [perform(Episode(slot, MAX_STEPS), task, play) for play in plays]
    assert not [f"{one.play.kind}, {one.play.name}: {one.problem}" for one in outcomes if one.problem]


def test_the_sample_is_of_every_tier_and_class() -> None:
    tiers = {task.tier for task, _ in SAMPLE.values()}
    kinds = {play.kind for _, plays in SAMPLE.values() for play in plays}
    assert (len(tiers), len(kinds)) == (5, 5)
