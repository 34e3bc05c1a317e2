"""Text of an agent cannot become a second request: no header, path, query or answer carries one,
the simulator takes none from the port that the worker did not send, and nothing of a lease lives on
in the next one."""

from __future__ import annotations

import json
import shlex
import socket

import pytest

from realhf.aws.simulator.pool import Slot

pytestmark = pytest.mark.sim


def _hidden(method: str, path: str, headers: str = "", body: str = "") -> str:
    """A metadata name that ends the head of its request and begins another one."""
    head = (
        f"x: 1\r\nContent-Length: 0\r\n\r\n{method} {path} HTTP/1.1\r\nHost: "
        f"localhost:4566\r\n{headers}"
    )
    return json.dumps(
        {f"{head}Content-Length: {len(body)}\r\n\r\n{body}" if body else f"{head}X-Y": "1"}
    )


_IAM = (
    "Authorization: AWS4-HMAC-SHA256 "
    "Credential=000000000000/20260101/us-east-1/iam/aws4_request\r\n"
)
SMUGGLED = {
    "a reset of the world": _hidden("POST", "/_ministack/reset"),
    "a call of another service": _hidden(
        "POST", "/?Action=CreateUser&UserName=ghost&Version=2010-05-08", _IAM
    ),
    "a switch of a module": _hidden(
        "POST", "/_ministack/config", body='{"cloudtrail._recording_enabled":"1"}'
    ),
}


def _stage(slot: Slot) -> None:
    slot.reset()
    slot.state.call("s3", "CreateBucket", {"Bucket": "own"})
    (slot.files.path / "f").write_bytes(b"x")


@pytest.mark.parametrize("metadata", SMUGGLED.values(), ids=SMUGGLED)
def test_a_metadata_name_is_not_a_request(slot: Slot, metadata: str) -> None:
    """Refused before a byte leaves: the world stands, nobody is created, and the next answers are
    their own."""
    _stage(slot)
    result = slot.executor.run(
        f"aws s3api put-object --bucket own --key k --metadata {shlex.quote(metadata)}"
    )
    assert (result.refusal, result.requests) == ("malformed", ()), result
    assert [bucket["Name"] for bucket in slot.state.call("s3", "ListBuckets")["Buckets"]] == ["own"]
    assert slot.state.call("iam", "ListUsers")["Users"] == []
    missing = slot.executor.run("aws s3api head-bucket --bucket none")
    assert [sent.status for sent in missing.requests] == [404]
    assert (
        slot.executor.run("aws s3api list-buckets --query Buckets[].Name --output text").stdout
        == "own\n"
    )


@pytest.mark.parametrize("name", ["a b", "a:b", "a\nb", "a\rb", "a\0b", "a\tb", "ä", "(a)", "a,b"])
def test_a_metadata_name_is_a_token(slot: Slot, name: str) -> None:
    _stage(slot)
    before = _parsed(slot)
    metadata = shlex.quote(json.dumps({name: "1"}))
    result = slot.executor.run(f"aws s3api put-object --bucket own --key k --metadata {metadata}")
    assert not result.success and _parsed(slot) == before


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b", "a\x7fb", "a\x1bb"])
@pytest.mark.parametrize(
    "option", ["--content-type", "--cache-control", "--content-disposition", "--tagging"]
)
def test_a_header_value_has_no_control_characters(slot: Slot, option: str, value: str) -> None:
    _stage(slot)
    before = _parsed(slot)
    line = f"aws s3api put-object --bucket own --key k {option} {shlex.quote(value)}"
    assert not slot.executor.run(line).success or option == "--tagging"
    result = slot.executor._execute(tuple(shlex.split(line)[1:]))
    assert not result.success or option == "--tagging"
    assert option == "--tagging" or _parsed(slot) == before


@pytest.mark.parametrize(
    "option",
    [
        "--response-content-type",
        "--response-content-disposition",
        "--response-cache-control",
        "--response-content-language",
    ],
)
def test_an_answer_is_not_split(slot: Slot, option: str) -> None:
    """What a query asks to be answered with comes back as a header, and must not become an answer
    of its own."""
    _stage(slot)
    slot.state.call("s3", "PutObject", {"Bucket": "own", "Key": "k", "Body": b"x"})
    forged = "a\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    result = slot.executor.run(
        f"aws s3api get-object --bucket own --key k {option} {shlex.quote(forged)} out"
    )
    assert not result.success and [sent.status for sent in result.requests] in ([], [500])
    missing = slot.executor.run("aws s3api head-bucket --bucket none")
    assert [sent.status for sent in missing.requests] == [404]


@pytest.mark.parametrize(
    "line",
    [
        "aws lambda delete-function --function-name f/concurrency",
        "aws lambda get-function --function-name f/policy",
        "aws lambda delete-function --function-name "
        "arn:aws:lambda:us-east-1:000000000000:function:f/concurrency",
        "aws apigateway get-stages --rest-api-id a/../b",
    ],
)
def test_a_name_in_a_path_stays_one_segment(slot: Slot, line: str) -> None:
    """Decoded, its slash would make another operation of it than the one that is recorded."""
    slot.reset()
    before = _parsed(slot)
    assert not slot.executor.run(line).success and _parsed(slot) == before


def test_every_request_that_is_parsed_was_recorded(slot: Slot) -> None:
    """Also those that left before another one of the same command was refused."""
    slot.reset()
    for line in (
        "aws s3 mb s3://first",
        "aws iam create-user --user-name u",
        "aws s3api head-bucket --bucket none",
        "aws s3 cp f s3://first/f",
        "aws s3 sync . s3://first/deep",
        "aws s3 ls s3://first",
        "aws s3 mv s3://first/f s3://first/x",
        "aws sqs create-queue --queue-name q",
    ):
        (slot.files.path / "f").write_bytes(b"x")
        before = slot.ministack.requests()["count"]
        result = slot.executor.run(line)
        seen = [
            each
            for each in slot.ministack.requests(before)["requests"]
            if each["entrance"] == "port"
        ]
        assert len(seen) == len(result.requests) > 0, line
        assert [each["service"] for each in seen] == [sent.service for sent in result.requests]
        named = [
            (each["operation"], sent.operation)
            for each, sent in zip(seen, result.requests, strict=True)
        ]
        assert all(parsed in ("", recorded) for parsed, recorded in named)


def test_what_left_before_a_refusal_is_recorded(slot: Slot) -> None:
    slot.reset()
    slot.state.call("s3", "CreateBucket", {"Bucket": "own"})
    slot.state.call("s3", "PutObject", {"Bucket": "own", "Key": "k", "Body": b"x"})
    before = _parsed(slot)
    result = slot.executor._execute(("s3", "cp", "s3://own/k", "s3://own/a/../_ministack/k"))
    assert result.refusal == "internal-path" and result.requests
    assert len(result.requests) == len(_parsed(slot)) - len(before)


@pytest.mark.parametrize(
    "path",
    [
        "/_ministack/reset",
        "/_ministack/config",
        "/_realhf/reset",
        "/%5fministack/reset",
        "//_ministack/reset",
        "/%255Fministack/reset",
        "/_ministack/health",
        "/_realhf/requests",
        "/_localstack/health",
        "/x/../_ministack/reset",
    ],
)
def test_control_paths_are_the_owners(slot: Slot, path: str) -> None:
    """Over the connection that an agent's worker has, they do not exist, whatever the worker
    sends."""
    _stage(slot)
    switches = slot.ministack.switches()
    answer = _raw(
        slot,
        f"POST {path} HTTP/1.1\r\nHost: localhost:4566\r\nContent-Length: 2\r\n\r\n{{}}".encode(),
    )
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert [bucket["Name"] for bucket in slot.state.call("s3", "ListBuckets")["Buckets"]] == ["own"]
    assert slot.ministack.switches() == switches


def test_the_simulator_takes_no_second_request_before_its_answer(slot: Slot) -> None:
    """Should a worker ever send one, neither is answered, and the connection is over."""
    _stage(slot)
    create = b"PUT /%s HTTP/1.1\r\nHost: localhost:4566\r\nContent-Length: 0\r\n\r\n"
    answer = _raw(slot, create % b"one" + create % b"two")
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1
    assert [bucket["Name"] for bucket in slot.state.call("s3", "ListBuckets")["Buckets"]] == ["own"]
    assert sum(slot.ministack.requests()["refused"].values()) >= 1


def test_a_reset_restores_the_switches_of_modules(slot: Slot) -> None:
    """MiniStack's own reset does not: neither switches nor the counter behind the sequence numbers
    of Kinesis."""
    slot.reset()
    before = slot.ministack.switches()
    config = json.dumps(
        {
            "cloudtrail._recording_enabled": "1",
            "stepfunctions._SFN_WAIT_SCALE": 7.5,
            "stepfunctions._sfn_mock_config": {"a": 1},
            "athena.ATHENA_ENGINE": "x",
        }
    )
    slot.ministack.ask("POST", "/_ministack/config", "s3", body=config.encode())
    slot.state.call("kinesis", "CreateStream", {"StreamName": "s", "ShardCount": 1})
    put = {"StreamName": "s", "Data": b"x", "PartitionKey": "k"}
    first = slot.state.call("kinesis", "PutRecord", put)["SequenceNumber"]
    changed = {name for name, value in slot.ministack.switches().items() if value != before[name]}
    assert len(changed) >= 5, changed
    slot.reset()
    assert slot.ministack.switches() == before
    slot.state.call("kinesis", "CreateStream", {"StreamName": "s", "ShardCount": 1})
    assert slot.state.call("kinesis", "PutRecord", put)["SequenceNumber"][-8:] == first[-8:]


def test_a_lease_leaves_no_process_behind(slot: Slot) -> None:
    """The next one has a simulator and a worker of its own: whatever a process could hold is gone
    with it."""
    slot.executor.run("aws s3 ls")
    simulator = slot.ministack.pid
    worker = slot.worker_pid
    slot.scrub()
    assert slot.ministack.pid != simulator and slot.worker_pid != worker
    assert _parsed(slot) == []


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: localhost:4566\r\n\r\n", b"no request\r\n\r\n"]
)
def test_what_came_by_the_port_ends_with_the_lease(slot: Slot, data: bytes) -> None:
    """Also from somebody else, and also what was refused; a simulator that took none of it is only
    emptied."""
    slot.scrub()
    unused = slot.ministack.pid
    slot.state.call("s3", "CreateBucket", {"Bucket": "of-the-environment"})
    slot.scrub()
    assert slot.ministack.pid == unused and slot.state.call("s3", "ListBuckets")["Buckets"] == []
    _raw(slot, data)
    slot.scrub()
    assert slot.ministack.pid != unused


def _parsed(slot: Slot) -> list[str]:
    return [
        each["target"]
        for each in slot.ministack.requests()["requests"]
        if each["entrance"] == "port"
    ]


def _raw(slot: Slot, data: bytes) -> bytes:
    with slot.ministack.connect() as connection:
        connection.settimeout(5.0)
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
            if b"\r\n\r\n" in received and not received.startswith(b"HTTP/1.1 400"):
                break
        return received
