"""Plays against the grader: what is generated for a task, how an outcome is judged, the command
that plays them all, and a sample of every tier with all that ever paid or was refused wrongly.
"""

from pathlib import Path

import pytest

from realhf.aws.episode.episode import Episode
from realhf.aws.simulator.slot import Slot
from realhf.aws.tasks.loader import Template, get_template, instantiate, load_templates
from realhf.aws.tasks.task import SetupCommand, TaskError
from tests.aws.validation import play as written
from tests.aws.validation.adversarial import MAX_STEPS, main, plays_of
from tests.aws.validation.command_line import CommandLine, line_of
from tests.aws.validation.play import Outcome, Play, instance_to_play, perform

TEMPLATES = load_templates()


def commands(task_id: int, kind: str, name: str) -> list[str]:
    task = instantiate(task_id, 0)
    return [
        line
        for play in plays_of(task)
        if (play.kind, play.name) == (kind, name)
        for line in play.commands
    ]


def test_written_plays_belong_to_templates() -> None:
    assert written.written_ids() <= {template.task_id for template in TEMPLATES}
    folder = Path(written.__file__).with_name("plays")
    tiers = {"warmup", "beginner", "intermediate", "advanced", "expert", "drift"}
    assert {file.stem for file in folder.glob("*.yaml")} <= tiers


def test_a_line_survives_being_taken_apart() -> None:
    api = "${step1:Items[?Name=='a b'].ApiId | [0]}"
    line = f"aws apigatewayv2 create-stage --api-id {api} --stage-name 'x y' --auto-deploy"
    command = CommandLine.parse(line)
    assert (command.value("--api-id"), command.value("--stage-name")) == (api, "x y")
    assert (command.value("--auto-deploy"), command.api_operation) == (
        None,
        "apigatewayv2:CreateStage",
    )
    assert CommandLine.parse(str(command)) == command
    assert CommandLine.parse("aws sqs create-queue --queue-name=a=b").value("--queue-name") == "a=b"
    with pytest.raises(ValueError, match="no operation"):
        CommandLine.parse("aws s3api")


def test_a_set_up_request_becomes_a_line() -> None:
    volume = SetupCommand(
        "ec2", "CreateVolume", {"Size": 8, "TagSpecifications": [{"Tags": []}], "Encrypted": False}
    )
    assert (
        line_of(volume)
        == "aws ec2 create-volume --size 8 --tag-specifications '[{\"Tags\": []}]' --no-encrypted"
    )
    subscribe = SetupCommand("sns", "Subscribe", {"Endpoint": "${setup1:a | b}"})
    assert line_of(subscribe) == "aws sns subscribe --notification-endpoint ${setup1:a | b}"
    assert line_of(SetupCommand(command="aws s3 ls")) == "aws s3 ls"


def test_spellings_are_generated() -> None:
    assert (
        commands(103, "equivalent", "--option=value")[0]
        .split()[-1]
        .startswith("--attributes=VisibilityTimeout=")
    )
    assert '\'{"VisibilityTimeout": "' in commands(103, "equivalent", "JSON for shorthand")[0]
    assert commands(201, "equivalent", "s3 mb for create-bucket")[0].startswith("aws s3 mb s3://")
    assert "arn:aws:lambda:" in commands(6, "equivalent", "ARN for name")[0]
    assert '"Statement": {' in commands(415, "equivalent", "policies with single values")[0]
    assert '"Action": ["s3:GetObject"]' in commands(415, "equivalent", "policies with lists")[0]


def judged(
    kind, score: float, *failures: str, achieved: bool = False, needs="all", sent: int = 2
) -> str:
    return Outcome(Play(kind, "play", ("a", "b"), needs), achieved, score, sent, failures).problem


def test_outcomes_are_judged_by_their_class() -> None:
    assert (
        not judged("nothing", 0.0) and not judged("unrelated", 0.0) and not judged("harmful", 0.0)
    )
    assert "scored 0.020, asked 0" in judged("nothing", 0.02)
    assert "asked at most 0" in judged("harmful", 0.3)
    assert not judged("overdone", 0.9) and "below 1" in judged("overdone", 1.0, achieved=True)
    assert not judged("equivalent", 1.0, achieved=True) and "asked 1" in judged("equivalent", 0.9)


def test_a_play_that_did_not_happen_proves_nothing() -> None:
    assert "proves nothing" in judged("unrelated", 0.0, "a: no such bucket")
    assert not judged("harmful", 0.0, "a: denied", needs="one")
    assert "proves nothing" in judged("harmful", 0.0, "a: denied", "b: denied", needs="one")
    assert "proves nothing" in judged("harmful", 0.0, needs="one", sent=0)
    assert not judged("nothing", 0.0, "a: exists", needs="none")
    assert not judged("equivalent", 0.0, "a: no ARN here", needs="all or skip"), (
        "the simulator does not know this way"
    )


def test_malformed_written_plays_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        written, "_entries", lambda: {413: {"harmful": [{"name": "x", "command": ["aws s3 ls"]}]}}
    )
    with pytest.raises(TaskError, match="task 413: malformed harmful play 'x'"):
        plays_of(instantiate(413, 0))


def test_a_play_of_some_instances_alone_is_left_out_of_the_others() -> None:
    engines = {instantiate(122, seed).params["engine"]: instantiate(122, seed) for seed in range(4)}
    assert set(engines) == {"postgres", "mariadb"}
    names = {
        engine: {play.name for play in written.written_plays(task)}
        for engine, task in engines.items()
    }
    assert "a version" in names["postgres"] and "a version" not in names["mariadb"]


def test_every_written_play_can_be_written_for_other_instances() -> None:
    for task_id in written.written_ids():
        for seed in range(4):
            written.written_plays(written.instance_to_play(task_id, seed))


@pytest.mark.slow
def test_a_play_is_performed_with_its_captures(slot) -> None:
    task = instantiate(413, 0)
    solution = Play("equivalent", "solution", task.solution)
    outcome = perform(Episode(slot), task, solution)
    assert (outcome.achieved, outcome.score, outcome.sent, outcome.failures) == (True, 1.0, 2, ())
    failing = perform(
        Episode(slot), task, Play("nothing", "fails", ("aws s3api head-bucket --bucket none",))
    )
    assert failing.sent == 1 and failing.failures[0].startswith(
        "aws s3api head-bucket --bucket none: "
    )


@pytest.mark.nightly
def test_the_command_prints_every_play_and_fails_on_one_outside(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--ids", "104", "--pool-size", "1"]) == 0
    printed = capsys.readouterr().out
    assert "looks in between" in printed and "equivalent" in printed
    assert "1 templates, " in printed and " 0 outside the bounds" in printed


def test_impossible_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--seeds", "--pool-size"):
        with pytest.raises(SystemExit):
            main([option, "0"])
        assert f"{option} is at least 1" in capsys.readouterr().err


WHOLE = (6, 112, 207, 214, 413, 507)
"""Templates all of whose plays are played."""
SPELLED = (1, 2, 8, 9, 13, 14, 15, 20, 22, 24)
"""Questions that another right way once answered in vain."""
GRANTING = (301, 304, 305, 306, 307, 308, 316, 318, 319, 324, 325)
"""Policies that were once read as they are written, not as what they permit."""
EDGES = (
    *(
        111,
        114,
        121,
        122,
        124,
        203,
        204,
        213,
        216,
        217,
        219,
        221,
        222,
        223,
        303,
        305,
        308,
        310,
        313,
        314,
        316,
        317,
    ),
    *(318, 320, 321, 322, 401, 408, 409, 414, 416, 424),
)
"""Where what was harmless, free, equal or given by default was once told by a pattern: all that a
person wrote."""
FROM_TEXTS = (
    *(104, 115, 118, 119, 121, 125),
    *(201, 203, 204, 206, 207, 208, 209, 210, 211, 212, 213),
    *(214, 215, 216, 217, 218, 219, 220, 221, 222, 223, 224, 225),
    *(301, 302, 303, 304, 305, 306, 307, 308, 309, 310, 311, 312),
    *(313, 314, 315, 316, 317, 318, 319, 321, 322, 323, 324, 325),
    *(
        401,
        402,
        405,
        406,
        407,
        408,
        409,
        412,
        413,
        414,
        415,
        417,
        418,
        419,
        420,
        421,
        422,
        423,
        424,
    ),
)
"""Tasks with plays by somebody who knew their texts and the CLI, and nothing of how they are
graded."""
REPAIRS = tuple(template.task_id for template in load_templates(["expert"]))
SAMPLE = sorted({*WHOLE, *SPELLED, *GRANTING, *EDGES, *FROM_TEXTS, *REPAIRS})
SEED = 0


def chosen(template: Template, play: Play) -> bool:
    """A repair is tried with what is beside the point or harms; the other tiers where they were
    broken."""
    if template.task_id in WHOLE or play.name in (
        "policies with single values",
        "policies with lists",
    ):
        return True
    if template.task_id in (*EDGES, *FROM_TEXTS) and play.written:
        return True
    if template.tier == "expert":
        return play.kind in ("nothing", "harmful")
    return template.tier == "warmup" and (
        play.name == "ARN for name" or (play.written and play.kind == "equivalent")
    )


@pytest.mark.sampled(12)
@pytest.mark.sim
@pytest.mark.parametrize("template_id", SAMPLE)
def test_every_play_scores_within_the_bounds_of_its_class(slot: Slot, template_id: int) -> None:
    template = get_template(template_id)
    task = instance_to_play(template_id, SEED)
    outcomes = [
        perform(Episode(slot, MAX_STEPS), task, play)
        for play in plays_of(task)
        if chosen(template, play)
    ]
    assert outcomes
    assert not [
        f"{one.play.kind}, {one.play.name}: {one.problem}" for one in outcomes if one.problem
    ]
