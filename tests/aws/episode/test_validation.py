"""What the validator says about templates: on paper, and when it plays them."""

from dataclasses import replace

import pytest

from realhf.aws.episode.validation import template_problems
from realhf.aws.tasks import get_template, load_templates
from realhf.aws.tasks import loader as loader_module
from realhf.aws.tasks.__main__ import main

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
        ({"solution": ("aws configure list",)}, "refused"),
        ({"any_of": (("aws configure list",),)}, "refused"),
        ({"solution": ("aws s3 mb s3://{nothing}",)}, "nothing fills"),
        ({"setup": [{"service": "athena", "operation": "StartQueryExecution"}]}, "does not allow athena"),
        ({"setup": ["aws configure list"]}, "does not allow aws configure"),
        ({"descriptions": ("Send aws s3api create-bucket --bucket {name}",)}, "the description says"),
        ({"desired_state_spec": "x"}, "a desired state belongs to a task with drifts"),
        ({"possible_drifts": ({"service": "s3", "operation": "ListBuckets"},)}, "a drift has no repair"),
    ],
)
def test_each_fault_is_named(change: dict, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = replace(get_template(101), **change)
    monkeypatch.setattr(loader_module, "_all_templates", lambda: {101: faulty})
    assert said in " ".join(template_problems(faulty))


def test_impossible_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--seeds", "--pool-size"):
        with pytest.raises(SystemExit):
            main(["validate", option, "0"])
        assert f"{option} is at least 1" in capsys.readouterr().err
