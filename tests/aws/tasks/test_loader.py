"""Templates, names, instances and captures. ``make validate``, a part of ``make test``, plays every
task."""

import itertools
import json
import random
import shlex
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.episode.episode import Episode
from realhf.aws.episode.validation import find_problems
from realhf.aws.grading.criteria import parse_criteria
from realhf.aws.grading.grader import build_freedom, is_graded_by_end_state
from realhf.aws.simulator.pool import ACCOUNT
from realhf.aws.tasks import loader
from realhf.aws.tasks.__main__ import main
from realhf.aws.tasks.captures import CaptureError, fill_setup, resolve, setup_captures
from realhf.aws.tasks.loader import (
    ADJECTIVES,
    NOUNS,
    SUFFIXES,
    TEN,
    TrainingTasks,
    draw_name,
    fill,
    get_template,
    instantiate,
    is_heldout_pair,
    is_heldout_seed,
    load_templates,
    mistakes,
)
from realhf.aws.tasks.task import ACCOUNT_ID, TIERS, Task, TaskError

TEMPLATES = load_templates()
STARTERS = load_templates(tags=["starter"])
SPLITS = ("train", "heldout")


def test_counts_ids_and_services() -> None:
    tiers = [template.tier for template in STARTERS]
    counts = {tier: tiers.count(tier) for tier in set(tiers)}
    assert counts.keys() == {"warmup", "beginner", "intermediate"}
    assert min(counts.values()) >= 13 and max(counts.values()) - min(counts.values()) <= 1, (
        "a starter has a weight"
    )
    warmup_services = {
        instantiate(t.task_id, 0).solution[0].split()[1] for t in STARTERS if t.tier == "warmup"
    }
    assert len(warmup_services) == counts["warmup"]
    assert ACCOUNT_ID == ACCOUNT


@pytest.mark.parametrize("template", STARTERS, ids=lambda template: template.name)
def test_template_text(template) -> None:
    assert 1 <= len(template.description) <= 2
    for seed, split in itertools.product(range(6), SPLITS):
        task = instantiate(template.task_id, seed, split)
        assert 15 <= len(task.description.split()) <= 32
        for value in task.params.values():
            assert str(value) in task.description, "the agent must be able to know every value"
        scripts = [task.solution]
        scripts += [[*mistake.commands, *mistake.recovery] for mistake in mistakes(task)]
        for command in itertools.chain.from_iterable(scripts):
            assert "{" not in command.replace("id={S=", "")
            argv = shlex.split(command)
            assert argv[0] == "aws" and argv[2] in ALLOWED[argv[1]], command
            assert "queue-url" not in argv or argv[1] != "sqs"
        assert len(mistakes(task)) >= 2
        assert any(mistake.recovery for mistake in mistakes(task))


def test_names_are_made_of_distinct_plain_words() -> None:
    assert (len(ADJECTIVES), len(NOUNS), len(SUFFIXES)) == (60, 60, 20)
    words = {*ADJECTIVES, *NOUNS, *SUFFIXES}
    assert len(words) == 140 and all(word.isalpha() and word.islower() for word in words)


@pytest.mark.slow
def test_heldout_names_are_unseen_pairs() -> None:
    def pairs(split: str) -> set[tuple[str, str]]:
        names = (
            instantiate(t.task_id, seed, split).params["name"]
            for t in STARTERS
            for seed in range(40)
        )
        return {tuple(name.split("-")[:2]) for name in names}  # type: ignore[misc]

    train = pairs("train")
    heldout = pairs("heldout")
    assert len(train) > 700 and len(heldout) > 350
    assert not train & heldout
    share = sum(is_heldout_pair(a, n) for a in ADJECTIVES for n in NOUNS) / 3600
    assert 0.15 < share < 0.25
    seen = {
        name.split("-")[0] for name in (draw_name(random.Random(i), "train") for i in range(2000))
    }
    assert seen == set(ADJECTIVES), "every word is known from training"


def test_an_instance_is_decided_by_its_seed() -> None:
    assert instantiate(206, 5) == instantiate(206, 5)
    assert instantiate(206, 5) != instantiate(206, 6)
    assert instantiate(206, 5).params != instantiate(206, 5, "heldout").params
    texts = {instantiate(101, seed).description.split()[0] for seed in range(20)}
    assert len(texts) == 2, "both phrasings are drawn"


def test_one_seed_in_ten_is_held_out() -> None:
    held = [seed for seed in range(1000) if is_heldout_seed(205, seed)]
    assert 60 < len(held) < 140
    for seed in held[:20]:
        task = instantiate(205, seed)
        assert not is_heldout_seed(205, task.seed) and task == instantiate(205, task.seed)
        assert instantiate(205, seed, "heldout").seed == seed


def test_fill_keeps_types_and_foreign_braces() -> None:
    params = {"days": 7, "name": "x"}
    assert fill({"a": "{days}", "b": ["{name}-{days}", True]}, params) == {
        "a": 7,
        "b": ["x-7", True],
    }
    assert fill("id={S={name}} {account} {other}", params) == f"id={{S=x}} {ACCOUNT_ID} {{other}}"


def test_wire_form_survives_a_round_trip() -> None:
    for template in TEMPLATES:
        task = instantiate(template.task_id, 3)
        assert Task.from_json(json.dumps(task.to_json())) == task
    data = instantiate(101, 0).to_json() | {"hints": ["ignored"], "params": None}
    assert Task.from_json(data).params == {}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"task_id": -1}, "task_id"),
        ({"task_id": True}, "task_id"),
        ({"difficulty": "easy"}, "difficulty"),
        ({"description": None}, "description"),
        ({"success_criteria": []}, "success_criteria"),
        ({"setup_commands": [7]}, "setup_commands"),
        ({"setup_commands": ["aws s3 ls " + "x" * 70000]}, "longer"),
        ({"success_criteria": {"operation": "x" * 70000}}, "success_criteria"),
        ({"possible_drifts": [{"service": "s3"}]}, r"possible_drifts\[0\]"),
        ({"decoys": {"a": 1}}, "decoys"),
        ({"assets": {"a.json": 1}}, "a.json"),
        ({"desired_state_spec": 1}, "desired_state_spec"),
        ({"setup_commands": [{"service": "s3"}]}, "operation"),
        (
            {"setup_commands": [{"service": "s3", "operation": "ListBuckets"}] * 41},
            "setup_commands",
        ),
    ],
)
def test_bad_task_objects_are_named(change: dict, named: str) -> None:
    with pytest.raises(TaskError, match=named):
        Task.from_json(instantiate(101, 0).to_json() | change)


JUNK = st.sampled_from([None, True, -1, 3, 0.5, "", "x", "aws", [1], {"x": [None]}])


def mutated(value: Any, draw: Callable[..., Any]) -> Any:
    """``value`` with a piece of it replaced by junk."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(value)))
        return value | {key: mutated(value[key], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], mutated(value[index], draw), *value[index + 1 :]]
    return draw(JUNK)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_task_object_is_a_task_or_a_task_error(data: st.DataObject) -> None:
    whole = instantiate(data.draw(st.sampled_from(TEMPLATES)).task_id, 0).to_json()
    with suppress(TaskError):
        task = Task.from_json(mutated(whole, data.draw))
        assert (
            is_graded_by_end_state(task) or parse_criteria(task.success).named_services is not None
        )
        assert build_freedom(task) and json.dumps(task.to_json())


def test_unknown_arguments_are_named() -> None:
    with pytest.raises(TaskError, match="split is"):
        instantiate(101, 0, "test")
    with pytest.raises(TaskError, match="9999"):
        get_template(9999)
    with pytest.raises(TaskError, match="novice"):
        load_templates(["novice"])


@pytest.mark.nightly
def test_acceptance_finds_a_task_that_is_too_easy(episode: Episode) -> None:
    task = instantiate(101, 0)
    easy = Task.from_json(
        task.to_json() | {"success_criteria": {"operation": "sts:GetCallerIdentity"}}
    )
    found = " ".join(map(str, find_problems(episode, easy)))
    assert "solution" in found and "doing nothing" in found


@pytest.mark.nightly
@pytest.mark.sim
def test_the_validator_prints_verdicts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    easy = replace(get_template(101), success_criteria={"operation": "sts:GetCallerIdentity"})
    templates = {101: easy, 102: get_template(102)}
    monkeypatch.setattr(loader, "_all_templates", lambda: templates)
    assert main(["validate", "--ids", "101", "102", "--seeds", "1", "--pool-size", "1"]) == 1
    printed = capsys.readouterr().out
    assert "2 tasks, 1 with problems" in printed and "doing" in printed and "ok" in printed
    with pytest.raises(SystemExit):
        main(["validate", "--ids", "103"])
    assert "103" in capsys.readouterr().err


def test_values_of_earlier_commands() -> None:
    outputs = ['{"QueueUrl": "http://x/q", "Groups": [{"Id": 7}]}', "no JSON"]
    assert (
        resolve("aws sqs x --queue-url ${step1:QueueUrl}", outputs)
        == "aws sqs x --queue-url http://x/q"
    )
    assert resolve("${step1:$.Groups[0].Id} ${step1:Groups}", outputs) == '7 [{"Id": 7}]'


@pytest.mark.parametrize(
    "command", ["${step2:Id}", "${step3:Id}", "${step1:Nope}", "${step1:][}", "${step0:Id}"]
)
def test_what_is_not_there_stays_as_it_is_written(command: str) -> None:
    assert resolve(command, ['{"Id": 1}', "no JSON"]) == command


def test_values_of_set_up_keep_their_type() -> None:
    answers = [{"Port": 80, "Vpc": {"Id": "vpc-1"}}]
    value = {
        "${setup1:Vpc.Id}": ["${setup1:Port}", "p${setup1:Port}", True],
        "t": ("${setup1:$.Vpc.Id}",),
    }
    assert setup_captures(value) and not setup_captures({"a": "${step1:x}"})
    assert fill_setup(value, answers) == {"vpc-1": [80, "p80", True], "t": ("vpc-1",)}
    for bad in ("${setup2:Port}", "${setup1:Nope}", "${setup1:][}"):
        with pytest.raises(CaptureError):
            fill_setup(bad, answers)


def test_the_ten_have_siblings_and_are_never_trained_on() -> None:
    """Two of each tier; every service of their solutions is used by a template that trains, which
    has no other."""
    ten = load_templates(split="ten")
    others = load_templates(split="all_but_ten")
    assert sorted(template.task_id for template in ten) == sorted(TEN)
    assert Counter(template.tier for template in ten) == dict.fromkeys(TIERS, 2)
    assert len(others) == len(TEMPLATES) - 10 and not {t.task_id for t in others} & set(TEN)
    assert {template.split for template in ten} == {"heldout"}, (
        "no run of either split trains on them"
    )
    trained = {command.split()[1] for template in others for command in template.solution}
    assert {command.split()[1] for template in ten for command in template.solution} <= trained
    assert set(TrainingTasks(split="all_but_ten").group_of) == {
        template.task_id for template in others
    }
