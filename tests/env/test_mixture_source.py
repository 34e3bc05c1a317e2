"""Which environment each group of a mixture plays, and the tasks that are drawn for it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.environment import TaskLimits
from realhf.api.rollout import parse_task
from realhf.api.source import DataSource, SampleResult, SourceItem
from realhf.env.curriculum import TaskSource
from realhf.env.loader.mixture import own_payload
from realhf.env.mixture_source import MixtureSource, SharePlan
from realhf.registry import sources

MIX = "[sql,countdown]"
WEIGHTS = st.lists(st.floats(0.01, 100), min_size=2, max_size=6)


def shares(weights: Sequence[float]) -> dict[str, float]:
    return {f"env{i}": weight / sum(weights) for i, weight in enumerate(weights)}


def mixture(seed: int = 3, **options: object) -> MixtureSource:
    return MixtureSource(seed, MIX, {"mix": ["sql", "countdown"], **options})


def play(source: DataSource, steps: int, n: int = 6) -> list[SourceItem]:
    """Draw steps, in which the templates with an even number of letters succeed half of the
    time."""
    played = []
    for _ in range(steps):
        items = source.next_batch(n)
        played += items
        source.record(
            [
                SampleResult(
                    item.id,
                    item.metadata,
                    [1.0, 0.0],
                    [len(item.metadata["template"]) % 2 == 0, False],
                )
                for item in items
            ]
        )
    return played


@pytest.mark.slow
@settings(max_examples=40)
@given(WEIGHTS, st.integers(0, 2**31))
def test_each_environment_is_less_than_a_group_away_from_its_share(weights, seed):
    wanted = shares(weights)
    plan = SharePlan(wanted, seed)
    for number in range(1, 61):
        plan.plan(1)
        for name, share in wanted.items():
            assert abs(plan.planned[name] - share * number) < 1 + 1e-6


@settings(max_examples=40)
@given(WEIGHTS, st.integers(0, 2**31), st.lists(st.integers(0, 20), max_size=8))
def test_the_order_does_not_depend_on_how_many_groups_are_planned_at_once(weights, seed, counts):
    plan = SharePlan(shares(weights), seed)
    in_parts = [name for count in counts for name in plan.plan(count)]
    assert in_parts == SharePlan(shares(weights), seed).plan(sum(counts))


def test_the_seed_decides_which_of_equal_environments_comes_first():
    first = {SharePlan(shares([1, 1, 1]), seed).plan(1)[0] for seed in range(30)}
    assert first == {"env0", "env1", "env2"}


def test_equal_shares_take_turns_for_as_long_as_a_run_lasts():
    order = SharePlan(shares([1, 1, 1]), 0).plan(3 * 4000)
    assert order == order[:3] * 4000


def test_items_name_their_environment_and_lead_to_its_tasks():
    source = sources.get("mixture")(
        seed=1,
        environment=MIX,
        options={"mix": ["sql", "countdown"], "limits": {"countdown": {"max_turns": 1}}},
    )
    assert isinstance(source, DataSource)
    items = source.next_batch(8)
    assert Counter(item.metadata["environment"] for item in items) == {"sql": 4, "countdown": 4}
    assert len({item.id for item in items}) == 8
    keys = {frozenset(item.metadata) for item in items}
    assert len(keys) == 1, "metadata that not all samples of a batch have are left out of it"
    for item in items:
        task = parse_task(json.loads(json.dumps(dict(item.metadata))))
        name = item.metadata["environment"]
        assert task.environment == name and task.id.startswith(f"{name}/")
        assert task.group.startswith(f"{name}/") and task.template.startswith(f"{name}/")
        assert task.limits == TaskLimits(1 if name == "countdown" else 0)
        assert ("prompt" in own_payload(task)) == (name == "countdown")


def test_each_environment_gets_the_tasks_that_it_gets_alone():
    drawn = mixture().next_batch(12)
    for name in ("sql", "countdown"):
        alone = TaskSource(3, name).next_batch(6)
        own = [item for item in drawn if item.metadata["environment"] == name]
        assert [item.metadata["task_seed"] for item in own] == [
            item.metadata["task_seed"] for item in alone
        ]
        assert [own_payload(parse_task(item.metadata)) for item in own] == [
            parse_task(item.metadata).payload for item in alone
        ]


def test_results_reach_the_curriculum_of_their_environment_alone():
    source = mixture(weights=[3, 1])
    items = play(source, 2, n=8)
    stats = source.stats()
    assert (stats["share/sql"], stats["share/countdown"]) == (0.75, 0.25)
    assert (stats["episodes/sql"], stats["episodes/countdown"]) == (12, 4)
    groups = {item.metadata["group"] for item in items}
    assert {f"success/{group}" for group in groups} <= {*stats}


def test_a_resumed_mixture_draws_as_one_that_was_never_stopped():
    whole = play(mixture(weights=[2, 1]), 9)
    first = mixture(weights=[2, 1])
    play(first, 4)
    saved = json.loads(json.dumps(first.state_dict()))
    second = mixture(weights=[2, 1])
    second.load_state_dict(saved)
    assert [item.to_map() for item in play(second, 5)] == [item.to_map() for item in whole[24:]]


def test_the_state_of_another_mixture_is_refused():
    state = MixtureSource(1, "[sql,files]", {"mix": ["sql", "files"]}).state_dict()
    with pytest.raises(ValueError, match="a mixture of sql, files, not of sql, countdown"):
        mixture().load_state_dict(state)
