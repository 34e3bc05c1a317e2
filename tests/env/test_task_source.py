"""The curriculum as a data source."""

import json

import pytest

from realhf.api.environment import task_of
from realhf.api.source import DataSource, SampleResult, SourceItem
from realhf.aws.tasks.loader import instantiate
from realhf.aws.tasks.task import Task
from realhf.env.curriculum import TaskSource
from realhf.registry import sources


def results(items: list[SourceItem], rewards: list[float | None], achieved: list[bool]) -> list[SampleResult]:
    return [SampleResult(item.id, item.metadata, rewards, achieved) for item in items]


def test_items() -> None:
    options = {"tiers": ["warmup", "beginner"], "chaos": True}
    source = sources.get("tasks")(seed=1, environment="aws", options=options)
    assert isinstance(source, DataSource)
    items = source.next_batch(5) + source.next_batch(3)
    assert [item.id.rpartition("@")[2] for item in items] == [str(n) for n in range(8)]
    for item in items:
        asked = task_of(item.metadata)
        task = Task.from_json(asked.payload["task"])
        assert asked.payload["chaos"] is True and (asked.id, asked.seed) == (f"{task.template}-{task.seed}", task.seed)
        assert item.id.startswith(f"{task.template}-{task.seed}@")
        assert task == instantiate(task.task_id, item.metadata["task_seed"])
        assert (item.metadata["template"], item.metadata["group"]) == (str(task.task_id), task.tier)
        assert asked.template == task.template, "people read the name of a template, and not its number"
        assert item.metadata["group"] in ("warmup", "beginner")
        assert dict(item.values) == {}, "a tensor that nobody reads would be stored by a call in every step"
        json.dumps(dict(item.metadata))


def test_failed_rollouts_do_not_count() -> None:
    source = TaskSource(0, "aws")
    items = source.next_batch(2)
    source.record(results(items[:1], [1.0, None, 0.5, None], [True, False, False, False]))
    source.record(results(items[1:], [None, None], [False, False]))
    figures = source.stats()
    assert (figures["episodes"], figures["invalid_groups"]) == (1, 1)
    assert figures["reward_last_10"] == pytest.approx(0.75)
    assert figures[f"success/{items[0].metadata['group']}"] == pytest.approx(0.5)


@pytest.mark.parametrize("strategy", ["learnability", "priority"])
def test_resume(strategy: str) -> None:
    def go(source: TaskSource, steps: int) -> list[str]:
        ids = []
        for _ in range(steps):
            items = source.next_batch(6)
            ids += [item.id for item in items]
            source.record(results(items, [1.0, 0.0], [True, False]))
        return ids

    first = TaskSource(5, "aws", strategy=strategy)
    go(first, 9)
    second = TaskSource(6, "aws", strategy=strategy)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert go(second, 9) == go(first, 9)
