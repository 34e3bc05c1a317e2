"""Makes MiniStack answer as AWS documents it, where this version of the package does not.

Each correction is a function with a link to the page of AWS that it follows and a test in
``tests/aws/simulator/test_corrections.py``, so that it can go when the package does it by itself. All of them are
applied once, in the zygote, to the tables by which MiniStack's modules find the handler of an operation.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

LONGEST_POLL_S = 1.0
"""Seconds that a poll of an empty queue may take: a session's clock is not spent on messages that nobody can send."""
_MOST_POLL_S = 20


def install() -> None:
    """Apply all corrections. Raises RuntimeError when this version of MiniStack lacks what is corrected."""
    for correct in (_keep_dns_names_in_lower_case, _answer_polls_in_time):
        try:
            correct()
        except (AttributeError, KeyError) as error:
            raise RuntimeError(f"this version of ministack has no {error}: {correct.__name__} does not fit") from error


def _module(name: str) -> Any:
    return importlib.import_module(f"ministack.services.{name}")


def _keep_dns_names_in_lower_case() -> None:
    """Keep names of DNS as AWS does, however they are spelt: MiniStack keeps a record for each spelling.

    https://docs.aws.amazon.com/Route53/latest/DeveloperGuide/DomainNameFormat.html
    """
    route53 = _module("route53")
    original = route53._normalise_name
    route53._normalise_name = lambda name: name and original(name).lower()


def _answer_polls_in_time() -> None:
    """Answer a poll of an empty queue after ``LONGEST_POLL_S``, and refuse a wait that AWS refuses: MiniStack waits for
    as long as was asked, past the deadline of the client.

    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_ReceiveMessage.html
    """
    sqs = _module("sqs")
    receive = sqs._HANDLERS["ReceiveMessage"]

    async def received(request: Mapping[str, Any], url: str) -> dict[str, Any]:
        queue = sqs._get_q(request.get("QueueUrl", url), "sqs:ReceiveMessage")
        asked = request.get("WaitTimeSeconds")
        wait_s = int(queue["attributes"].get("ReceiveMessageWaitTimeSeconds", "0") if asked is None else asked)
        if not 0 <= wait_s <= _MOST_POLL_S:
            bounds = f"Must be >= 0 and <= {_MOST_POLL_S}, if provided."
            message = f"Value {wait_s} for parameter WaitTimeSeconds is invalid. Reason: {bounds}"
            raise sqs._Err("InvalidParameterValue", message)
        return await receive({**request, "WaitTimeSeconds": min(wait_s, LONGEST_POLL_S)}, url)

    sqs._HANDLERS["ReceiveMessage"] = received
