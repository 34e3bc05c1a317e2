"""What the tiers promise as a whole: how many templates, of which shape, how many held out, over which services."""

import pytest

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.grading.grader import services_of
from realhf.aws.tasks.loader import Template, load_templates

COUNTS = {"warmup": 25, "beginner": 25, "intermediate": 25, "advanced": 25, "expert": 24, "drift": 9}
"""Least number of templates of each kind; drift tasks are of the tier expert."""
FIRST_IDS = {"warmup": 1, "beginner": 101, "intermediate": 201, "advanced": 301, "expert": 401, "drift": 501}
COMMANDS = {"warmup": (1, 1), "beginner": (1, 1), "intermediate": (2, 3), "advanced": (4, 7)}
TEMPLATES = load_templates()


def services(templates: list[Template]) -> set[str]:
    return {name for template in templates for name in services_of(template.solution)}


@pytest.mark.parametrize(("kind", "first"), FIRST_IDS.items())
def test_a_kind_counts_its_templates_and_holds_out_a_fifth(kind: str, first: int) -> None:
    """Identities have no gap; a task more is welcome."""
    templates = [template for template in TEMPLATES if template.kind == kind]
    assert len(templates) >= COUNTS[kind]
    assert [template.task_id for template in templates] == list(range(first, first + len(templates)))
    held_out = [template for template in templates if template.split == "heldout"]
    assert 0.15 <= len(held_out) / len(templates) <= 0.25
    assert not any("starter" in template.tags for template in held_out)
    assert all(template.tags for template in templates)


def test_services_are_many_and_names_are_taken_once() -> None:
    warmup = load_templates(["warmup"])
    assert len(services(warmup)) == len(warmup), "each warmup task is about another service"
    assert len(services(TEMPLATES)) >= 30
    assert {command.split()[1] for template in TEMPLATES for command in template.solution} <= set(ALLOWED)
    assert len({template.name for template in TEMPLATES}) == len(TEMPLATES) >= sum(COUNTS.values())


@pytest.mark.nightly
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_a_template_has_the_shape_of_its_kind(template: Template) -> None:
    """A warm-up task looks at one thing and says at what; all others are graded by the state of the account."""
    assert bool(template.success_criteria) is (template.kind == "warmup")
    low, high = COMMANDS.get(template.kind, (1, 8))
    assert low <= len(template.solution) <= high
    assert len(template.possible_drifts) in ((4, 5, 6) if template.kind == "drift" else (0,))
    assert len(services_of(template.solution)) >= 2 or template.kind != "advanced"
