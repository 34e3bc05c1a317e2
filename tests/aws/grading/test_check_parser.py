"""A check written as a command may only look, and what it does is read as the CLI reads it."""

from __future__ import annotations

import pytest

from realhf.aws.grading.check_parser import parse_check
from realhf.aws.tasks.task import TaskError


@pytest.mark.parametrize(
    ("command", "service"),
    [
        ("aws s3api get-bucket-policy --bucket b", "s3"),
        ("aws --region us-east-1 s3api get-bucket-policy --bucket b", "s3"),
        ("aws --output json dynamodb scan --table-name t", "dynamodb"),
        ("aws s3api --query delete-bucket list-buckets", "s3"),
        ("aws s3 ls", "s3"),
    ],
)
def test_commands_that_look(command: str, service: str) -> None:
    assert parse_check({"command": command}).service == service


@pytest.mark.parametrize(
    "command",
    [
        "aws s3api delete-bucket --bucket b",
        "aws s3api --query get-x delete-bucket --bucket b",
        "aws --region us-east-1 s3api delete-bucket --bucket b",
        "aws s3 rm s3://b/k",
        "aws s3api help",
        "aws configure list",
    ],
)
def test_commands_that_do_more_than_look(command: str) -> None:
    with pytest.raises(TaskError, match="may only look"):
        parse_check({"command": command})
