"""Commands in policy turns, and what the policy reads of an observation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from realhf.aws.messages import account_key, extract_command, observation_text, shorten


def observed(output: str = "", error: str = "", *, hint: str = "") -> dict[str, Any]:
    return {
        "command_success": not error,
        "command_output": output,
        "error": error,
        "hint_text": hint,
    }


def test_success_is_minified_json_without_noise() -> None:
    output = json.dumps(
        {
            "Buckets": [{"Name": "a-b", "CreationDate": "2026-01-01T10:00:00Z"}],
            "Owner": {"ID": "x"},
            "Prefix": "",
        },
        indent=4,
    )
    assert observation_text(observed(output)) == '{"Buckets":[{"Name":"a-b"}]}'


def test_success_without_output_and_with_plain_text() -> None:
    assert observation_text(observed()) == "ok"
    assert observation_text(observed("a   b\n\n  c \n")) == "a b\nc"
    assert observation_text(observed('{"broken": ')) == '{"broken":'


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            "\nAn error occurred (NoSuchBucket) when calling the ListObjectsV2 operation: No such "
            "bucket\n",
            "error: NoSuchBucket: No such bucket",
        ),
        (
            "usage: aws [options] <command>\nTo see help text, you can run:\n\n  aws help\n\n"
            "aws: error: the following arguments are required: --bucket\n",
            "error: the following arguments are required: --bucket",
        ),
        ("usage: aws\n\nUnknown options: --name, x\n", "error: Unknown options: --name, x"),
        ("strange words", "error: strange words"),
    ],
)
def test_an_error_is_its_last_meaningful_line(error: str, text: str) -> None:
    assert observation_text(observed(error=error)) == text


def test_an_empty_error_still_says_that_it_failed() -> None:
    assert observation_text({**observed(), "command_success": False}) == "error: command failed"


def test_what_differs_between_runs_is_normalised() -> None:
    first = {
        "QueueUrl": "http://localhost:4570/000000000000/q",
        "Id": "9b2d4d6e-0000-4aaa-8bbb-0123456789ab",
        "Digest": "0123456789abcdef0123456789abcdef",
        "When": "2026-01-01T10:00:00.123+00:00",
        "At": 1767261600.5,
    }
    second = {
        "QueueUrl": "http://localhost:31999/000000000000/q",
        "Id": "11111111-0000-4aaa-8bbb-0123456789ac",
        "Digest": "ffff456789abcdef0123456789abcdef",
        "When": "2027-02-03T11:00:00Z",
        "At": 1797261600,
    }
    texts = {observation_text(observed(json.dumps(value))) for value in (first, second)}
    assert texts == {
        '{"QueueUrl":"http://localhost:4566/000000000000/q","Id":"UUID","Digest":"HEX","When":"TIME","At":TIME}'
    }


def test_ids_by_which_alone_something_can_be_named_are_shown_where_they_are_asked_for() -> None:
    key = "11111111-0000-4aaa-8bbb-0123456789ac"
    group = "ffff456789abcdef0123456789abcdef"
    answer = observed(
        json.dumps(
            {"KeyId": key, "Group": group, "UserId": "AIDA1E2FEB89414C443C9", "At": 1767261600}
        )
    )
    assert (
        observation_text(answer, show_ids=True)
        == f'{{"KeyId":"{key}","Group":"{group}","UserId":"ID","At":TIME}}'
    )
    assert key not in observation_text(answer) and group not in observation_text(answer)


def test_an_empty_answer_still_names_what_is_empty() -> None:
    assert observation_text(observed('{"Buckets": [], "Owner": {"ID": "x"}}')) == '{"Buckets":[]}'
    assert (
        observation_text(observed('{"a": 1, "b": [], "c": {"d": null}}'))
        == '{"a":1,"c":{"d":null}}'
    )


def test_random_ids_of_users_and_secrets_are_normalised() -> None:
    user = {"UserId": "AIDA1E2FEB89414C443C9", "Arn": "arn:aws:iam::000000000000:user/ABLE"}
    assert observation_text(observed(json.dumps(user))) == (
        '{"UserId":"ID","Arn":"arn:aws:iam::000000000000:user/ABLE"}'
    )
    secret = {"ARN": "arn:aws:secretsmanager:us-east-1:000000000000:secret:fair-hawk-hub-1e2feb"}
    assert observation_text(observed(json.dumps(secret))).endswith(':secret:fair-hawk-hub"}')


def test_names_and_arns_are_left_alone() -> None:
    arn = "arn:aws:sns:us-east-1:000000000000:clever-otter-hub"
    assert observation_text(observed(json.dumps({"TopicArn": arn}))) == f'{{"TopicArn":"{arn}"}}'


def test_hint_comes_first() -> None:
    assert observation_text(observed("x", hint="use s3")) == "hint: use s3\nx"


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 10, 25, 26, 30])
def test_shorten_keeps_head_and_tail(limit: int) -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    short = shorten(text, limit)
    assert len(short) == min(limit, len(text))
    if 8 <= limit < len(text):
        head, tail = short.split("...")
        assert text.startswith(head) and text.endswith(tail) and tail and len(head) >= len(tail)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("aws s3 ls", "aws s3 ls"),
        ("  $ aws s3 ls  ", "aws s3 ls"),
        ("`aws s3 ls`", "aws s3 ls"),
        ("```bash\naws s3 ls\n```", "aws s3 ls"),
        ("```aws s3 ls```", "aws s3 ls"),
        ("```\n$ aws s3 ls\n```\naws sqs list-queues", "aws s3 ls"),
        ("I will list them.\naws s3 ls\naws sqs list-queues", "aws s3 ls"),
        ("<think>aws iam list-users</think>aws s3 ls", "aws s3 ls"),
        ("<think>\naws iam list-users\n</think>\n\naws s3 ls", "aws s3 ls"),
        ("aws iam list-users\n</think>\naws s3 ls", "aws s3 ls"),
        ("aws s3 ls\n<think>\naws iam list-users", "aws s3 ls"),
        ("<think>\naws s3 ls", None),
        ("aws", None),
        ("awsome s3 ls", None),
        ("use aws s3 ls", None),
        ("", None),
        (
            "aws s3api create-bucket \\\n  --bucket a \\\n  --acl b",
            "aws s3api create-bucket --bucket a --acl b",
        ),
        ("```bash aws s3 ls```", "aws s3 ls"),
        ("```aws\naws s3 ls\n```", "aws s3 ls"),
        ("aws s3 ls \\", "aws s3 ls"),
        ("aws s3 ls \\\r\n--recursive", "aws s3 ls --recursive"),
        ("aws x --policy '{\n \"a\": 1\n}' --y\nnext", "aws x --policy '{\n \"a\": 1\n}' --y"),
        ("```\naws x --policy '{\n```\nrest'", "aws x --policy '{"),
        ("aws x --name it\\'s\nnext", "aws x --name it\\'s"),
        ("aws x --query 'a[?b==`c`]'", "aws x --query 'a[?b==`c`]'"),
        ('aws x --n "a\\"b" \nnext', 'aws x --n "a\\"b"'),
    ],
)
def test_extract_command(text: str, command: str | None) -> None:
    assert extract_command(text) == command


def changed(*calls: str, name: str = "q", **more: Any) -> dict[str, Any]:
    return {
        "service": "sqs",
        "type": "queue",
        "name": name,
        "before": "none",
        "after": "there",
        "calls": [*calls],
        **more,
    }


def test_the_state_of_an_account_is_what_was_done_to_its_resources() -> None:
    """What was read or failed is in no observation of changes; an id that the simulator drew is as
    good as another."""
    start = account_key(observed())
    made = account_key({**observed(), "account_changes": [changed("CreateQueue")]})
    assert start == account_key(observed(error="no such queue")) and start != made
    drawn = ("9b2d4d6e-0000-4aaa-8bbb-0123456789ab", "0b2d4d6e-1111-4aaa-8bbb-0123456789ab")
    first, second = (
        account_key({"account_changes": [changed("CreateQueue", name=name)]}) for name in drawn
    )
    assert first == second != made
    assert made != account_key(
        {"account_changes": [changed("CreateQueue", 'SetQueueAttributes {"Delay": 5}')]}
    )
    assert account_key({"account_key": "k", "account_changes": [changed("CreateQueue")]}) == "k", (
        "the server knows best"
    )
