"""What the validator says about templates on paper."""

from dataclasses import replace

import pytest

from realhf.aws.tasks import get_template, load_templates
from realhf.aws.tasks import loader as loader_module
from realhf.aws.validation.static_checks import COUNTS, collection_problems, kind_of, template_problems

TEMPLATES = load_templates()


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_the_templates_are_sound(template) -> None:
    assert template_problems(template) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"split": "test"}, "split"),
        ({"success": {"services": ["s3"]}}, "names no operation"),
        ({"free": ("no such field",)}, "service/kind"),
        ({"success": {"operation": "s3:CreateBucket"}}, "graded by resource_creation"),
        ({"solution": ("aws s3 mb s3://{name}", "aws s3 ls")}, "2 commands"),
        ({"solution": ("aws configure list",)}, "refused"),
        ({"solution": ("aws s3 mb s3://{nothing}",)}, "nothing fills"),
        ({"setup": [{"service": "athena", "operation": "StartQueryExecution"}]}, "does not allow athena"),
        ({"setup": ["aws configure list"]}, "does not allow aws configure"),
        ({"descriptions": ("Send aws s3api create-bucket --bucket {name}",)}, "the description says"),
        ({"desired_state_spec": "x"}, "drift"),
        ({"possible_drifts": ({"service": "s3", "operation": "ListBuckets"},)}, "1 drifts"),
    ],
)
def test_each_fault_is_named(change: dict, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = replace(get_template(101), **change)
    monkeypatch.setattr(loader_module, "_all_templates", lambda: {101: faulty})
    assert said in " ".join(template_problems(faulty))


def test_the_whole_is_large_wide_and_split() -> None:
    assert sum(COUNTS.values()) == 133
    assert collection_problems(TEMPLATES) == []
    thin = [template for template in TEMPLATES if kind_of(template) != "warmup"] + [get_template(1)] * 2
    said = " ".join(collection_problems(thin))
    assert "warmup: 2 templates of 25" in said and "warmup templates use 1 services" in said
    assert "taken twice" in said and "0 of 2 templates are held out" in said
