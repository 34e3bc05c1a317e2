"""What an evaluation plays, and what it keeps of its episodes."""

from realhf.api.environment import HELD_OUT, TRAIN, EnvironmentSpec
from realhf.api.evaluation import evaluation_report
from realhf.env.loader.tasks import SeedTaskSet
from realhf.rollout.group_player import episode_results, held_out_tasks
from tests.rollout.episode.test_rollout_sample import outcome


def test_failed_episodes_are_counted_apart() -> None:
    report = evaluation_report(episode_results([outcome(), outcome("max_turns"), outcome("internal")]), 7)
    assert report["overall"]["success"] == 0.5
    assert (report["overall"]["episodes"], report["overall"]["failed"]) == (2, 1)
    assert report["overall"]["version"] == 7
    assert report["warmup"] == report["overall"]


def test_an_environment_without_tasks_is_evaluated_on_seeds_that_are_not_trained_on() -> None:
    """As many as episodes were asked for, since every seed is a task; they are shown as one template."""
    spec = EnvironmentSpec("mine", lambda _: None, lambda split: SeedTaskSet("Mine", split))  # type: ignore[arg-type,return-value]
    played = held_out_tasks(spec, HELD_OUT, 12, 200)
    trained = {spec.tasks(TRAIN).instantiate("Mine", seed).seed for seed in range(100)}
    assert len({task.seed for task in played}) == len({task.id for task in played}) == 12
    assert trained.isdisjoint(task.seed for task in played)
    assert {task.template for task in played} == {"Mine"}
