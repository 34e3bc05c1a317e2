"""Captures of values that only exist at run time."""

import pytest

from realhf.aws.tasks.captures import CaptureError, fill_setup, has_setup_captures, resolve


def test_values_of_earlier_commands() -> None:
    outputs = ['{"QueueUrl": "http://x/q", "Groups": [{"Id": 7}]}', "no JSON"]
    assert resolve("aws sqs x --queue-url ${step1:QueueUrl}", outputs) == "aws sqs x --queue-url http://x/q"
    assert resolve("${step1:$.Groups[0].Id} ${step1:Groups}", outputs) == '7 [{"Id": 7}]'


@pytest.mark.parametrize("command", ["${step2:Id}", "${step3:Id}", "${step1:Nope}", "${step1:][}", "${step0:Id}"])
def test_what_is_not_there_stays_as_it_is_written(command: str) -> None:
    assert resolve(command, ['{"Id": 1}', "no JSON"]) == command


def test_values_of_set_up_keep_their_type() -> None:
    answers = [{"Port": 80, "Vpc": {"Id": "vpc-1"}}]
    value = {"${setup1:Vpc.Id}": ["${setup1:Port}", "p${setup1:Port}", True], "t": ("${setup1:$.Vpc.Id}",)}
    assert has_setup_captures(value) and not has_setup_captures({"a": "${step1:x}"})
    assert fill_setup(value, answers) == {"vpc-1": [80, "p80", True], "t": ("vpc-1",)}
    for bad in ("${setup2:Port}", "${setup1:Nope}", "${setup1:][}"):
        with pytest.raises(CaptureError):
            fill_setup(bad, answers)
