"""What the validator says about templates: on paper, and when it plays them; of a file, its line
and the task."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from realhf.aws.episode.validation import template_problems
from realhf.aws.tasks import loader as loader_module
from realhf.aws.tasks.__main__ import main
from realhf.aws.tasks.loader import get_template, load_templates

TEMPLATES = load_templates()


@pytest.mark.nightly
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_the_templates_are_sound(template) -> None:
    assert template_problems(template) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"split": "test"}, "split"),
        ({"success_criteria": {"services": ["s3"]}}, "names no operation"),
        ({"free": ("no such field",)}, "service/kind"),
        ({"solution": ("aws configure list",)}, "refused"),
        ({"any_of": (("aws configure list",),)}, "refused"),
        ({"solution": ("aws s3 mb s3://{nothing}",)}, "nothing fills"),
        (
            {"setup_commands": [{"service": "athena", "operation": "StartQueryExecution"}]},
            "does not allow athena",
        ),
        ({"setup_commands": ["aws configure list"]}, "does not allow aws configure"),
        (
            {"description": ("Send aws s3api create-bucket --bucket {name}",)},
            "the description says",
        ),
        ({"desired_state_spec": "x"}, "a desired state belongs to a task with drifts"),
        (
            {"possible_drifts": ({"service": "s3", "operation": "ListBuckets"},)},
            "a drift has no repair",
        ),
    ],
)
def test_each_fault_is_named(change: dict, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = replace(get_template(101), **change)
    monkeypatch.setattr(loader_module, "_all_templates", lambda: {101: faulty})
    assert said in " ".join(map(str, template_problems(faulty)))


def test_impossible_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--seeds", "--pool-size"):
        with pytest.raises(SystemExit):
            main(["validate", option, "0"])
        assert f"{option} is at least 1" in capsys.readouterr().err


@pytest.fixture
def own_file(tmp_path: Path) -> Iterator[Path]:
    """A file of an author's own; its tasks are forgotten afterwards."""
    yield tmp_path / "own.yaml"
    loader_module._all_templates.cache_clear()


def said_of(file: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """What the command says of a file with this text, and its exit status."""
    file.write_text(text)
    arguments = [
        "validate",
        str(file),
        "--tiers",
        "intermediate",
        "--seeds",
        "1",
        "--pool-size",
        "1",
    ]
    return main(arguments), capsys.readouterr().out


TASK = """
- task_id: 901
  name: own-parameter
  description: ["Keep the status of {name} in a parameter of the same name."]
  params: {name: words}
  setup_commands:
    - {service: s3, operation: CreateBucket, params: {Bucket: "{name}"}}
    - "aws s3api put-bucket-versioning --bucket {name} --versioning-configuration Status=Enabled"
  solution:
    - aws s3api get-bucket-versioning --bucket {name}
    - aws ssm put-parameter --name {name} --type String --value ${step1:Status}
  mistakes: []
  free:
    - "ssm/parameters: Description = *"
    - "ssm/parameters: Value = Enabled | Suspended"
"""


@pytest.mark.nightly
@pytest.mark.sim
@pytest.mark.parametrize(
    ("free", "text"),
    [
        (
            "ssm/parameter: Value = Enabled",
            "free: no solution leaves a ssm/parameter, but ssm/parameters",
        ),
        (
            "ssm/parameters: Valeu = Enabled",
            "free: no ssm/parameters that a solution leaves has a field Valeu",
        ),
        ("ssm/parameters: Value = Off | On", "free: a solution's own Value is not Off | On"),
        (
            "ssm/parameters: Value",
            "task.free: 'ssm/parameters: Value' is not \"service/kind: path = value | value\"",
        ),
    ],
)
def test_a_field_that_nothing_has_is_named_with_its_line(
    own_file: Path, capsys: pytest.CaptureFixture[str], free: str, text: str
) -> None:
    """A misspelt ``free`` frees nothing, and the grader refuses what it was meant to let be; one
    that is empty may be given."""
    status, said = said_of(
        own_file, TASK.replace("ssm/parameters: Value = Enabled | Suspended", free), capsys
    )
    assert status == 1
    assert f"{own_file}:15: task 901: {text}" in said
    assert ":14:" not in said, "the description is empty"


@pytest.mark.nightly
@pytest.mark.sim
def test_a_solution_that_misses_its_own_target_is_named_with_its_line(
    own_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What depends on the clock is another account each time."""
    made = "s3api put-bucket-versioning --bucket {name} --versioning-configuration Status=Enabled"
    text = TASK.replace(made, "logs create-log-group --log-group-name {name}")
    text = text.replace("s3api get-bucket-versioning --bucket {name}", "logs describe-log-groups")
    text = text.replace("${step1:Status}", "at-${step1:logGroups[0].creationTime}")
    text = text.replace('    - "ssm/parameters: Value = Enabled | Suspended"\n', "")
    status, said = said_of(own_file, text, capsys)
    assert status == 1
    assert (
        f"{own_file}:9: task 901: the solution, played again, does not reach its own end state"
        in said
    )


@pytest.mark.sampled(1)
@pytest.mark.sim
@pytest.mark.parametrize(
    ("old", "new", "line", "text"),
    [
        (
            "put-bucket-versioning --bucket {name}",
            "put-bucket-versioning --bucket no-{name}",
            8,
            "a set-up command",
        ),
        (
            "get-bucket-versioning --bucket {name}",
            "get-bucket-versioning --bucket no-{name}",
            10,
            "command 1 of its",
        ),
    ],
)
def test_what_fails_is_named_with_its_line(
    own_file: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, line: int, text: str
) -> None:
    status, said = said_of(own_file, TASK.replace(old, new), capsys)
    assert status == 1
    assert f"{own_file}:{line}: task 901: " in said and text in said


@pytest.mark.slow
def test_a_file_that_is_none_is_named(own_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, said in (
        ("- task_id: 1\n  name: x\n", "'description'"),
        ("[", "while parsing"),
        (TASK.replace("901", "101"), "task_id 101 is taken"),
        (TASK.replace("mistakes:", "mistake:"), "unexpected keyword argument 'mistake'"),
    ):
        with pytest.raises(SystemExit):
            said_of(own_file, text, capsys)
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["validate", str(own_file)])
    assert "--tiers" in capsys.readouterr().err
