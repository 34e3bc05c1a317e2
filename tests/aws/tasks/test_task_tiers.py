"""What the three easy tiers promise as a whole: how many templates, how many held out, over which services."""

import pytest

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.grading.grader import criteria_of
from realhf.aws.tasks import Template, instantiate, load_templates

FIRST_IDS = {"warmup": 1, "beginner": 101, "intermediate": 201}


def services(templates: list[Template]) -> set[str]:
    return {command.split()[1] for template in templates for command in template.solution}


@pytest.mark.parametrize(("tier", "first"), FIRST_IDS.items())
def test_a_tier_counts_its_templates_and_holds_out_a_fifth(tier: str, first: int) -> None:
    """Identities have no gap; a task more is welcome."""
    templates = load_templates([tier])
    assert len(templates) >= 25
    assert [template.task_id for template in templates] == list(range(first, first + len(templates)))
    held_out = [template for template in templates if template.split == "heldout"]
    assert abs(len(held_out) - len(templates) / 5) < 1
    assert not any("starter" in template.tags for template in held_out)
    assert all(template.tags for template in templates)


def test_services_are_many() -> None:
    warmup, easy = load_templates(["warmup"]), load_templates(FIRST_IDS)
    assert len(services(warmup)) == len(warmup), "each warmup task is about another service"
    assert len(services(easy)) >= 30
    assert services(easy) <= set(ALLOWED)


def test_every_strategy_fits_its_tier() -> None:
    wanted = {"warmup": "command_match", "beginner": "resource_creation", "intermediate": "multi_step"}
    for tier, strategy in wanted.items():
        found = {template.name: len(template.solution) for template in load_templates([tier])}
        assert set(found.values()) <= ({2, 3} if tier == "intermediate" else {1}), found
        for template in load_templates([tier]):
            if template.success and "${setup" not in str(template.success):
                assert criteria_of(instantiate(template.task_id, 0)).strategy == strategy
