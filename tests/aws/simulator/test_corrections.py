"""Each correction of MiniStack, against a real simulator by command lines as an agent writes them."""

import json
import time
from collections.abc import Callable

import pytest

from realhf.aws.simulator.corrections import LONGEST_POLL_S
from realhf.aws.simulator.slot import Slot

pytestmark = [pytest.mark.sim, pytest.mark.slow]


@pytest.fixture
def aws(slot: Slot) -> Callable[[str], tuple[int, str, str]]:
    """Run a command line in an empty account; returns exit code, output and error."""
    slot.reset(1)

    def run(line: str) -> tuple[int, str, str]:
        result = slot.executor.run(f"aws {line}")
        return result.exit_code, result.stdout.strip(), " ".join(result.stderr.split())

    return run


def test_a_poll_of_an_empty_queue_answers_empty_within_two_seconds(aws) -> None:
    """It ended in "Read timeout" after eight seconds, a failed command."""
    url = json.loads(aws("sqs create-queue --queue-name q")[1])["QueueUrl"]
    for wait in ("--wait-time-seconds 20", ""):
        begun = time.monotonic()
        assert aws(f"sqs receive-message --queue-url {url} {wait}") == (0, "", ""), wait
        assert time.monotonic() - begun < LONGEST_POLL_S + 1
        assert aws(f"sqs set-queue-attributes --queue-url {url} --attributes ReceiveMessageWaitTimeSeconds=20")[0] == 0
    assert "InvalidParameterValue" in aws(f"sqs receive-message --queue-url {url} --wait-time-seconds 21")[2]
    aws(f"sqs send-message --queue-url {url} --message-body here")
    assert json.loads(aws(f"sqs receive-message --queue-url {url}")[1])["Messages"][0]["Body"] == "here"
