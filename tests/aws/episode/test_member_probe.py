"""Probing which members a simulator keeps: a sample of the table that comes with the package, made
anew."""

import json
from pathlib import Path

import pytest

from realhf.aws.episode.member_probe import (
    Site,
    about_of,
    collect,
    input_shape,
    merge_tables,
    probe,
    rank_sites,
    served_writes,
    versions,
    written_plays,
)
from realhf.aws.grading.member_notes import has_member, read_notes
from realhf.aws.grading.sent_settings import KEPT, NOT_KEPT, NOT_PROBED, TABLE, table_text
from realhf.aws.simulator.slot import Slot
from realhf.aws.tasks.__main__ import main
from realhf.aws.tasks.loader import get_template, instantiate
from tests.aws.validation import play

FILES = sorted(Path(play.__file__).with_name("plays").glob("*.yaml"))
SAMPLE = (
    "autoscaling:UpdateAutoScalingGroup",
    "dynamodb:UpdateContinuousBackups",
    "ec2:CreateLaunchTemplate",
    "elbv2:CreateTargetGroup",
    "sqs:CreateQueue",
    "stepfunctions:CreateStateMachine",
)


@pytest.fixture(scope="module")
def table() -> dict:
    return json.loads(TABLE.read_text())


@pytest.mark.slow
def test_the_table_holds_every_write_that_is_served_for_the_versions_in_use(table: dict) -> None:
    assert table["versions"] == versions(), "make the table anew"
    assert set(served_writes()) <= set(table["operations"])
    assert TABLE.read_text() == table_text(table) and TABLE.stat().st_size < 1_000_000
    for operation, entry in table["operations"].items():
        assert ("not probed" in entry) is not ("members" in entry), operation
        if not operation.startswith("AWS::"):
            assert all(
                has_member(operation, path.replace(".*", ".x")) for path in entry.get("members", ())
            ), operation


@pytest.mark.sampled(1)
@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize("operation", SAMPLE)
def test_a_sample_of_the_table_is_what_a_simulator_does(
    slot: Slot, table: dict, operation: str
) -> None:
    entry = table["operations"][operation]
    corpus = collect(
        slot, [get_template(number) for number in entry["tasks"]], written_plays(FILES)
    )
    assert probe(slot, operation, corpus, read_notes()) == entry


def _site(**params: object) -> Site:
    return Site(instantiate(101, 0), "lambda:CreateFunction", params)


def test_of_a_member_the_sites_speak_that_send_it() -> None:
    path = ("Handler",)
    sends = _site(Handler="main")
    other = _site(Runtime="python3.13")
    assert merge_tables([(sends, {path: NOT_KEPT}), (other, {path: KEPT})]) == {"Handler": NOT_KEPT}
    assert merge_tables([(other, {path: NOT_KEPT}), (sends, {path: KEPT})]) == {"Handler": KEPT}
    unknown = f"{NOT_PROBED}: fewer than two values are accepted"
    assert merge_tables([(sends, {path: unknown}), (other, {path: KEPT})]) == {"Handler": KEPT}


def test_sites_that_send_more_come_first() -> None:
    few = _site(Handler="a")
    many = _site(Handler="a", Timeout=3)
    others = _site(Runtime="python3.13")
    assert rank_sites([few, many, others])[0] == many


def test_what_the_operation_calls_it_names_it() -> None:
    about = about_of(
        "ecs:UpdateService", input_shape("ecs:UpdateService"), {"cluster": "a", "service": "b"}
    )
    assert set(about) == {"cluster", "service"}


def test_a_part_of_the_table_does_not_take_the_place_of_the_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = TABLE.read_bytes()
    for part in (["--ids", "104"], ["--tiers", "warmup"]):
        with pytest.raises(SystemExit):
            main(["members", *part])
        assert "--output" in capsys.readouterr().err
    assert TABLE.read_bytes() == before


def test_a_folder_that_is_not_there_is_named_before_minutes_of_probing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["members", "--output", str(tmp_path / "none" / "table.json")])
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
