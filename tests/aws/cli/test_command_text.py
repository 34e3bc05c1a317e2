"""How a command is written: over several lines, in a fence, behind a prompt; and what stays several
commands."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.aws.cli.command_text import read_command
from realhf.aws.cli.policy import check_command
from realhf.aws.messages import extract_command

WANTED = "aws s3api create-bucket --bucket a --acl private"
FORMS = [
    WANTED,
    f"  {WANTED}\n",
    f"$ {WANTED}",
    f"`{WANTED}`",
    f"`$ {WANTED}`",
    f"```{WANTED}```",
    f"```bash {WANTED}```",
    f"```\n{WANTED}\n```",
    f"```bash\n{WANTED}\n```",
    f"```sh\r\n$ {WANTED}\r\n```\r\n",
    f'```bash title="one"\n\n{WANTED}\n\n```',
    f"```aws\n{WANTED}```",
    f"````shell\n{WANTED}\n````",
    f"```bash\n{WANTED}",
    "aws s3api create-bucket \\\n  --bucket a \\\n  --acl private",
    "aws s3api create-bucket \\\r\n    --bucket a \\\r\n    --acl private\r\n",
    "aws s3api create-bucket\\\n  --bucket a \\ \t\n\t--acl private \\",
    "aws \\\ns3api create-bucket --bucket a --acl pri\\\nvate",
    "$ aws s3api create-bucket \\\n--bucket a \\\n--acl private",
    "```bash\naws s3api create-bucket \\\n  --bucket a \\\n  --acl private\n```",
    "```console\r\n$ aws s3api create-bucket \\\r\n    --bucket a \\\r\n    --acl private\r\n```",
    "```bash aws s3api create-bucket \\\n --bucket a \\\n --acl private```",
]


@pytest.mark.parametrize("text", FORMS)
def test_every_form_is_the_same_command_at_every_entrance(text: str) -> None:
    """The wire used to refuse what a turn of a policy may hold, and most published examples with
    it."""
    command = read_command(text)
    assert command == WANTED and read_command(command) == WANTED
    assert extract_command(text) == WANTED, "a turn is read in the same way"
    assert check_command(command).argv == tuple(WANTED.split()[1:])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("aws ssm put-parameter --value 'a \\\n b'", "a \\\n b"),
        ("aws ssm put-parameter --value 'a \\ \n b'", "a \\ \n b"),
        ('aws ssm put-parameter --value "a \\\n b"', "a  b"),
        ('aws ssm put-parameter --value "a\n b"', "a\n b"),
        ("aws ssm put-parameter --value '{\r\n \"a\": 1\r\n}'", '{\n "a": 1\n}'),
        ("aws ssm put-parameter \\\n --value 'it''s'", "its"),
        ("aws ssm put-parameter --value a\\\\", "a\\"),
        ("aws ssm put-parameter --value a\\ \\\n b", "b"),
        ("aws ssm put-parameter --value arn:aws:\\\niam", "arn:aws:iam"),
        ("aws ssm put-parameter --value 'x ```\n```'", "x ```\n```"),
        ("aws ssm put-parameter --value '$ x\n$ y'", "$ x\n$ y"),
    ],
)
def test_quotes_hold_what_a_shell_would_take_from_them(text: str, value: str) -> None:
    verdict = check_command(read_command(text))
    assert verdict.rule is None, verdict.message
    assert verdict.argv[-1] == value


@pytest.mark.parametrize(
    "text",
    [
        "aws s3 ls\nrm -rf /",
        "aws s3 ls\r\nrm -rf /",
        "aws s3 ls\rrm -rf /",
        "aws s3 ls\n\n\naws s3 rb s3://a",
        "```bash\naws s3 ls\naws s3 rb s3://a\n```",
        "```bash\n$ aws s3 ls\n$ aws s3 rb s3://a\n```",
        "```\naws s3 ls\n```\n```\naws s3 rb s3://a\n```",
        "$ aws s3 ls\n$ aws s3 rb s3://a",
        "aws s3 ls \\\\\naws s3 rb s3://a",
        "aws s3 ls \\\n\naws s3 rb s3://a",
        "aws s3 ls \\x\naws s3 rb s3://a",
        "aws s3 ls '\\'\naws s3 rb s3://a",
        "aws s3 ls # \\\\\naws s3 rb s3://a",
        "aws s3 ls \\\n --recursive\naws s3 rb s3://a",
    ],
)
def test_what_a_shell_would_run_as_several_commands_is_refused(text: str) -> None:
    verdict = check_command(read_command(text))
    assert verdict.rule == "newline"
    assert "one command at a time" in verdict.message


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("```bash\nrm -rf /\n```", "not-aws"),
        ("I list them:\n```bash\naws s3 ls\n```", "newline"),
        ("```\n```", "not-aws"),
        ("```bash", "not-aws"),
        ("$ $ aws s3 ls", "not-aws"),
        ("rm -rf / \\\n aws s3 ls", "not-aws"),
        ("aws s3 ls 'x\n```", "malformed"),
        ("aws s3 cp file:\\\n///etc/passwd s3://a", "local-file"),
        ("aws s3 ls --endpoint\\\n-url http://x", "global-option"),
        (
            "```sh\naws iam create-role --assume-role-policy-document \\\nfile:///etc/passwd\n```",
            "local-file",
        ),
    ],
)
def test_a_form_hides_nothing_from_the_policy(text: str, rule: str) -> None:
    assert check_command(read_command(text)).rule == rule


@pytest.mark.slow
@given(st.text(alphabet="a '\"\\\n\r`$\t-", max_size=40))
def test_what_is_read_is_what_a_shell_reads(text: str) -> None:
    """Against an independent reading: a backslash before a line end goes outside of single quotes;
    where no line end is left outside of quotes, both have the same words."""
    text = f"aws {text}"
    command = read_command(text)
    assert read_command(command) == command
    if (
        check_command(command).rule in ("newline", "malformed")
        or "`" in text
        or command.endswith("\\")
    ):
        return
    assert shlex.split(command) == shlex.split(_join_lines(text.replace("\r\n", "\n").strip()))


def _join_lines(text: str) -> str:
    """Remove line ends behind a backslash, with the blanks between them where they are outside of
    quotes."""
    kept = ""
    quote = ""
    place = 0
    while place < len(text):
        char = text[place]
        if char == "\\" and quote != "'":
            after = place + 1
            while not quote and text[after : after + 1] in (" ", "\t"):
                after += 1
            if text[after : after + 1] in ("\n", ""):
                place = after + 1
                continue
            kept += text[place : place + 2]
            place += 2
            continue
        quote = ("" if quote == char else quote) if quote else (char if char in "'\"" else "")
        kept += char
        place += 1
    return kept
