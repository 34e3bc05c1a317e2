"""Spellings that models use and that do no harm: they are accepted and do what they say, within bounds."""

from __future__ import annotations

import random
import time

import pytest
from botocore import xform_name

from realhf.aws.cli.policy import check_command
from realhf.aws.simulator.pool import Slot

pytestmark = pytest.mark.sim


def test_options_of_the_second_version_change_nothing(slot: Slot) -> None:
    plain = slot.executor.run("aws s3api list-buckets")
    for command in (
        "aws --no-cli-pager s3api list-buckets",
        "aws s3api list-buckets --no-cli-pager",
        "aws --cli-binary-format raw-in-base64-out s3api list-buckets --no-cli-auto-prompt",
    ):
        result = slot.executor.run(command)
        assert result.success and result.stdout == plain.stdout, result.stderr


def test_waiters_ask_the_simulator(slot: Slot) -> None:
    slot.reset()
    slot.state.call("s3", "CreateBucket", {"Bucket": "ready"})
    waited = slot.executor.run("aws s3api wait bucket-exists --bucket ready")
    assert waited.success and not waited.stdout
    assert [request.operation for request in waited.requests] == ["HeadBucket"]
    for _ in range(2):  # its parsers are kept: the second time as the first
        assert slot.executor.run("aws dynamodb wait table-not-exists --table-name none").success
    wrong = slot.executor.run("aws dynamodb wait table-exists --tabel-name none")
    assert not wrong.success and not wrong.requests and wrong.refusal is None


def test_a_waiter_gives_up_in_time(slot: Slot) -> None:
    started = time.monotonic()
    waited = slot.executor.run("aws s3api wait bucket-exists --bucket none-such")
    assert not waited.success and not waited.timed_out and not waited.stopped
    assert "Max attempts exceeded" in waited.stderr
    assert 2 <= len(waited.requests) <= 20 and time.monotonic() - started < 9
    assert slot.executor.run("aws s3 ls").success


def test_files_of_the_working_folder_by_their_usual_names(slot: Slot) -> None:
    slot.reset()
    slot.state.call("s3", "CreateBucket", {"Bucket": "box"})
    slot.files.put("in.txt", b"words")
    for command in (
        "aws s3 cp ./in.txt s3://box/a/in.txt",
        "aws s3api put-object --bucket box --key b.txt --body ./in.txt",
        "aws ssm put-parameter --name p --type String --value file://./in.txt",
        "aws s3 cp s3://box/b.txt .",
        "aws s3 cp s3://box/a/ ./below/ --recursive",
        "aws s3api get-object --bucket box --key b.txt ./c.txt",
        "aws s3 cp . s3://box/all/ --recursive",
    ):
        result = slot.executor.run(command)
        assert result.success, (command, result.stderr)
    for name in ("b.txt", "c.txt", "below/in.txt"):
        assert (slot.files.path / name).read_bytes() == b"words", name
    assert slot.state.call("ssm", "GetParameter", {"Name": "p"})["Parameter"]["Value"] == "words"
    keys = {found["Key"] for found in slot.state.call("s3", "ListObjectsV2", {"Bucket": "box"})["Contents"]}
    assert {"a/in.txt", "b.txt", "all/in.txt", "all/below/in.txt"} <= keys


def test_urls_and_underscores_are_texts_like_any_other(slot: Slot) -> None:
    slot.reset()
    slot.state.call("s3", "CreateBucket", {"Bucket": "box"})
    slot.files.put("in.txt", b"words")
    url = "https://example.com/hook?a=b"
    for command in (
        f"aws ssm put-parameter --name p --type String --value {url}",
        f"aws sqs create-queue --queue-name q --tags home={url}",
        "aws s3api put-object --bucket box --key _next/static.js --body in.txt",
        "aws s3 cp in.txt s3://box/_headers",
    ):
        result = slot.executor.run(command)
        assert result.success, (command, result.stderr)
    assert slot.state.call("ssm", "GetParameter", {"Name": "p"})["Parameter"]["Value"] == url
    keys = [found["Key"] for found in slot.state.call("s3", "ListObjectsV2", {"Bucket": "box"})["Contents"]]
    assert keys == ["_headers", "_next/static.js"]


def test_the_cli_sends_what_the_policy_read(slot: Slot) -> None:
    """However global options stand around them, service and operation are those that the CLI finds."""
    draw = random.Random(8)
    globals_ = (
        "--region us-east-1",
        "--output json",
        "--output=text",
        "--query Buckets",
        "--query list-queues",
        "--no-paginate",
        "--no-cli-pager",
        "--reg=us-east-1",
        "--quer Names",
        "-x",
        "-1",
        "--unknown",
        "-",
    )
    operations = (("s3api", "list-buckets"), ("sqs", "list-queues"), ("iam", "list-users"), ("dynamodb", "list-tables"))
    names = {"s3api": "s3"}
    sent = 0
    for _ in range(150):
        words = list(draw.choice(operations))
        for _ in range(draw.randint(0, 4)):
            words.insert(draw.randint(0, len(words)), draw.choice(globals_))
        command = f"aws {' '.join(words)}"
        verdict, result = check_command(command), slot.executor.run(command)
        for request in result.requests:
            sent += 1
            found = names.get(verdict.service, verdict.service), verdict.operation
            assert found == (request.service, xform_name(request.operation, "-")), command
    assert sent > 20
