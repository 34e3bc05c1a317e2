"""Drift tasks ask to look first: a write that changes nothing costs, so the whole desired state is no solution."""

import itertools

import pytest

from realhf.aws.episode.episode import Episode
from realhf.aws.episode.validation import BLIND_RETURN, play
from realhf.aws.tasks.loader import Template, instantiate, load_templates, whole_state, with_drifts
from realhf.aws.tasks.task import choose_drifts

DRIFTS = [template for template in load_templates(["expert"]) if template.possible_drifts]


@pytest.mark.sim
@pytest.mark.parametrize("template", DRIFTS[::3], ids=lambda template: template.name)
def test_the_repair_of_what_drifted_is_worth_more_than_everything(episode: Episode, template: Template) -> None:
    task = instantiate(template.task_id, 0)
    last = range(len(task.possible_drifts))[-2:]
    assert play(episode, task, with_drifts(task, last).solution, last) == (True, 1.0)
    assert play(episode, task, whole_state(task), last)[1] < 1.0


@pytest.mark.sim
def test_a_write_that_changes_nothing_costs_and_a_look_does_not(episode: Episode) -> None:
    task = instantiate(502, 0)
    protect, recover = with_drifts(task, [0, 1]).solution
    look = f"aws dynamodb describe-table --table-name {task.params['name']}"
    assert play(episode, task, [look, look, protect, look, recover], [0, 1]) == (True, 1.0)
    achieved, total = play(episode, task, [protect, protect, recover], [0, 1])
    assert achieved and total == pytest.approx(0.9)
    gone = look.replace("describe-table", "untag-resource").replace("--table-name", "--resource-arn") + " --tag-keys x"
    achieved, total = play(episode, task, [gone, protect, recover], [0, 1])
    assert achieved and total == pytest.approx(0.9), "an attempt that was refused is a blind one too"


@pytest.mark.sim
def test_a_wrong_value_written_first_does_not_make_a_blind_repair_one_with_a_look(episode: Episode) -> None:
    """Whatever drifted: everything is spoilt, and then the whole desired state is written."""
    task = instantiate(505, 0)
    name = task.params["name"]
    spoilt = [
        f"aws events put-rule --name {name} --schedule-expression 'rate(7 minutes)' --state DISABLED",
        f"aws logs put-retention-policy --log-group-name /jobs/{name} --retention-in-days 7",
        f"aws ssm put-parameter --name /jobs/{name}/mode --value none --type String --overwrite",
    ]
    for pair in itertools.combinations(range(len(task.possible_drifts)), 2):
        assert play(episode, task, [*spoilt, *whole_state(task)], pair)[1] <= BLIND_RETURN, pair
        assert play(episode, task, with_drifts(task, pair).solution, pair) == (True, 1.0)


def test_the_solution_of_an_instance_repairs_what_its_seed_draws() -> None:
    for seed in range(20):
        task = instantiate(505, seed)
        drawn = choose_drifts(task.possible_drifts, task.seed)
        assert list(task.solution) == [command for drift in drawn for command in drift.repair]
    assert len({instantiate(505, seed).solution for seed in range(20)}) > 3
