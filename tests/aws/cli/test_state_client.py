"""The environment's own calls against a real simulator."""

import importlib
import inspect
import json
import re
from urllib.parse import quote

import pytest

from realhf.aws.cli import pinned_http
from realhf.aws.cli.state_client import StateCallError, UnreadableAnswer, decode_document
from realhf.aws.grading.inventory import Inventory
from realhf.aws.simulator.pool import MiniStackPool, Slot

pytestmark = pytest.mark.sim


def test_a_document_is_decoded_or_stays_as_it_is() -> None:
    deep = "[" * 1500 + "]" * 1500
    trust = {"Version": "2012-10-17", "Statement": []}
    assert decode_document(quote(json.dumps(trust))) == trust
    for text in (deep, quote(deep), "no json"):
        assert decode_document(text) == text
    assert decode_document(None) is None


def test_answers_come_without_metadata(slot: Slot) -> None:
    assert slot.state.call("s3", "CreateBucket", {"Bucket": "b-1"}) == {"Location": "/b-1"}
    assert [bucket["Name"] for bucket in slot.state.call("s3", "ListBuckets")["Buckets"]] == ["b-1"]


def test_bytes_in_and_out(slot: Slot) -> None:
    slot.state.call("s3", "CreateBucket", {"Bucket": "b-1"})
    slot.state.call("s3", "PutObject", {"Bucket": "b-1", "Key": "a/ü 1", "Body": b"\x00\xff"})
    assert (
        slot.state.call("s3", "GetObject", {"Bucket": "b-1", "Key": "a/ü 1"})["Body"].read()
        == b"\x00\xff"
    )


def _addresses() -> set[tuple[str, str]]:
    """First and further parts of every path that MiniStack's routing names, where the first could
    be a bucket."""
    found = {("icebergs", ""), ("login", ""), ("health", "")}
    for name in ("app", "core.router"):
        source = inspect.getsource(importlib.import_module(f"ministack.{name}"))
        for path in re.findall(r"[\"'`r(^|](/[A-Za-z0-9_.{}-]+(?:/[A-Za-z0-9_.{}-]+)*)", source):
            bucket, _, key = re.sub(r"\{[^}]*\}?", "x", path).strip("/").lower().partition("/")
            if re.fullmatch(r"[a-z0-9][a-z0-9.-]+[a-z0-9]", bucket):
                found.add((bucket, key.strip("/")))
    return found


@pytest.mark.slow
def test_no_bucket_is_answered_by_another_service(slot: Slot) -> None:
    """Buckets named like addresses (iceberg, health, logout) were made and read somewhere else than
    in S3."""
    addresses = _addresses()
    assert len(addresses) > 60 and ("v20180820", "mrap/instances") in addresses
    refused = set()
    for bucket, key in sorted(addresses):
        try:
            slot.state.call("s3", "CreateBucket", {"Bucket": bucket})
            slot.state.call(
                "s3", "PutObject", {"Bucket": bucket, "Key": key or "k", "Body": b"mine"}
            )
            assert (
                slot.state.call("s3", "GetObject", {"Bucket": bucket, "Key": key or "k"})[
                    "Body"
                ].read()
                == b"mine"
            )
        except StateCallError as error:
            assert "would not be answered by S3" in str(error) or "InvalidBucketName" in str(
                error
            ), (bucket, key)
            refused.add(bucket)
    assert refused >= {"health", "iceberg", "icebergs", "login", "logout", "oauth2", "v20180820"}
    assert len(refused) < 12, "a route is refused, not every name"


def test_policy_documents_are_decoded(slot: Slot) -> None:
    document = '{"Version": "2012-10-17", "Statement": []}'
    slot.state.call("iam", "CreateRole", {"RoleName": "r", "AssumeRolePolicyDocument": document})
    role = slot.state.call("iam", "GetRole", {"RoleName": "r"})["Role"]
    assert role["AssumeRolePolicyDocument"] == {"Version": "2012-10-17", "Statement": []}


def test_names_that_are_no_xml_are_read_by_agent_and_grader(slot: Slot) -> None:
    """The simulator does not escape them."""
    slot.state.call("iam", "CreateGroup", {"GroupName": "g", "Path": "/op<|user|>/a&b/"})
    assert (
        slot.state.call("iam", "GetGroup", {"GroupName": "g"})["Group"]["Path"]
        == "/op<|user|>/a&b/"
    )
    topic = slot.state.call("sns", "CreateTopic", {"Name": "t"})["TopicArn"]
    queue = "arn:aws:sqs:us-east-1:000000000000:a{}b"
    command = f"aws sns subscribe --topic-arn {topic} --protocol sqs --notification-endpoint"
    assert slot.executor.run(f"{command} '{queue.format(chr(20))}'").success
    [subscription] = slot.state.call("sns", "ListSubscriptionsByTopic", {"TopicArn": topic})[
        "Subscriptions"
    ]
    assert subscription["Endpoint"] == queue.format("\ufffd")
    listed = slot.executor.run(f"aws sns list-subscriptions-by-topic --topic-arn {topic}")
    assert listed.success and json.loads(listed.stdout)["Subscriptions"] == [subscription]


@pytest.mark.parametrize(
    ("service", "operation", "params", "code"),
    [
        ("s3", "GetBucketLocation", {"Bucket": "none"}, "NoSuchBucket"),
        ("dynamodb", "DescribeTable", {"TableName": "none"}, "ResourceNotFoundException"),
        ("iam", "GetUser", {"UserName": "none"}, "NoSuchEntity"),
        ("s3", "NoSuchOperation", {}, "ParamValidation"),
        ("s3", "CreateBucket", {"Bogus": 1}, "ParamValidation"),
        ("nosuchservice", "List", {}, "ParamValidation"),
    ],
)
def test_errors_carry_their_code(
    slot: Slot, service: str, operation: str, params: dict, code: str
) -> None:
    with pytest.raises(StateCallError) as caught:
        slot.state.call(service, operation, params)
    assert caught.value.code == code


def test_copies_of_one_client_lead_to_their_own_simulators(pool: MiniStackPool) -> None:
    slots = [pool.acquire(), pool.acquire()]
    for slot in slots:
        slot.state.call("sqs", "CreateQueue", {"QueueName": f"queue-{slot.index}"})
    for slot in slots:
        urls = slot.state.call("sqs", "ListQueues")["QueueUrls"]
        assert [url.rpartition("/")[2] for url in urls] == [f"queue-{slot.index}"]
        pool.release(slot)


def test_an_answer_that_is_too_large_is_unreadable(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to count as a simulator that does not answer, which hid all that the account
    holds."""
    slot.state.call("s3", "CreateBucket", {"Bucket": "b-1"})
    for number in range(12):
        slot.state.call(
            "ssm", "PutParameter", {"Name": f"p{number}", "Value": "x" * 100, "Type": "String"}
        )
    monkeypatch.setattr(pinned_http, "_MAX_RESPONSE_BYTES", 1000)
    with pytest.raises(UnreadableAnswer, match="1000 can be read"):
        slot.state.call("ssm", "DescribeParameters")
    assert Inventory(slot.state, ("s3", "ssm")).read() == {"s3": {"bucket": ["b-1"]}}
