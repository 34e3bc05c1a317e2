"""Commands in policy turns."""

from __future__ import annotations

import pytest

from realhf.aws.messages import extract_command


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
        ("aws s3api create-bucket \\\n  --bucket a \\\n  --acl b", "aws s3api create-bucket --bucket a --acl b"),
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
