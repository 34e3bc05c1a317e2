"""The task templates as a whole: how many of which shape, and their words. An agent can know all it
needs, is told nothing of how it is graded, and held-out tasks do not read like those it trained
on."""

import itertools
import re
from collections import Counter
from dataclasses import replace

import pytest

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.grading.grader import services_of
from realhf.aws.tasks.loader import Template, fill, instantiate, load_templates, phrasings

TEMPLATES = load_templates()
EASY = load_templates(["warmup", "beginner", "intermediate"])
PLACE = re.compile(r"(?<!\$)\{([a-z_]+)\}")
SETUP_CAPTURE = re.compile(r"\$\{setup\d+:[^}]+\}")
CLI_OPERATIONS = frozenset(name for names in ALLOWED.values() for name in names if "-" in name)
COPIED_SHARE = 0.5
"""A text is a copy of another when the other has this share of its three-word runs."""


def by_name(template: Template) -> str:
    return template.name


def shown(template: Template) -> list[str]:
    """Per phrasing, all that the agent reads before it acts."""
    return [f"{text}\n{template.desired_state_spec}" for text in template.description]


def plain_words(text: str) -> list[str]:
    """Lower-case words, every place and number alike."""
    text = PLACE.sub(" PLACE ", SETUP_CAPTURE.sub(" PLACE ", text))
    return ["0" if word.isdigit() else word.lower() for word in re.findall(r"[\w'-]+", text)]


def runs(text: str) -> frozenset[tuple[str, ...]]:
    """The three-word runs of a text; one that is mostly a name says nothing about its wording."""
    words = plain_words(text)
    triples = (tuple(words[start : start + 3]) for start in range(len(words) - 2))
    return frozenset(triple for triple in triples if triple.count("place") < 2)


def likeness(one: str, other: str) -> float:
    """The share of the first text's three-word runs that the other text has too, from 0 to 1."""
    ours = runs(one)
    return len(ours & runs(other)) / max(1, len(ours))


@pytest.mark.nightly
@pytest.mark.parametrize("template", TEMPLATES, ids=by_name)
def test_every_value_of_the_solution_can_be_known(template: Template) -> None:
    """In every phrasing; in a broken world that the agent has to look at, what set-up put there
    counts too."""
    needed = {place for command in template.solution for place in PLACE.findall(command)} - {
        "account"
    }
    assert needed <= set(template.params), "a place without a parameter"
    found = (
        repr([*template.setup_commands, *template.possible_drifts, dict(template.assets)])
        if template.tier == "expert"
        else ""
    )
    for text in shown(template):
        assert needed <= set(PLACE.findall(text + found)), text


@pytest.mark.parametrize("template", EASY, ids=by_name)
def test_every_id_that_set_up_made_is_told(template: Template) -> None:
    """So that an easy task needs no search."""
    needed = {match for command in template.solution for match in SETUP_CAPTURE.findall(command)}
    for text in shown(template):
        assert needed <= set(SETUP_CAPTURE.findall(text)), text


@pytest.mark.nightly
@pytest.mark.parametrize("template", TEMPLATES, ids=by_name)
def test_descriptions_do_not_tell_commands_or_criteria(template: Template) -> None:
    asked = template.success_criteria.get("operation")
    for text in template.description:
        words = set(re.findall(r"[\w-]+", text))
        assert not words & CLI_OPERATIONS, "an operation of the CLI"
        assert not re.search(r"(^|\s)--\w|\baws [a-z0-9-]+ [a-z]+-[a-z]", text), (
            "a piece of a command line"
        )
        assert asked is None or asked not in text, "how it is graded"
        assert "${step" not in text


@pytest.mark.parametrize("template", EASY, ids=by_name)
def test_a_request_is_short_and_can_be_put_in_two_ways(template: Template) -> None:
    assert len(template.description) >= 2
    for text in template.description:
        assert 15 <= len(plain_words(text)) <= 60
        assert text[0].isupper() and text.rstrip().endswith((".", "?"))
    assert template.mistakes, "at least one wrong habit"


def test_no_two_templates_share_a_phrasing() -> None:
    texts = Counter(
        " ".join(plain_words(text)) for template in TEMPLATES for text in template.description
    )
    texts.update(" ".join(plain_words(text)) for worded in phrasings().values() for text in worded)
    assert [text for text, count in texts.items() if count > 1] == []


@pytest.mark.slow
def test_further_phrasings_say_what_those_of_the_template_say_and_train_alone() -> None:
    """They have the places of all others and none that the template does not know, are of known
    templates that may train, and no held-out instance is ever worded so."""
    known = {template.task_id: template for template in load_templates(split="all_but_ten")}
    assert len(phrasings()) > 80 and set(phrasings()) <= set(known)
    for number, worded in phrasings().items():
        template = known[number]
        needed = set.intersection(*(set(PLACE.findall(text)) for text in template.description))
        for text in worded:
            assert needed <= set(PLACE.findall(text)) <= set(template.params), text
            assert 13 <= len(plain_words(text)) <= 60 and text.endswith((".", "?")), text
            assert not set(re.findall(r"[\w-]+", text)) & CLI_OPERATIONS, text
        instances = [instantiate(number, seed, rephrased=True) for seed in range(40)]
        further = [task for task in instances if task.description in fill(worded, task.params)]
        assert 0 < len(further) < 40
        for task in further[:1]:
            usual = instantiate(number, task.seed)
            assert (
                usual.description != task.description
                and replace(task, description=usual.description) == usual
            )
        held_out = [instantiate(number, seed, "heldout") for seed in range(10)]
        assert [
            instantiate(number, seed, "heldout", rephrased=True) for seed in range(10)
        ] == held_out


@pytest.mark.slow
def test_held_out_templates_do_not_read_like_train_templates() -> None:
    kept = load_templates(split="heldout")
    seen = load_templates(split="train")
    assert kept and seen
    copies = [
        f"{template.name} and {other.name}: {likeness(one, two):.2f}"
        for template, other in itertools.product(kept, seen)
        for one, two in itertools.product(template.description, other.description)
        if likeness(one, two) >= COPIED_SHARE
    ]
    assert copies == []


def test_likeness_knows_a_copy() -> None:
    text = "Create the queue {name} and tell the warehouse about it."
    assert likeness(text, text.replace("queue {name}", "queue {other}")) == 1.0
    assert likeness(text, text.replace("warehouse", "office")) >= COPIED_SHARE
    assert likeness(text, "Our warehouse wants a message queue; please call it {name}.") == 0.0


COUNTS = {
    "warmup": 25,
    "beginner": 25,
    "intermediate": 25,
    "advanced": 25,
    "expert": 24,
    "drift": 9,
}
"""Least number of templates of each kind; drift tasks are of the tier expert."""
FIRST_IDS = {
    "warmup": 1,
    "beginner": 101,
    "intermediate": 201,
    "advanced": 301,
    "expert": 401,
    "drift": 501,
}
COMMANDS = {"warmup": (1, 1), "beginner": (1, 1), "intermediate": (2, 3), "advanced": (4, 7)}


def services(templates: list[Template]) -> set[str]:
    return {name for template in templates for name in services_of(template.solution)}


@pytest.mark.parametrize(("kind", "first"), FIRST_IDS.items())
def test_a_kind_counts_its_templates_and_holds_out_a_fifth(kind: str, first: int) -> None:
    """Identities have no gap; a task more is welcome."""
    templates = [template for template in TEMPLATES if template.kind == kind]
    assert len(templates) >= COUNTS[kind]
    assert [template.task_id for template in templates] == list(
        range(first, first + len(templates))
    )
    held_out = [template for template in templates if template.split == "heldout"]
    assert 0.15 <= len(held_out) / len(templates) <= 0.25
    assert not any("starter" in template.tags for template in held_out)
    assert all(template.tags for template in templates)


def test_services_are_many_and_names_are_taken_once() -> None:
    warmup = load_templates(["warmup"])
    assert len(services(warmup)) == len(warmup), "each warmup task is about another service"
    assert len(services(TEMPLATES)) >= 30
    assert {command.split()[1] for template in TEMPLATES for command in template.solution} <= set(
        ALLOWED
    )
    assert len({template.name for template in TEMPLATES}) == len(TEMPLATES) >= sum(COUNTS.values())


@pytest.mark.nightly
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_a_template_has_the_shape_of_its_kind(template: Template) -> None:
    """A warm-up task looks at one thing and says at what; all others are graded by the state of the
    account."""
    assert bool(template.success_criteria) is (template.kind == "warmup")
    low, high = COMMANDS.get(template.kind, (1, 8))
    assert low <= len(template.solution) <= high
    assert len(template.possible_drifts) in ((4, 5, 6) if template.kind == "drift" else (0,))
    assert len(services_of(template.solution)) >= 2 or template.kind != "advanced"
