"""Both strategies: arithmetic against independent formulas, mastery, promotion, persistence, what
changes state; and the tasks as a data source."""

from __future__ import annotations

import copy
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from realhf.api.rollout import parse_task
from realhf.api.source import DataSource, SampleResult, SourceItem
from realhf.aws.tasks.loader import (
    TrainingTasks,
    instantiate,
    is_heldout_pair,
    is_heldout_seed,
    is_name,
    load_templates,
)
from realhf.aws.tasks.task import Task
from realhf.env.curriculum import (
    PRESETS,
    Curriculum,
    LearnabilityCurriculum,
    PriorityCurriculum,
    PriorityRule,
    TaskSource,
    decayed_rate,
    make_curriculum,
)
from realhf.env.loader.load import build_environment
from realhf.registry import sources

STRATEGIES = ("priority", "learnability", "uniform")
TRAIN = {template.task_id for template in load_templates(split="train")}
HELDOUT = {template.task_id for template in load_templates(split="heldout")}
WARMUP = {template.task_id for template in load_templates(["warmup"], split="train")}
BEGINNER = {template.task_id for template in load_templates(["beginner"], split="train")}


def record(curriculum: Curriculum[Task], template_id: int, *results: float) -> None:
    for result in results:
        curriculum.record_result(instantiate(template_id, 0), result, result)


def drill(curriculum: Curriculum[Task], steps: int) -> list[tuple[int, int]]:
    """Draw, record a result that depends on the template, and so on."""
    drawn = []
    for _ in range(steps):
        for task in curriculum.next_tasks(4):
            drawn.append((task.task_id, task.seed))
            curriculum.record_result(task, (task.task_id % 5) / 4, 0.5)
    return drawn


def test_decayed_rate() -> None:
    assert decayed_rate([], 0.85) == 0
    assert decayed_rate([1, 0], 0.85) == pytest.approx(0.85 / 1.85)
    assert decayed_rate([0, 1], 0.85) == pytest.approx(1 / 1.85)


def test_priority_arithmetic() -> None:
    curriculum = PriorityCurriculum(0, TrainingTasks())
    assert curriculum.priority(1) == 100
    record(curriculum, 1, 0.0)
    assert curriculum.priority(1) == 50 - 20, "weak, but attempted just now"
    record(curriculum, 2, 1.0, 1.0)
    assert curriculum.priority(1) == 50, "two episodes have passed since"
    assert curriculum.priority(2) == -20


def test_mastery_and_spaced_repetition() -> None:
    curriculum = PriorityCurriculum(0, TrainingTasks(["warmup"]))

    def schedule() -> tuple[int, int]:
        return curriculum._records[1].interval, curriculum._records[1].reference

    record(curriculum, 1, 1.0, 1.0)
    assert schedule() == (0, 0)
    record(curriculum, 1, 1.0)
    assert schedule() == (3, 3)
    record(curriculum, 1, 1.0)
    assert schedule() == (3, 3), "not due yet"
    for interval in (6, 12, 24, 48, 48):
        record(curriculum, 2, *[0.0] * curriculum._records[1].interval)
        assert curriculum.priority(1) == 30
        record(curriculum, 1, 1.0)
        assert schedule()[0] == interval
    record(curriculum, 2, *[0.0] * 48)
    record(curriculum, 1, 0.69)
    assert schedule()[0] == 3, "a failed re-test starts over, the rate still being high"
    record(curriculum, 1, 0.0, 0.0)
    assert schedule()[0] == 0, "no longer mastered"


def test_a_result_counts_as_a_re_test_only_where_one_was_due_when_the_task_was_chosen() -> None:
    curriculum = PriorityCurriculum(0, TrainingTasks())
    record(curriculum, 1, 1.0, 1.0, 1.0)
    record(curriculum, 2, 0.0, 0.0)
    assert curriculum.get_stats()["spaced_rep_due"] == []
    record(curriculum, 1, 1.0)
    assert curriculum._records[1].interval == 3, "the third episode since is this one itself"
    record(curriculum, 2, 0.0)
    assert curriculum.get_stats()["spaced_rep_due"] == [1]
    record(curriculum, 1, 1.0)
    assert curriculum._records[1].interval == 6


def test_window_of_ten() -> None:
    curriculum = PriorityCurriculum(0, TrainingTasks())
    record(curriculum, 1, *[1.0] * 5, *[0.0] * 10)
    assert curriculum.success_rate(1) == 0


def test_promotion() -> None:
    fast = PriorityCurriculum(0, TrainingTasks())
    record(fast, 1, 1.0, 1.0)
    assert fast.group == "warmup"
    record(fast, 1, 1.0)
    assert fast.group == "beginner"
    slow = PriorityCurriculum(0, TrainingTasks())
    record(slow, 1, 0.0, 0.0, 1.0, 1.0)
    assert slow.group == "warmup"
    record(slow, 1, 1.0)
    assert slow.group == "beginner"
    record(slow, 1, 1.0, 1.0, 1.0)
    assert slow.group == "beginner", "results of an earlier group do not promote"
    failing = PriorityCurriculum(0, TrainingTasks())
    record(failing, 1, 1.0, 1.0, 0.0)
    assert failing.group == "warmup", "a failure blocks the fast track"
    last = PriorityCurriculum(0, TrainingTasks(["beginner"]))
    record(last, 101, *[1.0] * 20)
    assert last.group == "beginner"


def test_candidates_are_the_group_and_what_is_due() -> None:
    curriculum = PriorityCurriculum(0, TrainingTasks())
    record(curriculum, 1, 1.0, 1.0, 1.0)
    assert {task.task_id for task in curriculum.next_tasks(len(BEGINNER))} == BEGINNER
    record(curriculum, 101, 0.0, 0.0, 0.0)
    assert {task.task_id for task in curriculum.next_tasks(len(BEGINNER) + 1)} == BEGINNER | {1}


def test_learnability_weights() -> None:
    curriculum = LearnabilityCurriculum(0, TrainingTasks(), decay=0.5)
    record(curriculum, 1, 1.0, 0.0, 0.5)
    expected = (0.25 * 1.0 + 0.5 * 0.0 + 0.5) / 1.75
    assert curriculum.success_rate(1) == pytest.approx(expected)
    assert curriculum.weight(1) == pytest.approx(expected * (1 - expected) + 0.02)


@pytest.mark.slow
def test_learnability_tries_everything_first_and_then_what_can_be_learned() -> None:
    curriculum = LearnabilityCurriculum(3, TrainingTasks(tags=["starter"]))
    starters = {template.task_id for template in load_templates(tags=["starter"])}
    first: list[int] = []
    for count in (16, 16, len(starters) - 32):
        tasks = curriculum.next_tasks(count)
        first += [task.task_id for task in tasks]
        for task in tasks:
            curriculum.record_result(task, 0.5 if task.task_id in (203, 204) else 0.0)
    assert sorted(first) == sorted(starters)
    draws = Counter(task.task_id for _ in range(100) for task in curriculum.next_tasks(16))
    total = 2 * 0.27 + (len(starters) - 2) * 0.02
    assert draws[203] == pytest.approx(1600 * 0.27 / total, rel=0.05)
    assert draws[1] == pytest.approx(1600 * 0.02 / total, rel=0.5)
    batch = Counter(task.task_id for task in curriculum.next_tasks(16))
    assert 3 <= batch[203] <= 4, "one batch follows the weights closely"


def test_uniform_draws_what_never_succeeds_as_often_as_all_else() -> None:
    tasks = TrainingTasks(["warmup"])
    curriculum = make_curriculum("uniform", 3, tasks)
    for number, template in enumerate(tasks.group_of):
        record(curriculum, template, number % 3 / 2)
    size = len(tasks.group_of) // 2
    batches = [[template for template, _ in curriculum.draw(size)] for _ in range(100)]
    drawn = Counter(template for batch in batches for template in batch)
    assert drawn.keys() == tasks.group_of.keys() and all(
        len(set(batch)) == size for batch in batches
    )
    assert max(drawn.values()) < 1.8 * min(drawn.values())
    assert len({frozenset(batch) for batch in batches}) > 90, (
        "those that come together are others each time"
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_heldout_is_never_served(strategy: str) -> None:
    """Neither held-out templates, nor held-out names, nor held-out seeds."""
    assert len(HELDOUT) >= 20 and not HELDOUT & TRAIN
    curriculum = make_curriculum(strategy, 1, TrainingTasks())
    for _ in range(120):
        for task in curriculum.next_tasks(8):
            curriculum.record_result(task, 1.0, 1.0)
            assert task.task_id in TRAIN and not is_heldout_seed(task.task_id, task.seed)
            assert task == instantiate(task.task_id, task.seed)
            for value in task.params.values():
                if is_name(value):
                    adjective, noun, _ = value.split("-")
                    assert not is_heldout_pair(adjective, noun)
    assert curriculum.get_stats()["episode_count"] == 960
    with pytest.raises(LookupError, match="not in this curriculum"):
        curriculum.record_result(instantiate(min(HELDOUT), 0), 1.0, 1.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tags_choose_the_templates(strategy: str) -> None:
    curriculum = make_curriculum(strategy, 0, TrainingTasks(tags=["starter"]))
    starters = {template.task_id for template in load_templates(tags=["starter"], split="train")}
    assert set(curriculum._records) == starters and len(starters) == 39


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resume_continues_with_the_same_tasks(strategy: str) -> None:
    curriculum = make_curriculum(strategy, 7, TrainingTasks())
    drill(curriculum, 20)
    state = json.loads(json.dumps(curriculum.state_dict()))
    other = make_curriculum(strategy, 99, TrainingTasks())
    other.load_state_dict(state)
    assert drill(other, 15) == drill(curriculum, 15)
    assert other.stats() == curriculum.stats()
    same, again, other = (make_curriculum(strategy, seed, TrainingTasks()) for seed in (7, 7, 8))
    first = drill(same, 3)
    assert first == drill(again, 3) and first != drill(other, 3)


def test_loading_minds_version_strategy_and_task_set(caplog: pytest.LogCaptureFixture) -> None:
    curriculum = make_curriculum("learnability", 0, TrainingTasks())
    record(curriculum, 1, 0.5)
    state = curriculum.state_dict()
    with pytest.raises(ValueError, match="strategy"):
        make_curriculum("priority", 0, TrainingTasks()).load_state_dict(state)
    with pytest.raises(ValueError, match="version"):
        curriculum.load_state_dict(state | {"version": 0})
    smaller = LearnabilityCurriculum(0, TrainingTasks(["warmup"]))
    smaller.load_state_dict(state)
    assert "another set of tasks" in caplog.text
    assert smaller.success_rate(1) == 0.5 and smaller.stats()["untried"] == len(WARMUP) - 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_record_result_is_the_only_mutation(strategy: str) -> None:
    curriculum = make_curriculum(strategy, 0, TrainingTasks())
    drill(curriculum, 5)
    before = copy.deepcopy(curriculum.state_dict())
    curriculum.next_task()
    curriculum.next_task(seed=3)
    curriculum.next_tasks(20)
    curriculum.stats()
    curriculum.get_stats()
    curriculum.success_rate(1)
    after = curriculum.state_dict()
    assert {k: v for k, v in after.items() if k != "rng"} == {
        k: v for k, v in before.items() if k != "rng"
    }
    record(curriculum, 1, 1.0)
    assert curriculum.state_dict()["episodes"] == before["episodes"] + 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_without_valid_rollouts_are_counted_not_learned(strategy: str) -> None:
    curriculum = make_curriculum(strategy, 0, TrainingTasks())
    curriculum.record_result(instantiate(1, 0), None)
    figures = curriculum.stats()
    assert (figures["invalid_groups"], figures["episodes"], figures["untried"]) == (
        1,
        0,
        len(TRAIN),
    )
    curriculum.record_result(instantiate(1, 0), 0.25, 0.5)
    assert (
        curriculum.stats()["success/warmup"] == 0.25 and curriculum.stats()["reward_last_10"] == 0.5
    )
    curriculum.reset()
    assert curriculum.stats()["untried"] == len(TRAIN)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_template_that_always_fails_does_not_come_first_for_ever(strategy: str) -> None:
    tasks = TrainingTasks(["warmup"])
    curriculum = make_curriculum(strategy, 0, tasks)
    broken = next(iter(tasks.group_of))
    drawn = Counter[int]()
    for _ in range(200):
        [(template, _)] = curriculum.draw(1)
        drawn[template] += 1
        curriculum.record_template(template, None if template == broken else 0.5)
    assert 1 <= drawn[broken] < 10 and len(drawn) == len(tasks.group_of)


def test_templates_that_were_never_tried_leave_room_for_what_is_learned() -> None:
    tasks = TrainingTasks()
    seen = {}
    for share in (1.0, 0.5):
        curriculum = make_curriculum("learnability", 3, tasks, untried_share=share)
        drawn = Counter[int]()
        for step in range(5):
            batch = [template for template, _ in curriculum.draw(4)]
            for template in batch:
                drawn[template] += 1
                curriculum.record_template(template, 0.5 if step == 0 else 0.0)
        seen[share] = drawn
    assert set(seen[1.0].values()) == {1} and seen[1.0].total() == 20
    assert len(seen[0.5]) == 12, "four at first, then two of each four"
    alone = make_curriculum("learnability", 3, tasks, untried_share=0.25)
    alone.record_template(first := next(iter(tasks.group_of)), 0.5)
    known = sum(alone.draw(1)[0][0] == first for _ in range(400))
    assert 250 < known < 350, "a batch of one shares in the long run"


def test_wrong_arguments() -> None:
    curriculum = make_curriculum("learnability", 0, TrainingTasks(["warmup"]))
    with pytest.raises(LookupError, match="101"):
        record(curriculum, 101, 1.0)
    with pytest.raises(ValueError, match="fraction"):
        record(curriculum, 1, 1.5)
    for reward in (float("nan"), 1e300):  # fp32, in which rewards are trained, holds neither
        with pytest.raises(ValueError, match="reward"):
            curriculum.record_result(instantiate(1, 0), 1.0, reward)
    with pytest.raises(ValueError, match="learnability, priority, uniform"):
        make_curriculum("greedy", 0, TrainingTasks())
    with pytest.raises(ValueError, match="fraction, any"):
        make_curriculum("learnability", 0, TrainingTasks(), group_success="most")
    with pytest.raises(ValueError, match="slow, standard"):
        make_curriculum("priority", 0, TrainingTasks(), priority={"preset": "quick"})
    with pytest.raises(ValueError, match="patience"):
        make_curriculum("priority", 0, TrainingTasks(), priority={"patience": 3})
    with pytest.raises(ValueError, match="no task"):
        make_curriculum("priority", 0, TrainingTasks(["expert"], ["starter"]))


@pytest.mark.slow
def test_concurrent_records_are_all_counted() -> None:
    curriculum = make_curriculum("priority", 0, TrainingTasks())
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: record(curriculum, 1 + n % 13, 0.0), range(400)))
    assert curriculum.stats()["episodes"] == 400


def test_a_group_counts_as_its_fraction_or_as_any() -> None:
    for group_success, expected in (("fraction", 0.25), ("any", 1.0)):
        for strategy in STRATEGIES:
            curriculum = make_curriculum(strategy, 0, TrainingTasks(), group_success=group_success)
            curriculum.record_result(instantiate(1, 0), 0.25)
            curriculum.record_result(instantiate(2, 0), 0.0)
            assert curriculum.success_rate(1) == expected and curriculum.success_rate(2) == 0.0


def test_get_stats_of_the_priority_strategy() -> None:
    curriculum = PriorityCurriculum(0, TrainingTasks())
    record(curriculum, 1, 1.0, 1.0, 0.0, 1.0)
    record(curriculum, 2, 0.5)
    curriculum.record_result(instantiate(3, 0), None)
    figures = curriculum.get_stats()
    rate = decayed_rate([1, 1, 0, 1], 0.85)
    assert figures["skill_profile"] == {1: pytest.approx(rate), 2: 0.5}
    assert (figures["episode_count"], figures["invalid_groups"]) == (5, 1)
    assert (figures["graduated_tasks"], figures["weak_spots"]) == ([1], [2])
    assert figures["avg_reward_last_10"] == pytest.approx(3.5 / 5)
    assert (figures["group"], figures["group_episodes"], figures["promotions"]) == (
        "beginner",
        0,
        [(5, "beginner")],
    )
    record(curriculum, 101, 1.0, 0.0)
    later = curriculum.get_stats()
    assert (later["group_episodes"], later["spaced_rep_due"]) == (2, [1])
    assert later["group_success_rate"] == pytest.approx(decayed_rate([1, 0], 0.85))
    other = PriorityCurriculum(9, TrainingTasks())
    other.load_state_dict(json.loads(json.dumps(curriculum.state_dict())))
    assert other.get_stats() == later
    other.reset()
    assert other.get_stats()["promotions"] == [] and other.group == "warmup"


def test_all_strategies_tell_the_same_figures() -> None:
    kinds = [make_curriculum(strategy, 0, TrainingTasks()) for strategy in STRATEGIES]
    for curriculum in kinds:
        record(curriculum, 1, 0.0)
    figures = [curriculum.get_stats() for curriculum in kinds]
    assert (
        len({frozenset(each) for each in figures}) == 1
        and [each["weak_spots"] for each in figures] == [[1]] * 3
    )


def test_the_slow_preset_and_changed_constants() -> None:
    assert PRESETS["standard"] == PriorityRule()
    slow = make_curriculum(
        "priority", 0, TrainingTasks(), priority={"preset": "slow", "fast_track_rate": 2.0}
    )
    assert isinstance(slow, PriorityCurriculum)
    record(slow, 1, *[1.0] * 5)
    assert slow.group == "beginner"
    record(slow, 101, *[1.0] * 9)
    assert slow.group == "beginner", "the standard rule would have promoted after five"
    record(slow, 101, 1.0)
    assert slow.group == "intermediate"
    bold = PriorityCurriculum(
        0, TrainingTasks(), rule=PriorityRule.of(weak=10.0, due=1.0, recent=0.0, untried=7.0)
    )
    assert bold.priority(1) == 7.0
    record(bold, 1, 0.0)
    assert bold.priority(1) == 10.0


def test_the_classic_rule_leads_through_the_groups_of_any_environment() -> None:
    """The pairs of the rule hold for the first, the second and the further groups, whatever they
    are called."""
    tasks = build_environment("sql", {}).tasks("train")
    curriculum = PriorityCurriculum(
        0, tasks, rule=PriorityRule(promotion=((2, 0.5), (3, 0.5)), fast_track_rate=2.0)
    )
    reached = []
    for _ in range(20):
        template, _ = curriculum.draw(1)[0]
        curriculum.record_template(template, 1.0, 1.0)
        reached.append(curriculum.group)
    assert curriculum.get_stats()["promotions"] == [
        (2, "aggregate"),
        (5, "join"),
        (8, "change"),
        (11, "steps"),
    ]
    assert reached[-1] == "steps" and curriculum.stats()["group"] == 4.0
    with pytest.raises(ValueError, match="at least one pair"):
        PriorityRule.of(promotion=())
    with pytest.raises(ValueError, match="earlier release"):
        curriculum.load_state_dict(
            {key: value for key, value in curriculum.state_dict().items() if key != "group"}
        )


def results(
    items: list[SourceItem], rewards: list[float | None], achieved: list[bool]
) -> list[SampleResult]:
    return [SampleResult(item.id, item.metadata, rewards, achieved) for item in items]


def test_items() -> None:
    options = {"tiers": ["warmup", "beginner"], "chaos": True}
    source = sources.get("tasks")(seed=1, environment="aws", options=options)
    assert isinstance(source, DataSource)
    items = source.next_batch(5) + source.next_batch(3)
    assert [item.id.rpartition("@")[2] for item in items] == [str(n) for n in range(8)]
    for item in items:
        asked = parse_task(item.metadata)
        task = Task.from_json(asked.payload["task"])
        assert asked.payload["chaos"] is True and (asked.id, asked.seed) == (
            f"{task.template}-{task.seed}",
            task.seed,
        )
        assert item.id.startswith(f"{task.template}-{task.seed}@")
        assert task == instantiate(task.task_id, item.metadata["task_seed"])
        assert (item.metadata["template"], item.metadata["group"]) == (str(task.task_id), task.tier)
        assert asked.template == task.template, (
            "people read the name of a template, and not its number"
        )
        assert item.metadata["group"] in ("warmup", "beginner")
        assert dict(item.values) == {}, (
            "a tensor that nobody reads would be stored by a call in every step"
        )
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
